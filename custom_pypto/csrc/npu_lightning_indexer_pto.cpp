// Lightning indexer: which keys matter most to each query token. docs/npu_lightning_indexer_pto.md
#include <array>
#include <memory>
#include <numeric>

#include "ops_common.h"
#include "panels.h"

namespace custom_pypto {
namespace {

constexpr char kOp[] = "npu_lightning_indexer_pto";

// ---- contract: what Meta and CPU share
// -----------------------------------------------------------

struct Checked {
  Layouts layouts;
  Tensor out;
};

Checked check(const Tensor& query, const Tensor& key, const Tensor& weights,
              const OptionalTensor& lengths_query, const OptionalTensor& lengths_key,
              const OptionalTensor& block_table, c10::string_view layout_query,
              c10::string_view layout_key, int64_t sparse_count, int64_t sparse_mode) {
  check_sparse_count(kOp, sparse_count);
  check_sparse_mode(kOp, sparse_mode);
  const Layouts layouts =
      check_layouts({kOp, "layout_key", "actual_seq_lengths_key"}, layout_query, layout_key, query,
                    key, lengths_query, lengths_key, block_table);
  const int64_t dims = layouts.query_dims();
  check_floating(kOp, "query", query);
  check_dtype(kOp, "key", key, query.scalar_type(), "dtype of query");
  check_device(kOp, "key", key, query);
  check_multiple_of_16(kOp, "query", query, dims - 1);
  check_size(kOp, "key", key, layouts.key_dims() - 1, query.sym_size(-1), "D of query");
  check_dense_rows(kOp, "key", key);
  check_rank(kOp, "weights", weights, dims - 1, dims == 4 ? "[B, S1, N1]" : "[T1, N1]");
  for (int64_t i = 0; i < dims - 1; ++i) {
    check_size(kOp, "weights", weights, i, query.sym_size(i), "shape of query without D");
  }
  check_dtype_or_float32(kOp, "weights", weights, query.scalar_type(), "dtype of query");
  check_device(kOp, "weights", weights, query);

  c10::SymDimVector shape(query.sym_sizes().begin(), query.sym_sizes().end());
  shape[dims - 2] = 1;
  shape[dims - 1] = sparse_count;
  return {layouts, at::empty_symint(shape, query.options().dtype(at::kInt))};
}

Tensor npu_lightning_indexer_pto_meta(const Tensor& query, const Tensor& key, const Tensor& weights,
                                      const OptionalTensor& actual_seq_lengths_query,
                                      const OptionalTensor& actual_seq_lengths_key,
                                      const OptionalTensor& block_table,
                                      c10::string_view layout_query, c10::string_view layout_key,
                                      int64_t sparse_count, int64_t sparse_mode) {
  return check(query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, block_table,
               layout_query, layout_key, sparse_count, sparse_mode)
      .out;
}

// ---- top-k
// ---------------------------------------------------------------------------------------

struct Rank {
  uint32_t value;
  int64_t equal;  // how many of the k largest have it, of which there may be more
};

// The k-th largest of n ranks, digit by digit from the top; 1 <= k <= n.
Rank kth_largest(const uint32_t* ranks, int64_t n, int64_t k) {
  uint32_t found = 0;  // its digits above the current one
  int above = 32;      // bits below those
  for (const int bits : {11, 11, 10}) {
    const int shift = above - bits;
    const uint32_t mask = (1u << bits) - 1;
    // two counters: neighbours are often alike, and an addition waits for the one before; the last
    // ones take what has other digits above, without a branch that is often mispredicted
    int32_t counts[2049][2] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t digits = ranks[i];
      ++counts[digits >> above == found ? digits >> shift & mask : 2048][i & 1];
    }
    uint32_t digit = mask;
    for (; k > counts[digit][0] + counts[digit][1]; --digit) {
      k -= counts[digit][0] + counts[digit][1];
    }
    found = found << bits | digit;
    above = shift;
  }
  return {found, k};
}

// The k best of a stream of scores whose positions ascend. Keeps up to twice as many candidates,
// and what cannot be among the k best is not even stored.
class TopK {
 public:
  // uninitialised: most of it may never be used
  explicit TopK(int64_t k)
      : k_(k),
        ranks_(new uint32_t[capacity() + cpu::kMaxKeys + cpu::kLineElements]),
        positions_(new int32_t[capacity() + cpu::kMaxKeys + cpu::kLineElements]) {}

