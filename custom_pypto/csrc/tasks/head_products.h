// Products of the heads of a token and its keys, by kernels that multiply bfloat16
// (docs/cpu_kernels.md). Sums are float.
#pragma once

#include "attention_rows.h"

namespace custom_pypto {

class HeadProducts {
 public:
  using Rows = HeadRows<c10::BFloat16>;
  using Chunk = cpu::Chunk<uint16_t>;
  static constexpr int64_t kKeys = cpu::kMaxKeys;  // of a chunk

  struct Sizes {
    int64_t padded;          // heads
    int64_t columns = 0;     // of the gradients of a pair
    int64_t added = kKeys;   // keys that d_query takes at once
    int64_t packed = kKeys;  // keys that are packed at the same time
  };

  HeadProducts(const cpu::Bf16Kernels* kernels, const Rows& rows, Sizes sizes)
      : kernels_(kernels), rows_(rows), sizes_(sizes) {}
  HeadProducts(const HeadProducts&) = delete;  // rows are a member of the same object

  // of the products with keys
  struct Scratch {
    explicit Scratch(const HeadProducts& op)
        : tiles(op.kernels_),
          query(op.sizes_.padded * op.rows_.width / 2),
          keys(kKeys * op.rows_.width) {}
    TileRegisters tiles;
    Chunk chunks[2];                // the current one and the next
    AlignedVector<uint32_t> query;  // [16 heads][pair of dims][16]
    AlignedVector<uint16_t> keys;   // rows of a chunk
  };

  struct GradScratch : Scratch {
    explicit GradScratch(const HeadProducts& op)
        : Scratch(op),
          packed(op.rows_.width / 16 * op.packed_group()),
          by_head(op.sizes_.padded * op.by_head_stride()) {}
    AlignedVector<uint32_t> packed;  // pairs of the keys of a chunk
    AlignedVector<uint16_t>
        by_head;  // gradients of their products, [padded head][by_head_stride()]
  };

  // a power of two as distance would put the lines of a tile into few sets of the cache
  int64_t by_head_stride() const { return sizes_.added + 32; }

  static int64_t tiles(int64_t n) { return (n + 31) / 32 * 32; }
  static int64_t vectors(int64_t n) { return (n + 15) / 16 * 16; }
  static const uint16_t* bits(const c10::BFloat16* row) {
    return reinterpret_cast<const uint16_t*>(row);
  }

  // Pairs of heads as operands of add_rows: [group of 16 dims][pair of heads][16].
  int64_t group() const { return (sizes_.columns / 2 + 1) * 16; }

  void load_query(const Token& token, Scratch& scratch) const {
    const int64_t stride = 8 * rows_.width;
    uint32_t* to = scratch.query.data();
    pack_heads(bits(rows_.query(token)), rows_.latent, stride, to);
    if (rows_.rope) {
      pack_heads(bits(rows_.query_rope(token)), rows_.rope, stride, to + 8 * rows_.latent);
    }
  }

  // [head][dims] as columns of the products with keys
  void pack_heads(const uint16_t* from, int64_t dims, int64_t stride, uint32_t* to) const {
    for (int64_t h = 0; h < rows_.heads; h += 16) {
      kernels_->pack_panel(from + h * dims, dims, std::min<int64_t>(16, rows_.heads - h), 16, dims,
                           to + h / 16 * stride);
    }
  }

  // [head][dims] as pairs of heads, zeros up to `padded`
  void pack_pairs(const uint16_t* from, int64_t dims, int64_t padded, uint32_t* to) const {
    std::vector<const uint16_t*> heads(rows_.heads);
    for (int64_t h = 0; h < rows_.heads; ++h) heads[h] = from + h * dims;
    kernels_->pack_row_pairs(heads.data(), rows_.heads, padded, dims, group(), to, nullptr);
  }

  // Calls f(chunk, its first key) for the keys of a token.
  template <typename F>
  void each_chunk(const std::vector<KeyMap::Slot>& slots, bool backwards, Scratch& scratch,
                  const F& f) const {
    const int64_t count = (slots.size() + kKeys - 1) / kKeys;
    const auto first = [&](int64_t c) { return (backwards ? count - 1 - c : c) * kKeys; };
    Chunk *chunk = &scratch.chunks[0], *next = &scratch.chunks[1];
    if (count > 0) locate(slots, first(0), *chunk);
    for (int64_t c = 0; c < count; ++c, std::swap(chunk, next)) {
      chunk->next = c + 1 < count ? next : nullptr;
      if (chunk->next) locate(slots, first(c + 1), *next);
      f(*chunk, first(c));
    }
  }

