#include "attention.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attention_keys.h"
#include "attention_sums.h"
#include "attention_tasks.h"
#include "run_tasks.h"

namespace custom_pypto {
namespace {

// E is the compute type, T the storage type, Reader that of the keys' rows (row_readers.h)
template <typename E, typename T, typename Reader>
class SparseAttention {
 public:
  SparseAttention(const AttentionParams& p, bool by_token, const cpu::Bf16Kernels* bf16)
      : bf16_(std::is_same_v<E, float> ? nullptr : bf16),
        query_(p.sequences.query.contiguous()),
        rope_(p.query_rope ? p.query_rope->contiguous() : Tensor()),
        indices_tensor_(p.sparse_indices.contiguous()),
        indices_(indices_tensor_.template const_data_ptr<int32_t>()),
        reader_(p, bf16_),
        sequences_(read_sequences(p.sequences)),
        key_map_(p.sequences),
        heads_(query_.size(-2)),
        k_(p.sparse_indices.size(-1)),
        mode_(p.sequences.sparse_mode),
        by_token_(by_token),
        scale_(static_cast<float>(p.scale_value * M_LOG2E)),
        sinks_(p.sinks ? p.sinks->contiguous() : Tensor()),
        results_{.out = static_cast<T*>(p.out.mutable_data_ptr()), .scale = p.scale_value} {
    int64_t rows = 0;
    for (const Sequence& s : sequences_) rows += s.len_query * heads_ * query_.size(-1);
    if (rows < query_.numel()) p.out.zero_();  // tokens of no sequence
    if (p.sinks) results_.sinks = sinks_.const_data_ptr<float>();
    if (!p.return_softmax_lse) return;
    results_.softmax_max = p.softmax_max.fill_(-INFINITY).mutable_data_ptr<float>();
    results_.softmax_sum = p.softmax_sum.zero_().mutable_data_ptr<float>();
  }

  void run() {
    const AttentionPlan plan = plan_attention(sequences_, heads_, mode_, by_token_,
                                              [&](int64_t token) { return columns(token); });
    const std::vector<AttentionTask>& tasks = plan.tasks;
    std::vector<SoftmaxSums> parts(plan.part_count);
    run_tasks(
        tasks.size(), [&] { return Scratch(*this); },
        [&](Scratch& scratch, int64_t t) {
          const AttentionTask& task = tasks[t];
          SoftmaxSums& sums = task.part == kOwnSums ? scratch.sums : parts[task.part];
          if (!task.dense) {
            gather(task, scratch, sums);
          } else if (!dense(task, scratch, sums)) {
            for (int64_t i = task.first; i < task.first + task.count; ++i) {
              gather(gathering(task.sequence, i, 0, k_, kOwnSums), scratch, sums);
            }
          }
        });
    if (plan.shared.empty()) return;
    run_tasks(
        plan.shared.size(), [] { return 0; },
        [&](int, int64_t i) {
          const AttentionTask& task = tasks[plan.shared[i].first];
          const SoftmaxSums total = combine(&parts[task.part], plan.shared[i].count, heads_,
                                            reader_.latent, scale_, bf16_);
          write(task, total, {total.any});
        });
  }

 private:
  using Keys = KeyChunks<E, Reader>;

  struct Scratch {
    explicit Scratch(const SparseAttention& op)
        : tiles(op.bf16_),
          keys(op.reader_),
          packed(op.bf16_ ? (cpu::kMaxKeys / 2 + 1) * op.reader_.latent : 0),
          staged(op.bf16_ ? cpu::kStagedKeys * (op.reader_.latent + op.reader_.rope) : 0) {}
    TileRegisters tiles;
    Keys keys;
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

  int64_t token(const AttentionTask& task, int64_t i) const {
    return sequences_[task.sequence].first_token + task.first + i;
  }

  // columns before the -1 that ends a row
  int64_t columns(int64_t token) const {
    const int32_t* row = indices_ + token * k_;
    return std::find(row, row + k_, -1) - row;
  }

