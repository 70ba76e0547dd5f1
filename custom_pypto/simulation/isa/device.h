// The interface for generated code: the instructions of an AI core of Atlas A2/A3, after the public
// documentation of the PTO ISA (https://gitcode.com/cann/pto-isa, docs/isa). The library behind it
// works on real layouts in private buffers, so that a wrong offset, stride or reuse of a buffer
// shows in the result.
//
// Not modelled: the order in which the sort unit returns equal values, the last bit of exp, rsqrt
// and of sums, and time. Tasks run one by one, instructions in program order.
#pragma once

#include <cstdint>

#include "numbers.h"

namespace isa {

enum class Type : uint8_t { f32, f16, bf16, i64, u64, i32, u32, i16, u16, i8, u8 };
enum class Buffer : uint8_t { UB, L1, L0A, L0B, L0C, bias, fixpipe };
enum class Layout : uint8_t { rows, columns, nz, zn, other };
enum class Pad : uint8_t { none, zero, highest, lowest, number };

// A tile in a buffer: ``rows x cols`` elements from ``address`` on, of which some are valid.
struct Tile {
  Buffer buffer;
  Type type;
  Layout layout;
  int rows, cols, valid_rows, valid_cols;
  uint64_t address;
  Pad pad;
  float pad_number;
  bool pad_whole;  // TFILLPAD in L1: up to the tile's end, not to the next 16 rows
};

// A part of global memory; shape and stride in elements, outermost first.
struct Global {
  Type type;
  uint64_t address;
  int64_t shape[5], stride[5];
};

enum class Binary : uint8_t { add, sub, mul, div, max, min };
enum class Unary : uint8_t { exp, sqrt, rsqrt, reciprocal, absolute, log };
enum class Reduce : uint8_t { sum, max, min, prod };
enum class Compare : uint8_t { eq, ne, lt, le, gt, ge };
enum class Round : uint8_t { none, rint, round, floor, ceil, trunc, odd };

// Copies between global memory and buffers, in the size of the global shape.
void load(const Tile& dst, const Global& src);
void store(const Global& dst, const Tile& src, bool add, bool relu);
void fill_pad_in_l1(const Tile& dst, const Tile& src);

// Vector unit; the valid part of ``dst`` unless said otherwise.
void binary(const char* name, Binary op, const Tile& dst, const Tile& a, const Tile& b);
void binary_scalar(const char* name, Binary op, const Tile& dst, const Tile& a, double scalar);
void unary(const char* name, Unary op, const Tile& dst, const Tile& src);
void fill(const Tile& dst, double scalar);
void copy(const Tile& dst, const Tile& src);
void convert(const Tile& dst, const Tile& src, Round mode);  // out of range: the nearest
void compare(const Tile& dst, const Tile& a, const Tile& b, Compare mode);
void compare_scalar(const Tile& dst, const Tile& a, double scalar, Compare mode);
void select(const Tile& dst, const Tile& mask, const Tile& a, const Tile& b, const Tile& tmp);
void row_expand(const Tile& dst, const Tile& src);  // dst[r][c] = src[r][0]
void row_expand_binary(const char* name, Binary op, const Tile& dst, const Tile& a, const Tile& b);
void column_expand(const Tile& dst, const Tile& src);  // dst[r][c] = src[0][c]
void column_expand_binary(const char* name, Binary op, const Tile& dst, const Tile& a,
                          const Tile& b);
void row_reduce(const char* name, Reduce op, const Tile& dst, const Tile& src, const Tile& tmp);
void column_reduce(const char* name, Reduce op, const Tile& dst, const Tile& src, const Tile* tmp);
void fill_pad(const Tile& dst, const Tile& src);
void spoil(const Tile& tmp);  // an instruction's scratch
void count_up(const Tile& dst, int64_t start, bool descending);
void transpose(const Tile& dst, const Tile& src, const Tile& tmp);
void gather(const Tile& dst, const Tile& src, const Tile& index, const Tile& tmp);
void gather_every_second(const Tile& dst, const Tile& src, int first);
void sort32(const Tile& dst, const Tile& src, const Tile& index, const Tile* tmp);
void merge_blocks(const Tile& dst, const Tile& src, uint32_t block);
void merge_lists(const Tile& dst, const Tile& tmp, const Tile* lists, int count);

// Cube unit: L1 to L0, and products of what lies there.
void extract(const Tile& dst, const Tile& src, int row, int col);
void multiply(const Tile& c, const Tile& a, const Tile& b, bool accumulate);

// Scalar unit and synchronisation.
void set_flag(int from, int to, int event);
void wait_flag(int from, int to, int event);
uint64_t buffer_address(Buffer buffer, uint64_t offset);
[[noreturn]] void unsupported(const char* instruction);

}  // namespace isa
