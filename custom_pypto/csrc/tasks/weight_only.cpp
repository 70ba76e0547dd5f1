#include "weight_only.h"

#include <ATen/ops/mm.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

#include "int8_panels.h"
#include "packed_rows.h"
#include "rounded_rows.h"
#include "run_tasks.h"
#include "weight_product.h"

namespace custom_pypto {
namespace {

// of a weight, per task, of which each thread has some
constexpr int64_t kRowsOfDots = 16, kBytesOfDots = 1 << 19;
constexpr int64_t kColumns = 512;  // of a transposed one
constexpr int64_t kRowsOfProduct = 256;
constexpr int64_t kTokensOfProduct = 2048, kTokensOfCopy = 512;  // where x is, or copied
// rows of x in int8 that meet the weight as it is stored; tiles, or panels, take less time for more
constexpr int64_t kMostBesideTiles = 8, kMostBesidePanels = 12;
// rows of x of a turn: what a way makes of them stays in memory for all tasks
constexpr int64_t kPartOfRows = 1024, kPartOfPackedRows = 512, kAllRows = int64_t{1} << 40;

// The ways of a product, each a class with `multiply`, for the groups of a turn.

// The weight as it is stored; rows of x in the form of its kernels.
template <typename T>
class StoredWay {
 public:
  static constexpr int64_t kRowsOfTurn = kAllRows;

  explicit StoredWay(const WeightProduct<T>& product)
      : product_(product),
        weight_(product.weight()),
        dots_(product.int8_x() ? *weight_.dots_of_int8()
                               : weight_.dots(std::is_same_v<T, c10::BFloat16>)),
        prepared_bytes_(cpu::prepared_bytes(weight_.depth())) {}

  void multiply(const std::vector<Group>& turn) {
    prepare(turn);
    const int64_t of_thread = weight_.rows() / (4 * at::get_num_threads()) / kRowsOfDots;
    const int64_t most_of_dots =
        kBytesOfDots / std::max<int64_t>(kRowsOfDots * weight_.row_bytes(), 1);
    const int64_t dots = std::max<int64_t>(std::min(of_thread, most_of_dots), 1) * kRowsOfDots;
    const int64_t most = weight_.transposed() ? kColumns : dots;
    const auto tasks = product_.tasks(turn, [&](const Group&) { return most; });
    int64_t rows = 0;
    for (const Group& group : turn) rows += group.count;
    run_tasks(
        tasks.size(), [] { return Scratch(); },
        [&](Scratch& scratch, int64_t t) { multiply(turn[tasks[t].group], tasks[t], scratch); },
        {.most = threads_for(rows * weight_.rows() * weight_.row_bytes())});
  }

 private:
  struct Scratch {
    AlignedVector<float> scales, out;
    std::vector<const void*> rows_of_x;
    std::vector<float*> rows_of_out;
  };

  // The rows of x, each once.
  void prepare(const std::vector<Group>& turn) {
    index_.clear();
    std::vector<int64_t> place(product_.rows_of_x(), -1), rows;
    for (const Group& group : turn) {
      for (int64_t row = group.first; row < group.first + group.count; ++row) {
        int64_t& at = place[product_.index_of_x(row)];
        if (at < 0) {
          at = rows.size();
          rows.push_back(row);
        }
        if (static_cast<int64_t>(index_.size()) <= row) index_.resize(row + 1);
        index_[row] = at;
      }
    }
    prepared_.resize(rows.size() * prepared_bytes_);
    run_tasks(
        rows.size(), [] { return nullptr; },
        [&](std::nullptr_t, int64_t i) {
          prepare(product_.x_row(rows[i]), prepared_.data() + i * prepared_bytes_);
        },
        {.most = threads_for(rows.size() * weight_.depth() * sizeof(T))});
  }

