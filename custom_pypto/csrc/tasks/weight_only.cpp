#include "weight_only.h"

#include <ATen/ops/mm.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "expert_groups.h"
#include "packed_rows.h"
#include "rounded_rows.h"
#include "run_tasks.h"
#include "stored_weight.h"
#include "torch_product.h"

namespace custom_pypto {
namespace {

// Up to so many rows of x, a weight is multiplied as it is stored; above, widened once for all.
constexpr int64_t kFewRows = 16;
// of x in bfloat16, where the CPU multiplies that: by vectors, by tiles, and by tiles a weight in
// bfloat16
constexpr int64_t kFewRowsOfVectors = 24, kFewRowsOfTiles = 6, kFewRowsOfHalves = 4;
// of a weight, per task
constexpr int64_t kRowsOfDots = 16, kMostOfDots = 4;
constexpr int64_t kRowsOfTile = 4;  // that kernels multiply at once
constexpr int64_t kColumns = 512;   // of a transposed one
constexpr int64_t kRowsOfProduct = 256;
constexpr int64_t kTokensOfProduct = 2048, kTokensOfCopy = 512;  // where x is, or copied
constexpr int64_t kRowsOfTurn = 1024;                            // of x, rounded or packed at once
constexpr int64_t kMostPacked = 256;                             // of x in a group
// of a weight, per task of packed rows
constexpr int64_t kFewTokens = 64;
constexpr int64_t kRowsOfFewTokens = 32, kRowsOfTokens = 128;

// A part of the weight for a group.
struct Task {
  int64_t group, first, rows;
};

// T is the type of x and of the output.
template <typename T>
class Linear {
 public:
  explicit Linear(const WeightOnlyParams& p)
      : weight_(p.weight, p.scales, p.block_size),
        x_(p.x.reshape({-1, weight_.depth()})),
        out_(p.out.mutable_data_ptr<T>()),
        copies_(x_.size(0) ? p.out.numel() / weight_.rows() / x_.size(0) : 1),
        by_expert_(p.experts, p.out.numel() / weight_.rows(), weight_.experts()) {
    if (x_.stride(1) != 1 && weight_.depth() > 1) x_ = x_.contiguous();
    x_stride_ = x_.stride(0);
    // rows of experts that do not exist
    if (static_cast<int64_t>(order_.size()) * weight_.rows() < p.out.numel()) p.out.zero_();
  }

  void run() {
    prepare();
    std::vector<Task> tasks;
    std::vector<Group> packed, rounded;
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (!few(groups_[g]) && packs_x(groups_[g])) {
        packed.push_back(groups_[g]);
      } else if (!few(groups_[g]) && rounds_x()) {
        rounded.push_back(groups_[g]);
      } else {
        add_tasks(g, groups_[g], tasks);
      }
    }
    PackedRows panels(weight_);
    in_turns(packed, [&](const std::vector<Group>& turn) { multiply_packed(turn, panels); });
    RoundedRows rows(weight_);
    in_turns(rounded, [&](const std::vector<Group>& turn) { multiply_rounded(turn, rows); });
    if (tasks.empty()) return;
    Team team;
    if (std::all_of(groups_.begin(), groups_.end(), [&](const Group& g) { return few(g); })) {
      team.most = threads_for(order_.size() * weight_.rows() * weight_.row_bytes());
    } else {
      // Outside of a parallel region torch.mm takes all threads, and gives bits that depend on
      // their number.
      team.always = true;
      if (tasks.size() == 1) tasks.push_back({0, 0, 0});
    }
    run_tasks(
        tasks.size(), [] { return Scratch(); },
        [&](Scratch& scratch, int64_t t) {
          if (tasks[t].rows == 0) return;
          const Group& group = groups_[tasks[t].group];
          if (few(group)) return products_of_few(group, tasks[t], scratch);
          if constexpr (std::is_same_v<T, c10::BFloat16>) {
            if (multiplies_bf16()) return products<T>(group, tasks[t], scratch);
          }
          products<float>(group, tasks[t], scratch);
        },
        team);
  }

 private:
  struct Scratch {
    AlignedVector<float> scales, x, out;
    Slices<float> floats;
    Slices<c10::BFloat16> halves;
    Slices<float>& slices(float) { return floats; }
    Slices<c10::BFloat16>& slices(c10::BFloat16) { return halves; }
  };

