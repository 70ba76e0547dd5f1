// The rows of a product with the matrices of experts, in the order of these.
#pragma once

#include <algorithm>
#include <vector>

#include "tensor.h"

namespace custom_pypto {

// The rows for one expert.
struct Group {
  int64_t expert, first, count;  // in the order of the rows
};

struct ExpertGroups {
  // ids: of each row, or nothing: all rows are for expert 0.
  ExpertGroups(const OptionalTensor& ids, int64_t rows, int64_t experts) {
    if (!ids) {
      for (int64_t i = 0; i < rows; ++i) order.push_back(i);
      groups.push_back({.expert = 0, .first = 0, .count = rows});
      return;
    }
    const Tensor contiguous = ids->to(at::kLong).contiguous();
    const int64_t* id = contiguous.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < rows; ++i) {
      if (id[i] >= 0 && id[i] < experts) order.push_back(i);
    }
    // an expanded weight may have more experts than memory holds counts of
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return id[a] < id[b]; });
    for (int64_t i = 0; i < static_cast<int64_t>(order.size()); ++i) {
      const int64_t expert = id[order[i]];
      if (groups.empty() || groups.back().expert != expert) {
        groups.push_back({.expert = expert, .first = i, .count = 0});
      }
      ++groups.back().count;
    }
  }

  std::vector<int64_t> order;  // rows of experts that exist, by expert
  std::vector<Group> groups;
};

}  // namespace custom_pypto
