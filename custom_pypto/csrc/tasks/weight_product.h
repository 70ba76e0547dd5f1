// The operands of a product with a stored weight: its rows of x, of the weight and of the output.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "expert_groups.h"
#include "rows.h"
#include "stored_weight.h"
#include "torch_product.h"
#include "weight_only.h"

namespace custom_pypto {

// A part of the weight for a group of a turn.
struct WeightTask {
  int64_t group, first, rows;
};

// T is the type of x and of the output. Rows are counted in the order of their experts.
template <typename T>
class WeightProduct {
 public:
  explicit WeightProduct(const WeightOnlyParams& p)
      : weight_(p.weight, p.scales, p.block_size),
        x_(p.x),
        rows_of_x_(p.x.numel() / weight_.depth()),
        x_stride_(weight_.depth()),
        out_(p.out.mutable_data_ptr<T>()),
        int8_x_(p.int8_x),
        copies_(rows_of_x_ ? p.out.numel() / weight_.rows() / rows_of_x_ : 1),
        by_expert_(p.experts, p.out.numel() / weight_.rows(), weight_.experts()) {
    // calls of torch take long where weights have left no code in the caches
    if (!x_.is_contiguous()) {
      x_ = dense(x_.reshape({-1, weight_.depth()}));
      x_stride_ = x_.stride(0);
    }
    // rows of experts that do not exist
    if (static_cast<int64_t>(by_expert_.order.size()) * weight_.rows() < p.out.numel()) {
      p.out.zero_();
    }
  }

  const StoredWeight& weight() const { return weight_; }
  const std::vector<Group>& groups() const { return by_expert_.groups; }

  // Parts of up to `most` rows of the weight for each group.
  template <typename Most>
  std::vector<WeightTask> tasks(const std::vector<Group>& turn, const Most& most) const {
    std::vector<WeightTask> found;
    size_t count = 0;
    for (const Group& group : turn) count += (weight_.rows() + most(group) - 1) / most(group);
    found.reserve(count);
    for (size_t g = 0; g < turn.size(); ++g) {
      const int64_t step = most(turn[g]);
      for (int64_t first = 0; first < weight_.rows(); first += step) {
        found.push_back({static_cast<int64_t>(g), first, std::min(step, weight_.rows() - first)});
      }
    }
    return found;
  }

  bool int8_x() const { return int8_x_; }
  int64_t rows_of_x() const { return rows_of_x_; }
  int64_t index_of_x(int64_t row) const { return by_expert_.order[row] / copies_; }
  const T* x_row(int64_t row) const { return x_.const_data_ptr<T>() + index_of_x(row) * x_stride_; }
  T* out_row(int64_t row) const { return out_ + by_expert_.order[row] * weight_.rows(); }

  // Whether some rows of x are an operand where they are.
  template <typename E>
  bool in_place(int64_t first, int64_t rows) const {
    if (!std::is_same_v<E, T>) return false;
    int64_t i = 1;
    while (i < rows && x_row(first + i) == x_row(first) + i * x_stride_) ++i;
    return i >= rows;
  }

  template <typename E>
  Tensor slice_of_x(int64_t first, int64_t rows, AlignedVector<E>& copy) const {
    const int64_t depth = weight_.depth();
    if constexpr (std::is_same_v<E, T>) {
      if (in_place<E>(first, rows)) return matrix(x_row(first), rows, depth, x_stride_);
    }
    copy.resize(rows * depth);
    for (int64_t i = 0; i < rows; ++i) convert(x_row(first + i), depth, copy.data() + i * depth);
    return matrix(copy.data(), rows, depth, depth);
  }

 private:
  StoredWeight weight_;
  Tensor x_;
  int64_t rows_of_x_, x_stride_;
  T* out_;
  bool int8_x_;
  int64_t copies_;          // rows of the output for a row of x
  ExpertGroups by_expert_;  // rows of the output
};

}  // namespace custom_pypto
