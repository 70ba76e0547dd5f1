// Instructions of the vector unit that expand, reduce, pad, count, transpose and gather.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core.h"

namespace isa {

namespace {

bool empty(const Tile& tile) { return tile.valid_rows <= 0 || tile.valid_cols <= 0; }

template <class T>
T* elements(const Tile& tile, const char* role) {
  return reinterpret_cast<T*>(operand(tile, tile.valid_rows, tile.valid_cols, role));
}

}  // namespace

// The contents of a scratch operand are not specified afterwards.
void spoil(const Tile& tmp) {
  int64_t bytes = static_cast<int64_t>(tmp.rows) * tmp.cols * size_of(tmp.type);
  poison(region(tmp, bytes, "tmp"), bytes);
}

void row_expand(const Tile& dst, const Tile& src) {
  instruction = "TROWEXPAND";
  if (empty(dst) || empty(src)) return;
  int size = size_of(dst.type);
  const char* from = operand(src, dst.valid_rows, 1, "src");
  char* to = operand(dst, dst.valid_rows, dst.valid_cols, "dst");
  std::vector<char> value(size);
  for (int row = 0; row < dst.valid_rows; ++row) {
    std::memcpy(value.data(), from + offset(src, row, 0) * size, size);
    for (int col = 0; col < dst.valid_cols; ++col)
      std::memcpy(to + offset(dst, row, col) * size, value.data(), size);
  }
}

void column_expand(const Tile& dst, const Tile& src) {
  instruction = "TCOLEXPAND";
  if (empty(dst) || empty(src)) return;
  // whole blocks of 32 bytes
  int size = size_of(dst.type), cols = round_up(dst.valid_cols * size, 32) / size;
  const char* from = operand(src, 1, cols, "src");
  char* to = operand(dst, dst.valid_rows, cols, "dst");
  for (int row = 0; row < dst.valid_rows; ++row)
    std::memmove(to + offset(dst, row, 0) * size, from, static_cast<size_t>(cols) * size);
}

namespace {

template <class T>
T reduced(Reduce op, T a, T b) {
  float x = static_cast<float>(a), y = static_cast<float>(b);
  switch (op) {
    case Reduce::sum:
      return std::is_integral_v<T> ? static_cast<T>(a + b) : T(x + y);
    case Reduce::prod:
      return std::is_integral_v<T> ? static_cast<T>(a * b) : T(x * y);
    case Reduce::max:
      return std::isnan(x) || (x > y && !std::isnan(y)) ? a : b;
    default:
      return std::isnan(x) || (x < y && !std::isnan(y)) ? a : b;
  }
}

}  // namespace

void row_reduce(const char* name, Reduce op, const Tile& dst, const Tile& src, const Tile& tmp) {
  instruction = name;
  require(src.valid_rows > 0 && src.valid_cols > 0, "src without valid elements");
  require(src.valid_rows == dst.valid_rows, "operands with different valid rows");
  require(dst.layout == Layout::rows || dst.cols == 1, "dst in columns has one");
  with_type(dst.type, [&](auto zero) {
    using T = decltype(zero);
    T* from = elements<T>(src, "src");
    T* to = reinterpret_cast<T*>(operand(dst, dst.valid_rows, 1, "dst"));
    std::vector<T> results(src.valid_rows);
    // lane by lane over the repeats of 256 bytes, then pairs of lanes
    int lanes = 256 / static_cast<int>(sizeof(T));
    for (int row = 0; row < src.valid_rows; ++row) {
      const T* values = from + offset(src, row, 0);
      std::vector<T> lane(values, values + std::min(lanes, src.valid_cols));
      for (int col = lanes; col < src.valid_cols; ++col)
        lane[col % lanes] = reduced(op, lane[col % lanes], values[col]);
      while (lane.size() > 1) {
        std::vector<T> pairs;
        for (size_t i = 0; i < lane.size(); i += 2)
          pairs.push_back(i + 1 < lane.size() ? reduced(op, lane[i], lane[i + 1]) : lane[i]);
        lane.swap(pairs);
      }
      results[row] = lane[0];
    }
    spoil(tmp);
    for (int row = 0; row < src.valid_rows; ++row) to[offset(dst, row, 0)] = results[row];
  });
}

void column_reduce(const char* name, Reduce op, const Tile& dst, const Tile& src, const Tile* tmp) {
  instruction = name;
  require(src.valid_cols == dst.valid_cols, "operands with different valid columns");
  require(!tmp || src.valid_cols <= tmp->cols, "tmp is narrower than src");
  if (empty(src)) return;
  with_type(dst.type, [&](auto zero) {
    using T = decltype(zero);
    T* from = elements<T>(src, "src");
    T* to = reinterpret_cast<T*>(operand(dst, 1, dst.valid_cols, "dst"));
    std::vector<T> results(src.valid_cols);
    std::vector<T> rows(src.valid_rows);
    for (int col = 0; col < src.valid_cols; ++col) {
      for (int row = 0; row < src.valid_rows; ++row) rows[row] = from[offset(src, row, col)];
      if (tmp) {
        // pairs of rows; an odd last one joins the first pair
        for (int count = src.valid_rows; count > 1; count /= 2) {
          T odd = rows[count - 1];
          for (int i = 0; i < count / 2; ++i) rows[i] = reduced(op, rows[2 * i], rows[2 * i + 1]);
          if (count % 2) rows[0] = reduced(op, rows[0], odd);
        }
      } else {
        for (int row = 1; row < src.valid_rows; ++row) rows[0] = reduced(op, rows[0], rows[row]);
      }
      results[col] = rows[0];
    }
    if (tmp && src.valid_rows > 1) {
      int64_t bytes = static_cast<int64_t>(src.valid_rows / 2) * tmp->cols * sizeof(T);
      poison(region(*tmp, bytes, "tmp"), bytes);
    }
    for (int col = 0; col < src.valid_cols; ++col) to[offset(dst, 0, col)] = results[col];
  });
}

namespace {

template <class T>
T pad_value(Pad pad) {
  require(pad != Pad::none, "dst without a pad value");
  if (pad == Pad::zero) return T(0);
  if constexpr (std::is_integral_v<T>)
    return pad == Pad::lowest ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max();
  else
    return T(pad == Pad::lowest ? -INFINITY : INFINITY);
}

}  // namespace

void fill_pad(const Tile& dst, const Tile& src) {
  instruction = "TFILLPAD_EXPAND";
  if (empty(dst)) return;
  with_type(dst.type, [&](auto zero) {
    using T = decltype(zero);
    T pad = dst.pad == Pad::number ? T(dst.pad_number) : pad_value<T>(dst.pad);
    int rows = std::max(dst.valid_rows, src.valid_rows);
    // pads up to the tile's last column, whatever is valid
    T* to = reinterpret_cast<T*>(operand(dst, rows, dst.cols, "dst"));
    T* from = empty(src) ? nullptr : elements<T>(src, "src");
    for (int row = 0; row < rows; ++row)
      for (int col = 0; col < dst.cols; ++col) {
        bool valid = row < src.valid_rows && col < src.valid_cols;
        to[offset(dst, row, col)] = valid ? from[offset(src, row, col)] : pad;
      }
  });
}

void count_up(const Tile& dst, int64_t start, bool descending) {
  instruction = "TCI";
  with_type(dst.type, [&](auto zero) {
    using T = decltype(zero);
    T* to = reinterpret_cast<T*>(operand(dst, 1, dst.valid_cols, "dst"));
    for (int i = 0; i < dst.valid_cols; ++i)
      to[i] = static_cast<T>(descending ? start - i : start + i);
  });
}

void transpose(const Tile& dst, const Tile& src, const Tile& tmp) {
  instruction = "TTRANS";
  if (empty(src)) return;
  int size = size_of(src.type), rows = src.valid_rows, cols = src.valid_cols;
  require(src.layout == Layout::rows && dst.layout == Layout::rows, "tiles must be row-major");
  const char* from = operand(src, rows, cols, "src");
  char* to = operand(dst, cols, rows, "dst");
  std::vector<char> values(static_cast<size_t>(rows) * cols * size);
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < cols; ++col)
      std::memcpy(&values[(static_cast<size_t>(col) * rows + row) * size],
                  from + offset(src, row, col) * size, size);
  spoil(tmp);
  for (int col = 0; col < cols; ++col)
    std::memcpy(to + offset(dst, col, 0) * size, &values[static_cast<size_t>(col) * rows * size],
                static_cast<size_t>(rows) * size);
}

