#include "attention_grad.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "panels.h"
#include "run_tasks.h"
#include "sequences.h"

namespace custom_pypto {
namespace {

constexpr int64_t kBlock = 64;             // keys of a product
constexpr int64_t kOwners = 32;            // tasks that own the rows of the cache
constexpr int64_t kChunkBytes = 64 << 20;  // what the first pass leaves for the second
constexpr int64_t kLeastTokens = 16;       // of a chunk

using Floats = AlignedVector<float>;

// Pointers to `count` rows.
std::vector<const float*> rows_of(const float* first, int64_t count, int64_t stride) {
  std::vector<const float*> rows(count);
  for (int64_t i = 0; i < count; ++i) rows[i] = first + i * stride;
  return rows;
}

// The rows of a gradient, which holds zeros: float32 sums, which become its dtype at the end.
struct Sums {
  Sums(const Tensor& gradient, int64_t row)
      : tensor(gradient.scalar_type() == at::kFloat
                   ? gradient
                   : at::zeros(gradient.sizes(), gradient.options().dtype(at::kFloat))),
        width(row),
        data(tensor.mutable_data_ptr<float>()) {}
  void finish(const Tensor& gradient) const {
    if (!gradient.is_same(tensor)) gradient.copy_(tensor);
  }
  Tensor tensor;
  int64_t width;
  float* data;
};

// T is the storage type. Chunks of tokens take two passes. In the first, tasks own tokens: the
// probabilities, the gradients of logits, and all that ends within a token. In the second, tasks
// own rows of the cache, to which they add the pairs of the chunk in the order of tokens and
// columns. So every sum has one order, whatever the number of threads and of tokens in a chunk.
template <typename T>
class Backward {
 public:
  explicit Backward(AttentionGradParams& p)
      : p_(p),
        query_(p.attention.sequences.query.contiguous()),
        query_rope_(p.attention.query_rope ? p.attention.query_rope->contiguous() : Tensor()),
        d_out_(p.d_out.contiguous()),
        max_(p.softmax_max.contiguous()),
        sum_(p.softmax_sum.contiguous()),
        indices_(p.attention.sparse_indices.contiguous()),
        sequences_(read_sequences(p.attention.sequences)),
        key_map_(p.attention.sequences),
        key_(p.attention.sequences.key),
        key_rope_(p.attention.key_rope ? *p.attention.key_rope : p.attention.sequences.key),
        value_(p.attention.value ? *p.attention.value : p.attention.sequences.key),
        own_value_(p.attention.value.has_value()),
        heads_(query_.size(-2)),
        padded_(panel_rows(heads_)),
        latent_(query_.size(-1)),
        rope_(p.attention.query_rope ? p.attention.query_rope->size(-1) : 0),
        width_(latent_ + rope_),
        k_(indices_.size(-1)),
        d_key_(p.d_key, latent_),
        d_key_rope_(p.d_key_rope, rope_),
        d_value_(p.d_value, latent_) {
    const Tensor& key = p.attention.sequences.key;
    block_size_ = key.size(-3);
    const int64_t rows = key.numel() / latent_;
    for (const Sequence& s : sequences_) {
      for (int64_t i = 0; i < s.len_query; ++i) tokens_.push_back({&s, i});
    }
    per_owner_ = std::max<int64_t>(1, (rows + kOwners - 1) / kOwners);
  }

