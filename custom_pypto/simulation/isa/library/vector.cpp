// Element by element instructions of the vector unit.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core.h"

namespace isa {

namespace {

void same_valid(const Tile& a, const Tile& b) {
  require(a.valid_rows == b.valid_rows && a.valid_cols == b.valid_cols,
          "operands with different valid shapes");
}

double apply(Binary op, double a, double b) {
  switch (op) {
    case Binary::add:
      return a + b;
    case Binary::sub:
      return a - b;
    case Binary::mul:
      return a * b;
    case Binary::div:
      return a / b;
    case Binary::max:
      return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b);
    default:
      return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b);
  }
}

// In double, then rounded to float: for these operations on two floats equal to rounding once.
template <class T>
T rounded(double value) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<int64_t>(value));  // wraps
  else
    return T(static_cast<float>(value));
}

template <class T>
double apply_unary(Unary op, T value) {
  float x = static_cast<float>(value);
  switch (op) {
    case Unary::exp:
      return std::exp(x);
    case Unary::sqrt:
      return std::sqrt(x);
    case Unary::rsqrt:
      return 1.0 / std::sqrt(static_cast<double>(x));
    case Unary::reciprocal:
      return 1.0 / x;
    case Unary::absolute:
      return std::fabs(x);
    default:
      return std::log(x);
  }
}

// ``function(row, col)`` for the valid part of a tile
template <class Function>
void for_each(const Tile& tile, Function function) {
  for (int row = 0; row < tile.valid_rows; ++row)
    for (int col = 0; col < tile.valid_cols; ++col) function(row, col);
}

template <class T>
T* elements(const Tile& tile, const char* role) {
  return reinterpret_cast<T*>(operand(tile, tile.valid_rows, tile.valid_cols, role));
}

}  // namespace

void binary(const char* name, Binary op, const Tile& dst, const Tile& a, const Tile& b) {
  instruction = name;
  same_valid(dst, a);
  same_valid(dst, b);
  with_type(dst.type, [&](auto zero) {
    using T = decltype(zero);
    T *x = elements<T>(a, "src0"), *y = elements<T>(b, "src1"), *to = elements<T>(dst, "dst");
    for_each(dst, [&](int row, int col) {
      double value = apply(op, static_cast<double>(x[offset(a, row, col)]),
                           static_cast<double>(y[offset(b, row, col)]));
      to[offset(dst, row, col)] = rounded<T>(value);
    });
  });
}

void binary_scalar(const char* name, Binary op, const Tile& dst, const Tile& a, double scalar) {
  instruction = name;
  same_valid(dst, a);
  with_type(dst.type, [&](auto zero) {
    using T = decltype(zero);
    T *x = elements<T>(a, "src"), *to = elements<T>(dst, "dst");
    for_each(dst, [&](int row, int col) {
      double value = apply(op, static_cast<double>(x[offset(a, row, col)]), scalar);
      to[offset(dst, row, col)] = rounded<T>(value);
    });
  });
}

void row_expand_binary(const char* name, Binary op, const Tile& dst, const Tile& a, const Tile& b) {
  instruction = name;
  same_valid(dst, a);
  // the second operand: a value, or a block of 32 bytes, per row
  bool column = b.cols == 1 || b.layout == Layout::columns;
  require(column || b.valid_cols * size_of(b.type) == 32,
          "src1 must have one value or 32 bytes per row");
  require(b.valid_rows >= dst.valid_rows, "src1 has fewer rows than dst");
  with_type(dst.type, [&](auto zero) {
    using T = decltype(zero);
    T *x = elements<T>(a, "src0"), *y = elements<T>(b, "src1"), *to = elements<T>(dst, "dst");
    // a repeat of 256 bytes reads its operands before it writes: PyPTO lets dst overlap src1
    constexpr int LANES = 256 / sizeof(T);
    T right[LANES];
    for_each(dst, [&](int row, int col) {
      for (int lane = 0; col % LANES == 0 && lane < LANES; ++lane)
        right[lane] = y[offset(b, row, column ? 0 : lane % b.valid_cols)];
      double value = apply(op, static_cast<double>(x[offset(a, row, col)]),
                           static_cast<double>(right[col % LANES]));
      to[offset(dst, row, col)] = rounded<T>(value);
    });
  });
}