  void add_tasks(int64_t index, const Group& group, std::vector<Task>& tasks) const {
    // some tasks for each thread
    const int64_t of_thread = weight_.rows() / (4 * at::get_num_threads()) / kRowsOfDots;
    const int64_t dots = std::clamp<int64_t>(of_thread, 1, kMostOfDots) * kRowsOfDots;
    const int64_t most = weight_.transposed() ? kColumns : few(group) ? dots : kRowsOfProduct;
    for (int64_t first = 0; first < weight_.rows(); first += most) {
      tasks.push_back({index, first, std::min(most, weight_.rows() - first)});
    }
  }

  bool few(const Group& group) const { return group.count <= few_rows_; }

  // Whether the kernels multiply in bfloat16; for more rows, torch.mm is faster.
  bool packs_x(const Group& group) const {
    return std::is_same_v<T, c10::BFloat16> && multiplies_bf16() && !weight_.transposed() &&
           group.count <= kMostPacked;
  }

  // Whether many rows are multiplied in integers, faster than in float.
  bool rounds_x() const {
    return !std::is_same_v<T, float> && !multiplies_bf16() && custom_pypto::kernels().int16 &&
           weight_.kernels().pack_int16;
  }

  const T* x_row(int64_t row) const {
    return x_.const_data_ptr<T>() + order_[row] / copies_ * x_stride_;
  }
  T* out_row(int64_t row) const { return out_ + order_[row] * weight_.rows(); }
  char* prepared(int64_t row) { return prepared_.data() + index_[row] * prepared_bytes_; }

  // The rows of x for the groups of few rows, each once.
  void prepare() {
    prepared_bytes_ = cpu::prepared_bytes(weight_.depth());
    index_.resize(order_.size());
    std::vector<int64_t> place(x_.size(0), -1), rows;
    for (const Group& group : groups_) {
      if (!few(group)) continue;
      for (int64_t row = group.first; row < group.first + group.count; ++row) {
        int64_t& at = place[order_[row] / copies_];
        if (at < 0) {
          at = rows.size();
          rows.push_back(row);
        }
        index_[row] = at;
      }
    }
    prepared_.resize(rows.size() * prepared_bytes_);
    run_tasks(
        rows.size(), [] { return Scratch(); },
        [&](Scratch& scratch, int64_t i) {
          scratch.x.resize(weight_.depth());
          widen(x_row(rows[i]), weight_.depth(), scratch.x.data());
          char* to = prepared_.data() + i * prepared_bytes_;
          if (weight_.transposed()) {
            std::memcpy(to, scratch.x.data(), sizeof(float) * weight_.depth());
          } else {
            const cpu::Dots shape = weight_.operand(0, 0, 1, scratch.scales);
            kernels_.prepare(shape, scratch.x.data(), to);
          }
        },
        {.most = threads_for(rows.size() * weight_.depth() * sizeof(T))});
  }

  void products_of_few(const Group& group, const Task& task, Scratch& scratch) {
    const void* x[kFewRowsOfVectors];
    float* out[kFewRowsOfVectors];
    scratch.out.resize(group.count * task.rows);
    for (int64_t i = 0; i < group.count; ++i) {
      x[i] = prepared(group.first + i);
      out[i] = scratch.out.data() + i * task.rows;
    }
    if (weight_.transposed()) {
      kernels().add_rows(weight_.bfloat16(group.expert, task.first), weight_.column_stride(), x,
                         group.count, weight_.depth(), task.rows, out);
    } else {
      // scales of some rows at a time, to leave x in the level-1 cache
      const int64_t most = weight_.has_small_groups() ? kRowsOfTile : kRowsOfDots;
      for (int64_t r = 0; r < task.rows; r += most) {
        const int64_t rows = std::min(most, task.rows - r);
        cpu::Dots call = weight_.operand(group.expert, task.first + r, rows, scratch.scales);
        call.x = x;
        call.m = group.count;
        call.out = out;
        kernels_.dots(call);
        for (int64_t i = 0; i < group.count; ++i) out[i] += rows;
      }
    }
    for (int64_t i = 0; i < group.count; ++i) {
      narrow(scratch.out.data() + i * task.rows, task.rows, out_row(group.first + i) + task.first);
    }
  }

