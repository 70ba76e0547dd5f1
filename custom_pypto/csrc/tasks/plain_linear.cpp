#include "plain_linear.h"

#include <algorithm>
#include <vector>

#include "expert_groups.h"
#include "rows.h"

namespace custom_pypto {
namespace {

constexpr int64_t kDepth = 256;        // a panel of so many values stays in the level-1 or 2 cache
constexpr int64_t kRowsOfTask = 32;    // of the weight
constexpr int64_t kRowsOfTurn = 1024;  // of x, whose panels stay in memory for all tasks
constexpr int64_t kUnit = 16;          // rows of x that the kernels take at least

// Rows of x for one expert, transposed to [K][width]: a row is a lane of the kernel's vectors.
struct Panel {
  int64_t first, count, width;
  AlignedVector<float> values;
};

// T is the type of x, W that of the weight.
template <typename T, typename W>
class PlainLinear {
 public:
  explicit PlainLinear(const PlainLinearParams& p)
      : weight_(p.weight),
        rows_(p.weight.size(-2)),
        depth_(p.weight.size(-1)),
        x_(dense(p.x.reshape({-1, depth_}))),
        out_(p.out.mutable_data_ptr<T>()),
        copies_(p.out.numel() / rows_ / std::max<int64_t>(1, x_.size(0))),
        by_expert_(p.experts, p.out.numel() / rows_, weight_.dim() == 3 ? weight_.size(0) : 1) {
    if (static_cast<int64_t>(by_expert_.order.size()) * rows_ < p.out.numel()) p.out.zero_();
  }

  void multiply() const {
    for (const Group& group : by_expert_.groups) {
      const int64_t end = group.first + group.count;
      for (int64_t first = group.first; first < end; first += kRowsOfTurn) {
        multiply(group.expert, first, std::min(kRowsOfTurn, end - first));
      }
    }
  }

 private:
  struct Scratch {
    std::vector<float> weight, sums;
    std::vector<const float*> a, b;
    std::vector<float*> out;
  };

  void multiply(int64_t expert, int64_t first, int64_t count) const {
    std::vector<Panel> panels;
    for (int64_t i = 0; i < count; i += cpu::kMaxWidth) {
      const int64_t rows = std::min<int64_t>(cpu::kMaxWidth, count - i);
      panels.push_back({first + i, rows, (rows + kUnit - 1) / kUnit * kUnit, {}});
    }
    const auto bytes = [&](int64_t of_rows) { return of_rows * depth_ * int64_t{sizeof(W)}; };
    run_tasks(
        panels.size(), [] { return nullptr; }, [&](std::nullptr_t, int64_t i) { pack(panels[i]); },
        {.most = threads_for(bytes(count))});
    run_tasks((rows_ + kRowsOfTask - 1) / kRowsOfTask, [] { return Scratch(); },
              [&](Scratch& scratch, int64_t t) {
                const int64_t row = t * kRowsOfTask;
                multiply(expert, panels, row, std::min(kRowsOfTask, rows_ - row), scratch);
              },
              {.most = threads_for(bytes(rows_ * static_cast<int64_t>(panels.size())))});
  }

  void pack(Panel& panel) const {
    panel.values.resize(depth_ * panel.width);
    for (int64_t i = 0; i < panel.width; ++i) {
      float* to = panel.values.data() + i;
      if (i >= panel.count) {
        for (int64_t d = 0; d < depth_; ++d) to[d * panel.width] = 0.0f;
        continue;
      }
      const int64_t row = by_expert_.order[panel.first + i] / copies_;
      const T* from = x_.template const_data_ptr<T>() + row * x_.stride(0);
      for (int64_t d = 0; d < depth_; ++d) to[d * panel.width] = static_cast<float>(from[d]);
    }
  }

  // Some rows of the weight times all panels.
  void multiply(int64_t expert, const std::vector<Panel>& panels, int64_t row, int64_t count,
                Scratch& scratch) const {
    int64_t width = 0;
    for (const Panel& panel : panels) width += panel.width;
    scratch.sums.assign(count * width, 0.0f);
    const int64_t stride = weight_.stride(-2), step = weight_.stride(-1);
    const W* from = weight_.const_data_ptr<W>() + row * stride;
    if (weight_.dim() == 3) from += expert * weight_.stride(0);
    scratch.a.resize(count);
    scratch.out.resize(count);
    for (int64_t first = 0; first < depth_; first += kDepth) {
      const int64_t depth = std::min(kDepth, depth_ - first);
      int64_t a_step = 1;
      if constexpr (std::is_same_v<W, float>) {
        a_step = step;
        for (int64_t r = 0; r < count; ++r) scratch.a[r] = from + r * stride + first * step;
      } else {
        scratch.weight.resize(count * kDepth);
        for (int64_t r = 0; r < count; ++r) {
          float* to = scratch.weight.data() + r * kDepth;
          const W* values = from + r * stride + first * step;
          for (int64_t d = 0; d < depth; ++d) to[d] = static_cast<float>(values[d * step]);
          scratch.a[r] = to;
        }
      }
      int64_t column = 0;
      scratch.b.resize(depth);
      for (const Panel& panel : panels) {
        for (int64_t d = 0; d < depth; ++d) {
          scratch.b[d] = panel.values.data() + (first + d) * panel.width;
        }
        for (int64_t r = 0; r < count; ++r) {
          scratch.out[r] = scratch.sums.data() + r * width + column;
        }
        kernels().multiply({.a = scratch.a.data(),
                            .a_step = a_step,
                            .n = static_cast<int>(count),
                            .b = scratch.b.data(),
                            .depth = static_cast<int>(depth),
                            .width = static_cast<int>(panel.width),
                            .out = scratch.out.data()});
        column += panel.width;
      }
    }
    float of_row[kRowsOfTask];
    int64_t column = 0;
    for (const Panel& panel : panels) {
      for (int64_t i = 0; i < panel.count; ++i) {
        for (int64_t r = 0; r < count; ++r) of_row[r] = scratch.sums[r * width + column + i];
        narrow(of_row, count, out_ + by_expert_.order[panel.first + i] * rows_ + row);
      }
      column += panel.width;
    }
  }

  const Tensor& weight_;
  int64_t rows_, depth_;
  Tensor x_;
  T* out_;
  int64_t copies_;  // rows of the output for a row of x
  ExpertGroups by_expert_;
};

}  // namespace

void plain_linear(const PlainLinearParams& p) {
  with_type(p.x.scalar_type(), [&](auto of_x) {
    with_type(p.weight.scalar_type(), [&](auto of_weight) {
      PlainLinear<decltype(of_x), decltype(of_weight)>(p).multiply();
    });
  });
}

}  // namespace custom_pypto
