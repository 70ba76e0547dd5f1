// Sparse attention over the rows of a latent cache. docs/npu_sparse_flash_attention_pto.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <cmath>
#include <tuple>

#include "../tasks/attention_keys.h"
#include "../tasks/attention_sums.h"
#include "../tasks/attention_tasks.h"
#include "../tasks/kernel_set.h"
#include "../tasks/panels.h"
#include "../tasks/params.h"
#include "../tasks/sequences.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {"npu_sparse_flash_attention_pto", "layout_kv",
                             "actual_seq_lengths_kv"};

// Checks that rank, dtype, device and all sizes but the last match `like`.
Argument like(const Tensor& like, const char* name, const Tensor& tensor, const char* why) {
  return Argument(kNames.op, name, tensor)
      .rank(like.dim(), why)
      .sizes(like, like.dim() - 1, why)
      .dtype(like.scalar_type(), why)
      .device_of(like);
}

// Checks every argument and allocates the output.
void contract(AttentionParams& p) {
  const char* op = kNames.op;
  check_attention(kNames, p);
  const int64_t query_last = p.query.dim() - 1, key_last = p.key.dim() - 1;
  const c10::SymInt L = p.query.sym_size(-1);
  Argument(op, "query", p.query).dtype(kFloating).keeps(query_last, Dim::kMultipleOf16, "L");
  Argument(op, "key", p.key)
      .dtype(p.query.scalar_type(), "dtype of query")
      .device_of(p.query)
      .size(key_last, L, "L of query")
      .dense_rows();
  if (p.value) like(p.key, "value", *p.value, "as key").size(key_last, L, "as key").dense_rows();
  CHECK_ARGUMENT(p.query_rope.has_value() == p.key_rope.has_value(), op, "key_rope",
                 p.query_rope ? "a tensor, as query_rope is" : "None, as query_rope is",
                 p.key_rope ? "a tensor" : "None");
  if (p.query_rope) {
    like(p.query, "query_rope", *p.query_rope, "as query, except R")
        .keeps(query_last, Dim::kMultipleOf16, "R");
    like(p.key, "key_rope", *p.key_rope, "as key, except R")
        .size(key_last, p.query_rope->sym_size(-1), "R of query_rope")
        .dense_rows();
  }
  if (p.sinks) {
    Argument(op, "sinks", *p.sinks)
        .rank(1, "[N1]")
        .size(0, p.query.sym_size(-2), "N1 of query")
        .dtype(at::kFloat, "a logit per head")
        .device_of(p.query);
  }
  p.out = at::empty_symint(p.query.sym_sizes(), p.query.options());
  if (p.return_softmax_lse) {
    // [B, N2, S1, N1] or [N2, T1, N1]
    c10::SymDimVector shape(p.query.sym_sizes().begin(), p.query.sym_sizes().end() - 1);
    shape.insert(shape.end() - 2, 1);
    p.softmax_max = at::empty_symint(shape, p.query.options().dtype(at::kFloat));
    p.softmax_sum = at::empty_like(p.softmax_max);
  }
}

using Task = AttentionTask;

// E is the compute type, T the storage type
template <typename E, typename T>
class SparseAttention {
 public:
  SparseAttention(const AttentionParams& p, const cpu::Bf16Kernels* bf16)
      : bf16_(std::is_same_v<E, float> ? nullptr : bf16),
        query_(p.query.contiguous()),
        rope_(p.query_rope ? p.query_rope->contiguous() : Tensor()),
        indices_tensor_(p.sparse_indices.contiguous()),
        indices_(indices_tensor_.template const_data_ptr<int32_t>()),
        caches_(p),
        sequences_(read_sequences(p)),
        key_map_(p),
        heads_(p.query.size(-2)),
        k_(p.sparse_indices.size(-1)),
        mode_(p.sparse_mode),
        scale_(static_cast<float>(p.scale_value * M_LOG2E)),
        sinks_(p.sinks ? p.sinks->contiguous() : Tensor()),
        results_{static_cast<T*>(p.out.mutable_data_ptr()), nullptr, nullptr, nullptr,
                 p.scale_value} {
    p.out.zero_();
    if (p.sinks) results_.sinks = sinks_.const_data_ptr<float>();
    if (!p.return_softmax_lse) return;
    results_.softmax_max = p.softmax_max.fill_(-INFINITY).mutable_data_ptr<float>();
    results_.softmax_sum = p.softmax_sum.zero_().mutable_data_ptr<float>();
  }

