// The attention whose keys an indexer selects.
#pragma once

#include "head_products.h"

namespace custom_pypto {

// How the logits of a token are multiplied: elements widened to float, or bfloat16 as it is. Both
// have
//   rows, padded                 queries and keys, and the padded heads of a logit
//   Scratch                      buffers of a thread
//   start(token, scratch)        takes the token
//   each_block(slots, scratch, f)   calls f(first, count, logits) for blocks of its keys

template <typename T>
struct WidenedLogits {
  explicit WidenedLogits(const IndexKlParams& p)
      : rows(p.query, p.key, p.query_rope, p.key_rope, p.softmax_max, p.softmax_sum),
        padded(rows.padded) {}

  struct Scratch {
    explicit Scratch(const WidenedLogits& op)
        : heads(op.rows.heads * op.rows.width),
          query(op.padded * op.rows.width),
          keys(kBlock * op.rows.width),
          logits(kBlock * op.padded) {}
    Floats heads, query;  // of the token: query is packed into panels
    Floats keys, logits;  // of a block
  };

  void start(const Token& token, Scratch& scratch) const {
    rows.load_query(token, scratch.heads.data());
    pack_panels<float>(scratch.heads.data(), rows.heads, rows.width, scratch.query.data());
  }

  template <typename F>
  void each_block(const std::vector<KeyMap::Slot>& slots, Scratch& scratch, const F& f) const {
    const int64_t n = slots.size(), width = rows.width;
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      for (int64_t j = 0; j < count; ++j) {
        rows.load_key(slots[first + j], scratch.keys.data() + j * width);
      }
      std::fill_n(scratch.logits.data(), count * padded, 0.0f);
      multiply_panels(rows_of(scratch.keys.data(), count, width), scratch.query.data(), width,
                      padded, scratch.logits.data());
      f(first, count, scratch.logits.data());
    }
  }

  const AttentionRows<T> rows;
  const int64_t padded;
};

struct Bf16Logits {
  explicit Bf16Logits(const IndexKlParams& p)
      : rows(p.query, p.key, p.query_rope, p.key_rope, p.softmax_max, p.softmax_sum),
        padded(HeadProducts::vectors(rows.heads)),
        products(attention_grad_kernels(rows.latent, rows.rope), rows, {.padded = padded}) {}

  struct Scratch : HeadProducts::Scratch {
    explicit Scratch(const Bf16Logits& op)
        : HeadProducts::Scratch(op.products), logits(HeadProducts::kKeys * op.padded) {}
    Floats logits;  // of a chunk
  };

  void start(const Token& token, Scratch& scratch) const { products.load_query(token, scratch); }

  template <typename F>
  void each_block(const std::vector<KeyMap::Slot>& slots, Scratch& scratch, const F& f) const {
    products.each_chunk(slots, /*backwards=*/false, scratch,
                        [&](const HeadProducts::Chunk& chunk, int64_t first) {
                          products.multiply(chunk, scratch, scratch.logits.data());
                          f(first, chunk.n, scratch.logits.data());
                        });
  }

  const AttentionRows<c10::BFloat16> rows;
  const int64_t padded;
  const HeadProducts products;
};

template <typename Logits>
class Attention {
 public:
  explicit Attention(const IndexKlParams& p)
      : logits_(p), scale_(static_cast<float>(p.scale_value * M_LOG2E)) {}

  struct Scratch : Logits::Scratch {
    explicit Scratch(const Attention& op)
        : Logits::Scratch(op.logits_), max(op.logits_.padded), inverse(op.logits_.padded) {}
    Floats max, inverse;
  };

  int64_t heads() const { return logits_.rows.heads; }

  // The probabilities of the token's keys, summed over the heads.
  void sums(const Token& token, const Pairs& pairs, Scratch& scratch, float* out) const {
    logits_.start(token, scratch);
    logits_.rows.load_statistics(token, logits_.padded, scratch.max.data(), scratch.inverse.data());
    logits_.each_block(pairs.slots, scratch,
                       [&](int64_t first, int64_t count, const float* logits) {
                         kernels().head_sums({.scores = logits,
                                              .n = static_cast<int>(count),
                                              .heads = static_cast<int>(logits_.padded),
                                              .scale = scale_,
                                              .max = scratch.max.data(),
                                              .inverse = scratch.inverse.data(),
                                              .out = out + first});
                       });
  }

 private:
  const Logits logits_;
  const float scale_;
};

}  // namespace custom_pypto
