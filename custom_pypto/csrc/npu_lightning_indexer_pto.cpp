// Lightning indexer: which keys matter most to each query token. docs/npu_lightning_indexer_pto.md
#include "panels.h"
#include "params.h"
#include "sequences.h"
#include "topk.h"

namespace custom_pypto {
namespace {

constexpr KeyNames kNames = {"npu_lightning_indexer_pto", "layout_key", "actual_seq_lengths_key"};

// Checks every argument and allocates the output.
void contract(IndexerParams& p) {
  const char* op = kNames.op;
  check_sparse_count(op, p.sparse_count);
  CHECK_ARGUMENT(p.cmp_ratio >= 1 && p.cmp_ratio <= 128, op, "cmp_ratio",
                 "1 to 128 (tokens per key)", p.cmp_ratio);
  check_sequences(kNames, p);
  const int64_t rank = p.query.dim();
  const auto dtype = p.query.scalar_type();
  Argument(op, "query", p.query).dtype(kFloating).keeps(rank - 1, Dim::kMultipleOf16, "D");
  Argument(op, "key", p.key)
      .dtype(dtype, "dtype of query")
      .device_of(p.query)
      .size(p.key.dim() - 1, p.query.sym_size(-1), "D of query")
      .dense_rows();
  Argument(op, "weights", p.weights)
      .rank(rank - 1, rank == 4 ? "[B, S1, N1]" : "[T1, N1]")
      .sizes(p.query, rank - 1, "shape of query without D")
      .dtype_or_float32(dtype, "dtype of query")
      .device_of(p.query);

  c10::SymDimVector shape(p.query.sym_sizes().begin(), p.query.sym_sizes().end());
  shape[rank - 2] = 1;
  shape[rank - 1] = p.sparse_count;
  p.out = at::empty_symint(shape, p.query.options().dtype(at::kInt));
}

// Query tokens [first, first + count) of one sequence against the keys [begin, end).
struct Task {
  int64_t sequence, first, count;
  int64_t begin, end;
};

constexpr int64_t kTokensOfTask = 8;  // maximum; tokens of a task share the keys they read

// E is the compute type, T the storage type
template <typename E, typename T>
class Indexer {
 public:
  Indexer(const IndexerParams& p, const cpu::Bf16Kernels* bf16)
      : bf16_(std::is_same_v<E, float> ? nullptr : bf16),
        query_(p.query.contiguous()),
        weights_(p.weights.to(at::kFloat).contiguous()),
        sequences_(read_sequences(p)),
        key_map_(p),
        keys_(p.key),
        heads_(p.query.size(-2)),
        dims_(p.query.size(-1)),
        k_(p.sparse_count),
        mode_(p.sparse_mode),
        out_(p.out.mutable_data_ptr<int32_t>()) {
    std::fill_n(out_, p.out.numel(), -1);
  }

  void run() {
    const std::vector<Task> tasks = plan();
    std::vector<TopK> parts;  // if keys are split: one per task and token
    for (size_t t = 0; split_ && t < tasks.size() * group_; ++t) parts.emplace_back(k_);
    run_tasks(
        tasks.size(), [&] { return Scratch(*this); },
        [&](Scratch& scratch, int64_t t) {
          const Task& task = tasks[t];
          TopK* best = split_ ? &parts[t * group_] : scratch.best.data();
          for (int64_t i = 0; i < task.count; ++i) best[i].clear();
          score(task, scratch, best);
          for (int64_t i = 0; i < task.count; ++i) {
            split_ ? best[i].shrink() : best[i].write(out_row(task, i));
          }
        });
    if (!split_) return;
    // tasks of the same tokens are consecutive, in key order
    std::vector<size_t> starts;
    for (size_t t = 0; t < tasks.size(); ++t) {
      if (tasks[t].begin == 0) starts.push_back(t);
    }
    starts.push_back(tasks.size());
    run_tasks((starts.size() - 1) * group_, [&] { return TopK(k_); },
              [&](TopK& all, int64_t i) {
                const Task& task = tasks[starts[i / group_]];
                const int64_t token = i % group_;
                if (token >= task.count) return;
                all.clear();
                for (size_t t = starts[i / group_]; t < starts[i / group_ + 1]; ++t) {
                  all.push(parts[t * group_ + token]);
                }
                all.write(out_row(task, token));
              });
  }

 private:
  struct Scratch {
    explicit Scratch(const Indexer& op)
        : tiles(op.bf16_),
          panels(op.group_ * panel_elements<E>(op.heads_, op.dims_)),
          weights(op.group_ * panel_rows(op.heads_)),
          keys(std::is_same_v<E, T> ? 0 : cpu::kMaxKeys * op.dims_) {
      for (int64_t i = 0; !op.split_ && i < op.group_; ++i) best.emplace_back(op.k_);
    }
    TileRegisters tiles;
    AlignedVector<cpu::PanelElement<E>> panels;
    AlignedVector<float> weights;
    AlignedVector<E> keys;
    std::vector<TopK> best;
  };

  int32_t* out_row(const Task& task, int64_t i) const {
    const int64_t token = sequences_[task.sequence].first_token + task.first + i;
    return out_ + token * k_;
  }