  void run() {
    const AttentionPlan plan =
        plan_attention(sequences_, heads_, mode_, [&](int64_t token) { return columns(token); });
    const std::vector<Task>& tasks = plan.tasks;
    std::vector<SoftmaxSums> parts(plan.part_count);
    run_tasks(
        tasks.size(), [&] { return Scratch(*this); },
        [&](Scratch& scratch, int64_t t) {
          const Task& task = tasks[t];
          SoftmaxSums& sums = task.part < 0 ? scratch.sums : parts[task.part];
          if (!task.dense) {
            gather(task, scratch, sums);
          } else if (!dense(task, scratch, sums)) {
            for (int64_t i = task.first; i < task.first + task.count; ++i) {
              gather({false, task.sequence, i, 1, 0, k_, -1}, scratch, sums);
            }
          }
        });
    if (plan.part_count == 0) return;
    std::vector<int64_t> shared;  // first task of each token whose columns are split
    for (size_t t = 0; t < tasks.size(); ++t) {
      if (tasks[t].part >= 0 && tasks[t].begin == 0) shared.push_back(t);
    }
    run_tasks(
        shared.size(), [] { return 0; },
        [&](int, int64_t i) {
          const Task& task = tasks[shared[i]];
          const int64_t count = (columns(token(task, 0)) + plan.step - 1) / plan.step;
          const SoftmaxSums total =
              combine(&parts[task.part], count, heads_, caches_.latent, scale_, bf16_);
          write(task, total, {total.any});
        });
  }

 private:
  struct Scratch {
    explicit Scratch(const SparseAttention& op)
        : tiles(op.bf16_),
          keys(op.caches_, op.bf16_),
          packed(op.bf16_ ? (cpu::kMaxKeys / 2 + 1) * op.caches_.latent : 0),
          staged(op.bf16_ ? cpu::kStagedKeys * (op.caches_.latent + op.caches_.rope) : 0) {}
    TileRegisters tiles;
    KeyChunks<E, T> keys;
    AlignedVector<cpu::PanelElement<E>> query;
    std::vector<cpu::AttendPanel<E>> panels;
    AlignedVector<float> scores;
    AlignedVector<uint32_t> packed;
    AlignedVector<uint16_t> staged;
    AlignedVector<float> panel_counts;  // dense: [row of each panel][key]
    std::vector<int32_t> counts;        // dense: [j][t], how often token t selected key j
    std::vector<int64_t> seen;          // number of keys each token attended to
    SoftmaxSums sums;
  };

  int64_t token(const Task& task, int64_t i) const {
    return sequences_[task.sequence].first_token + task.first + i;
  }

  // Calls f(position) for every index in columns [begin, end) that the token may see.
  template <typename F>
  void for_each_index(int64_t token, int64_t begin, int64_t end, int64_t visible,
                      const F& f) const {
    const int32_t* row = indices_ + token * k_;
    for (int64_t c = begin; c < end && row[c] != -1; ++c) {
      if (row[c] >= 0 && row[c] < visible) f(int64_t{row[c]});
    }
  }

  // columns before the -1 that ends a row
  int64_t columns(int64_t token) const {
    const int32_t* row = indices_ + token * k_;
    return std::find(row, row + k_, -1) - row;
  }

  void start(const Task& task, Scratch& scratch, SoftmaxSums& sums) const {
    const int64_t rows = task.count * heads_, latent = caches_.latent, rope_dims = caches_.rope;
    scratch.query.resize(panel_elements<E>(rows, latent + rope_dims));
    const int64_t first = token(task, 0) * heads_;
    const T* query = static_cast<const T*>(query_.const_data_ptr()) + first * latent;
    auto* panel = scratch.query.data();
    for (int64_t r = 0; r < rows; r += cpu::kMaxWidth) {
      const int64_t here = std::min<int64_t>(rows - r, cpu::kMaxWidth);
      const int64_t width = cpu::panel_width(here);
      pack_panel(query + r * latent, latent, here, width, latent, panel);
      panel += panel_elements<E>(width, latent);
      if (rope_dims) {
        const T* rope = static_cast<const T*>(rope_.const_data_ptr()) + (first + r) * rope_dims;
        pack_panel(rope, rope_dims, here, width, rope_dims, panel);
        panel += panel_elements<E>(width, rope_dims);
      }
    }
    sums.start(rows, latent);
    scratch.seen.assign(task.count, 0);
    scratch.keys.clear();
  }

  template <typename Counts>
  void add_key(const KeyMap::Slot& slot, int64_t position, const Task& task, Scratch& scratch,
               SoftmaxSums& sums, const Counts& counts) const {
    if (!scratch.keys.add(slot, position)) return;
    if (scratch.keys.count()) attend(task, scratch, sums, counts);
    scratch.keys.advance();
  }

