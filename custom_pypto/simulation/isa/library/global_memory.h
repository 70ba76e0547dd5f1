// Global memory as a launch sees it: its arguments and its workspace, and who touches them.
#pragma once

#include <string>
#include <vector>

#include "core.h"

namespace isa {

struct Area {
  std::string name;
  uint64_t begin, end;
};

// What an instruction does to global memory; an atomic store adds.
enum class Use { read, write, add };
extern const char* const verbs[];  // "reads", ...

// Contiguous bytes that one instruction of a task touched.
struct Access {
  uint64_t begin, end;
  const char* instruction;
  Use use;
};

void set_areas(std::vector<Area> arguments, Area workspace);
// Begins a task and its log. ``stack``: global memory of the task's core for values outside
// its buffers; not logged, since the tasks of a core use it one after the other.
void start_task(uint64_t stack, uint64_t bytes);
std::vector<Access>& access_log();
std::string place_of(uint64_t address);

// The host address of ``bytes`` of global memory, checked and logged.
const char* read_global(uint64_t address, int64_t bytes);
char* write_global(uint64_t address, int64_t bytes);
char* add_global(uint64_t address, int64_t bytes);
// Requires that the bytes may be read, by a copy of values that do not matter.
void require_memory(uint64_t address, int64_t bytes);

}  // namespace isa
