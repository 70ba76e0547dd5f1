// The cube unit. Layouts in units of 16 x 16 elements of 2 bytes: L0A row of blocks by row of
// blocks, L0B likewise with every block in columns, L0C column of blocks by column of blocks.
#include <cstring>
#include <vector>

#include "core.h"

namespace isa {

namespace {

constexpr int BLOCK = 16;

int blocks(int size) { return round_up(size, BLOCK) / BLOCK; }

int64_t in_l0a(int row, int col, int cols) {
  return (static_cast<int64_t>(row / BLOCK) * blocks(cols) + col / BLOCK) * BLOCK * BLOCK +
         row % BLOCK * BLOCK + col % BLOCK;
}

int64_t in_l0b(int row, int col, int cols) {
  return (static_cast<int64_t>(row / BLOCK) * blocks(cols) + col / BLOCK) * BLOCK * BLOCK +
         col % BLOCK * BLOCK + row % BLOCK;
}

int64_t in_l0c(int row, int col, int rows) {
  return (static_cast<int64_t>(col / BLOCK) * blocks(rows) + row / BLOCK) * BLOCK * BLOCK +
         row % BLOCK * BLOCK + col % BLOCK;
}

}  // namespace

void extract(const Tile& dst, const Tile& src, int row, int col) {
  instruction = "TEXTRACT";
  // rows and columns that fill the last blocks are copied as well
  int rows = round_up(dst.valid_rows, BLOCK), cols = round_up(dst.valid_cols, BLOCK);
  require(row % BLOCK == 0 && col % BLOCK == 0, "offsets are multiples of 16");
  require(rows > 0 && cols > 0, "dst without valid elements");
  require(rows <= dst.rows && cols <= dst.cols, "more valid elements than dst has");
  require(row + rows <= src.rows && col + cols <= src.cols, "dst reaches out of src");
  require(src.layout == Layout::nz || src.layout == Layout::zn,
          "of the layouts of L1 only NZ and ZN are modelled");
  bool transposed = src.layout == Layout::zn;
  int height = transposed ? src.cols : src.rows, width = transposed ? src.rows : src.cols;
  const uint16_t* from = reinterpret_cast<uint16_t*>(region(src, 2ll * height * width, "src"));
  uint16_t* to = reinterpret_cast<uint16_t*>(region(dst, 2ll * rows * cols, "dst"));
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < cols; ++j) {
      int r = transposed ? col + j : row + i, c = transposed ? row + i : col + j;
      int64_t at = (static_cast<int64_t>(c / BLOCK) * height + r) * BLOCK + c % BLOCK;
      to[dst.buffer == Buffer::L0A ? in_l0a(i, j, cols) : in_l0b(i, j, cols)] = from[at];
    }
}

namespace {

// float sums in the order of k, as the cube unit's are not documented
template <class T>
void product(float* c, const T* a, const T* b, int m, int k, int n, bool accumulate) {
  std::vector<float> right(static_cast<size_t>(k) * n), row(n), left(k);
  for (int i = 0; i < k; ++i)
    for (int j = 0; j < n; ++j) right[static_cast<size_t>(i) * n + j] = b[in_l0b(i, j, n)];
  for (int r = 0; r < m; ++r) {
    for (int j = 0; j < n; ++j) row[j] = accumulate ? c[in_l0c(r, j, m)] : 0;
    for (int i = 0; i < k; ++i) {
      float value = a[in_l0a(r, i, k)];
      const float* other = &right[static_cast<size_t>(i) * n];
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
  int64_t rows = round_up(m, BLOCK), inner = round_up(k, BLOCK), cols = round_up(n, BLOCK);
  const char* left = region(a, 2 * rows * inner, "a");
  const char* right = region(b, 2 * inner * cols, "b");
  float* to = reinterpret_cast<float*>(region(c, 4 * rows * cols, "c"));
  if (a.type == Type::f16)
    product(to, reinterpret_cast<const half*>(left), reinterpret_cast<const half*>(right), m, k, n,
            accumulate);
  else
    product(to, reinterpret_cast<const bfloat16_t*>(left),
            reinterpret_cast<const bfloat16_t*>(right), m, k, n, accumulate);
}

}  // namespace isa
