// The backward of sparse attention by kernels that multiply bfloat16. P and dS are rounded to it,
// sums are float.
#pragma once

#include "attention_grad_products.h"

namespace custom_pypto {

class Bf16Products {
 public:
  using Stored = c10::BFloat16;
  Bf16Products(const AttentionGradParams& p, const cpu::Bf16Kernels* kernels)
      : rows(p),
        kernels_(kernels),
        padded_(rows.own_value ? tiles(rows.heads) : (rows.heads + 15) / 16 * 16) {}

  struct Operands : Pairs {
    uint16_t* weights;  // [pair][2 * padded heads]: dS, P
    uint32_t* heads;    // [group of 16 dims][pair of heads of query, then of d_out][16]
  };

  // Of an owner, the kernels read weights up to a multiple of 16 pairs.
  int64_t floats() const { return (rows.k + 15) * padded_ + groups(rows.width) * group(); }

  void place(float* at, Operands& operands) const {
    operands.weights = reinterpret_cast<uint16_t*>(at);
    operands.heads = reinterpret_cast<uint32_t*>(at + (rows.k + 15) * padded_);
  }

  struct Scratch : AttentionGradSums {
    explicit Scratch(const Bf16Products& op)
        : AttentionGradSums(op.rows, op.padded_),
          tiles(op.kernels_),
          query(op.padded_ * op.rows.width / 2),
          d_out(op.padded_ * op.rows.latent / 2),
          keys(kKeys * op.rows.width),
          values(op.rows.own_value ? kKeys * op.rows.latent : 0),
          packed(groups(op.rows.width) * kPackedGroup),
          by_head(op.padded_ * kByHead),
          logits((op.rows.k + 15) * op.padded_),
          dots((op.rows.k + 15) * op.padded_),
          heads(op.rows.heads) {}
    TileRegisters tiles;
    AlignedVector<uint32_t> query, d_out;  // [16 heads][pair of dims][16]
    cpu::Chunk<uint16_t> chunks[2];        // the current one and the next
    AlignedVector<uint16_t> keys, values;  // rows of a chunk
    AlignedVector<uint32_t> packed;        // pairs of its keys
    AlignedVector<uint16_t> by_head;       // its dS
    Floats logits, dots;                   // [pair][padded heads]
    std::vector<const uint16_t*> heads;
  };

  void first_pass(const Token& token, Operands& pairs, Scratch& scratch) const {
    // by owner: its weights are consecutive
    std::vector<KeyMap::Slot> slots(pairs.slots.size());
    for (size_t j = 0; j < slots.size(); ++j) slots[j] = pairs.slots[pairs.order[j]];
    pairs.slots.swap(slots);
    load_query(token, scratch, pairs);
    const int64_t count = (pairs.slots.size() + kKeys - 1) / kKeys;
    each_chunk(pairs, 0, count, 1, scratch, [&](const Chunk& chunk, const Chunk& next, int64_t at) {
      add_logits(chunk, next, at, scratch);
    });
    // from the last one on: its probabilities are still in the level-2 cache
    each_chunk(pairs, count - 1, -1, -1, scratch,
               [&](const Chunk& chunk, const Chunk& next, int64_t at) {
                 add_query(chunk, next, at, pairs, scratch);
               });
  }

  struct Adder {
    explicit Adder(const Bf16Products& op) : tiles(op.kernels_) {}
    TileRegisters tiles;
    std::vector<float*> out;
  };

