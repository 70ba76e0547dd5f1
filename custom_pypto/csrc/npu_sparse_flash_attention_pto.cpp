// Sparse attention over the rows of a latent cache. docs/npu_sparse_flash_attention_pto.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <cmath>
#include <cstring>

#include "ops_common.h"
#include "panels.h"

namespace custom_pypto {
namespace {

constexpr char kOp[] = "npu_sparse_flash_attention_pto";

// ---- contract: what Meta and CPU share
// -----------------------------------------------------------

struct Checked {
  Layouts layouts;
  Tensor out;
};

void check_same_shape_but_last(const char* name, const Tensor& tensor, const Tensor& like,
                               const char* why) {
  check_rank(kOp, name, tensor, like.dim(), why);
  for (int64_t i = 0; i < like.dim() - 1; ++i) {
    check_size(kOp, name, tensor, i, like.sym_size(i), why);
  }
  check_dtype(kOp, name, tensor, like.scalar_type(), why);
  check_device(kOp, name, tensor, like);
}

Checked check(const Tensor& query, const Tensor& key, const OptionalTensor& value,
              const Tensor& sparse_indices, double scale_value, const OptionalTensor& block_table,
              const OptionalTensor& lengths_query, const OptionalTensor& lengths_kv,
              const OptionalTensor& query_rope, const OptionalTensor& key_rope,
              int64_t sparse_block_size, c10::string_view layout_query, c10::string_view layout_kv,
              int64_t sparse_mode) {
  check_sparse_mode(kOp, sparse_mode);
  CHECK_ARGUMENT(sparse_block_size == 1, kOp, "sparse_block_size", "1 (an index names one key)",
                 sparse_block_size);
  CHECK_ARGUMENT(is_scale(scale_value), kOp, "scale_value", kScales, scale_value);
  const Layouts layouts =
      check_layouts({kOp, "layout_kv", "actual_seq_lengths_kv"}, layout_query, layout_kv, query,
                    key, lengths_query, lengths_kv, block_table);
  check_floating(kOp, "query", query);
  check_multiple_of_16(kOp, "query", query, layouts.query_dims() - 1);
  check_dtype(kOp, "key", key, query.scalar_type(), "dtype of query");
  check_device(kOp, "key", key, query);
  check_size(kOp, "key", key, layouts.key_dims() - 1, query.sym_size(-1), "L of query");
  check_dense_rows(kOp, "key", key);
  if (value) {
    check_same_shape_but_last("value", *value, key, "as key");
    check_size(kOp, "value", *value, key.dim() - 1, key.sym_size(-1), "as key");
    check_dense_rows(kOp, "value", *value);
  }
  CHECK_ARGUMENT(query_rope.has_value() == key_rope.has_value(), kOp, "key_rope",
                 query_rope ? "given, as query_rope is" : "None, as query_rope is",
                 key_rope ? "a tensor" : "None");
  if (query_rope) {
    check_same_shape_but_last("query_rope", *query_rope, query, "as query, but for R");
    check_multiple_of_16(kOp, "query_rope", *query_rope, query.dim() - 1);
    check_same_shape_but_last("key_rope", *key_rope, key, "as key, but for R");
    check_size(kOp, "key_rope", *key_rope, key.dim() - 1, query_rope->sym_size(-1),
               "R of query_rope");
    check_dense_rows(kOp, "key_rope", *key_rope);
  }
  check_rank(kOp, "sparse_indices", sparse_indices, query.dim(),
             layouts.query == Layout::kTnd ? "[T1, 1, K]" : "[B, S1, 1, K]");
  for (int64_t i = 0; i < query.dim() - 2; ++i) {
    check_size(kOp, "sparse_indices", sparse_indices, i, query.sym_size(i), "as query");
  }
  check_size(kOp, "sparse_indices", sparse_indices, query.dim() - 2, 1, "N2: one key head");
  check_dtype(kOp, "sparse_indices", sparse_indices, at::kInt, "positions");
  check_device(kOp, "sparse_indices", sparse_indices, query);
  return {layouts, at::empty_symint(query.sym_sizes(), query.options())};
}

Tensor npu_sparse_flash_attention_pto_meta(
    const Tensor& query, const Tensor& key, const OptionalTensor& value,
    const Tensor& sparse_indices, double scale_value, const OptionalTensor& block_table,
    const OptionalTensor& actual_seq_lengths_query, const OptionalTensor& actual_seq_lengths_kv,
    const OptionalTensor& query_rope, const OptionalTensor& key_rope, int64_t sparse_block_size,
    c10::string_view layout_query, c10::string_view layout_kv, int64_t sparse_mode) {
  return check(query, key, value, sparse_indices, scale_value, block_table,
               actual_seq_lengths_query, actual_seq_lengths_kv, query_rope, key_rope,
               sparse_block_size, layout_query, layout_kv, sparse_mode)
      .out;
}

// ---- computation
// -----------------------------------------------------------------------------------

// Rows (query token, head) that are worked on together. A dense task takes tokens that follow each
// other and reads every key any of them may see, with the selection as a mask: a matrix multiply. A
// gathering task takes one token and some columns of its indices.
struct Task {
  bool dense;
  int64_t sequence, first, count;  // tokens
  int64_t begin, end;              // dense: keys, gathering: columns of the indices
  int64_t part;  // gathering: where its sums go if other tasks share the token, else -1
};

constexpr int64_t kDenseRows = 128;
// A gathered key costs more than one in a row of keys: it serves the heads of one token only.
constexpr double kGatherCost = 1.25;
// The columns of few tokens are split between tasks: of one, so many to a task; of more tokens,
// so many times more, because the sums of all tasks are written and read once more. Depends on
// shapes alone, so that sums are added in the same order for any number of threads.
constexpr int64_t kSplitColumns = 512;

// Softmax sums of the rows of a task, in panels.
struct Sums {
  Lines<float> max, sum, out;
  bool any = false;  // whether a key has been added
};

// Whether no element has all exponent bits set.
template <typename T>
bool finite(const T* row, int64_t n) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  constexpr Bits kExponent = std::is_same_v<T, float>       ? 0x7F800000
                             : std::is_same_v<T, c10::Half> ? 0x7C00
                                                            : 0x7F80;
  Bits bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    Bits bits;
    std::memcpy(&bits, row + i, sizeof(T));
    bad |= (bits & kExponent) == kExponent;
  }
  return !bad;
}

