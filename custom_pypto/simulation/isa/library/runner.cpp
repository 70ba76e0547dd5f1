// Runs the generated bodies: PyPTO's control flow, which the cost model executes on the host, hands
// over each group of tasks that a device would get, with its addresses and its task graph.
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "races.h"
#include "tilefwk/core_func_data.h"

namespace {

using namespace npu::tile_fwk;

// Of DynDeviceTaskBase and DevStartArgs, PyPTO's wheel declares only the bases; the members added
// here follow them in memory.
struct DeviceTaskBatch {
  DeviceTask task;
  DynFuncHeader* functions;
};
struct StartArguments : DevStartArgsBase {
  uint64_t workspace, workspace_size;
};
struct Parameters {  // CoreFuncParam
  DynFuncData* function;
  uint64_t* attributes;
  uint64_t* expressions;
  uint32_t task;
  void* context;
};
using Body = void (*)(Parameters*, int64_t, int64_t*, void*);

struct Program {
  std::map<uint64_t, std::pair<Body, std::string>> bodies;
  std::vector<uint64_t> sizes;  // bytes of each argument
  std::vector<uint64_t> addresses;
  std::string topology;
  int pattern = 0xff;
  bool unordered_adds = false;
  std::string problem;  // the first
  uint64_t tasks = 0, batches = 0;
  // what the scalar unit may touch besides global memory and buffers: stack, code, PyPTO's tables
  std::vector<std::pair<uint64_t, uint64_t>> known;
} program;

constexpr int64_t CODE_BYTES = 1 << 20;
constexpr int HUB = static_cast<int>(MachineType::HUB);

// The schedulers, on as many threads as a device has, wait for this thread in busy loops.
void yield_to_this_thread() {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &all);
  sched_setaffinity(0, sizeof all, &all);
  int this_thread = static_cast<int>(syscall(SYS_gettid));
  DIR* threads = opendir("/proc/self/task");
  if (!threads) return;
  sched_param none = {};
  while (dirent* entry = readdir(threads)) {
    int thread = std::atoi(entry->d_name);
    if (thread && thread != this_thread) sched_setscheduler(thread, SCHED_IDLE, &none);
  }
  closedir(threads);
}

void learn_areas(DynFuncHeader* header) {
  auto* start = static_cast<StartArguments*>(header->At(0).startArgs);
  uint64_t count = start->inputTensorSize + start->outputTensorSize;
  if (count != program.sizes.size())
    throw isa::Fault("PyPTO passes " + std::to_string(count) + " tensors, the kernel has " +
                     std::to_string(program.sizes.size()));
  std::vector<isa::Area> arguments;
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t begin = start->devTensorList[i].address;
    program.addresses.push_back(begin);
    arguments.push_back({"argument " + std::to_string(i), begin, begin + program.sizes[i]});
  }
  isa::Area workspace = {"the workspace", start->workspace,
                         start->workspace + start->workspace_size};
  uint64_t first = header->At(0).workspaceAddr;  // 0 if a function needs none
  if (first && (first < workspace.begin || first > workspace.end))
    throw isa::Fault("PyPTO's launch arguments have another layout than those of 0.2.0 and 0.2.1");
  isa::set_areas(std::move(arguments), workspace);
}

// A head that names the columns, the last of which is successors, then lines of numbers, in which
// empty fields do not count: batch, task, root, hash, op, leaf, leaf hash, core type, ...
isa::Graph read_graph(uint64_t batch, std::map<uint32_t, int>& core_types) {
  isa::Graph graph;
  std::ifstream file(program.topology);
  std::string line;
  std::getline(file, line);
  const auto columns = std::count(line.begin(), line.end(), ',');
  while (std::getline(file, line)) {
    std::vector<uint64_t> fields;
    std::istringstream stream(line);
    for (std::string field; std::getline(stream, field, ',');)
      if (!field.empty()) fields.push_back(std::strtoull(field.c_str(), nullptr, 10));
    if (fields.empty() || fields[0] != batch || !std::isdigit(line[0])) continue;
    if (fields.size() < static_cast<size_t>(columns))
      throw isa::Fault("a line of PyPTO's task graph has fewer fields than its head");
    uint32_t task = static_cast<uint32_t>(fields[1]);
    core_types[task] = static_cast<int>(fields[7]);
    graph[task].successors.assign(fields.begin() + columns, fields.end());
  }
  return graph;
}

