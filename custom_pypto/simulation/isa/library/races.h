// Whether the task graph orders every two tasks that touch the same memory.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "global_memory.h"

namespace isa {

struct Node {
  std::vector<uint32_t> successors;
  std::string name;
  std::vector<Access> accesses;
};

using Graph = std::map<uint32_t, Node>;

// The tasks in an order that the graph allows.
std::vector<uint32_t> topological_order(const Graph& graph);
// Throws a Fault that names two tasks of a conflict without an order. Two that add to the same
// memory are a conflict too, as the order of a sum's terms decides its last bit, unless
// ``unordered_adds``.
void check_races(const Graph& graph, const std::vector<uint32_t>& order, bool unordered_adds);

}  // namespace isa