// E is what is multiplied, T what is stored
template <typename E, typename T>
class SparseAttention {
 public:
  SparseAttention(const Tensor& query, const Tensor& key, const OptionalTensor& value,
                  const Tensor& sparse_indices, double scale_value,
                  const OptionalTensor& query_rope, const OptionalTensor& key_rope,
                  const std::vector<Sequence>& sequences, const KeyMap& key_map,
                  int64_t sparse_mode, Tensor& out)
      : query_(query.contiguous()),
        rope_(query_rope ? query_rope->contiguous() : Tensor()),
        indices_tensor_(sparse_indices.contiguous()),
        indices_(indices_tensor_.template const_data_ptr<int32_t>()),
        keys_(key),
        values_(value ? *value : key),
        key_ropes_(key_rope ? std::optional<Source>(*key_rope) : std::nullopt),
        own_values_(value && (value->const_data_ptr() != key.const_data_ptr() ||
                              value->strides() != key.strides())),
        sequences_(sequences),
        key_map_(key_map),
        heads_(query.size(-2)),
        latent_(query.size(-1)),
        rope_dims_(query_rope ? query_rope->size(-1) : 0),
        k_(sparse_indices.size(-1)),
        mode_(sparse_mode),
        scale_(static_cast<float>(scale_value * M_LOG2E)),
        out_(out) {}

  void run() {
    out_.zero_();
    plan();
    std::vector<Sums> parts(part_count_);
    run_tasks(
        tasks_.size(), [&] { return Scratch(*this); },
        [&](Scratch& scratch, int64_t t) {
          const Task& task = tasks_[t];
          Sums& sums = task.part < 0 ? scratch.sums : parts[task.part];
          if (!task.dense) {
            gather(task, scratch, sums);
          } else if (!dense(task, scratch, sums)) {
            for (int64_t i = task.first; i < task.first + task.count; ++i) {
              gather({false, task.sequence, i, 1, 0, k_, -1}, scratch, sums);
            }
          }
        });
    if (part_count_ == 0) return;
    std::vector<int64_t> shared;  // first task of each token whose columns are split
    for (size_t t = 0; t < tasks_.size(); ++t) {
      if (tasks_[t].part >= 0 && tasks_[t].begin == 0) shared.push_back(t);
    }
    run_tasks(
        shared.size(), [] { return 0; },
        [&](int, int64_t i) { combine(tasks_[shared[i]], parts); });
  }

