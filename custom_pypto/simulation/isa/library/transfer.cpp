// Copies between global memory and the buffers of a core.
#include <algorithm>
#include <cstring>

#include "core.h"
#include "global_memory.h"

namespace isa {

namespace {

constexpr int BLOCK = 32;  // bytes that a copy into a buffer writes at once

uint64_t element(const Global& global, const int64_t (&index)[4]) {
  int64_t at = 0;
  for (int i = 0; i < 4; ++i) at += index[i] * global.stride[i];
  return global.address + at * size_of(global.type);
}

// Rows of the four outer dimensions, in order.
template <class Row>
void for_each_row(const Global& global, Row row) {
  int64_t index[4], count = 0;
  for (index[0] = 0; index[0] < global.shape[0]; ++index[0])
    for (index[1] = 0; index[1] < global.shape[1]; ++index[1])
      for (index[2] = 0; index[2] < global.shape[2]; ++index[2])
        for (index[3] = 0; index[3] < global.shape[3]; ++index[3])
          row(static_cast<int>(count++), element(global, index));
}

int64_t rows_of(const Global& global) {
  return global.shape[0] * global.shape[1] * global.shape[2] * global.shape[3];
}

void check_shapes(const Tile& tile, const Global& global) {
  // documented as greater than 0; PyPTO expresses "nothing to copy" this way
  require(global.shape[4] >= 0 && rows_of(global) >= 0, "negative shape of global memory");
  require(tile.valid_cols == global.shape[4] && tile.valid_rows == rows_of(global),
          "the tile's valid shape is not the shape of global memory");
  require(global.shape[3] < 4096, "more than 4095 rows at once");
}

// L1 as columns of 32 bytes: column block after column block, each with all the tile's rows. The
// copied bytes beyond the valid part must be memory, and must not matter.
void load_fractal(const Tile& dst, const Global& src) {
  int size = size_of(dst.type), per_block = BLOCK / size;
  int64_t rows = src.shape[3], cols = src.shape[4];
  require(src.shape[0] == 1 && src.shape[1] == 1 && src.shape[2] == 1, "ND to NZ of 2 dims only");
  require(rows > 0 && rows <= 16384 && cols > 0 && cols <= 65535 && src.stride[3] > 0 &&
              src.stride[3] <= 65535,
          "ND to NZ: rows in [1, 16384], columns and row stride in [1, 65535]");
  int blocks = round_up(static_cast<int>(cols), per_block) / per_block;
  int64_t bytes = ((blocks - 1) * static_cast<int64_t>(dst.rows) + rows) * BLOCK;
  char* to = region(dst, bytes, "dst");
  for (int64_t row = 0; row < rows; ++row) {
    uint64_t begin = src.address + row * src.stride[3] * size;
    int64_t valid = row < dst.valid_rows ? std::min<int64_t>(cols, dst.valid_cols) * size : 0;
    require_memory(begin, cols * size);
    const char* from = read_global(begin, valid);
    for (int64_t byte = 0; byte < blocks * BLOCK; byte += BLOCK) {
      char* place = to + (byte / BLOCK * dst.rows + row) * BLOCK;
      int64_t copied = std::min<int64_t>(BLOCK, valid - byte);
      poison(place, BLOCK);
      if (copied > 0) std::memcpy(place, from + byte, copied);
    }
  }
}

}  // namespace

// Zeros where nothing is valid, for products that take whole blocks.
void fill_pad_in_l1(const Tile& dst, const Tile& src) {
  instruction = "TFILLPAD";
  require(dst.address == src.address && dst.layout == Layout::nz && dst.pad == Pad::none,
          "in L1 in place, of NZ with zeros, others are not modelled");
  int size = size_of(dst.type), per_block = BLOCK / size;
  int rows = dst.pad_whole ? dst.rows : round_up(dst.valid_rows, 16);
  int cols = dst.pad_whole ? dst.cols : round_up(dst.valid_cols, per_block);
  char* to = region(dst, static_cast<int64_t>(dst.rows) * cols * size, "dst");
  for (int col = 0; col < cols; ++col)
    for (int row = 0; row < rows; ++row)
      if (row >= dst.valid_rows || (dst.pad_whole && col >= dst.valid_cols))
        std::memset(to + (col / per_block * static_cast<int64_t>(dst.rows) + row) * BLOCK +
                        col % per_block * size,
                    0, size);
}

void load(const Tile& dst, const Global& src) {
  instruction = "TLOAD";
  if (dst.layout == Layout::nz) return load_fractal(dst, src);
  require(dst.layout == Layout::rows, "of the layouts of a tile only rows and NZ are modelled");
  check_shapes(dst, src);
  int size = size_of(dst.type);
  int64_t bytes = src.shape[4] * size;
  require(dst.buffer == Buffer::UB || bytes % BLOCK == 0, "L1 takes whole blocks of 32 bytes");
  char* to = operand(dst, dst.valid_rows, dst.valid_cols, "dst");
  if (!to) return;
  for_each_row(src, [&](int row, uint64_t address) {
    char* place = to + static_cast<int64_t>(row) * dst.cols * size;
    std::memcpy(place, read_global(address, bytes), bytes);
    // the rest of the last block is not specified
    poison(place + bytes, -bytes & (BLOCK - 1));
  });
}

namespace {

template <class To>
void add_or_set(char* place, float value, bool add) {
  To number;
  std::memcpy(&number, place, sizeof number);
  number = To(add ? static_cast<float>(number) + value : value);
  std::memcpy(place, &number, sizeof number);
}

// From L0C: blocks of 16 columns, each with the rows rounded up to 16; rounded to nearest even.
void store_product(const Global& dst, const Tile& src, bool add, bool relu) {
  const bool integers = src.type == Type::i32 && dst.type == Type::i32 && !add && !relu;
  require(integers || (src.type == Type::f32 &&
                       (dst.type == Type::f32 || dst.type == Type::f16 || dst.type == Type::bf16)),
          "L0C is stored as float, half or bfloat16, of int32 as int32");
  require(src.valid_cols >= 1 && src.valid_cols <= 4095, "1 to 4095 columns from L0C");
  int height = round_up(src.valid_rows, 16), size = size_of(dst.type);
  int width = round_up(src.valid_cols, 16);
  const float* from = reinterpret_cast<const float*>(region(src, 4ll * height * width, "src"));
  for_each_row(dst, [&](int row, uint64_t address) {
    int64_t bytes = src.valid_cols * size;
    char* to = add ? add_global(address, bytes) : write_global(address, bytes);
    for (int col = 0; col < src.valid_cols; ++col) {
      const float* product = from + (col / 16 * height + row) * 16 + col % 16;
      if (integers) {
        std::memcpy(to + col * size, product, size);
        continue;
      }
      float value = *product;
      if (relu) value = value > 0 ? value : 0;
      char* place = to + col * size;
      if (dst.type == Type::f32) add_or_set<float>(place, value, add);
      if (dst.type == Type::f16) add_or_set<half>(place, value, add);
      if (dst.type == Type::bf16) add_or_set<bfloat16_t>(place, value, add);
    }
  });
}

}  // namespace

void store(const Global& dst, const Tile& src, bool add, bool relu) {
  instruction = "TSTORE";
  check_shapes(src, dst);
  if (src.buffer == Buffer::L0C) return store_product(dst, src, add, relu);
  require(!relu && (!add || (src.type == Type::f32 && dst.type == Type::f32)),
          "from UB only a copy and the addition of floats are modelled");
  require(size_of(dst.type) == size_of(src.type), "source and destination of one size");
  const char* from = operand(src, src.valid_rows, src.valid_cols, "src");
  if (!from) return;
  int size = size_of(src.type);
  for_each_row(dst, [&](int row, uint64_t address) {
    int64_t bytes = dst.shape[4] * size;
    const char* values = from + static_cast<int64_t>(row) * src.cols * size;
    if (!add) {
      std::memcpy(write_global(address, bytes), values, bytes);
      return;
    }
    char* to = add_global(address, bytes);
    for (int64_t at = 0; at < bytes; at += size) {
      float value;
      std::memcpy(&value, values + at, size);
      add_or_set<float>(to + at, value, true);
    }
  });
}

}  // namespace isa