  void add_rows(const Operands& pairs, const Owners& owners, int64_t owner,
                const KeyGradients& gradients, Adder& adder) const {
    const int64_t first = pairs.begin[owner], n = pairs.begin[owner + 1] - first;
    const uint16_t* weights = pairs.weights + first * 2 * padded_;
    adder.out.resize(n);
    const auto add = [&](int64_t column, int64_t depth, const uint32_t* heads, const Sums& sums) {
      for (int64_t j = 0; j < n; ++j) adder.out[j] = owners.row(sums, pairs.slots[first + j]);
      kernels_->multiply_to_rows(
          product(weights + column, 2 * padded_, n, heads, group(), depth, sums.width),
          adder.out.data());
    };
    const uint32_t* d_out = pairs.heads + padded_ / 2 * 16;
    if (rows.own_value) {
      add(0, padded_, pairs.heads, gradients.key);
      add(padded_, padded_, d_out, gradients.value);
    } else {
      add(0, 2 * padded_, pairs.heads, gradients.key);
    }
    if (rows.rope) {  // what a depth of whole tiles takes of P meets zeros
      add(0, tiles(padded_), pairs.heads + groups(rows.latent) * group(), gradients.rope);
    }
  }

  const AttentionGradRows<c10::BFloat16> rows;

 private:
  using Chunk = cpu::Chunk<uint16_t>;
  static constexpr int64_t kKeys = cpu::kMaxKeys;
  // a power of two as distance would put the lines of a tile into few sets of the cache
  static constexpr int64_t kByHead = kKeys + 32;
  static constexpr int64_t kPackedGroup = (kKeys / 2 + 1) * 16;

  static int64_t tiles(int64_t n) { return (n + 31) / 32 * 32; }
  static int64_t groups(int64_t dims) { return dims / 16; }
  int64_t group() const { return (padded_ + 1) * 16; }  // of pairs of heads

  static const uint16_t* bits(const c10::BFloat16* row) {
    return reinterpret_cast<const uint16_t*>(row);
  }

  static cpu::PairProduct product(const uint16_t* a, int64_t a_stride, int64_t n, const uint32_t* b,
                                  int64_t b_stride, int64_t depth, int64_t width) {
    return {.a = a,
            .a_stride = a_stride,
            .n = static_cast<int>(n),
            .b = b,
            .b_stride = b_stride,
            .depth = static_cast<int>(depth),
            .width = static_cast<int>(width)};
  }

  // Query and d_out as operands of both passes.
  void load_query(const Token& token, Scratch& scratch, Operands& pairs) const {
    const uint16_t *query = bits(rows.query(token)), *d_out = bits(rows.d_out(token));
    const uint16_t* rope = rows.rope ? bits(rows.query_rope(token)) : nullptr;
    const int n = static_cast<int>(rows.heads);
    const auto pack = [&](const uint16_t* from, int64_t dims, uint32_t* panels, int64_t panel,
                          int64_t padded, uint32_t* to) {
      for (int64_t h = 0; h < n; h += 16) {
        kernels_->pack_panel(from + h * dims, dims, std::min<int64_t>(16, n - h), 16, dims,
                             panels + h / 16 * panel);
      }
      for (int64_t h = 0; h < n; ++h) scratch.heads[h] = from + h * dims;
      kernels_->pack_row_pairs(scratch.heads.data(), n, static_cast<int>(padded),
                               static_cast<int>(dims), group(), to);
    };
    pack(query, rows.latent, scratch.query.data(), 8 * rows.width, padded_, pairs.heads);
    if (rope) {
      pack(rope, rows.rope, scratch.query.data() + 8 * rows.latent, 8 * rows.width, tiles(padded_),
           pairs.heads + groups(rows.latent) * group());
    }
    pack(d_out, rows.latent, scratch.d_out.data(), 8 * rows.latent, padded_,
         pairs.heads + padded_ / 2 * 16);
  }

  // Calls f(chunk, the next one, first pair) for chunks of the token's keys.
  template <typename F>
  void each_chunk(const Pairs& pairs, int64_t from, int64_t end, int64_t step, Scratch& scratch,
                  const F& f) const {
    Chunk *chunk = &scratch.chunks[0], *next = &scratch.chunks[1];
    locate(pairs, from, *chunk);
    for (int64_t c = from; c != end; c += step, std::swap(chunk, next)) {
      next->n = 0;
      if (c + step != end) locate(pairs, c + step, *next);
      f(*chunk, *next, c * kKeys);
    }
  }