 private:
  // A cache: base and strides, in elements.
  struct Source {
    explicit Source(const Tensor& cache)
        : data(static_cast<const T*>(cache.const_data_ptr())), rows(cache) {}
    const T* at(const KeyMap::Slot& slot) const { return data + rows.offset(slot); }
    const T* data;
    Rows rows;
  };

  static constexpr int kKeys = cpu::kAttendKeys<E>;
  // The first chunk is waited for: a short one, during which the next is on its way.
  static constexpr int kFirstKeys = kKeys / 4;

  // A chunk and what belongs to its keys.
  struct Keys {
    explicit Keys(const SparseAttention& op)
        : widened(std::is_same_v<E, T> ? 0 : kKeys * (2 * op.latent_ + op.rope_dims_)),
          position(kKeys) {}
    cpu::Chunk<E> chunk;
    Lines<E> widened;
    std::vector<int64_t> position;  // dense: in the sequence
  };

  struct Scratch {
    explicit Scratch(const SparseAttention& op)
        : chunks{Keys(op), Keys(op)},
          scores(cpu::kMaxKeys * cpu::kMaxWidth),
          packed(std::is_same_v<E, float> ? 0 : kKeys / 2 * op.latent_) {}
    Scratch(const Scratch&) = delete;  // it points into itself
    // One is attended to when the next is full, so that the rows of that one are on their way.
    Keys chunks[2];
    Keys *keys = &chunks[0], *next = &chunks[1];
    Lines<cpu::PanelElement<E>> query;
    Lines<float> scores;
    Lines<uint32_t> packed;
    Lines<float> panel_counts;
    std::vector<int32_t> counts;  // dense: how often key j was selected by token t, [j][t]
    std::vector<int64_t> seen;    // keys each token has attended to
    Sums sums;
  };

  int64_t token(const Task& task, int64_t i) const {
    return sequences_[task.sequence].first_token + task.first + i;
  }

  // Calls f(position) for every index of a row, from column `begin`, that its token may see.
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

  void plan() {
    int64_t tokens = 0;
    for (const Sequence& s : sequences_) tokens += s.len_query;
    step_ = kSplitColumns * std::max<int64_t>(1, tokens);
    const int64_t group = std::max<int64_t>(1, kDenseRows / heads_);
    for (const Sequence& s : sequences_) {
      for (int64_t i = 0; i < s.len_query; i += group) {
        const int64_t count = std::min(group, s.len_query - i);
        const int64_t visible = s.visible(i + count - 1, mode_);
        int64_t selected = 0;
        for (int64_t t = 0; t < count; ++t) selected += columns(s.first_token + i + t);
        const double gathered = kGatherCost * panel_rows(heads_) * selected;
        if (panel_rows(count * heads_) * static_cast<double>(visible) < gathered) {
          tasks_.push_back({true, s.index, i, count, 0, visible, -1});
          continue;
        }
        for (int64_t t = i; t < i + count; ++t) {
          const int64_t end = columns(s.first_token + t);
          for (int64_t c = 0; c < end; c += step_) {
            const int64_t part = end > step_ ? part_count_++ : -1;
            tasks_.push_back({false, s.index, t, 1, c, std::min(c + step_, end), part});
          }
        }
      }
    }
  }

  int64_t row_count(const Task& task) const { return task.count * heads_; }

