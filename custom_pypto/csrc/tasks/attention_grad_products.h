// How the backward of sparse attention multiplies: elements widened to float, or bfloat16 as it is.
// Both have
//   kByOwner                      whether it takes the pairs of a token by owner
//   rows                          queries and keys
//   Operands                      what the first pass of a token leaves for the second
//   floats(), place(at, operands) their memory
//   Scratch                       buffers of a thread in the first pass
//   first_pass(token, operands, scratch)   fills operands, and delta and d_query of scratch
//   Adder                         buffers of a thread in the second pass
//   add_rows(operands, owners, owner, gradients, adder)   adds the pairs of an owner to its rows
#pragma once

#include "attention_rows.h"

namespace custom_pypto {

template <typename T>
struct AttentionGradRows : AttentionRows<T> {
  explicit AttentionGradRows(const AttentionGradParams& p)
      : AttentionRows<T>(p.attention.sequences.query, p.attention.sequences.key,
                         p.attention.query_rope, p.attention.key_rope, p.softmax_max,
                         p.softmax_sum),
        k(p.attention.sparse_indices.size(-1)),
        scale(static_cast<float>(p.attention.scale_value)),
        exponent_scale(static_cast<float>(p.attention.scale_value * M_LOG2E)),
        own_value(p.attention.value.has_value()),
        value(own_value ? *p.attention.value : p.attention.sequences.key),
        d_out_(p.d_out.contiguous()) {}

  const T* d_out(const Token& token) const {
    return static_cast<const T*>(d_out_.const_data_ptr()) +
           token.row() * this->heads * this->latent;
  }

  const int64_t k;  // indices of a token
  const float scale, exponent_scale;
  const bool own_value;
  const Cache<T> value;

 private:
  Tensor d_out_;
};

// Of the keys; those of values are added to `key` unless there are values of their own.
struct KeyGradients {
  KeyGradients(const AttentionGradParams& p, int64_t latent, int64_t rope_dims)
      : key(p.d_key, latent), rope(p.d_key_rope, rope_dims), value(p.d_value, latent) {}
  void finish(const AttentionGradParams& p) const {
    key.finish(p.d_key);
    rope.finish(p.d_key_rope);
    value.finish(p.d_value);
  }
  Sums key, rope, value;
};

// Of the heads of a token.
struct AttentionGradSums {
  template <typename T>
  AttentionGradSums(const AttentionRows<T>& rows, int64_t padded)
      : d_query(padded * rows.width), max(padded), inverse(padded), delta(padded) {}

  template <typename T>
  void start(const AttentionRows<T>& rows, const Token& token) {
    rows.load_statistics(token, delta.size(), max.data(), inverse.data());
    std::fill(delta.begin(), delta.end(), 0.0f);
  }

  // Makes the logits of some keys probabilities; dots are those of d_out and their values.
  void add(float* logits, const float* dots, int64_t keys, float exponent_scale) {
    kernels().probabilities({.scores = logits,
                             .dots = dots,
                             .n = static_cast<int>(keys),
                             .heads = static_cast<int>(delta.size()),
                             .scale = exponent_scale,
                             .max = max.data(),
                             .inverse = inverse.data(),
                             .delta = delta.data()});
  }

  Floats d_query;              // [padded head][latent + rope]
  Floats max, inverse, delta;  // [padded heads]
};

template <typename T>
class WidenedProducts {
 public:
  using Stored = T;
  static constexpr bool kByOwner = false;
  explicit WidenedProducts(const AttentionGradParams& p) : rows(p) {}

  struct Operands : Pairs {
    float *probabilities, *d_logits;  // [pair][padded heads]
    float *query, *d_out;             // [head][latent + rope], [head][latent]
  };

  int64_t floats() const {
    return 2 * rows.k * rows.padded + rows.heads * (rows.width + rows.latent);
  }

  void place(float* at, Operands& operands) const {
    operands.probabilities = at;
    operands.d_logits = at += rows.k * rows.padded;
    operands.query = at += rows.k * rows.padded;
    operands.d_out = at += rows.heads * rows.width;
  }