  // in parts that stay in the nearest cache
  void prepare(const T* x, char* to) const {
    const int64_t depth = weight_.depth();
    if (weight_.transposed()) return widen(x, depth, reinterpret_cast<float*>(to));
    const cpu::Dots shape = weight_.shape();
    alignas(64) float part[cpu::kPreparedUnit];
    for (int64_t d = 0; d < depth; d += cpu::kPreparedUnit) {
      const int64_t n = std::min<int64_t>(depth - d, cpu::kPreparedUnit);
      widen(x + d, n, part);
      dots_.prepare(shape, part, d, n, to);
    }
  }

  void multiply(const Group& group, const WeightTask& task, Scratch& scratch) const {
    scratch.out.resize(group.count * task.rows);
    scratch.rows_of_x.resize(group.count);
    scratch.rows_of_out.resize(group.count);
    const void** x = scratch.rows_of_x.data();
    float** out = scratch.rows_of_out.data();
    for (int64_t i = 0; i < group.count; ++i) {
      x[i] = prepared_.data() + index_[group.first + i] * prepared_bytes_;
      out[i] = scratch.out.data() + i * task.rows;
    }
    if (weight_.transposed()) {
      kernels().add_rows(weight_.bfloat16(group.expert, task.first), weight_.column_stride(), x,
                         group.count, weight_.depth(), task.rows, out);
    } else {
      const bool stored = dots_.stored_scales;
      const bool whole = stored || group.count > 1 || !weight_.shape().in_turn();
      for (int64_t first = task.first, end = first + task.rows, rows; first < end; first += rows) {
        rows = whole ? task.rows : weight_.rows_of_call(first, end - first);
        cpu::Dots call = weight_.operand(group.expert, first, rows, scratch.scales, stored);
        call.x = x;
        call.m = group.count;
        call.out = out;
        dots_.dots(call);
        for (int64_t i = 0; i < group.count; ++i) out[i] += rows;
      }
    }
    for (int64_t i = 0; i < group.count; ++i) {
      narrow(scratch.out.data() + i * task.rows, task.rows,
             product_.out_row(group.first + i) + task.first);
    }
  }

  const WeightProduct<T>& product_;
  const StoredWeight& weight_;
  const cpu::DotsKernels& dots_;
  int64_t prepared_bytes_;      // of a row of x
  std::vector<int64_t> index_;  // of the prepared row of x
  AlignedVector<char> prepared_;
};

// x packed once for all tasks, by Rows: PackedRows, whose weight is in bfloat16, whole or a part at
// a time, or Int8Panels.
template <typename Rows>
class PackedWay {
 public:
  static constexpr int64_t kRowsOfTurn = kPartOfPackedRows;

  explicit PackedWay(const WeightProduct<c10::BFloat16>& product)
      : product_(product), packed_(product.weight()) {}

  void multiply(const std::vector<Group>& turn) {
    std::vector<int64_t> first_panels, rows;  // the first row of each panel
    for (const Group& group : turn) {
      first_panels.push_back(rows.size());
      for (int64_t i = 0; i < group.count; i += kPanel) rows.push_back(group.first + i);
    }
    const auto group_of = [&](int64_t panel) -> const Group& {
      const auto next = std::upper_bound(first_panels.begin(), first_panels.end(), panel);
      return turn[next - first_panels.begin() - 1];
    };
    packed_.resize(rows.size());
    run_tasks(
        rows.size(), [] { return AlignedVector<c10::BFloat16>(); },
        [&](AlignedVector<c10::BFloat16>& copy, int64_t p) {
          const Group& group = group_of(p);
          const int64_t count = std::min(kPanel, group.first + group.count - rows[p]);
          const Tensor x = product_.slice_of_x(rows[p], count, copy);
          packed_.pack(p, x.const_data_ptr<c10::BFloat16>(), x.stride(0), count, group.count);
        });
    const auto tasks =
        product_.tasks(turn, [](const Group& group) { return Rows::rows_of_task(group.count); });
    run_tasks(
        tasks.size(), [&] { return typename Rows::Scratch(packed_); },
        [&](typename Rows::Scratch& scratch, int64_t t) {
          const WeightTask& task = tasks[t];
          const Group& group = turn[task.group];
          scratch.rows.resize(group.count);
          for (int64_t i = 0; i < group.count; ++i) {
            scratch.rows[i] = &product_.out_row(group.first + i)[task.first].x;
          }
          packed_.multiply(first_panels[task.group], group.expert, task.first, task.rows, scratch);
        });
  }