  void start(const Task& task, Scratch& scratch, Sums& sums) const {
    const int64_t rows = row_count(task), dims = latent_ + rope_dims_;
    const int64_t padded = panel_rows(rows);
    scratch.query.resize(panel_elements<E>(rows, dims));
    const int64_t first = token(task, 0) * heads_;
    const T* query = static_cast<const T*>(query_.const_data_ptr()) + first * latent_;
    auto* panel = scratch.query.data();
    for (int64_t r = 0; r < rows; r += cpu::kMaxWidth) {
      const int64_t here = std::min<int64_t>(rows - r, cpu::kMaxWidth);
      const int64_t width = cpu::panel_width(here);
      pack_panel(query + r * latent_, latent_, here, width, latent_, panel);
      panel += panel_elements<E>(width, latent_);
      if (rope_dims_) {
        const T* rope = static_cast<const T*>(rope_.const_data_ptr()) + (first + r) * rope_dims_;
        pack_panel(rope, rope_dims_, here, width, rope_dims_, panel);
        panel += panel_elements<E>(width, rope_dims_);
      }
    }
    sums.max.resize(padded);
    sums.sum.resize(padded);
    sums.out.resize(padded * latent_);
    sums.any = false;
    scratch.seen.assign(task.count, 0);
    scratch.keys->chunk.n = scratch.next->chunk.n = 0;
  }

  // Starts to load a row.
  static const T* fetch(const T* row, int64_t dims) {
    constexpr int64_t kLine = 64 / sizeof(T);
    for (int64_t d = 0; d < dims; d += kLine) __builtin_prefetch(row + d, 0, 2);
    return row;
  }

  // Puts a key at the end of the next chunk, widened if need be; when that is full, attends to the
  // one before.
  template <typename Counts>
  void add_key(const KeyMap::Slot& slot, int64_t position, const Task& task, Scratch& scratch,
               Sums& sums, const Counts& counts) const {
    Keys& keys = *scratch.next;
    cpu::Chunk<E>& chunk = keys.chunk;
    const int j = chunk.n++;
    keys.position[j] = position;
    if constexpr (std::is_same_v<E, T>) {
      chunk.keys[j] = keys_.at(slot);
      chunk.values[j] = own_values_ ? values_.at(slot) : chunk.keys[j];
      if (rope_dims_) chunk.ropes[j] = key_ropes_->at(slot);
      if (scratch.keys->chunk.n == 0) {  // the first: no kernel runs meanwhile that could fetch
        fetch(chunk.keys[j], latent_);
        if (own_values_) fetch(chunk.values[j], latent_);
        if (rope_dims_) fetch(chunk.ropes[j], rope_dims_);
      }
    } else {
      E* to = keys.widened.data() + j * (2 * latent_ + rope_dims_);
      widen(keys_.at(slot), latent_, to);
      chunk.keys[j] = chunk.values[j] = to;
      if (own_values_) {
        widen(values_.at(slot), latent_, to + latent_);
        chunk.values[j] = to + latent_;
      }
      if (rope_dims_) {
        widen(key_ropes_->at(slot), rope_dims_, to + 2 * latent_);
        chunk.ropes[j] = to + 2 * latent_;
      }
    }
    if (chunk.n == (scratch.keys->chunk.n ? kKeys : kFirstKeys)) turn(task, scratch, sums, counts);
  }

  // Attends to the chunk, if it has keys, and makes the next one the chunk.
  template <typename Counts>
  void turn(const Task& task, Scratch& scratch, Sums& sums, const Counts& counts) const {
    if (scratch.keys->chunk.n) attend(task, scratch, sums, counts);
    std::swap(scratch.keys, scratch.next);
    scratch.next->chunk.n = 0;
  }

  // Adds the keys of the chunk to the sums of every panel; `counts(first row, width)` gives the
  // mask of a panel, or null for all.
  template <typename Counts>
  void attend(const Task& task, Scratch& scratch, Sums& sums, const Counts& counts) const {
    cpu::Chunk<E>& chunk = scratch.keys->chunk;
    chunk.next = std::is_same_v<E, T> && scratch.next->chunk.n ? &scratch.next->chunk : nullptr;
    chunk.latent = latent_;
    chunk.rope = rope_dims_;
    chunk.packed = scratch.packed.data();
    if constexpr (!std::is_same_v<E, float>) kernels().bf16->pack_values(chunk);
    const int64_t rows = row_count(task);
    const auto* query = scratch.query.data();
    for (int64_t r = 0; r < rows; r += cpu::kMaxWidth) {
      const int64_t width = cpu::panel_width(std::min<int64_t>(rows - r, cpu::kMaxWidth));
      const cpu::AttendPanel<E> panel{query,
                                      static_cast<int>(width),
                                      scale_,
                                      counts(r, width),
                                      !sums.any,
                                      r == 0,
                                      sums.max.data() + r,
                                      sums.sum.data() + r,
                                      sums.out.data() + r * latent_,
                                      scratch.scores.data()};
      if constexpr (std::is_same_v<E, float>) {
        kernels().attend(chunk, panel);
      } else {
        kernels().bf16->attend(chunk, panel);
      }
      query += panel_elements<E>(width, latent_ + rope_dims_);
    }
    sums.any = true;
  }

