#include "core.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

namespace isa {

const char* instruction = "";

namespace {

struct Memory {
  const char* name;
  uint64_t size;
  char* begin = nullptr;
};

// Atlas A2/A3: bytes per core
Memory memories[] = {{"UB", 192 << 10},  {"L1", 512 << 10}, {"L0A", 64 << 10},   {"L0B", 64 << 10},
                     {"L0C", 128 << 10}, {"bias", 1 << 10}, {"fixpipe", 7 << 10}};
int pattern = 0xff;
std::map<std::tuple<int, int, int>, int> flags;

const char* const pipes[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "ALL"};

std::string flag_name(int from, int to, int event) {
  return std::string("flag ") + std::to_string(event) + " from pipe " + pipes[from] + " to pipe " +
         pipes[to];
}

// Memory at addresses of 32 bits: PyPTO's tile operations cut longer ones off. The page behind it
// is inaccessible.
char* low_memory(uint64_t size) {
  for (uint64_t hint = 1 << 28; hint < uint64_t{1} << 32; hint += 1 << 24) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void* place = mmap(reinterpret_cast<void*>(hint), size + 4096, PROT_NONE, flags, -1, 0);
    if (place == MAP_FAILED) break;
    if (reinterpret_cast<uint64_t>(place) + size < uint64_t{1} << 32) {
      if (mprotect(place, size, PROT_READ | PROT_WRITE)) break;
      return static_cast<char*>(place);
    }
    munmap(place, size + 4096);
  }
  throw std::bad_alloc();
}

}  // namespace

void fault(const std::string& problem) { throw Fault(std::string(instruction) + ": " + problem); }

void unsupported(const char* name) {
  instruction = name;
  fault("not modelled");
}

void reset_core(int byte) {
  pattern = byte;
  flags.clear();
  for (Memory& memory : memories) {
    if (!memory.begin) memory.begin = low_memory(memory.size);
    std::memset(memory.begin, pattern, memory.size);
  }
}

void poison(char* begin, uint64_t bytes) { std::memset(begin, pattern, bytes); }

uint64_t buffer_address(Buffer buffer, uint64_t offset) {
  return reinterpret_cast<uint64_t>(memories[static_cast<int>(buffer)].begin) + offset;
}

bool in_buffer(uint64_t address, uint64_t bytes) {
  for (const Memory& memory : memories) {
    uint64_t begin = reinterpret_cast<uint64_t>(memory.begin);
    if (address >= begin && address + bytes <= begin + memory.size) return true;
  }
  return false;
}

int size_of(Type type) {
  switch (type) {
    case Type::i64:
    case Type::u64:
      return 8;
    case Type::f32:
    case Type::i32:
    case Type::u32:
      return 4;
    case Type::i8:
    case Type::u8:
      return 1;
    default:
      return 2;
  }
}

const char* name_of(Type type) {
  const char* const names[] = {"float",  "half",  "bfloat16", "int64", "uint64", "int32",
                               "uint32", "int16", "uint16",   "int8",  "uint8"};
  return names[static_cast<int>(type)];
}

char* region(const Tile& tile, uint64_t bytes, const char* role) {
  const Memory& memory = memories[static_cast<int>(tile.buffer)];
  uint64_t begin = reinterpret_cast<uint64_t>(memory.begin);
  if (tile.address < begin || tile.address + bytes > begin + memory.size)
    fault(std::string(role) + " takes bytes " +
          std::to_string(static_cast<int64_t>(tile.address - begin)) + " to " +
          std::to_string(static_cast<int64_t>(tile.address - begin + bytes)) + " of " +
          memory.name + ", which has " + std::to_string(memory.size));
  if (tile.address % 32)
    fault(std::string(role) + " starts at byte " + std::to_string(tile.address - begin) + " of " +
          memory.name + ", not at a multiple of 32");
  return reinterpret_cast<char*>(tile.address);
}

char* operand(const Tile& tile, int rows, int cols, const char* role) {
  if (rows > tile.rows || cols > tile.cols)
    fault(std::string(role) + " of " + std::to_string(tile.rows) + " x " +
          std::to_string(tile.cols) + " elements has " + std::to_string(rows) + " x " +
          std::to_string(cols) + " valid ones");
  if (tile.layout != Layout::rows && tile.layout != Layout::columns)
    fault(std::string(role) + " is fractal");
  if (rows <= 0 || cols <= 0) return nullptr;
  return region(tile, (offset(tile, rows - 1, cols - 1) + 1) * size_of(tile.type), role);
}

void set_flag(int from, int to, int event) {
  instruction = "set_flag";
  if (++flags[{from, to, event}] > 1)
    fault(flag_name(from, to, event) + " is set twice without a wait between: one is lost");
}

void wait_flag(int from, int to, int event) {
  instruction = "wait_flag";
  if (--flags[{from, to, event}] < 0)
    fault(flag_name(from, to, event) + " is waited for before it is set");
}

void check_flags() {
  instruction = "end of the task";
  for (const auto& [key, count] : flags)
    if (count)
      fault(std::apply(flag_name, key) +
            " is set and never waited for: the next task of the core "
            "would not wait for its own");
}

}  // namespace isa
