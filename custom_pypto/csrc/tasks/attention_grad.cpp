#include "attention_grad.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_rows.h"

namespace custom_pypto {
namespace {

// T is the storage type.
template <typename T>
class Backward {
 public:
  explicit Backward(AttentionGradParams& p)
      : p_(p),
        rows_(p.attention.sequences.query, p.attention.sequences.key, p.attention.query_rope,
              p.attention.key_rope, p.softmax_max, p.softmax_sum),
        d_out_(p.d_out.contiguous()),
        indices_(p.attention.sparse_indices.contiguous()),
        sequences_(read_sequences(p.attention.sequences)),
        tokens_(tokens_of(sequences_)),
        key_map_(p.attention.sequences),
        owners_(p.attention.sequences.key),
        value_(p.attention.value ? *p.attention.value : p.attention.sequences.key),
        own_value_(p.attention.value.has_value()),
        heads_(rows_.heads),
        padded_(rows_.padded),
        latent_(rows_.latent),
        rope_(rows_.rope),
        width_(rows_.width),
        k_(indices_.size(-1)),
        d_key_(p.d_key, latent_),
        d_key_rope_(p.d_key_rope, rope_),
        d_value_(p.d_value, latent_) {}

  void run() {
    Floats sink_terms(p_.attention.sinks ? tokens_.size() * heads_ : 0);
    const int64_t floats = 2 * k_ * padded_ + heads_ * (width_ + latent_);  // of a token
    const int64_t chunk = chunk_of(floats), count = tokens_.size();
    std::vector<Logits> pairs(std::min(chunk, count));
    // One thread allocates and frees, because malloc keeps a pool per thread.
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
          kOwners, [] { return Owners::Operands(); },
          [&](Owners::Operands& operands, int64_t owner) {
            for (int64_t i = 0; i < here; ++i) add_rows(pairs[i], owner, operands);
          });
    }
    d_key_.finish(p_.d_key);
    d_key_rope_.finish(p_.d_key_rope);
    d_value_.finish(p_.d_value);
    if (p_.attention.sinks) write_sinks(sink_terms);
  }

 private:
  struct Logits : Pairs {
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

  // Fills the token's pairs; returns their number.
  int64_t find(const Token& token, Pairs& pairs) const {
    const Sequence& s = *token.sequence;
    const int64_t visible = s.visible(token.i, p_.attention.sequences.sparse_mode);
    const int32_t* row = indices_.template const_data_ptr<int32_t>() + token.row() * k_;
    pairs.slots.clear();
    for_each_index(row, 0, k_, visible, [&](int64_t position, int64_t) {
      const KeyMap::Slot slot = key_map_.find(s, position);
      if (slot.exists) pairs.slots.push_back(slot);
    });
    owners_.group(pairs);
    return pairs.slots.size();
  }

  void first_pass(const Token& token, Scratch& scratch, Logits& pairs, float* sink) const {
    const int64_t n = find(token, pairs), row = token.row() * heads_;
    if (sink) std::fill_n(sink, heads_, 0.0f);
    if (n == 0) return;
    load_query(token, scratch, pairs);
    rows_.load_statistics(token, scratch.max.data(), scratch.inverse.data());
    std::fill(scratch.delta.begin(), scratch.delta.end(), 0.0f);
    std::fill_n(pairs.probabilities, n * padded_, 0.0f);
    std::fill_n(pairs.d_logits, n * padded_, 0.0f);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      load_keys(pairs, first, count, scratch);
      const auto keys = rows_of(scratch.keys.data(), count, width_);
      const auto values = own_value_ ? rows_of(scratch.values.data(), count, latent_) : keys;
      float* scores = pairs.probabilities + first * padded_;
      float* dots = pairs.d_logits + first * padded_;
      multiply_panels(keys, scratch.query.data(), width_, padded_, scores);
      multiply_panels(values, scratch.d_out.data(), latent_, padded_, dots);
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
    const float *max = rows_.maxima(token), *sum = rows_.sums(token);
    const float* logits = p_.attention.sinks->template const_data_ptr<float>();
    for (int64_t h = 0; h < heads_; ++h) {
      sink[h] = std::exp(logits[h] - max[h]) / sum[h] * scratch.delta[h];
    }
  }

  // Rows of query and d_out in float, as they are and as panels.
  void load_query(const Token& token, Scratch& scratch, Logits& pairs) const {
    rows_.load_query(token, pairs.query);
    const int64_t size = heads_ * latent_;
    widen(static_cast<const T*>(d_out_.const_data_ptr()) + token.row() * size, size, pairs.d_out);
    pack_panels<float>(pairs.query, heads_, width_, scratch.query.data());
    pack_panels<float>(pairs.d_out, heads_, latent_, scratch.d_out.data());
  }

  void load_keys(const Pairs& pairs, int64_t first, int64_t count, Scratch& scratch) const {
    for (int64_t j = 0; j < count; ++j) {
      const KeyMap::Slot& slot = pairs.slots[first + j];
      rows_.load_key(slot, scratch.keys.data() + j * width_);
      if (own_value_) widen(value_.row(slot), latent_, scratch.values.data() + j * latent_);
    }
  }

  void write_query(int64_t row, const Logits& pairs, Scratch& scratch) const {
    const int64_t n = pairs.slots.size();
    std::fill(scratch.d_query.begin(), scratch.d_query.end(), 0.0f);
    std::vector<float*> to(heads_);
    for (int64_t h = 0; h < heads_; ++h) to[h] = scratch.d_query.data() + h * width_;
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      load_keys(pairs, first, count, scratch);
      multiply_keys(pairs.d_logits + first * padded_, padded_,
                    rows_of(scratch.keys.data(), count, width_), width_, to);
    }
    T* d_query = static_cast<T*>(p_.d_query.mutable_data_ptr()) + row * latent_;
    T* d_rope = rope_ ? static_cast<T*>(p_.d_query_rope.mutable_data_ptr()) + row * rope_ : nullptr;
    for (int64_t h = 0; h < heads_; ++h) {
      narrow(to[h], latent_, d_query + h * latent_);
      if (rope_) narrow(to[h] + latent_, rope_, d_rope + h * rope_);
    }
  }

  // Adds the token's pairs to the rows of this owner.
  void add_rows(const Logits& pairs, int64_t owner, Owners::Operands& operands) const {
    if (pairs.begin[owner] == pairs.begin[owner + 1]) return;
    const auto add = [&](const float* weights, const float* from, int64_t stride,
                         const Sums& sums) {
      const auto rows = rows_of(from, heads_, stride);
      owners_.add(pairs, owner, weights, padded_, rows, sums, operands);
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
  AttentionRows<T> rows_;
  Tensor d_out_, indices_;
  std::vector<Sequence> sequences_;
  std::vector<Token> tokens_;
  KeyMap key_map_;
  Owners owners_;
  Cache<T> value_;
  bool own_value_;
  int64_t heads_, padded_, latent_, rope_, width_, k_;
  Sums d_key_, d_key_rope_, d_value_;
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
