// One AI core: its buffers, the running task and the instruction that it executes.
#pragma once

#include <stdexcept>
#include <string>

#include "../device.h"

namespace isa {

// A mistake of a task; its message names the instruction and the buffer.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The instruction that runs; set first by every instruction.
extern const char* instruction;
[[noreturn]] void fault(const std::string& problem);
inline void require(bool condition, const char* rule) {
  if (!condition) fault(rule);
}

// Fills every buffer with the byte ``pattern`` and forgets the flags.
void reset_core(int pattern);
// After the last instruction of a task: a flag that is still set would meet the next task.
void check_flags();

// The first byte of ``rows x cols`` elements of a tile, after the checks of place and alignment.
char* operand(const Tile& tile, int rows, int cols, const char* role);
// The bytes of a buffer, for layouts other than rows and columns.
char* region(const Tile& tile, uint64_t bytes, const char* role);
bool in_buffer(uint64_t address, uint64_t bytes);
int size_of(Type type);
const char* name_of(Type type);
// Spoils bytes of the buffers without data of the program: scratch, padding of copies.
void poison(char* begin, uint64_t bytes);

inline int64_t offset(const Tile& tile, int row, int col) {
  return tile.layout == Layout::columns ? static_cast<int64_t>(col) * tile.rows + row
                                        : static_cast<int64_t>(row) * tile.cols + col;
}

inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// Calls ``function`` with a value of the element type.
template <class Function>
void with_type(Type type, Function function) {
  switch (type) {
    case Type::f32:
      return function(float());
    case Type::f16:
      return function(half());
    case Type::bf16:
      return function(bfloat16_t());
    case Type::i32:
      return function(int32_t());
    case Type::u32:
      return function(uint32_t());
    case Type::i16:
      return function(int16_t());
    case Type::u16:
      return function(uint16_t());
    case Type::u8:
      return function(uint8_t());
    case Type::i8:
      return function(int8_t());
    case Type::i64:
      return function(int64_t());
    case Type::u64:
      return function(uint64_t());
  }
}

}  // namespace isa