  void locate(const Pairs& pairs, int64_t index, Chunk& chunk) const {
    const int64_t first = index * kKeys;
    chunk.n = static_cast<int>(std::min<int64_t>(kKeys, pairs.slots.size() - first));
    chunk.latent = static_cast<int>(rows.latent);
    chunk.rope = static_cast<int>(rows.rope);
    for (int j = 0; j < chunk.n; ++j) {
      const KeyMap::Slot& slot = pairs.slots[first + j];
      chunk.keys[j] = bits(rows.key(slot));
      chunk.values[j] = bits(rows.value.row(slot));
      if (rows.rope) chunk.ropes[j] = bits(rows.key_rope(slot));
    }
  }

  // Probabilities of the keys of a chunk, dots of d_out and their values, and their part of delta.
  void add_logits(const Chunk& chunk, const Chunk& next, int64_t first, Scratch& scratch) const {
    const int64_t width = rows.width, latent = rows.latent;
    for (int j = 0; j < chunk.n; ++j) {
      uint16_t* to = scratch.keys.data() + j * width;
      std::copy_n(chunk.keys[j], latent, to);
      if (rows.rope) std::copy_n(chunk.ropes[j], rows.rope, to + latent);
      if (rows.own_value) std::copy_n(chunk.values[j], latent, scratch.values.data() + j * latent);
    }
    float* logits = scratch.logits.data() + first * padded_;
    float* dots = scratch.dots.data() + first * padded_;
    const int64_t heads = (rows.heads + 15) / 16 * 16;
    cpu::PairProduct keys =
        product(scratch.keys.data(), width, chunk.n, scratch.query.data(), 8 * width, width, heads);
    keys.next = &next;
    kernels_->multiply(keys, logits, padded_, true);
    const uint16_t* values = rows.own_value ? scratch.values.data() : scratch.keys.data();
    kernels_->multiply(product(values, rows.own_value ? latent : width, chunk.n,
                               scratch.d_out.data(), 8 * latent, latent, heads),
                       dots, padded_, true);
    scratch.add(logits, dots, chunk.n, rows.exponent_scale);
  }

  // Weights of the keys of a chunk, and their part of d_query.
  void add_query(const Chunk& chunk, const Chunk& next, int64_t first, Operands& pairs,
                 Scratch& scratch) const {
    const int padded = static_cast<int>(tiles(chunk.n));
    kernels_->pack_row_pairs(chunk.keys, chunk.n, padded, chunk.latent, kPackedGroup,
                             scratch.packed.data());
    if (rows.rope) {
      kernels_->pack_row_pairs(chunk.ropes, chunk.n, padded, chunk.rope, kPackedGroup,
                               scratch.packed.data() + groups(rows.latent) * kPackedGroup);
    }
    kernels_->logit_gradients({.p = scratch.logits.data() + first * padded_,
                               .dots = scratch.dots.data() + first * padded_,
                               .n = chunk.n,
                               .heads = static_cast<int>(rows.heads),
                               .padded = static_cast<int>(padded_),
                               .scale = rows.scale,
                               .delta = scratch.delta.data(),
                               .by_key = pairs.weights + first * 2 * padded_,
                               .by_head = scratch.by_head.data(),
                               .stride = kByHead});
    cpu::PairProduct keys = product(scratch.by_head.data(), kByHead, rows.heads,
                                    scratch.packed.data(), kPackedGroup, padded, rows.width);
    keys.next = &next;
    const bool last = first + chunk.n == static_cast<int64_t>(pairs.slots.size());
    kernels_->multiply(keys, scratch.d_query.data(), rows.width, last);  // the first to be added
  }

  const cpu::Bf16Kernels* kernels_;
  // heads, so that the depth of each product is a multiple of 32
  int64_t padded_;
};

}  // namespace custom_pypto