  // Groups of many rows, in turns, for the memory of the rows of x that are made for a product.
  template <typename F>
  void in_turns(const std::vector<Group>& groups, const F& multiply) {
    std::vector<Group> turn;
    int64_t count = 0;
    for (const Group& group : groups) {
      const int64_t end = group.first + group.count;
      for (int64_t first = group.first; first < end; first += kRowsOfTurn) {
        turn.push_back({group.expert, first, std::min(kRowsOfTurn, end - first)});
        count += turn.back().count;
        if (count < kRowsOfTurn) continue;
        multiply(turn);
        turn.clear();
        count = 0;
      }
    }
    if (count) multiply(turn);
  }

  void multiply_packed(const std::vector<Group>& turn, PackedRows& packed) {
    constexpr int64_t kPanel = PackedRows::kPanel;
    std::vector<int64_t> first_panels, rows;  // the first row of each panel
    std::vector<Task> tasks;
    for (size_t g = 0; g < turn.size(); ++g) {
      const Group& group = turn[g];
      first_panels.push_back(rows.size());
      for (int64_t i = 0; i < group.count; i += kPanel) rows.push_back(group.first + i);
      const int64_t most = group.count <= kFewTokens ? kRowsOfFewTokens : kRowsOfTokens;
      for (int64_t first = 0; first < weight_.rows(); first += most) {
        tasks.push_back({static_cast<int64_t>(g), first, std::min(most, weight_.rows() - first)});
      }
    }
    const auto end = [&](int64_t panel) {  // of its rows
      const auto next = std::upper_bound(first_panels.begin(), first_panels.end(), panel);
      const Group& group = turn[next - first_panels.begin() - 1];
      return std::min(rows[panel] + kPanel, group.first + group.count);
    };
    packed.resize(rows.size());
    run_tasks(
        rows.size(), [] { return Slices<T>(); },
        [&](Slices<T>& slices, int64_t p) {
          if constexpr (std::is_same_v<T, c10::BFloat16>) {
            const Tensor x = rows_of_x(rows[p], end(p) - rows[p], slices.x);
            packed.pack(p, x.const_data_ptr<T>(), x.stride(0), x.size(0));
          }
        });
    run_tasks(
        tasks.size(), [&] { return PackedRows::Scratch(packed); },
        [&](PackedRows::Scratch& scratch, int64_t t) {
          const Task& task = tasks[t];
          const Group& group = turn[task.group];
          const int64_t panels = (group.count + kPanel - 1) / kPanel;
          packed.multiply(first_panels[task.group], panels, group.expert, task.first, task.rows,
                          scratch);
          float columns[kPanel][kRowsOfTokens];
          for (int64_t i = 0; i < group.count; i += kPanel) {
            for (int64_t r = 0; r < task.rows; ++r) {
              const float* row = scratch.out.data() + r * scratch.width + i;
              for (int64_t c = 0; c < kPanel; ++c) columns[c][r] = row[c];
            }
            const int64_t count = std::min(kPanel, group.count - i);
            for (int64_t c = 0; c < count; ++c) {
              narrow(columns[c], task.rows, out_row(group.first + i + c) + task.first);
            }
          }
        });
  }

  void multiply_rounded(const std::vector<Group>& turn, RoundedRows& rounded) {
    std::vector<int64_t> rows, first_rows;
    std::vector<Task> tasks;
    for (size_t g = 0; g < turn.size(); ++g) {
      first_rows.push_back(rows.size());
      for (int64_t i = 0; i < turn[g].count; ++i) rows.push_back(turn[g].first + i);
      add_tasks(g, turn[g], tasks);
    }
    rounded.resize(rows.size());
    run_tasks(
        rows.size(), [] { return Scratch(); },
        [&](Scratch& scratch, int64_t i) {
          scratch.x.resize(weight_.depth());
          widen(x_row(rows[i]), weight_.depth(), scratch.x.data());
          rounded.round(i, scratch.x.data());
        });
    run_tasks(
        tasks.size(), [] { return RoundedRows::Scratch(); },
        [&](RoundedRows::Scratch& scratch, int64_t t) {
          const Task& task = tasks[t];
          const Group& group = turn[task.group];
          rounded.multiply(first_rows[task.group], group.count, group.expert, task.first, task.rows,
                           scratch);
          for (int64_t i = 0; i < group.count; ++i) {
            narrow(scratch.out.data() + i * scratch.width, task.rows,
                   out_row(group.first + i) + task.first);
          }
        });
  }