  // Groups tokens, which then share their keys. If there are too few groups for the threads, splits
  // their keys. Scores do not depend on the split, so neither does the result.
  std::vector<Task> plan() {
    int64_t longest = 1, groups = 0;
    for (const Sequence& s : sequences_) longest = std::max(longest, s.len_query);
    group_ = std::min(longest, kTokensOfTask);
    for (const Sequence& s : sequences_) groups += (s.len_query + group_ - 1) / group_;
    const int64_t threads = at::get_num_threads();
    const int64_t wanted = threads == 1 ? 1 : 8 * threads;
    split_ = groups < wanted;
    std::vector<Task> tasks;
    for (const Sequence& s : sequences_) {
      for (int64_t i = 0; i < s.len_query; i += group_) {
        const int64_t count = std::min(group_, s.len_query - i);
        const int64_t visible = s.visible(i + count - 1, mode_);
        int64_t step = std::max<int64_t>(visible, 1);
        if (split_) {
          const int64_t pieces = (wanted + groups - 1) / groups;
          step = std::max<int64_t>(1024, ((visible + pieces - 1) / pieces + 127) / 128 * 128);
        }
        for (int64_t begin = 0; begin < visible; begin += step) {
          tasks.push_back({s.index, i, count, begin, std::min(begin + step, visible)});
        }
      }
    }
    return tasks;
  }

  void score(const Task& task, Scratch& scratch, TopK* best) const {
    const Sequence& s = sequences_[task.sequence];
    const int64_t rows = panel_rows(heads_), size = panel_elements<E>(heads_, dims_);
    for (int64_t i = 0; i < task.count; ++i) {
      const int64_t token = s.first_token + task.first + i;
      pack_panels(static_cast<const T*>(query_.const_data_ptr()) + token * heads_ * dims_, heads_,
                  dims_, scratch.panels.data() + i * size);
      float* w = scratch.weights.data() + i * rows;
      std::copy_n(weights_.const_data_ptr<float>() + token * heads_, heads_, w);
      std::fill(w + heads_, w + rows, 0.0f);
    }
    float scores[cpu::kMaxKeys];
    for (int64_t j = task.begin; j < task.end;) {
      const KeyMap::Slot slot = key_map_.find(s, j);
      const int n = std::min({slot.run, task.end - j, int64_t{cpu::kMaxKeys}});
      if (slot.exists) {
        const E* next = ahead(s, j + n, task.end);
        const auto [keys, stride] = widened(keys_.row(slot), n, scratch);
        for (int64_t i = 0; i < task.count; ++i) {
          const int64_t seen = std::min<int64_t>(n, s.visible(task.first + i, mode_) - j);
          if (seen <= 0) continue;
          cpu::IndexCall<E> call{scratch.panels.data() + i * size,
                                 scratch.weights.data() + i * rows,
                                 static_cast<int>(heads_),
                                 static_cast<int>(rows),
                                 static_cast<int>(dims_),
                                 keys,
                                 stride,
                                 static_cast<int>(seen),
                                 i == 0 ? next : nullptr,
                                 scores};
          if constexpr (std::is_same_v<E, float>) {
            kernels().index(call);
          } else {
            bf16_->index(call);
          }
          best[i].push(scores, seen, j);
        }
      }
      j += n;
    }
  }

  // The keys to prefetch, or null. Widening reads keys before the kernel does: no prefetch then.
  const E* ahead(const Sequence& s, int64_t position, int64_t end) const {
    if constexpr (std::is_same_v<E, T>) {
      if (position + cpu::kMaxKeys > end) return nullptr;
      const KeyMap::Slot slot = key_map_.find(s, position);
      if (slot.exists && slot.run >= cpu::kMaxKeys) return keys_.row(slot);
    }
    return nullptr;
  }

  std::pair<const E*, int64_t> widened(const T* keys, int n, Scratch& scratch) const {
    if constexpr (std::is_same_v<E, T>) {
      return {keys, keys_.stride};
    } else {
      for (int j = 0; j < n; ++j) widen(keys + j * keys_.stride, dims_, &scratch.keys[j * dims_]);
      return {scratch.keys.data(), dims_};
    }
  }

  const cpu::Bf16Kernels* bf16_;
  Tensor query_, weights_;
  std::vector<Sequence> sequences_;
  KeyMap key_map_;
  Cache<T> keys_;
  int64_t heads_, dims_, k_, mode_;
  int32_t* out_;
  bool split_ = false;
  int64_t group_ = 1;  // tokens per task
};

}  // namespace

void lightning_indexer(IndexerParams& p) {
  contract(p);
  // without tokens the number of sequences is unbounded: a list of them may not fit in memory
  if (p.out.numel() == 0) return;
  const cpu::Bf16Kernels* bf16 = index_kernels(p.query.size(-1));
  dispatch_elements(p.query.scalar_type(), bf16, [&](auto multiplied, auto stored) {
    Indexer<decltype(multiplied), decltype(stored)>(p, bf16).run();
  });
}

template <bool computes>
Tensor npu_lightning_indexer_pto(const Tensor& query, const Tensor& key, const Tensor& weights,
                                 const OptionalTensor& actual_seq_lengths_query,
                                 const OptionalTensor& actual_seq_lengths_key,
                                 const OptionalTensor& block_table, c10::string_view layout_query,
                                 c10::string_view layout_key, int64_t sparse_count,
                                 int64_t sparse_mode, int64_t cmp_ratio) {
  IndexerParams p{{query, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table,
                   layout_query, layout_key, sparse_mode, cmp_ratio},
                  weights,
                  sparse_count};
  computes ? lightning_indexer(p) : contract(p);
  return p.out;
}

REGISTER_CPU_AND_META(npu_lightning_indexer_pto)

}  // namespace custom_pypto