  // Attends to the current chunk and the next one, unless they are empty.
  template <typename Counts>
  void flush(const Task& task, Scratch& scratch, SoftmaxSums& sums, const Counts& counts) const {
    for (int chunk = 0; chunk < 2; ++chunk) {
      if (scratch.keys.count()) attend(task, scratch, sums, counts);
      scratch.keys.advance();
    }
  }

  // Adds the keys of the chunk to the sums of every panel. `counts(first row, width)` returns the
  // mask of a panel, or null to select every key.
  template <typename Counts>
  void attend(const Task& task, Scratch& scratch, SoftmaxSums& sums, const Counts& counts) const {
    const int64_t rows = task.count * heads_;
    const auto* query = scratch.query.data();
    scratch.panels.clear();
    for (int64_t r = 0; r < rows; r += cpu::kMaxWidth) {
      const int64_t width = cpu::panel_width(std::min<int64_t>(rows - r, cpu::kMaxWidth));
      scratch.panels.push_back({query, static_cast<int>(width), scale_, counts(r, width), !sums.any,
                                sums.max.data() + r, sums.sum.data() + r,
                                sums.out.data() + r * caches_.latent});
      query += panel_elements<E>(width, caches_.latent + caches_.rope);
    }
    scratch.scores.resize(cpu::kMaxKeys * panel_rows(rows));
    const cpu::AttendScratch buffers{scratch.scores.data(), scratch.packed.data(),
                                     scratch.staged.data()};
    const int panels = static_cast<int>(scratch.panels.size());
    if constexpr (std::is_same_v<E, float>) {
      kernels().attend(scratch.keys.current(), scratch.panels.data(), panels, buffers);
    } else {
      bf16_->attend(scratch.keys.current(), scratch.panels.data(), panels, buffers);
    }
    sums.any = true;
  }

  void gather(const Task& task, Scratch& scratch, SoftmaxSums& sums) const {
    start(task, scratch, sums);
    const Sequence& s = sequences_[task.sequence];
    const auto all = [](int64_t, int64_t) -> const float* { return nullptr; };
    for_each_index(token(task, 0), task.begin, task.end, s.visible(task.first, mode_),
                   [&](int64_t position) {
                     const KeyMap::Slot slot = key_map_.find(s, position);
                     if (!slot.exists) return;
                     add_key(slot, position, task, scratch, sums, all);
                     ++scratch.seen[0];
                   });
    flush(task, scratch, sums, all);
    if (task.part < 0) write(task, sums, scratch.seen);
  }

  // Returns false and writes nothing if a value is Inf or NaN: 0 times that value is NaN, which
  // would reach tokens that have not selected the key.
  bool dense(const Task& task, Scratch& scratch, SoftmaxSums& sums) const {
    start(task, scratch, sums);
    const Sequence& s = sequences_[task.sequence];
    scratch.counts.assign(task.count * task.end, 0);
    for (int64_t t = 0; t < task.count; ++t) {
      for_each_index(token(task, t), 0, k_, s.visible(task.first + t, mode_),
                     [&](int64_t position) { ++scratch.counts[position * task.count + t]; });
    }
    scratch.panel_counts.resize(KeyChunks<E, T>::kKeys * panel_rows(task.count * heads_));
    const auto mask = [&](int64_t row, int64_t width) -> const float* {
      float* to = scratch.panel_counts.data() + row * KeyChunks<E, T>::kKeys;
      for (int j = 0; j < scratch.keys.count(); ++j) {
        for (int64_t r = 0; r < width;) {
          const int64_t t = (row + r) / heads_;
          const int64_t end = std::min((t + 1) * heads_ - row, width);
          const int32_t count =
              t < task.count ? scratch.counts[scratch.keys.position(j) * task.count + t] : 0;
          std::fill(to + j * width + r, to + j * width + end, static_cast<float>(count));
          r = end;
        }
      }
      return to;
    };
    for (int64_t j = 0; j < task.end; ++j) {
      const int32_t* counts = scratch.counts.data() + j * task.count;
      if (std::all_of(counts, counts + task.count, [](int32_t c) { return c == 0; })) continue;
      const KeyMap::Slot slot = key_map_.find(s, j);
      if (!slot.exists) continue;
      if (!scratch.keys.finite_values(slot)) return false;
      add_key(slot, j, task, scratch, sums, mask);
      for (int64_t t = 0; t < task.count; ++t) scratch.seen[t] += counts[t];
    }
    flush(task, scratch, sums, mask);
    write(task, sums, scratch.seen);
    return true;
  }