void column_expand_binary(const char* name, Binary op, const Tile& dst, const Tile& a,
                          const Tile& b) {
  instruction = name;
  same_valid(dst, a);
  require(b.valid_rows >= 1 && b.valid_cols >= dst.valid_cols, "src1 has fewer columns than dst");
  with_type(dst.type, [&](auto zero) {
    using T = decltype(zero);
    T *x = elements<T>(a, "src0"), *to = elements<T>(dst, "dst");
    T* y = reinterpret_cast<T*>(operand(b, 1, dst.valid_cols, "src1"));
    for_each(dst, [&](int row, int col) {
      double value = apply(op, static_cast<double>(x[offset(a, row, col)]),
                           static_cast<double>(y[offset(b, 0, col)]));
      to[offset(dst, row, col)] = rounded<T>(value);
    });
  });
}

void unary(const char* name, Unary op, const Tile& dst, const Tile& src) {
  instruction = name;
  same_valid(dst, src);
  // documented for A2/A3
  require(op != Unary::reciprocal || dst.address != src.address, "dst must not be src");
  with_type(dst.type, [&](auto zero) {
    using T = decltype(zero);
    T *from = elements<T>(src, "src"), *to = elements<T>(dst, "dst");
    for_each(dst, [&](int row, int col) {
      to[offset(dst, row, col)] = rounded<T>(apply_unary(op, from[offset(src, row, col)]));
    });
  });
}

void fill(const Tile& dst, double scalar) {
  instruction = "TEXPANDS";
  with_type(dst.type, [&](auto zero) {
    using T = decltype(zero);
    T* to = elements<T>(dst, "dst");
    for_each(dst, [&](int row, int col) { to[offset(dst, row, col)] = rounded<T>(scalar); });
  });
}

void copy(const Tile& dst, const Tile& src) {
  instruction = "TMOV";
  int size = size_of(dst.type);
  const char* from = operand(src, dst.valid_rows, dst.valid_cols, "src");
  char* to = operand(dst, dst.valid_rows, dst.valid_cols, "dst");
  for_each(dst, [&](int row, int col) {
    std::memcpy(to + offset(dst, row, col) * size, from + offset(src, row, col) * size, size);
  });
}

namespace {

double round_to_integer(double value, Round mode) {
  switch (mode) {
    case Round::rint:
      return std::nearbyint(value);
    case Round::round:
      return std::round(value);
    case Round::floor:
      return std::floor(value);
    case Round::ceil:
      return std::ceil(value);
    case Round::odd:
      return std::floor(value) == value ? value : std::floor(value / 2) * 2 + 1;
    default:
      return std::trunc(value);  // none, trunc
  }
}

template <class To, class From>
To converted(From value, Round mode) {
  if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    return static_cast<To>(value);
  } else if constexpr (std::is_integral_v<To>) {
    double number = round_to_integer(static_cast<double>(static_cast<float>(value)), mode);
    if (std::isnan(number)) return 0;
    using Limits = std::numeric_limits<To>;
    if (number <= static_cast<double>(Limits::min())) return Limits::min();
    if (number >= static_cast<double>(Limits::max())) return Limits::max();
    return static_cast<To>(number);
  } else if constexpr (std::is_same_v<To, From>) {
    return To(static_cast<float>(
        round_to_integer(static_cast<double>(value), mode == Round::none ? Round::rint : mode)));
  } else if constexpr (std::is_integral_v<From>) {
    return To(static_cast<float>(value));
  } else {
    return To(static_cast<float>(value));
  }
}

}  // namespace

void convert(const Tile& dst, const Tile& src, Round mode) {
  instruction = "TCVT";
  same_valid(dst, src);
  bool narrows = size_of(dst.type) < size_of(src.type) || src.type == Type::i32;
  bool to_real = dst.type == Type::f32 || dst.type == Type::f16 || dst.type == Type::bf16;
  require(!narrows || !to_real || mode == Round::none || mode == Round::rint,
          "to a narrower real type only rounding to nearest even is modelled");
  with_type(src.type, [&](auto from_zero) {
    with_type(dst.type, [&](auto to_zero) {
      using From = decltype(from_zero);
      using To = decltype(to_zero);
      From* from = elements<From>(src, "src");
      To* to = elements<To>(dst, "dst");
      // by row: in place a wider result would overwrite values still to be read
      std::vector<To> row_values(dst.valid_cols);
      for (int row = 0; row < dst.valid_rows; ++row) {
        for (int col = 0; col < dst.valid_cols; ++col)
          row_values[col] = converted<To>(from[offset(src, row, col)], mode);
        for (int col = 0; col < dst.valid_cols; ++col) to[offset(dst, row, col)] = row_values[col];
      }
    });
  });
}

