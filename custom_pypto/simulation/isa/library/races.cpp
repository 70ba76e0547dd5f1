#include "races.h"

#include <algorithm>
#include <queue>

namespace isa {

std::vector<uint32_t> topological_order(const Graph& graph) {
  std::map<uint32_t, int> waiting;
  for (const auto& [id, node] : graph)
    for (uint32_t next : node.successors) ++waiting[next];
  std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> ready;
  for (const auto& [id, node] : graph)
    if (!waiting[id]) ready.push(id);
  std::vector<uint32_t> order;
  while (!ready.empty()) {
    uint32_t id = ready.top();
    ready.pop();
    order.push_back(id);
    for (uint32_t next : graph.at(id).successors)
      if (--waiting[next] == 0) ready.push(next);
  }
  if (order.size() != graph.size()) throw Fault("the task graph has a circle");
  return order;
}

namespace {

// For each task a bit per task that runs before it, whatever the schedule.
class Ancestors {
 public:
  Ancestors(const Graph& graph, const std::vector<uint32_t>& order) {
    for (size_t i = 0; i < order.size(); ++i) place_[order[i]] = i;
    words_ = (order.size() + 63) / 64;
    bits_.assign(words_ * order.size(), 0);
    for (size_t i = 0; i < order.size(); ++i)
      for (uint32_t next : graph.at(order[i]).successors) {
        uint64_t* row = &bits_[place_.at(next) * words_];
        for (size_t word = 0; word < words_; ++word) row[word] |= bits_[i * words_ + word];
        row[i / 64] |= uint64_t{1} << i % 64;
      }
  }

  bool ordered(uint32_t a, uint32_t b) const {
    size_t x = place_.at(a), y = place_.at(b);
    if (x > y) std::swap(x, y);
    return bits_[y * words_ + x / 64] >> x % 64 & 1;
  }

 private:
  std::map<uint32_t, size_t> place_;
  size_t words_;
  std::vector<uint64_t> bits_;
};

struct Touch {
  Access access;
  uint32_t task;
};

}  // namespace

void check_races(const Graph& graph, const std::vector<uint32_t>& order, bool unordered_adds) {
  Ancestors ancestors(graph, order);
  std::vector<Touch> touches;
  for (const auto& [id, node] : graph)
    for (const Access& access : node.accesses) touches.push_back({access, id});
  std::sort(touches.begin(), touches.end(),
            [](const Touch& a, const Touch& b) { return a.access.begin < b.access.begin; });
  // by use, accesses that begin before this one and reach into it
  std::vector<Touch> open[3];
  for (const Touch& touch : touches) {
    auto meet = [&](std::vector<Touch>& others) {
      auto ended = [&](const Touch& other) { return other.access.end <= touch.access.begin; };
      others.erase(std::remove_if(others.begin(), others.end(), ended), others.end());
      for (const Touch& other : others) {
        if (other.task == touch.task || ancestors.ordered(other.task, touch.task)) continue;
        auto did = [&](const Touch& one) {
          return "task " + std::to_string(one.task) + " (" + graph.at(one.task).name + ", " +
                 one.access.instruction + ") " + verbs[static_cast<int>(one.access.use)];
        };
        const bool both_add = other.access.use == Use::add && touch.access.use == Use::add;
        throw Fault("race: " + did(other) + " and " + did(touch) + " " +
                    place_of(touch.access.begin) + ", and the task graph does not order them" +
                    (both_add ? ": the sum's last bit is not fixed" : ""));
      }
    };
    const Use use = touch.access.use;
    for (Use other : {Use::read, Use::write, Use::add})
      if (other != use || use == Use::write || (use == Use::add && !unordered_adds))
        meet(open[static_cast<int>(other)]);
    open[static_cast<int>(use)].push_back(touch);
  }
}

}  // namespace isa