  void write(const Task& task, const SoftmaxSums& sums, const std::vector<int64_t>& seen) const {
    const int64_t row = token(task, 0) * heads_;
    Results<T> rows = results_;
    rows.out += row * caches_.latent;
    if (rows.softmax_max) rows.softmax_max += row, rows.softmax_sum += row;
    write_rows<E>(sums, seen, heads_, caches_.latent, bf16_, rows);
  }

  const cpu::Bf16Kernels* bf16_;  // null: E is float
  Tensor query_, rope_, indices_tensor_;
  const int32_t* indices_;
  LatentCaches<T> caches_;
  std::vector<Sequence> sequences_;
  KeyMap key_map_;
  int64_t heads_, k_, mode_;
  float scale_;  // of exponents of 2
  Tensor sinks_;
  Results<T> results_;  // of all rows
};

}  // namespace

void check_attention(const KeyNames& names, AttentionParams& p) {
  const char* op = names.op;
  CHECK_ARGUMENT(p.sparse_block_size == 1, op, "sparse_block_size", "1 (an index names one key)",
                 p.sparse_block_size);
  CHECK_ARGUMENT(is_scale(p.scale_value), op, "scale_value", kScales, p.scale_value);
  check_sequences(names, p);
  const int64_t heads = p.query.dim() - 2;
  Argument(op, "sparse_indices", p.sparse_indices)
      .rank(p.query.dim(), p.query_layout == Layout::kTnd ? "[T1, 1, K]" : "[B, S1, 1, K]")
      .sizes(p.query, heads, "as query")
      .size(heads, 1, "N2: one key head")
      .dtype(at::kInt, "positions")
      .device_of(p.query);
}

void attend(const AttentionParams& p) {
  // without tokens the number of sequences is unbounded: a list of them may not fit in memory
  if (p.out.numel() == 0) return;
  const int64_t rope = p.query_rope ? p.query_rope->size(-1) : 0;
  const cpu::Bf16Kernels* bf16 = attention_kernels(p.query.size(-1), rope);
  dispatch_elements(p.query.scalar_type(), bf16, [&](auto multiplied, auto stored) {
    SparseAttention<decltype(multiplied), decltype(stored)>(p, bf16).run();
  });
}

void sparse_flash_attention(AttentionParams& p) {
  contract(p);
  attend(p);
}

// Both overloads. Statistics is bool, return_softmax_lse, for softmax_lse, and absent otherwise.
template <bool computes, typename... Statistics>
auto npu_sparse_flash_attention_pto(
    const Tensor& query, const Tensor& key, const OptionalTensor& value,
    const Tensor& sparse_indices, double scale_value, const OptionalTensor& block_table,
    const OptionalTensor& actual_seq_lengths_query, const OptionalTensor& actual_seq_lengths_kv,
    const OptionalTensor& query_rope, const OptionalTensor& key_rope, int64_t sparse_block_size,
    c10::string_view layout_query, c10::string_view layout_kv, int64_t sparse_mode,
    const OptionalTensor& sinks, Statistics... return_softmax_lse) {
  AttentionParams p{{query, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table,
                     layout_query, layout_kv, sparse_mode},
                    value,
                    sparse_indices,
                    scale_value,
                    query_rope,
                    key_rope,
                    sinks,
                    sparse_block_size,
                    (false || ... || return_softmax_lse)};
  computes ? sparse_flash_attention(p) : contract(p);
  if constexpr (sizeof...(Statistics) == 0) {
    return p.out;
  } else {
    const auto none = [&] { return at::empty({0}, query.options().dtype(at::kFloat)); };
    return p.return_softmax_lse ? std::make_tuple(p.out, p.softmax_max, p.softmax_sum)
                                : std::make_tuple(p.out, none(), none());
  }
}

constexpr char kSoftmaxLse[] = "npu_sparse_flash_attention_pto.softmax_lse";

REGISTER_CPU_AND_META(npu_sparse_flash_attention_pto)
TORCH_LIBRARY_IMPL(custom_pypto, CPU, m) {
  m.impl(kSoftmaxLse, &npu_sparse_flash_attention_pto<true, bool>);
}
TORCH_LIBRARY_IMPL(custom_pypto, Meta, m) {
  m.impl(kSoftmaxLse, &npu_sparse_flash_attention_pto<false, bool>);
}

// backward() raises an error instead of silently omitting a gradient
TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  for (const char* overload : {kNames.op, kSoftmaxLse}) {
    m.impl(overload, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace custom_pypto