  void run() {
    Floats sink_terms(p_.attention.sinks ? tokens_.size() * heads_ : 0);
    const int64_t floats = 2 * k_ * padded_ + heads_ * (width_ + latent_);  // of a token
    const int64_t least = std::max<int64_t>(kLeastTokens, at::get_num_threads());
    const int64_t chunk = std::max<int64_t>(least, kChunkBytes / (floats * sizeof(float)));
    const int64_t count = tokens_.size();
    std::vector<Pairs> pairs(std::min(chunk, count));
    // allocated and freed by this thread: each keeps a pool of its own
    Floats memory(pairs.size() * floats);
    for (size_t i = 0; i < pairs.size(); ++i) {
      float* at = memory.data() + i * floats;
      pairs[i].probabilities = at;
      pairs[i].d_logits = at += k_ * padded_;
      pairs[i].query = at += k_ * padded_;
      pairs[i].d_out = at += heads_ * width_;
    }
    for (int64_t first = 0; first < count; first += chunk) {
      const int64_t here = std::min(chunk, count - first);
      run_tasks(
          here, [&] { return Scratch(*this); },
          [&](Scratch& scratch, int64_t i) {
            float* sink = sink_terms.empty() ? nullptr : sink_terms.data() + (first + i) * heads_;
            first_pass(tokens_[first + i], scratch, pairs[i], sink);
          });
      run_tasks(
          kOwners, [] { return Operands(); },
          [&](Operands& operands, int64_t owner) {
            for (int64_t i = 0; i < here; ++i) add_rows(pairs[i], owner, operands);
          });
    }
    d_key_.finish(p_.d_key);
    d_key_rope_.finish(p_.d_key_rope);
    d_value_.finish(p_.d_value);
    if (p_.attention.sinks) write_sinks(sink_terms);
  }

 private:
  struct Token {
    const Sequence* sequence;
    int64_t i;
    int64_t row() const { return sequence->first_token + i; }
  };

  // The keys that a token attends to, with what the second pass reads.
  struct Pairs {
    std::vector<KeyMap::Slot> slots;  // in the order of the columns
    std::vector<int64_t> order;       // pairs by owner, stable
    std::vector<int64_t> begin;       // of each owner, in order
    float *probabilities, *d_logits;  // [pair][padded heads]
    float *query, *d_out;             // [head][latent + rope], [head][latent]
  };

  struct Scratch {
    explicit Scratch(const Backward& op)
        : query(op.padded_ * op.width_),
          d_out(op.padded_ * op.latent_),
          keys(kBlock * op.width_),
          values(op.own_value_ ? kBlock * op.latent_ : 0),
          d_query(op.heads_ * op.width_),
          max(op.padded_),
          inverse(op.padded_),
          delta(op.padded_) {}
    Floats query, d_out;  // panels
    Floats keys, values;  // of a block
    Floats d_query, max, inverse, delta;
  };

  struct Operands {
    std::vector<const float*> a, b;
    std::vector<float*> out;
  };

  // Fills the token's pairs; returns their number.
  int64_t find(const Token& token, Pairs& pairs) const {
    const Sequence& s = *token.sequence;
    const int64_t visible = s.visible(token.i, p_.attention.sequences.sparse_mode);
    const int32_t* row = indices_.template const_data_ptr<int32_t>() + token.row() * k_;
    pairs.slots.clear();
    pairs.begin.assign(kOwners + 1, 0);
    for_each_index(row, 0, k_, visible, [&](int64_t position) {
      const KeyMap::Slot slot = key_map_.find(s, position);
      if (!slot.exists) return;
      pairs.slots.push_back(slot);
      ++pairs.begin[flat(slot) / per_owner_ + 1];
    });
    for (int64_t o = 0; o < kOwners; ++o) pairs.begin[o + 1] += pairs.begin[o];
    std::vector<int64_t> next(pairs.begin.begin(), pairs.begin.end() - 1);
    const int64_t n = pairs.slots.size();
    pairs.order.resize(n);
    for (int64_t j = 0; j < n; ++j) pairs.order[next[flat(pairs.slots[j]) / per_owner_]++] = j;
    return n;
  }

  int64_t flat(const KeyMap::Slot& slot) const { return slot.block * block_size_ + slot.row; }

