// The cube unit. Layouts in units of 16 rows or columns x 32 bytes of k: L0A row of blocks by row
// of blocks, L0B too, with every block in columns; L0C column of blocks of 16 x 16 by column of
// blocks.
#include <cstring>
#include <vector>

#include "core.h"

namespace isa {

namespace {

constexpr int BLOCK = 16;

int blocks(int size) { return round_up(size, BLOCK) / BLOCK; }

// elements of k in a block
int depth(Type type) { return 32 / size_of(type); }

int64_t in_l0a(int row, int k, int depths, int depth) {
  return (static_cast<int64_t>(row / BLOCK) * depths + k / depth) * BLOCK * depth +
         row % BLOCK * depth + k % depth;
}

int64_t in_l0b(int k, int col, int cols, int depth) {
  return (static_cast<int64_t>(k / depth) * blocks(cols) + col / BLOCK) * BLOCK * depth +
         col % BLOCK * depth + k % depth;
}

int64_t in_l0c(int row, int col, int rows) {
  return (static_cast<int64_t>(col / BLOCK) * blocks(rows) + row / BLOCK) * BLOCK * BLOCK +
         row % BLOCK * BLOCK + col % BLOCK;
}

}  // namespace

void extract(const Tile& dst, const Tile& src, int row, int col) {
  instruction = "TEXTRACT";
  const int size = size_of(dst.type), deep = depth(dst.type);
  const bool left = dst.buffer == Buffer::L0A;
  require(src.layout == Layout::nz || src.layout == Layout::zn,
          "of the layouts of L1 only NZ and ZN are modelled");
  bool transposed = src.layout == Layout::zn;
  // int8 whose inner dim is not k is transposed in squares of 32
  const int block = size == 1 && left == transposed ? 32 : BLOCK;
  require(size < 4 || left != transposed, "float whose inner dim is not k is not modelled");
  require(src.rows % block == 0 && src.cols % block == 0, "src is of whole blocks");
  // rows and columns that fill the last blocks are copied as well
  int rows = round_up(dst.valid_rows, left ? block : deep);
  int cols = round_up(dst.valid_cols, left ? deep : block);
  require(row % (left ? block : deep) == 0 && col % (left ? deep : block) == 0,
          "offsets are multiples of a block, of 32 bytes along k");
  require(rows > 0 && cols > 0, "dst without valid elements");
  require(rows <= dst.rows && cols <= dst.cols, "more valid elements than dst has");
  require(row + rows <= src.rows && col + cols <= src.cols, "dst reaches out of src");
  int height = transposed ? src.cols : src.rows, width = transposed ? src.rows : src.cols;
  const char* from = region(src, static_cast<int64_t>(size) * height * width, "src");
  char* to = region(dst, static_cast<int64_t>(size) * rows * cols, "dst");
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < cols; ++j) {
      int r = transposed ? col + j : row + i, c = transposed ? row + i : col + j;
      int64_t at = (static_cast<int64_t>(c / deep) * height + r) * deep + c % deep;
      int64_t place = left ? in_l0a(i, j, cols / deep, deep) : in_l0b(i, j, cols, deep);
      std::memcpy(to + place * size, from + at * size, size);
    }
}

namespace {

// Float sums in the order of k, as the cube unit's are not documented; of int8 in int32, exact.
template <class T, class Sum>
void product(char* sums, const char* lefts, const char* rights, int m, int k, int n,
             bool accumulate) {
  constexpr int deep = 32 / sizeof(T);
  Sum* c = reinterpret_cast<Sum*>(sums);
  const T *a = reinterpret_cast<const T*>(lefts), *b = reinterpret_cast<const T*>(rights);
  std::vector<Sum> right(static_cast<size_t>(k) * n), row(n);
  for (int i = 0; i < k; ++i)
    for (int j = 0; j < n; ++j)
      right[static_cast<size_t>(i) * n + j] = static_cast<Sum>(b[in_l0b(i, j, n, deep)]);
  for (int r = 0; r < m; ++r) {
    for (int j = 0; j < n; ++j) row[j] = accumulate ? c[in_l0c(r, j, m)] : Sum(0);
    for (int i = 0; i < k; ++i) {
      Sum value = static_cast<Sum>(a[in_l0a(r, i, round_up(k, deep) / deep, deep)]);
      const Sum* other = &right[static_cast<size_t>(i) * n];
      for (int j = 0; j < n; ++j) row[j] += value * other[j];
    }
    for (int j = 0; j < n; ++j) c[in_l0c(r, j, m)] = row[j];
  }
}

}  // namespace

void multiply(const Tile& c, const Tile& a, const Tile& b, bool accumulate) {
  instruction = accumulate ? "TMATMUL_ACC" : "TMATMUL";
  int m = a.valid_rows, k = a.valid_cols, n = b.valid_cols;
  require(m >= 1 && k >= 1 && n >= 1 && m <= 4095 && k <= 4095 && n <= 4095,
          "m, k and n are in [1, 4095]");
  require(b.valid_rows == k, "operands with different k");
  int64_t rows = round_up(m, BLOCK), cols = round_up(n, BLOCK);
  require(rows <= c.rows && cols <= c.cols, "more rows or columns than the result has");
  int64_t inner = 32ll * (round_up(k, depth(a.type)) / depth(a.type));  // bytes
  const char *left = region(a, rows * inner, "a"), *right = region(b, inner * cols, "b");
  char* to = region(c, 4 * rows * cols, "c");
  if (a.type == Type::f32)
    product<float, float>(to, left, right, m, k, n, accumulate);
  else if (a.type == Type::f16)
    product<half, float>(to, left, right, m, k, n, accumulate);
  else if (a.type == Type::bf16)
    product<bfloat16_t, float>(to, left, right, m, k, n, accumulate);
  else
    product<int8_t, int32_t>(to, left, right, m, k, n, accumulate);
}

}  // namespace isa