 private:
  static constexpr int64_t kPanel = Rows::kPanel;

  const WeightProduct<c10::BFloat16>& product_;
  Rows packed_;
};

// The weight in the integers that it stores; x rounded to int16.
template <typename T>
class RoundedWay {
 public:
  static constexpr int64_t kRowsOfTurn = kPartOfRows;

  explicit RoundedWay(const WeightProduct<T>& product)
      : product_(product), rounded_(product.weight()) {}

  void multiply(const std::vector<Group>& turn) {
    std::vector<int64_t> rows, first_rows;
    for (const Group& group : turn) {
      first_rows.push_back(rows.size());
      for (int64_t i = 0; i < group.count; ++i) rows.push_back(group.first + i);
    }
    rounded_.resize(rows.size());
    run_tasks(
        rows.size(), [] { return AlignedVector<float>(); },
        [&](AlignedVector<float>& x, int64_t i) {
          x.resize(product_.weight().depth());
          widen(product_.x_row(rows[i]), x.size(), x.data());
          rounded_.round(i, x.data());
        });
    const auto tasks = product_.tasks(turn, [](const Group&) { return kRowsOfProduct; });
    run_tasks(
        tasks.size(), [] { return RoundedRows::Scratch(); },
        [&](RoundedRows::Scratch& scratch, int64_t t) {
          const WeightTask& task = tasks[t];
          const Group& group = turn[task.group];
          rounded_.multiply(first_rows[task.group], group.count, group.expert, task.first,
                            task.rows, scratch);
          for (int64_t i = 0; i < group.count; ++i) {
            narrow(scratch.out.data() + i * scratch.width, task.rows,
                   product_.out_row(group.first + i) + task.first);
          }
        });
  }

 private:
  const WeightProduct<T>& product_;
  RoundedRows rounded_;
};

// The weight widened to E, the type in which torch.mm multiplies.
template <typename T, typename E>
class WidenedWay {
 public:
  static constexpr int64_t kRowsOfTurn = kAllRows;

  explicit WidenedWay(const WeightProduct<T>& product)
      : product_(product), weight_(product.weight()) {}

  void multiply(const std::vector<Group>& turn) {
    const int64_t most = weight_.transposed() ? kColumns : kRowsOfProduct;
    auto tasks = product_.tasks(turn, [&](const Group&) { return most; });
    // Outside of a parallel region torch.mm takes all threads, and gives bits that depend on their
    // number. One task opens none, two do.
    if (tasks.size() == 1) tasks.push_back({0, 0, 0});
    run_tasks(
        tasks.size(), [] { return Scratch(); },
        [&](Scratch& scratch, int64_t t) {
          if (tasks[t].rows) multiply(turn[tasks[t].group], tasks[t], scratch);
        },
        {.always = true});
  }

 private:
  struct Scratch {
    AlignedVector<float> scales;
    Slices<E> slices;
  };

  void multiply(const Group& group, const WeightTask& task, Scratch& scratch) const {
    const OneMklThread one_thread;
    Slices<E>& slices = scratch.slices;
    const Tensor weight = weight_of(group, task, scratch.scales, slices.weight);
    const int64_t end = group.first + group.count;
    int64_t most = kTokensOfCopy;
    if (product_.template in_place<E>(group.first, group.count)) most = kTokensOfProduct;
    for (int64_t first = group.first; first < end; first += most) {
      const int64_t rows = std::min(most, end - first);
      slices.out.resize(rows * task.rows);
      Tensor out = matrix(slices.out.data(), rows, task.rows, task.rows);
      at::mm_out(out, product_.slice_of_x(first, rows, slices.x), weight);
      for (int64_t i = 0; i < rows; ++i) {
        convert(slices.out.data() + i * task.rows, task.rows,
                product_.out_row(first + i) + task.first);
      }
    }
  }