void learn_known(const DynFuncHeader* header, const DynFuncData& function, Body body) {
  auto range = [](const auto* begin, uint64_t count) {
    uint64_t address = reinterpret_cast<uint64_t>(begin);
    program.known.emplace_back(address, address + count * sizeof *begin);
  };
  program.known.clear();
  pthread_attr_t attributes;
  void* stack;
  size_t size;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &stack, &size);
  pthread_attr_destroy(&attributes);
  range(static_cast<const char*>(stack), size);
  // constants of the body
  range(reinterpret_cast<const char*>(body) - CODE_BYTES, 2 * CODE_BYTES);
  range(reinterpret_cast<const char*>(header), header->funcSize);
  range(&function, 1);
  range(function.opAttrs, function.opAttrSize);
  range(function.exprTbl, function.exprNum);
  range(function.rawTensorDesc, function.rawTensorDescSize);
  range(function.rawTensorAddr, function.rawTensorAddrSize);
  // dims of arguments
  auto* start = static_cast<StartArguments*>(function.startArgs);
  range(start, 1);
  range(start->devTensorList, start->inputTensorSize + start->outputTensorSize);
}

void run_task(DynFuncHeader* header, uint32_t id, isa::Node& node, int core_type) {
  DynFuncData& function = header->At(FuncID(id));
  uint64_t* attributes = function.opAttrs + function.opAtrrOffsets[TaskID(id)];
  auto found = program.bodies.find(header->cceBinary[attributes[0]].funcHash);
  if (found == program.bodies.end()) {
    if (core_type == HUB) return;  // joins edges
    throw isa::Fault("task " + std::to_string(id) + " has no generated code");
  }
  node.name = found->second.second;
  learn_known(header, function, found->second.first);
  isa::reset_core(program.pattern);
  isa::start_task(function.stackWorkSpaceAddr, function.stackWorkSpaceSize);
  Parameters parameters = {&function, attributes, function.exprTbl, id, nullptr};
  try {
    // the stack of core 0: each core has its own, and runs its tasks one after the other
    found->second.first(&parameters, function.stackWorkSpaceAddr, nullptr, nullptr);
    isa::check_flags();
  } catch (const isa::Fault& fault) {
    throw isa::Fault("task " + std::to_string(id) + " (" + node.name + "), " + fault.what());
  }
  node.accesses.swap(isa::access_log());
  ++program.tasks;
}

void run_batch(DynFuncHeader* header) {
  if (program.addresses.empty()) learn_areas(header);
  std::map<uint32_t, int> core_types;
  isa::Graph graph = read_graph(header->seqNo, core_types);
  std::vector<uint32_t> order = isa::topological_order(graph);
  for (uint32_t id : order) run_task(header, id, graph[id], core_types[id]);
  isa::check_races(graph, order, program.unordered_adds);
  ++program.batches;
}

// A load or store of the scalar unit; the compiler calls this before each.
void scalar_access(uint64_t address, int64_t bytes, bool write) {
  for (const auto& [begin, end] : program.known)
    if (address >= begin && address + bytes <= end) return;
  if (isa::in_buffer(address, bytes)) return;
  isa::instruction = write ? "a scalar store" : "a scalar load";
  write ? static_cast<void>(isa::write_global(address, bytes))
        : static_cast<void>(isa::read_global(address, bytes));
}

}  // namespace

extern "C" {

void isa_begin(const char* topology, int pattern, bool unordered_adds) {
  program = Program();
  program.topology = topology;
  program.pattern = pattern;
  program.unordered_adds = unordered_adds;
}

void isa_argument(uint64_t bytes) { program.sizes.push_back(bytes); }

void isa_body(uint64_t hash, void* body, const char* name) {
  program.bodies[hash] = {reinterpret_cast<Body>(body), name};
}

// PyPTO's control flow calls this with every group of tasks, ahead of the schedulers.
void isa_run(void*, void*, void* batch) {
  if (!program.problem.empty()) return;
  yield_to_this_thread();
  try {
    run_batch(static_cast<DeviceTaskBatch*>(batch)->functions);
  } catch (const std::exception& error) {
    program.problem = error.what();
  }
}

const char* isa_problem() { return program.problem.c_str(); }
uint64_t isa_address(int argument) {
  return static_cast<size_t>(argument) < program.addresses.size() ? program.addresses[argument] : 0;
}
uint64_t isa_tasks() { return program.tasks; }
uint64_t isa_batches() { return program.batches; }

#define ISA_SCALAR(bytes)                                                                       \
  void __asan_load##bytes##_noabort(uint64_t address) { scalar_access(address, bytes, false); } \
  void __asan_store##bytes##_noabort(uint64_t address) { scalar_access(address, bytes, true); }
ISA_SCALAR(1)
ISA_SCALAR(2)
ISA_SCALAR(4)
ISA_SCALAR(8)
ISA_SCALAR(16)
#undef ISA_SCALAR
void __asan_loadN_noabort(uint64_t address, uint64_t bytes) {
  scalar_access(address, static_cast<int64_t>(bytes), false);
}
void __asan_storeN_noabort(uint64_t address, uint64_t bytes) {
  scalar_access(address, static_cast<int64_t>(bytes), true);
}
void __asan_handle_no_return() {}
}
