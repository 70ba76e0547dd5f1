#include "global_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace isa {

const char* const verbs[] = {"reads", "writes", "adds to"};

namespace {

std::vector<Area> areas;     // the workspace is the last
uint8_t* written = nullptr;  // a byte for each byte of the workspace
uint64_t written_size = 0;
std::vector<Access> accesses;
uint64_t stack_begin = 0, stack_end = 0;  // of the core that runs the task

const Area* area_of(uint64_t address) {
  for (const Area& area : areas)
    if (address >= area.begin && address < area.end) return &area;
  return nullptr;
}

[[noreturn]] void outside(uint64_t address, int64_t bytes, const char* verb) {
  const Area* before = nullptr;
  for (const Area& area : areas)
    if (address + bytes > area.begin && (!before || area.begin > before->begin)) before = &area;
  std::string what = std::string(verb) + " " + std::to_string(bytes) + " bytes ";
  if (!before) fault(what + "in front of every argument and the workspace");
  uint64_t size = before->end - before->begin;
  fault(what + "at byte " + std::to_string(static_cast<int64_t>(address - before->begin)) + " of " +
        before->name + ", which has " + std::to_string(size));
}

const Area& inside(uint64_t address, int64_t bytes, Use use) {
  const Area* area = area_of(address);
  if (!area || address + bytes > area->end) outside(address, bytes, verbs[static_cast<int>(use)]);
  return *area;
}

const Area& checked(uint64_t address, int64_t bytes, Use use) {
  const Area& area = inside(address, bytes, use);
  if (address >= stack_begin && address + bytes <= stack_end) return area;
  if (!accesses.empty()) {
    Access& last = accesses.back();
    if (last.end == address && last.use == use && last.instruction == instruction) {
      last.end += bytes;
      return area;
    }
  }
  accesses.push_back({address, address + bytes, instruction, use});
  return area;
}

}  // namespace

void set_areas(std::vector<Area> arguments, Area workspace) {
  areas = std::move(arguments);
  areas.push_back(workspace);
  if (written) munmap(written, written_size);
  written_size = std::max<uint64_t>(workspace.end - workspace.begin, 1);
  // pages of a workspace that nobody touches take no memory
  void* place = mmap(nullptr, written_size, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) throw std::bad_alloc();
  written = static_cast<uint8_t*>(place);
}

void start_task(uint64_t stack, uint64_t bytes) {
  accesses.clear();
  stack_begin = stack;
  stack_end = stack + bytes;
  if (!bytes) return;
  const Area& workspace = areas.back();
  if (stack_begin < workspace.begin || stack_end > workspace.end)
    throw Fault("PyPTO's stack of a core lies outside the workspace");
  std::memset(written + (stack_begin - workspace.begin), 0, bytes);
}

std::vector<Access>& access_log() { return accesses; }

std::string place_of(uint64_t address) {
  const Area* area = area_of(address);
  return "byte " + std::to_string(address - area->begin) + " of " + area->name;
}

namespace {

char* read_as(Use use, uint64_t address, int64_t bytes) {
  if (bytes <= 0) return nullptr;
  const Area& area = checked(address, bytes, use);
  if (&area == &areas.back()) {
    const uint8_t* begin = written + (address - area.begin);
    if (!std::memchr(begin, 1, bytes))
      fault("reads " + std::to_string(bytes) + " bytes at " + place_of(address) +
            ", which no task wrote");
    // padding of a tile: it may be read and must not matter
    for (int64_t i = 0; i < bytes; ++i)
      if (!begin[i]) poison(reinterpret_cast<char*>(address + i), 1);
  }
  return reinterpret_cast<char*>(address);
}

}  // namespace

const char* read_global(uint64_t address, int64_t bytes) {
  return read_as(Use::read, address, bytes);
}

char* add_global(uint64_t address, int64_t bytes) { return read_as(Use::add, address, bytes); }

void require_memory(uint64_t address, int64_t bytes) { inside(address, bytes, Use::read); }

char* write_global(uint64_t address, int64_t bytes) {
  if (bytes <= 0) return nullptr;
  const Area& area = checked(address, bytes, Use::write);
  if (&area == &areas.back()) std::memset(written + (address - area.begin), 1, bytes);
  return reinterpret_cast<char*>(address);
}

}  // namespace isa