  // The transpose of some rows of the weight, where they are if they are in bfloat16.
  Tensor weight_of(const Group& group, const WeightTask& task, AlignedVector<float>& scales,
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

  const WeightProduct<T>& product_;
  const StoredWeight& weight_;
};

template <typename Way, typename Product>
void multiply(const Product& product, const std::vector<Group>& groups,
              int64_t rows_of_turn = Way::kRowsOfTurn) {
  if (groups.empty()) return;
  Way way(product);
  std::vector<Group> turn;
  int64_t count = 0;
  for (const Group& group : groups) {
    const int64_t end = group.first + group.count;
    for (int64_t first = group.first; first < end; first += rows_of_turn) {
      turn.push_back({group.expert, first, std::min(rows_of_turn, end - first)});
      count += turn.back().count;
      if (count < rows_of_turn) continue;
      way.multiply(turn);
      turn.clear();
      count = 0;
    }
  }
  if (count) way.multiply(turn);
}

template <typename T>
void multiply(const WeightOnlyParams& p) {
  constexpr bool kHalves = std::is_same_v<T, c10::BFloat16>;
  const WeightProduct<T> product(p);
  const StoredWeight& weight = product.weight();
  if (p.int8_x) {
    const bool panels = kHalves && Int8Panels::fit(weight), stored = weight.dots_of_int8();
    if (panels || (stored && (!kernels().tiles || product.rows_of_x() <= kMostBesideTiles))) {
      std::vector<Group> few, many;
      for (const Group& group : product.groups()) {
        (panels && !(stored && group.count <= kMostBesidePanels) ? many : few).push_back(group);
      }
      multiply<StoredWay<T>>(product, few, kPartOfRows);
      if constexpr (kHalves) multiply<PackedWay<Int8Panels>>(product, many);
      return;
    }
    using E = std::conditional_t<kHalves, T, float>;
    const int64_t part = weight.format() == cpu::kInt8Weight ? weight.depth() : cpu::kWeightUnit;
    WeightOnlyParams rounded = p;
    rounded.int8_x = false;
    rounded.x = rounded_to_int8<T, E>(p.x, part);
    rounded.out = p.out.to(rounded.x.scalar_type());
    multiply<E>(rounded);
    p.out.copy_(rounded.out);
    return;
  }
  // the one way whose kernels sum each product by itself, whatever rows there are
  if (p.invariant) return multiply<StoredWay<T>>(product, product.groups(), kPartOfRows);
  const cpu::WeightWays& ways = weight.ways(p.x.scalar_type());
  std::vector<Group> stored, packed, rounded, widened;
  for (const Group& group : product.groups()) {
    if (group.count <= ways.most_stored) {
      stored.push_back(group);
    } else if (kHalves && group.count <= ways.most_packed && !weight.transposed()) {
      packed.push_back(group);
    } else if (ways.rounds && weight.kernels().pack_int16) {
      rounded.push_back(group);
    } else {
      widened.push_back(group);
    }
  }
  multiply<StoredWay<T>>(product, stored);
  multiply<RoundedWay<T>>(product, rounded);
  if constexpr (kHalves) {
    multiply<PackedWay<PackedRows>>(product, packed);
    if (ways.in_bfloat16) return multiply<WidenedWay<T, T>>(product, widened);
  }
  multiply<WidenedWay<T, float>>(product, widened);
}

}  // namespace

void weight_only(const WeightOnlyParams& p) {
  const at::ScalarType dtype = p.x.scalar_type();
  if (dtype == at::kFloat) return multiply<float>(p);
  if (dtype == at::kHalf) return multiply<c10::Half>(p);
  multiply<c10::BFloat16>(p);
}

}  // namespace custom_pypto