  void start(const AttentionTask& task, Scratch& scratch, SoftmaxSums& sums) const {
    const int64_t rows = task.count * heads_, latent = reader_.latent, rope_dims = reader_.rope;
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
  void add_key(const KeyMap::Slot& slot, int64_t position, const AttentionTask& task,
               Scratch& scratch, SoftmaxSums& sums, const Counts& counts) const {
    if (!scratch.keys.add(slot, position)) return;
    if (scratch.keys.count()) attend(task, scratch, sums, counts);
    scratch.keys.advance();
  }

  // Attends to the current chunk and the next one, unless they are empty.
  template <typename Counts>
  void flush(const AttentionTask& task, Scratch& scratch, SoftmaxSums& sums,
             const Counts& counts) const {
    for (int chunk = 0; chunk < 2; ++chunk) {
      if (scratch.keys.count()) attend(task, scratch, sums, counts);
      scratch.keys.advance();
    }
  }

  // Adds the keys of the chunk to the sums of every panel. `counts(first row, width)` returns the
  // mask of a panel, or null to select every key.
  template <typename Counts>
  void attend(const AttentionTask& task, Scratch& scratch, SoftmaxSums& sums,
              const Counts& counts) const {
    const int64_t rows = task.count * heads_;
    const auto* query = scratch.query.data();
    scratch.panels.clear();
    for (int64_t r = 0; r < rows; r += cpu::kMaxWidth) {
      const int64_t width = cpu::panel_width(std::min<int64_t>(rows - r, cpu::kMaxWidth));
      scratch.panels.push_back(cpu::AttendPanel<E>{.query = query,
                                                   .width = static_cast<int>(width),
                                                   .scale = scale_,
                                                   .counts = counts(r, width),
                                                   .first = !sums.any,
                                                   .max = sums.max.data() + r,
                                                   .sum = sums.sum.data() + r,
                                                   .out = sums.out.data() + r * reader_.latent});
      query += panel_elements<E>(width, reader_.latent + reader_.rope);
    }
    scratch.scores.resize(cpu::kMaxKeys * panel_rows(rows));
    const cpu::AttendScratch buffers{.scores = scratch.scores.data(),
                                     .packed = scratch.packed.data(),
                                     .staged = scratch.staged.data()};
    const int panels = static_cast<int>(scratch.panels.size());
    if constexpr (std::is_same_v<E, float>) {
      kernels().attend(scratch.keys.current(), scratch.panels.data(), panels, buffers);
    } else {
      bf16_->attend(scratch.keys.current(), scratch.panels.data(), panels, buffers);
    }
    sums.any = true;
  }

  void gather(const AttentionTask& task, Scratch& scratch, SoftmaxSums& sums) const {
    start(task, scratch, sums);
    const Sequence& s = sequences_[task.sequence];
    const auto all = [](int64_t, int64_t) -> const float* { return nullptr; };
    for_each_index(indices_ + token(task, 0) * k_, task.begin, task.end,
                   s.visible(task.first, mode_), [&](int64_t position, int64_t) {
                     const KeyMap::Slot slot = key_map_.find(s, position);
                     if (!slot.exists) return;
                     add_key(slot, position, task, scratch, sums, all);
                     ++scratch.seen[0];
                   });
    flush(task, scratch, sums, all);
    if (task.part == kOwnSums) write(task, sums, scratch.seen);
  }

  // Returns false and writes nothing if a value is Inf or NaN: 0 times that value is NaN, which
  // would reach tokens that have not selected the key.
  bool dense(const AttentionTask& task, Scratch& scratch, SoftmaxSums& sums) const {
    start(task, scratch, sums);
    const Sequence& s = sequences_[task.sequence];
    scratch.counts.assign(task.count * task.end, 0);
    for (int64_t t = 0; t < task.count; ++t) {
      for_each_index(
          indices_ + token(task, t) * k_, 0, k_, s.visible(task.first + t, mode_),
          [&](int64_t position, int64_t) { ++scratch.counts[position * task.count + t]; });
    }
    scratch.panel_counts.resize(Keys::kKeys * panel_rows(task.count * heads_));
    const auto mask = [&](int64_t row, int64_t width) -> const float* {
      float* to = scratch.panel_counts.data() + row * Keys::kKeys;
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

  void write(const AttentionTask& task, const SoftmaxSums& sums,
             const std::vector<int64_t>& seen) const {
    const int64_t row = token(task, 0) * heads_;
    Results<T> rows = results_;
    rows.out += row * reader_.latent;
    if (rows.softmax_max) rows.softmax_max += row, rows.softmax_sum += row;
    write_rows<E>(sums, seen, heads_, reader_.latent, bf16_, rows);
  }

  const cpu::Bf16Kernels* bf16_;  // null: E is float
  Tensor query_, rope_, indices_tensor_;
  const int32_t* indices_;
  Reader reader_;
  std::vector<Sequence> sequences_;
  KeyMap key_map_;
  int64_t heads_, k_, mode_;
  bool by_token_;
  float scale_;  // of exponents of 2
  Tensor sinks_;
  Results<T> results_;  // of all rows
};

}  // namespace

template <template <typename E, typename T> class Rows>
void attend(const AttentionParams& p, bool by_token) {
  // without tokens the number of sequences is unbounded: a list of them may not fit in memory
  if (p.out.numel() == 0) return;
  const Tensor& query = p.sequences.query;
  const int64_t rope = p.query_rope ? p.query_rope->size(-1) : 0;
  const cpu::Bf16Kernels* bf16 = attention_kernels(query.size(-1), rope);
  dispatch_elements(query.scalar_type(), bf16, [&](auto multiplied, auto stored) {
    using E = decltype(multiplied);
    using T = decltype(stored);
    if constexpr (Rows<E, T>::kReads) SparseAttention<E, T, Rows<E, T>>(p, by_token, bf16).run();
  });
}

template void attend<ModelRows>(const AttentionParams& p, bool by_token);
template void attend<Int8Rows>(const AttentionParams& p, bool by_token);

}  // namespace custom_pypto