  void gather(const Task& task, Scratch& scratch, Sums& sums) const {
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
    turn(task, scratch, sums, all);
    turn(task, scratch, sums, all);
    if (task.part < 0) finish(task, sums, scratch.seen);
  }

  // False, and nothing written, where a value is Inf or NaN: 0 times it would reach the tokens that
  // have not selected it.
  bool dense(const Task& task, Scratch& scratch, Sums& sums) const {
    start(task, scratch, sums);
    const Sequence& s = sequences_[task.sequence];
    scratch.counts.assign(task.count * task.end, 0);
    for (int64_t t = 0; t < task.count; ++t) {
      for_each_index(token(task, t), 0, k_, s.visible(task.first + t, mode_),
                     [&](int64_t position) { ++scratch.counts[position * task.count + t]; });
    }
    scratch.panel_counts.resize(kKeys * cpu::kMaxWidth);
    const auto mask = [&](int64_t row, int64_t width) -> const float* {
      float* to = scratch.panel_counts.data();
      for (int j = 0; j < scratch.keys->chunk.n; ++j) {
        for (int64_t r = 0; r < width;) {
          const int64_t t = (row + r) / heads_;
          const int64_t end = std::min((t + 1) * heads_ - row, width);
          const int32_t count =
              t < task.count ? scratch.counts[scratch.keys->position[j] * task.count + t] : 0;
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
      if (!finite(values_.at(slot), latent_)) return false;
      add_key(slot, j, task, scratch, sums, mask);
      for (int64_t t = 0; t < task.count; ++t) scratch.seen[t] += counts[t];
    }
    turn(task, scratch, sums, mask);
    turn(task, scratch, sums, mask);
    finish(task, sums, scratch.seen);
    return true;
  }

  // Divides by the sums and writes the rows of the tokens that have attended to a key; the others
  // stay zero.
  void finish(const Task& task, const Sums& sums, const std::vector<int64_t>& seen) const {
    if (!sums.any) return;
    const int64_t rows = row_count(task);
    T* out = static_cast<T*>(out_.mutable_data_ptr()) + token(task, 0) * heads_ * latent_;
    for (int64_t first = 0; first < rows; first += cpu::kMaxWidth) {
      const int64_t count = std::min<int64_t>(rows - first, cpu::kMaxWidth);
      const int64_t width = cpu::panel_width(count);
      // what has seen no key has sums of zeros
      float factors[cpu::kMaxWidth] = {};
      for (int64_t r = 0; r < count; ++r) {
        if (seen[(first + r) / heads_]) factors[r] = 1.0f / sums.sum[first + r];
      }
      const float* panel = sums.out.data() + first * latent_;
      T* to = out + first * latent_;
      if constexpr (std::is_same_v<E, uint16_t>) {
        kernels().bf16->finish(panel, width, count, latent_, factors, to, latent_);
      } else {
        T block[16 * cpu::kMaxWidth];  // rounded while rows are in vectors, then transposed
        for (int64_t l = 0; l < latent_; l += 16) {
          for (int64_t i = 0; i < 16; ++i) {
            float x[cpu::kMaxWidth];
            for (int64_t r = 0; r < width; ++r) x[r] = panel[(l + i) * width + r] * factors[r];
            narrow(x, width, block + i * width);
          }
          for (int64_t r = 0; r < count; ++r) {
            for (int64_t i = 0; i < 16; ++i) to[r * latent_ + l + i] = block[i * width + r];
          }
        }
      }
    }
  }

  // Brings the parts of one token to a common maximum and adds them, in the order of the columns.
  void combine(const Task& task, std::vector<Sums>& parts) const {
    const int64_t end = (columns(token(task, 0)) + step_ - 1) / step_;
    const int64_t width_all = panel_rows(heads_);
    Sums total;
    total.max.assign(width_all, -INFINITY);
    total.sum.assign(width_all, 0.0f);
    total.out.resize(width_all * latent_);
    std::vector<const Sums*> added;
    for (int64_t p = task.part; p < task.part + end; ++p) {
      if (parts[p].any) added.push_back(&parts[p]);
    }
    total.any = !added.empty();
    for (const Sums* part : added) {
      for (int64_t r = 0; r < width_all; ++r) total.max[r] = std::max(total.max[r], part->max[r]);
    }
    Lines<float> factors(added.size() * cpu::kMaxWidth);
    for (int64_t first = 0; first < heads_; first += cpu::kMaxWidth) {
      const int64_t width = cpu::panel_width(std::min<int64_t>(heads_ - first, cpu::kMaxWidth));
      float* factor = factors.data();
      for (const Sums* part : added) {
        for (int64_t r = 0; r < width; ++r, ++factor) {
          const float max = total.max[first + r];
          *factor = std::exp2((part->max[first + r] - (max == -INFINITY ? 0 : max)) * scale_);
          total.sum[first + r] += part->sum[first + r] * *factor;
        }
      }
      for (int64_t l = 0; l < latent_; ++l) {
        const int64_t at = first * latent_ + l * width;
        float* to = total.out.data() + at;
        std::fill_n(to, width, 0.0f);
        factor = factors.data();
        for (const Sums* part : added) {
          const float* from = part->out.data() + at;
          for (int64_t r = 0; r < width; ++r) to[r] += from[r] * factor[r];
          factor += width;
        }
      }
    }
    finish(task, total, {total.any});
  }

  Tensor query_, rope_, indices_tensor_;
  const int32_t* indices_;
  Source keys_, values_;
  std::optional<Source> key_ropes_;
  bool own_values_;
  const std::vector<Sequence>& sequences_;
  const KeyMap& key_map_;
  int64_t heads_, latent_, rope_dims_, k_, mode_;
  float scale_;
  Tensor& out_;
  std::vector<Task> tasks_;
  int64_t step_ = 0;  // columns of a task
  int64_t part_count_ = 0;
};

}  // namespace

Tensor npu_sparse_flash_attention_pto_cpu(
    const Tensor& query, const Tensor& key, const OptionalTensor& value,
    const Tensor& sparse_indices, double scale_value, const OptionalTensor& block_table,
    const OptionalTensor& actual_seq_lengths_query, const OptionalTensor& actual_seq_lengths_kv,
    const OptionalTensor& query_rope, const OptionalTensor& key_rope, int64_t sparse_block_size,
    c10::string_view layout_query, c10::string_view layout_kv, int64_t sparse_mode) {
  auto [layouts, out] = check(query, key, value, sparse_indices, scale_value, block_table,
                              actual_seq_lengths_query, actual_seq_lengths_kv, query_rope, key_rope,
                              sparse_block_size, layout_query, layout_kv, sparse_mode);
  // without a token there may be any number of sequences, more than memory has room to list
  if (out.numel() == 0) return out;
  const auto sequences = read_sequences(layouts, query, key, actual_seq_lengths_query,
                                        actual_seq_lengths_kv, block_table);
  const KeyMap key_map(layouts, key, block_table);
  dispatch_elements(query.scalar_type(), [&](auto multiplied, auto stored) {
    SparseAttention<decltype(multiplied), decltype(stored)>(query, key, value, sparse_indices,
                                                            scale_value, query_rope, key_rope,
                                                            sequences, key_map, sparse_mode, out)
        .run();
  });
  return out;
}

TORCH_LIBRARY_IMPL(custom_pypto, CPU, m) {
  m.impl("npu_sparse_flash_attention_pto", &npu_sparse_flash_attention_pto_cpu);
}

TORCH_LIBRARY_IMPL(custom_pypto, Meta, m) {
  m.impl("npu_sparse_flash_attention_pto", &npu_sparse_flash_attention_pto_meta);
}

// backward() says that there is none, rather than leave a gradient out
TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl("npu_sparse_flash_attention_pto", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