  struct Scratch : AttentionGradSums {
    explicit Scratch(const WidenedProducts& op)
        : AttentionGradSums(op.rows, op.rows.padded),
          query(op.rows.padded * op.rows.width),
          d_out(op.rows.padded * op.rows.latent),
          keys(kBlock * op.rows.width),
          values(op.rows.own_value ? kBlock * op.rows.latent : 0) {}
    Floats query, d_out;  // panels
    Floats keys, values;  // of a block
  };

  void first_pass(const Token& token, Operands& pairs, Scratch& scratch) const {
    const int64_t n = pairs.slots.size(), padded = rows.padded;
    load_query(token, scratch, pairs);
    std::fill_n(pairs.probabilities, n * padded, 0.0f);
    std::fill_n(pairs.d_logits, n * padded, 0.0f);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      load_keys(pairs, first, count, scratch);
      const auto keys = rows_of(scratch.keys.data(), count, rows.width);
      const auto values =
          rows.own_value ? rows_of(scratch.values.data(), count, rows.latent) : keys;
      float* scores = pairs.probabilities + first * padded;
      float* dots = pairs.d_logits + first * padded;
      multiply_panels(keys, scratch.query.data(), rows.width, padded, scores);
      multiply_panels(values, scratch.d_out.data(), rows.latent, padded, dots);
      scratch.add(scores, dots, count, rows.exponent_scale);
    }
    for (int64_t j = 0; j < n; ++j) {
      const float* p = pairs.probabilities + j * padded;
      float* d = pairs.d_logits + j * padded;
      for (int64_t h = 0; h < padded; ++h) d[h] = rows.scale * p[h] * (d[h] - scratch.delta[h]);
    }
    std::fill(scratch.d_query.begin(), scratch.d_query.end(), 0.0f);
    const auto to = rows_to(scratch.d_query.data(), rows.heads, rows.width);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      load_keys(pairs, first, count, scratch);
      multiply_keys(pairs.d_logits + first * padded, padded,
                    rows_of(scratch.keys.data(), count, rows.width), rows.width, to);
    }
  }

  struct Adder : Owners::Operands {
    explicit Adder(const WidenedProducts&) {}
  };

  void add_rows(const Operands& pairs, const Owners& owners, int64_t owner,
                const KeyGradients& gradients, Adder& adder) const {
    const auto add = [&](const float* weights, const float* from, int64_t stride,
                         const Sums& sums) {
      owners.add(pairs, owner, weights, rows.padded, rows_of(from, rows.heads, stride), sums,
                 adder);
    };
    add(pairs.d_logits, pairs.query, rows.width, gradients.key);
    if (rows.rope) add(pairs.d_logits, pairs.query + rows.latent, rows.width, gradients.rope);
    add(pairs.probabilities, pairs.d_out, rows.latent,
        rows.own_value ? gradients.value : gradients.key);
  }

  const AttentionGradRows<T> rows;

 private:
  // Rows of query and d_out in float, as they are and as panels.
  void load_query(const Token& token, Scratch& scratch, Operands& pairs) const {
    rows.load_query(token, pairs.query);
    widen(rows.d_out(token), rows.heads * rows.latent, pairs.d_out);
    pack_panels<float>(pairs.query, rows.heads, rows.width, scratch.query.data());
    pack_panels<float>(pairs.d_out, rows.heads, rows.latent, scratch.d_out.data());
  }

  void load_keys(const Pairs& pairs, int64_t first, int64_t count, Scratch& scratch) const {
    for (int64_t j = 0; j < count; ++j) {
      const KeyMap::Slot& slot = pairs.slots[first + j];
      rows.load_key(slot, scratch.keys.data() + j * rows.width);
      if (!rows.own_value) continue;
      widen(rows.value.row(slot), rows.latent, scratch.values.data() + j * rows.latent);
    }
  }
};

}  // namespace custom_pypto
