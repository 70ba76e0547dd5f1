// How sparse attention splits its work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "panels.h"
#include "sequences.h"

namespace custom_pypto {

// Rows (query token, head) that one thread processes together. A dense task is a matrix multiply:
// consecutive tokens times every key that any of them selects, masked by the selection. A gathering
// task takes one token and a range of columns of its indices.
struct AttentionTask {
  bool dense;
  int64_t sequence, first, count;  // tokens
  int64_t begin, end;              // dense: keys, gathering: columns of the indices
  int64_t part;  // gathering: slot of its sums if other tasks share the token, else kOwnSums
};
constexpr int64_t kOwnSums = -1;

// A task of one token and the columns [begin, end) of its indices.
inline AttentionTask gathering(int64_t sequence, int64_t token, int64_t begin, int64_t end,
                               int64_t part) {
  return {.dense = false,
          .sequence = sequence,
          .first = token,
          .count = 1,
          .begin = begin,
          .end = end,
          .part = part};
}

// A token whose columns `count` consecutive tasks from `first` share.
struct SharedToken {
  size_t first;
  int64_t count;
};

struct AttentionPlan {
  std::vector<AttentionTask> tasks;
  std::vector<SharedToken> shared;
  int64_t part_count = 0;  // sums of tasks that share their token
};

constexpr int64_t kDenseRows = 128;
// A gathered key costs more than a key of a dense task: it serves the heads of one token only.
constexpr double kGatherCost = 1.25;
// With few query tokens, tasks split the index columns evenly: at most kSplitColumns * tokens
// columns per task, coarser for more tokens, because all partial sums are written and read once
// more. The split depends on shapes alone, so that any number of threads adds the sums in the same
// order.
constexpr int64_t kSplitColumns = 512;

// `columns(token)` is the number of indices of a query token. by_token: the tasks of a token depend
// on its own indices alone.
template <typename Columns>
AttentionPlan plan_attention(const std::vector<Sequence>& sequences, int64_t heads,
                             int64_t sparse_mode, bool by_token, const Columns& columns) {
  int64_t tokens = 0;
  for (const Sequence& s : sequences) tokens += s.len_query;
  AttentionPlan plan;
  const int64_t most = kSplitColumns * (by_token ? 1 : std::max<int64_t>(1, tokens));
  const int64_t group = std::max<int64_t>(1, kDenseRows / heads);
  for (const Sequence& s : sequences) {
    for (int64_t i = 0; i < s.len_query; i += group) {
      const int64_t count = std::min(group, s.len_query - i);
      const int64_t visible = s.visible(i + count - 1, sparse_mode);
      int64_t selected = 0;
      for (int64_t t = 0; t < count; ++t) selected += columns(s.first_token + i + t);
      const double gathered = kGatherCost * panel_rows(heads) * selected;
      if (!by_token && panel_rows(count * heads) * static_cast<double>(visible) < gathered) {
        plan.tasks.push_back(AttentionTask{.dense = true,
                                           .sequence = s.index,
                                           .first = i,
                                           .count = count,
                                           .begin = 0,
                                           .end = visible,
                                           .part = kOwnSums});
        continue;
      }
      for (int64_t t = i; t < i + count; ++t) {
        const int64_t end = columns(s.first_token + t);
        const int64_t parts = std::max<int64_t>(1, (end + most - 1) / most);
        if (parts > 1) plan.shared.push_back({plan.tasks.size(), parts});
        for (int64_t c = 0; c < parts; ++c) {
          const int64_t part = parts > 1 ? plan.part_count++ : kOwnSums;
          plan.tasks.push_back(gathering(s.index, t, c * end / parts, (c + 1) * end / parts, part));
        }
      }
    }
  }
  return plan;
}

}  // namespace custom_pypto