  void clear() {
    count_ = 0;
    threshold_ = 0;
  }

  void push(const float* scores, int n, int64_t first_position) {
    count_ += kernels().filter(scores, n, threshold_, static_cast<int32_t>(first_position),
                               ranks_.get() + count_, positions_.get() + count_);
    if (count_ > capacity()) shrink();
  }

  // what another stream, of lower positions than any pushed later, has kept
  void push(const TopK& other) {
    for (int64_t i = 0; i < other.count_; ++i) {
      ranks_[count_] = other.ranks_[i];
      positions_[count_] = other.positions_[i];
      count_ += ranks_[count_] > threshold_;
      if (count_ > capacity()) shrink();
    }
  }

  // the k best, in order of their positions
  void shrink() {
    if (count_ <= k_) return;
    const Rank worst = kth_largest(ranks_.get(), count_, k_);
    threshold_ = worst.value;
    // of equals the first, since positions ascend
    count_ = kernels().keep(ranks_.get(), positions_.get(), count_, worst.value, worst.equal);
  }

  // best first, the lower position first among equals, -1 after the last
  void write(int32_t* out) {
    shrink();
    // radix sort, least significant byte first: stable, so that positions stay in order
    std::array<std::array<int32_t, 257>, 4> starts = {};  // of each byte, the largest first
    order_.resize(count_);
    sorted_.resize(count_);
    for (int64_t i = 0; i < count_; ++i) {
      const uint32_t falling = ~ranks_[i];
      order_[i] = uint64_t{falling} << 32 | static_cast<uint32_t>(positions_[i]);
      for (int b = 0; b < 4; ++b) ++starts[b][(falling >> 8 * b & 255) + 1];
    }
    for (int b = 0; b < 4; ++b) {
      std::partial_sum(starts[b].begin(), starts[b].end(), starts[b].begin());
      for (const uint64_t x : order_) sorted_[starts[b][x >> (32 + 8 * b) & 255]++] = x;
      order_.swap(sorted_);
    }
    for (int64_t i = 0; i < count_; ++i) out[i] = static_cast<int32_t>(order_[i]);
    std::fill(out + count_, out + k_, -1);
  }

 private:
  int64_t capacity() const { return 2 * k_ + 1024; }

  int64_t k_, count_ = 0;
  uint32_t threshold_ = 0;  // once k are kept, the worst of them: a candidate must be better
  std::unique_ptr<uint32_t[]> ranks_;
  std::unique_ptr<int32_t[]> positions_;
  std::vector<uint64_t> order_, sorted_;  // falling rank, position
};

// ---- scores
// ----------------------------------------------------------------------------------------

// Query tokens [first, first + count) of one sequence against the keys [begin, end).
struct Task {
  int64_t sequence, first, count;
  int64_t begin, end;
};

constexpr int64_t kTokensOfTask = 8;  // at most; they share the keys they read

// E is what is multiplied, T what is stored
template <typename E, typename T>
class Indexer {
 public:
  Indexer(const Tensor& query, const Tensor& key, const Tensor& weights,
          const std::vector<Sequence>& sequences, const KeyMap& key_map, int64_t sparse_count,
          int64_t sparse_mode, Tensor& out)
      : tokens_(query.contiguous()),
        weights_(weights.to(at::kFloat).contiguous()),
        sequences_(sequences),
        key_map_(key_map),
        key_(reinterpret_cast<const T*>(key.const_data_ptr())),
        rows_(key),
        heads_(query.size(-2)),
        dims_(query.size(-1)),
        k_(sparse_count),
        mode_(sparse_mode),
        out_(out) {}

