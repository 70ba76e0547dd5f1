// The backward of sparse attention by kernels that multiply bfloat16. P and dS are rounded to it,
// sums are float.
#pragma once

#include "attention_grad_products.h"
#include "head_products.h"

namespace custom_pypto {

class Bf16Products {
 public:
  using Stored = c10::BFloat16;
  static constexpr bool kByOwner = true;
  explicit Bf16Products(const AttentionGradParams& p)
      : rows(p),
        kernels_(attention_grad_kernels(rows.latent, rows.rope)),
        padded_(rows.own_value ? HeadProducts::tiles(rows.heads)
                               : HeadProducts::vectors(rows.heads)),
        products_(kernels_, rows, {.padded = padded_, .columns = 2 * padded_}) {}

  struct Operands : Pairs {
    uint16_t* weights;  // [pair][2 * padded heads]: dS, P
    uint32_t* heads;    // [group of 16 dims][pair of heads of query, then of d_out][16]
  };

  // Of an owner, the kernels read weights up to a multiple of 16 pairs.
  int64_t floats() const { return (rows.k + 15) * padded_ + rows.width / 16 * products_.group(); }

  void place(float* at, Operands& operands) const {
    operands.weights = reinterpret_cast<uint16_t*>(at);
    operands.heads = reinterpret_cast<uint32_t*>(at + (rows.k + 15) * padded_);
  }

  struct Scratch : AttentionGradSums, HeadProducts::GradScratch {
    explicit Scratch(const Bf16Products& op)
        : AttentionGradSums(op.rows, op.padded_),
          HeadProducts::GradScratch(op.products_),
          d_out(op.padded_ * op.rows.latent / 2),
          values(op.rows.own_value ? HeadProducts::kKeys * op.rows.latent : 0),
          logits((op.rows.k + 15) * op.padded_),
          dots((op.rows.k + 15) * op.padded_) {}
    AlignedVector<uint32_t> d_out;   // [16 heads][pair of dims][16]
    AlignedVector<uint16_t> values;  // rows of a chunk
    Floats logits, dots;             // [pair][padded heads]
  };

  void first_pass(const Token& token, Operands& pairs, Scratch& scratch) const {
    load_heads(token, scratch, pairs);
    products_.each_chunk(pairs.slots, /*backwards=*/false, scratch,
                         [&](const HeadProducts::Chunk& chunk, int64_t first) {
                           add_logits(chunk, first, pairs, scratch);
                         });
    // from the last one on: its probabilities are still in the level-2 cache
    products_.each_chunk(pairs.slots, /*backwards=*/true, scratch,
                         [&](const HeadProducts::Chunk& chunk, int64_t first) {
                           add_query(chunk, first, pairs, scratch);
                         });
  }

  struct Adder : HeadProducts::Adder {
    explicit Adder(const Bf16Products& op) : HeadProducts::Adder(op.products_) {}
  };

  void add_rows(const Operands& pairs, const Owners& owners, int64_t owner,
                const KeyGradients& gradients, Adder& adder) const {
    const uint16_t* weights = pairs.weights + pairs.begin[owner] * 2 * padded_;
    const auto add = [&](int64_t column, int64_t depth, const uint32_t* heads, const Sums& sums) {
      products_.add_rows(pairs, owners, owner, weights + column, depth, heads, sums, adder);
    };
    if (rows.own_value) {
      add(0, padded_, pairs.heads, gradients.key);
      add(padded_, padded_, d_out(pairs), gradients.value);
    } else {
      add(0, 2 * padded_, pairs.heads, gradients.key);
    }
    // what a depth of whole tiles takes of P meets zeros
    if (rows.rope) add(0, HeadProducts::tiles(padded_), rope(pairs), gradients.rope);
  }

  const AttentionGradRows<c10::BFloat16> rows;

 private:
  uint32_t* d_out(const Operands& pairs) const { return pairs.heads + padded_ / 2 * 16; }
  uint32_t* rope(const Operands& pairs) const {
    return pairs.heads + rows.latent / 16 * products_.group();
  }

  // Query and d_out as operands of both passes.
  void load_heads(const Token& token, Scratch& scratch, Operands& pairs) const {
    const auto bits = HeadProducts::bits;
    products_.load_query(token, scratch);
    products_.pack_heads(bits(rows.d_out(token)), rows.latent, 8 * rows.latent,
                         scratch.d_out.data());
    products_.pack_pairs(bits(rows.query(token)), rows.latent, padded_, pairs.heads);
    products_.pack_pairs(bits(rows.d_out(token)), rows.latent, padded_, d_out(pairs));
    if (rows.rope) {
      products_.pack_pairs(bits(rows.query_rope(token)), rows.rope, HeadProducts::tiles(padded_),
                           rope(pairs));
    }
  }

  // Probabilities of the keys of a chunk, dots of d_out and their values, and their part of delta.
  void add_logits(const HeadProducts::Chunk& chunk, int64_t first, const Operands& pairs,
                  Scratch& scratch) const {
    const int64_t latent = rows.latent;
    float* logits = scratch.logits.data() + first * padded_;
    float* dots = scratch.dots.data() + first * padded_;
    products_.multiply(chunk, scratch, logits);
    const uint16_t* values = scratch.keys.data();
    if (rows.own_value) {
      for (int j = 0; j < chunk.n; ++j) {
        std::copy_n(HeadProducts::bits(rows.value.row(pairs.slots[first + j])), latent,
                    scratch.values.data() + j * latent);
      }
      values = scratch.values.data();
    }
    kernels_->multiply(products_.columns(values, rows.own_value ? latent : rows.width, chunk.n,
                                         scratch.d_out.data(), latent),
                       dots, padded_, true);
    scratch.add(logits, dots, chunk.n, rows.exponent_scale);
  }

  // Weights of the keys of a chunk, and their part of d_query.
  void add_query(const HeadProducts::Chunk& chunk, int64_t first, Operands& pairs,
                 Scratch& scratch) const {
    kernels_->logit_gradients({.p = scratch.logits.data() + first * padded_,
                               .dots = scratch.dots.data() + first * padded_,
                               .n = chunk.n,
                               .heads = static_cast<int>(rows.heads),
                               .padded = static_cast<int>(padded_),
                               .scale = rows.scale,
                               .delta = scratch.delta.data(),
                               .by_key = pairs.weights + first * 2 * padded_,
                               .by_head = scratch.by_head.data(),
                               .stride = products_.by_head_stride()});
    const int64_t n = chunk.n, depth = HeadProducts::tiles(n);
    products_.pack_keys(chunk.keys, n, depth, rows.latent, 0, 0, scratch);
    if (rows.rope) products_.pack_keys(chunk.ropes, n, depth, rows.rope, rows.latent, 0, scratch);
    const bool last = first + n == static_cast<int64_t>(pairs.slots.size());
    products_.add_keys(n, 0, chunk.next, last, scratch,
                       scratch.d_query.data());  // the first to be added
  }

  const cpu::Bf16Kernels* kernels_;
  // heads, so that the depth of each product is a multiple of 32
  int64_t padded_;
  HeadProducts products_;
};

}  // namespace custom_pypto