  // out[key][padded head] = the query times the keys of a chunk
  void multiply(const Chunk& chunk, Scratch& scratch, float* out) const {
    const int64_t width = rows_.width, latent = rows_.latent;
    for (int j = 0; j < chunk.n; ++j) {
      uint16_t* to = scratch.keys.data() + j * width;
      std::copy_n(chunk.keys[j], latent, to);
      if (rows_.rope) std::copy_n(chunk.ropes[j], rows_.rope, to + latent);
    }
    cpu::PairProduct product = columns(scratch.keys.data(), width, chunk.n, scratch);
    product.next = chunk.next;
    kernels_->multiply(product, out, sizes_.padded, true);
  }

  // The query times n rows.
  cpu::PairProduct columns(const uint16_t* rows, int64_t stride, int64_t n,
                           const Scratch& scratch) const {
    return columns(rows, stride, n, scratch.query.data(), rows_.width);
  }

  // Other heads of `dims` dims times n rows.
  cpu::PairProduct columns(const uint16_t* rows, int64_t stride, int64_t n, const uint32_t* heads,
                           int64_t dims) const {
    return {.a = rows,
            .a_stride = stride,
            .n = static_cast<int>(n),
            .b = heads,
            .b_stride = 8 * dims,
            .depth = static_cast<int>(dims),
            .width = static_cast<int>(vectors(rows_.heads))};
  }

  // Packs dims from `dim` on of n keys as those from number `at` on, a multiple of 2; zeros up to
  // `padded`. Also copies the keys, unless `copies` is null.
  void pack_keys(const uint16_t* const* keys, int64_t n, int64_t padded, int64_t dims, int64_t dim,
                 int64_t at, GradScratch& scratch, uint16_t* copies = nullptr) const {
    kernels_->pack_row_pairs(keys, static_cast<int>(n), static_cast<int>(padded),
                             static_cast<int>(dims), packed_group(),
                             scratch.packed.data() + dim / 16 * packed_group() + 8 * at, copies);
  }

  // out[head][width] += scratch.by_head times n packed keys from number `at` on; = if `first`
  void add_keys(int64_t n, int64_t at, const Chunk* next, bool first, GradScratch& scratch,
                float* out) const {
    kernels_->multiply({.a = scratch.by_head.data(),
                        .a_stride = by_head_stride(),
                        .n = static_cast<int>(rows_.heads),
                        .b = scratch.packed.data() + 8 * at,
                        .b_stride = packed_group(),
                        .depth = static_cast<int>(tiles(n)),
                        .width = static_cast<int>(rows_.width),
                        .next = next},
                       out, rows_.width, first);
  }

  struct Adder {
    explicit Adder(const HeadProducts& op) : tiles(op.kernels_) {}
    TileRegisters tiles;
    std::vector<float*> out;
  };

  // Adds weights[pair] . heads to the row of each pair of an owner. The pairs are in the order of
  // the owners; their weights, which start with those of this one, have `columns` each, of which
  // `depth` count.
  void add_rows(const Pairs& pairs, const Owners& owners, int64_t owner, const uint16_t* weights,
                int64_t depth, const uint32_t* heads, const Sums& sums, Adder& adder) const {
    const int64_t first = pairs.begin[owner], n = pairs.begin[owner + 1] - first;
    adder.out.resize(n);
    for (int64_t j = 0; j < n; ++j) adder.out[j] = owners.row(sums, pairs.slots[first + j]);
    kernels_->multiply_to_rows({.a = weights,
                                .a_stride = sizes_.columns,
                                .n = static_cast<int>(n),
                                .b = heads,
                                .b_stride = group(),
                                .depth = static_cast<int>(depth),
                                .width = static_cast<int>(sums.width)},
                               adder.out.data());
  }

 private:
  int64_t packed_group() const { return (sizes_.packed / 2 + 1) * 16; }

  void locate(const std::vector<KeyMap::Slot>& slots, int64_t first, Chunk& chunk) const {
    chunk.n = static_cast<int>(std::min<int64_t>(kKeys, slots.size() - first));
    chunk.latent = static_cast<int>(rows_.latent);
    chunk.rope = static_cast<int>(rows_.rope);
    for (int j = 0; j < chunk.n; ++j) {
      chunk.keys[j] = bits(rows_.key(slots[first + j]));
      if (rows_.rope) chunk.ropes[j] = bits(rows_.key_rope(slots[first + j]));
    }
  }

  const cpu::Bf16Kernels* kernels_;
  const Rows& rows_;
  Sizes sizes_;
};

}  // namespace custom_pypto