namespace {

bool holds(Compare mode, double a, double b) {
  switch (mode) {
    case Compare::eq:
      return a == b;
    case Compare::ne:
      return a != b;
    case Compare::lt:
      return a < b;
    case Compare::le:
      return a <= b;
    case Compare::gt:
      return a > b;
    default:
      return a >= b;
  }
}

// One bit per element, in whole repeats of 256 bytes: the unit reads and writes beyond the valid
// columns.
template <class Right>
void compare_rows(const Tile& dst, const Tile& a, Compare mode, Right right) {
  require(size_of(dst.type) == 1, "dst must be bytes of 8 results");
  int per_repeat = 256 / size_of(a.type);
  int cols = round_up(a.valid_cols, per_repeat);
  with_type(a.type, [&](auto zero) {
    using T = decltype(zero);
    if (a.valid_rows <= 0 || cols == 0) return;
    int64_t last = static_cast<int64_t>(a.valid_rows - 1) * a.cols;
    T* x = reinterpret_cast<T*>(region(a, (last + cols) * sizeof(T), "src0"));
    auto y = right(zero, cols);
    int64_t bytes = static_cast<int64_t>(a.valid_rows - 1) * dst.cols + cols / 8;
    uint8_t* to = reinterpret_cast<uint8_t*>(region(dst, bytes, "dst"));
    for (int row = 0; row < a.valid_rows; ++row)
      for (int col = 0; col < cols; ++col) {
        uint8_t& byte = to[static_cast<int64_t>(row) * dst.cols + col / 8];
        bool result = holds(mode, static_cast<double>(x[static_cast<int64_t>(row) * a.cols + col]),
                            y(row, col));
        byte = static_cast<uint8_t>((byte & ~(1 << col % 8)) | result << col % 8);
      }
  });
}

}  // namespace

void compare(const Tile& dst, const Tile& a, const Tile& b, Compare mode) {
  instruction = "TCMP";
  same_valid(a, b);
  require(a.valid_rows == dst.valid_rows, "operands with different valid rows");
  require(a.type != Type::i32 || mode == Compare::eq, "int32 is compared for equality only");
  compare_rows(dst, a, mode, [&](auto zero, int cols) {
    using T = decltype(zero);
    int64_t last = static_cast<int64_t>(b.valid_rows - 1) * b.cols;
    T* y = reinterpret_cast<T*>(region(b, (last + cols) * sizeof(T), "src1"));
    int stride = b.cols;
    return [y, stride](int row, int col) {
      return static_cast<double>(y[static_cast<int64_t>(row) * stride + col]);
    };
  });
}

void compare_scalar(const Tile& dst, const Tile& a, double scalar, Compare mode) {
  instruction = "TCMPS";
  require(a.type != Type::i32 || mode == Compare::eq, "int32 is compared for equality only");
  compare_rows(dst, a, mode, [&](auto, int) { return [=](int, int) { return scalar; }; });
}

void select(const Tile& dst, const Tile& mask, const Tile& a, const Tile& b, const Tile& tmp) {
  instruction = "TSEL";
  if (dst.valid_rows <= 0 || dst.valid_cols <= 0) return;
  int size = size_of(dst.type), rows = dst.valid_rows, cols = dst.valid_cols;
  poison(region(tmp, 32, "tmp"), 32);
  const char* x = operand(a, rows, cols, "src0");
  const char* y = operand(b, rows, cols, "src1");
  char* to = operand(dst, rows, cols, "dst");
  int64_t stride = static_cast<int64_t>(mask.cols) * size_of(mask.type);
  const uint8_t* bits =
      reinterpret_cast<uint8_t*>(region(mask, (rows - 1) * stride + (cols + 7) / 8, "mask"));
  for_each(dst, [&](int row, int col) {
    bool first = bits[row * stride + col / 8] >> col % 8 & 1;
    const char* from = first ? x + offset(a, row, col) * size : y + offset(b, row, col) * size;
    std::memmove(to + offset(dst, row, col) * size, from, size);
  });
}

}  // namespace isa