  void run() {
    std::fill_n(out_.template mutable_data_ptr<int32_t>(), out_.numel(), -1);
    const std::vector<Task> tasks = plan();
    std::vector<TopK> parts;  // of sequences whose keys are split, one a task and token
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
    // tasks of the same tokens follow each other, in the order of their keys
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
        : panels(op.group_ * panel_elements<E>(op.heads_, op.dims_)),
          weights(op.group_ * panel_rows(op.heads_)),
          keys(std::is_same_v<E, T> ? 0 : cpu::kMaxKeys * op.dims_) {
      for (int64_t i = 0; !op.split_ && i < op.group_; ++i) best.emplace_back(op.k_);
    }
    Lines<cpu::PanelElement<E>> panels;
    Lines<float> weights;
    Lines<E> keys;
    std::vector<TopK> best;
  };

  int32_t* out_row(const Task& task, int64_t i) const {
    const int64_t token = sequences_[task.sequence].first_token + task.first + i;
    return out_.template mutable_data_ptr<int32_t>() + token * k_;
  }

  // Tokens in groups that share their keys; where there are too few groups for the threads, their
  // keys are split. Scores do not depend on the split, so neither does the result.
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
      pack_panels(reinterpret_cast<const T*>(tokens_.const_data_ptr()) + token * heads_ * dims_,
                  heads_, dims_, scratch.panels.data() + i * size);
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
        const auto [keys, stride] = widened(key_ + rows_.offset(slot), n, scratch);
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
            kernels().bf16->index(call);
          }
          best[i].push(scores, seen, j);
        }
      }
      j += n;
    }
  }

  // Keys that are widened are read for that beforehand: there is nothing to fetch ahead.
  const E* ahead(const Sequence& s, int64_t position, int64_t end) const {
    if constexpr (std::is_same_v<E, T>) {
      if (position + cpu::kMaxKeys > end) return nullptr;
      const KeyMap::Slot slot = key_map_.find(s, position);
      if (slot.exists && slot.run >= cpu::kMaxKeys) return key_ + rows_.offset(slot);
    }
    return nullptr;
  }

  std::pair<const E*, int64_t> widened(const T* keys, int n, Scratch& scratch) const {
    if constexpr (std::is_same_v<E, T>) {
      return {keys, rows_.stride};
    } else {
      for (int j = 0; j < n; ++j) widen(keys + j * rows_.stride, dims_, &scratch.keys[j * dims_]);
      return {scratch.keys.data(), dims_};
    }
  }

  Tensor tokens_, weights_;
  const std::vector<Sequence>& sequences_;
  const KeyMap& key_map_;
  const T* key_;
  Rows rows_;
  int64_t heads_, dims_, k_, mode_;
  Tensor& out_;
  bool split_ = false;
  int64_t group_ = 1;  // tokens of a task
};

}  // namespace

Tensor npu_lightning_indexer_pto_cpu(const Tensor& query, const Tensor& key, const Tensor& weights,
                                     const OptionalTensor& actual_seq_lengths_query,
                                     const OptionalTensor& actual_seq_lengths_key,
                                     const OptionalTensor& block_table,
                                     c10::string_view layout_query, c10::string_view layout_key,
                                     int64_t sparse_count, int64_t sparse_mode) {
  auto [layouts, out] = check(query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key,
                              block_table, layout_query, layout_key, sparse_count, sparse_mode);
  // without a token there may be any number of sequences, more than memory has room to list
  if (out.numel() == 0) return out;
  const auto sequences = read_sequences(layouts, query, key, actual_seq_lengths_query,
                                        actual_seq_lengths_key, block_table);
  const KeyMap key_map(layouts, key, block_table);
  dispatch_elements(query.scalar_type(), [&](auto multiplied, auto stored) {
    Indexer<decltype(multiplied), decltype(stored)>(query, key, weights, sequences, key_map,
                                                    sparse_count, sparse_mode, out)
        .run();
  });
  return out;
}

TORCH_LIBRARY_IMPL(custom_pypto, CPU, m) {
  m.impl("npu_lightning_indexer_pto", &npu_lightning_indexer_pto_cpu);
}

TORCH_LIBRARY_IMPL(custom_pypto, Meta, m) {
  m.impl("npu_lightning_indexer_pto", &npu_lightning_indexer_pto_meta);
}

}  // namespace custom_pypto