  // E: the type in which slices are multiplied.
  template <typename E>
  void products(const Group& group, const Task& task, Scratch& scratch) {
    const OneMklThread one_thread;
    Slices<E>& slices = scratch.slices(E{});
    const Tensor weight = weight_of<E>(group, task, scratch.scales, slices.weight);
    const int64_t end = group.first + group.count;
    int64_t most = kTokensOfCopy;
    if (in_place<E>(group.first, group.count)) most = kTokensOfProduct;
    for (int64_t first = group.first; first < end; first += most) {
      const int64_t rows = std::min(most, end - first);
      slices.out.resize(rows * task.rows);
      Tensor out = matrix(slices.out.data(), rows, task.rows, task.rows);
      at::mm_out(out, rows_of_x(first, rows, slices.x), weight);
      for (int64_t i = 0; i < rows; ++i) {
        convert(slices.out.data() + i * task.rows, task.rows, out_row(first + i) + task.first);
      }
    }
  }

  // Whether some rows of x are an operand where they are.
  template <typename E>
  bool in_place(int64_t first, int64_t rows) const {
    if (!std::is_same_v<E, T>) return false;
    int64_t i = 1;
    while (i < rows && x_row(first + i) == x_row(first) + i * x_stride_) ++i;
    return i >= rows;
  }

  template <typename E>
  Tensor rows_of_x(int64_t first, int64_t rows, AlignedVector<E>& copy) const {
    const int64_t depth = weight_.depth();
    if constexpr (std::is_same_v<E, T>) {
      if (in_place<E>(first, rows)) return matrix(x_row(first), rows, depth, x_stride_);
    }
    copy.resize(rows * depth);
    for (int64_t i = 0; i < rows; ++i) convert(x_row(first + i), depth, copy.data() + i * depth);
    return matrix(copy.data(), rows, depth, depth);
  }

  // The transpose of some rows of the weight, where they are if they are in bfloat16.
  template <typename E>
  Tensor weight_of(const Group& group, const Task& task, AlignedVector<float>& scales,
                   AlignedVector<E>& copy) const {
    const int64_t depth = weight_.depth();
    const auto* halves = reinterpret_cast<const c10::BFloat16*>(
        weight_.is_bfloat16() ? weight_.bfloat16(group.expert, task.first) : nullptr);
    if constexpr (std::is_same_v<E, c10::BFloat16>) {
      if (weight_.transposed()) return matrix(halves, depth, task.rows, weight_.column_stride());
      if (halves) return matrix(halves, task.rows, depth, weight_.row_stride()).t();
    }
    copy.resize(task.rows * depth);
    if (weight_.transposed()) {
      for (int64_t d = 0; d < depth; ++d) {
        convert(halves + d * weight_.column_stride(), task.rows, copy.data() + d * task.rows);
      }
      return matrix(copy.data(), depth, task.rows, task.rows);
    }
    if constexpr (std::is_same_v<E, float>) {
      const cpu::Dots rows = weight_.operand(group.expert, task.first, task.rows, scales);
      for (int64_t r = 0; r < task.rows; ++r) {
        weight_.kernels().widen(rows, r, copy.data() + r * depth);
      }
    } else {
      weight_.widen_bf16(group.expert, task.first, task.rows, depth, scales, &copy.data()->x);
    }
    return matrix(copy.data(), task.rows, depth, depth).t();
  }

  StoredWeight weight_;
  const cpu::WeightKernels& kernels_ =
      std::is_same_v<T, c10::BFloat16> ? weight_.kernels_by_bf16() : weight_.kernels();
  const int64_t few_rows_ = !std::is_same_v<T, c10::BFloat16> || !multiplies_bf16() ? kFewRows
                            : !custom_pypto::kernels().tiles ? kFewRowsOfVectors
                            : weight_.is_bfloat16()          ? kFewRowsOfHalves
                                                             : kFewRowsOfTiles;
  Tensor x_;
  int64_t x_stride_;
  T* out_;
  int64_t copies_;          // rows of the output for a row of x
  ExpertGroups by_expert_;  // rows of the output
  const std::vector<int64_t>& order_ = by_expert_.order;
  const std::vector<Group>& groups_ = by_expert_.groups;
  std::vector<int64_t> index_;  // of the prepared row of x
  AlignedVector<char> prepared_;
  int64_t prepared_bytes_ = 0;
};

}  // namespace

void weight_only(const WeightOnlyParams& p) {
  switch (p.x.scalar_type()) {
    case at::kFloat:
      return Linear<float>(p).run();
    case at::kHalf:
      return Linear<c10::Half>(p).run();
    default:
      return Linear<c10::BFloat16>(p).run();
  }
}

}  // namespace custom_pypto