void gather(const Tile& dst, const Tile& src, const Tile& index, const Tile& tmp) {
  instruction = "TGATHER";
  require(index.valid_cols == tmp.valid_cols && index.valid_rows == tmp.valid_rows,
          "index and tmp with different valid shapes");
  if (empty(dst)) return;
  int size = size_of(dst.type);
  int64_t count = static_cast<int64_t>(src.rows) * src.cols;
  const char* from = operand(src, src.rows, src.cols, "src");
  const int32_t* indices = elements<int32_t>(index, "index");
  char* to = elements<char>(dst, "dst");
  for (int row = 0; row < dst.valid_rows; ++row)
    for (int col = 0; col < dst.valid_cols; ++col) {
      int32_t i = indices[offset(index, row, col)];
      require(i >= 0 && i < count, "an index outside src");
      std::memcpy(to + offset(dst, row, col) * size, from + static_cast<int64_t>(i) * size, size);
    }
}

void gather_every_second(const Tile& dst, const Tile& src, int first) {
  instruction = "TGATHER";
  require(dst.valid_cols == dst.cols, "dst must be contiguous: its valid columns are not all");
  if (empty(src)) return;
  int size = size_of(dst.type);
  const char* from = operand(src, src.valid_rows, src.valid_cols, "src");
  int64_t count = static_cast<int64_t>(src.valid_rows) * (src.valid_cols / 2);
  char* to = region(dst, count * size, "dst");
  for (int row = 0; row < src.valid_rows; ++row)
    for (int col = first; col < src.valid_cols; col += 2, to += size)
      std::memmove(to, from + offset(src, row, col) * size, size);
}

}  // namespace isa