  void first_pass(const Token& token, Scratch& scratch, Pairs& pairs, float* sink) const {
    const int64_t n = find(token, pairs), row = token.row() * heads_;
    if (sink) std::fill_n(sink, heads_, 0.0f);
    if (n == 0) return;
    load_query(row, scratch, pairs);
    const float* max = max_.template const_data_ptr<float>() + row;
    const float* sum = sum_.template const_data_ptr<float>() + row;
    for (int64_t h = 0; h < padded_; ++h) {
      scratch.max[h] = h < heads_ ? max[h] * static_cast<float>(M_LOG2E) : 0.0f;
      scratch.inverse[h] = h < heads_ ? 1.0f / sum[h] : 0.0f;
    }
    std::fill(scratch.delta.begin(), scratch.delta.end(), 0.0f);
    std::fill_n(pairs.probabilities, n * padded_, 0.0f);
    std::fill_n(pairs.d_logits, n * padded_, 0.0f);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      load_keys(pairs, first, count, scratch);
      const float* values = own_value_ ? scratch.values.data() : scratch.keys.data();
      float* scores = pairs.probabilities + first * padded_;
      float* dots = pairs.d_logits + first * padded_;
      by_panels(scratch.keys.data(), width_, count, scratch.query.data(), width_, scores);
      by_panels(values, own_value_ ? latent_ : width_, count, scratch.d_out.data(), latent_, dots);
      kernels().probabilities({.scores = scores,
                               .dots = dots,
                               .n = static_cast<int>(count),
                               .heads = static_cast<int>(padded_),
                               .scale = static_cast<float>(p_.attention.scale_value * M_LOG2E),
                               .max = scratch.max.data(),
                               .inverse = scratch.inverse.data(),
                               .delta = scratch.delta.data()});
    }
    const float scale = static_cast<float>(p_.attention.scale_value);
    for (int64_t j = 0; j < n; ++j) {
      const float* p = pairs.probabilities + j * padded_;
      float* d = pairs.d_logits + j * padded_;
      for (int64_t h = 0; h < padded_; ++h) d[h] = scale * p[h] * (d[h] - scratch.delta[h]);
    }
    write_query(row, pairs, scratch);
    if (!sink) return;
    const float* logits = p_.attention.sinks->template const_data_ptr<float>();
    for (int64_t h = 0; h < heads_; ++h) {
      sink[h] = std::exp(logits[h] - max[h]) / sum[h] * scratch.delta[h];
    }
  }

  // Rows of query and d_out in float, as they are and as panels.
  void load_query(int64_t row, Scratch& scratch, Pairs& pairs) const {
    const T* query = static_cast<const T*>(query_.const_data_ptr()) + row * latent_;
    const T* d_out = static_cast<const T*>(d_out_.const_data_ptr()) + row * latent_;
    for (int64_t h = 0; h < heads_; ++h) {
      widen(query + h * latent_, latent_, pairs.query + h * width_);
      widen(d_out + h * latent_, latent_, pairs.d_out + h * latent_);
      if (!rope_) continue;
      const T* rope = static_cast<const T*>(query_rope_.const_data_ptr()) + (row + h) * rope_;
      widen(rope, rope_, pairs.query + h * width_ + latent_);
    }
    pack_panels<float>(pairs.query, heads_, width_, scratch.query.data());
    pack_panels<float>(pairs.d_out, heads_, latent_, scratch.d_out.data());
  }

  void load_keys(const Pairs& pairs, int64_t first, int64_t count, Scratch& scratch) const {
    for (int64_t j = 0; j < count; ++j) {
      const KeyMap::Slot& slot = pairs.slots[first + j];
      float* to = scratch.keys.data() + j * width_;
      widen(key_.row(slot), latent_, to);
      if (rope_) widen(key_rope_.row(slot), rope_, to + latent_);
      if (own_value_) widen(value_.row(slot), latent_, scratch.values.data() + j * latent_);
    }
  }

  // out[key][padded heads] += rows[key] . panels, over `dims` dims
  void by_panels(const float* rows, int64_t stride, int64_t count, const float* panels,
                 int64_t dims, float* out) const {
    const auto a = rows_of(rows, count, stride);
    std::vector<float*> to(count);
    for (int64_t h = 0; h < padded_; h += cpu::kMaxWidth) {
      const int64_t width = std::min<int64_t>(cpu::kMaxWidth, padded_ - h);
      const auto b = rows_of(panels, dims, width);
      for (int64_t j = 0; j < count; ++j) to[j] = out + j * padded_ + h;
      kernels().multiply({.a = a.data(),
                          .a_step = 1,
                          .n = static_cast<int>(count),
                          .b = b.data(),
                          .depth = static_cast<int>(dims),
                          .width = static_cast<int>(width),
                          .out = to.data()});
      panels += width * dims;
    }
  }

  void write_query(int64_t row, const Pairs& pairs, Scratch& scratch) const {
    const int64_t n = pairs.slots.size();
    std::fill(scratch.d_query.begin(), scratch.d_query.end(), 0.0f);
    std::vector<float*> to(heads_);
    for (int64_t h = 0; h < heads_; ++h) to[h] = scratch.d_query.data() + h * width_;
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      load_keys(pairs, first, count, scratch);
      const auto a = rows_of(pairs.d_logits + first * padded_, heads_, 1);
      const auto b = rows_of(scratch.keys.data(), count, width_);
      kernels().multiply({.a = a.data(),
                          .a_step = padded_,
                          .n = static_cast<int>(heads_),
                          .b = b.data(),
                          .depth = static_cast<int>(count),
                          .width = static_cast<int>(width_),
                          .out = to.data()});
    }
    T* d_query = static_cast<T*>(p_.d_query.mutable_data_ptr()) + row * latent_;
    T* d_rope = rope_ ? static_cast<T*>(p_.d_query_rope.mutable_data_ptr()) + row * rope_ : nullptr;
    for (int64_t h = 0; h < heads_; ++h) {
      narrow(to[h], latent_, d_query + h * latent_);
      if (rope_) narrow(to[h] + latent_, rope_, d_rope + h * rope_);
    }
  }

  // Adds the token's pairs to the rows of this owner.
  void add_rows(const Pairs& pairs, int64_t owner, Operands& operands) const {
    const int64_t* order = pairs.order.data() + pairs.begin[owner];
    const int64_t n = pairs.begin[owner + 1] - pairs.begin[owner];
    if (n == 0) return;
    const auto add = [&](const float* weights, const float* from, int64_t stride,
                         const Sums& sums) {
      operands.a.resize(n);
      operands.out.resize(n);
      for (int64_t j = 0; j < n; ++j) {
        operands.a[j] = weights + order[j] * padded_;
        operands.out[j] = sums.data + flat(pairs.slots[order[j]]) * sums.width;
      }
      operands.b = rows_of(from, heads_, stride);
      kernels().multiply({.a = operands.a.data(),
                          .a_step = 1,
                          .n = static_cast<int>(n),
                          .b = operands.b.data(),
                          .depth = static_cast<int>(heads_),
                          .width = static_cast<int>(sums.width),
                          .out = operands.out.data()});
    };
    add(pairs.d_logits, pairs.query, width_, d_key_);
    if (rope_) add(pairs.d_logits, pairs.query + latent_, width_, d_key_rope_);
    add(pairs.probabilities, pairs.d_out, latent_, own_value_ ? d_value_ : d_key_);
  }

  void write_sinks(const Floats& terms) const {
    float* to = p_.d_sinks.template mutable_data_ptr<float>();
    for (int64_t h = 0; h < heads_; ++h) {
      double sum = 0;
      for (size_t t = 0; t < tokens_.size(); ++t) sum -= terms[t * heads_ + h];
      to[h] = static_cast<float>(sum);
    }
  }

  AttentionGradParams& p_;
  Tensor query_, query_rope_, d_out_, max_, sum_, indices_;
  std::vector<Sequence> sequences_;
  KeyMap key_map_;
  Cache<T> key_, key_rope_, value_;
  bool own_value_;
  int64_t heads_, padded_, latent_, rope_, width_, k_;
  Sums d_key_, d_key_rope_, d_value_;
  int64_t block_size_, per_owner_;
  std::vector<Token> tokens_;
};

}  // namespace

void attend_backward(AttentionGradParams& p) {
  for (const Tensor& gradient : {p.d_query, p.d_key, p.d_value, p.d_query_rope, p.d_key_rope}) {
    gradient.zero_();
  }
  p.d_sinks.zero_();
  // without tokens the number of sequences is unbounded: a list of them may not fit in memory
  if (p.d_query.numel() == 0 || p.d_key.numel() == 0) return;
  dispatch_elements(p.d_query.scalar_type(), nullptr, [&](auto, auto stored) {
    using T = decltype(stored);
    if constexpr (!std::is_same_v<T, uint16_t>) Backward<T>(p).run();
  });
}

}  // namespace custom_pypto
