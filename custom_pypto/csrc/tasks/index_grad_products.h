// How the gradients of an indexer multiply: elements widened to float, or bfloat16 as it is. Both
// have
//   Logits                        of the attention (index_grad_attention.h)
//   kByOwner                      whether it takes the pairs of a token by owner
//   rows, padded                  queries and keys, and the padded heads of a product
//   Operands                      what the first pass of a token leaves for the second
//   floats(), place(at, operands)   their memory
//   load(token, operands)         what they have of the token
//   Scratch                       buffers of a thread in the first pass
//   start(token, operands, scratch)   takes the token's pairs
//   multiply(operands, scratch, f)   calls f(first, count, products) for blocks of pairs, products
//                                 being [count][padded]
//   add(operands, scratch)        then adds to d_query and d_weights, given d_scores
//   multiply_and_add(operands, scratch, f)   both, block by block: f(first, count) fills the
//                                 d_scores of a block
//   Adder                         buffers of a thread in the second pass
//   add_rows(operands, owners, owner, d_key, adder)   adds the pairs of an owner to its rows
#pragma once

#include "head_products.h"
#include "index_grad_attention.h"
#include "index_grad_sources.h"

namespace custom_pypto {

template <typename T>
class WidenedIndexProducts {
 public:
  using Stored = T;
  using Logits = WidenedLogits<T>;
  static constexpr bool kByOwner = false;
  template <typename Source>
  WidenedIndexProducts(const IndexGradParams& p, const Source& source)
      : rows(p.sequences.query, p.sequences.key), padded(rows.padded), keys_(source.keys()) {}

  struct Operands : Scored {
    float* products;  // [pair][padded heads]: query . key, then their gradients
    float* query;     // [head][dims]
  };

  int64_t floats() const { return keys_ * (padded + 1) + 2 * heads() + 2 * padded; }

  void place(float* at, Operands& pairs) const {
    pairs.products = at;
    pairs.query = at += keys_ * padded;
    pairs.d_query = at += heads();
    pairs.weights = at += heads();
    pairs.d_weights = at += padded;
    pairs.d_scores = at += padded;
  }

  void load(const Token& token, Operands& pairs) const {
    rows.load_query(token, pairs.query);
    std::fill_n(pairs.d_query, heads(), 0.0f);
  }

  struct Scratch {
    explicit Scratch(const WidenedIndexProducts& op)
        : query(op.padded * op.rows.width),
          widened(std::is_same_v<T, float> ? 0 : kKeys * op.rows.width) {}
    Floats query;  // panels
    Floats widened;
    std::vector<const float*> keys;  // of a block
  };

  void start(const Token&, const Operands& pairs, Scratch& scratch) const {
    pack_panels<float>(pairs.query, rows.heads, rows.width, scratch.query.data());
  }

  template <typename F>
  void multiply(const Operands& pairs, Scratch& scratch, const F& f) const {
    each_block(pairs, scratch, [&](int64_t first, int64_t count) {
      f(first, count, multiply_block(pairs, first, count, scratch));
    });
  }

  void add(const Operands& pairs, Scratch& scratch) const {
    each_block(pairs, scratch,
               [&](int64_t first, int64_t count) { add_block(pairs, first, count, scratch); });
  }

  template <typename F>
  void multiply_and_add(const Operands& pairs, Scratch& scratch, const F& f) const {
    each_block(pairs, scratch, [&](int64_t first, int64_t count) {
      multiply_block(pairs, first, count, scratch);
      f(first, count);
      add_block(pairs, first, count, scratch);
    });
  }

  struct Adder : Owners::Operands {
    explicit Adder(const WidenedIndexProducts&) {}
  };

  void add_rows(const Operands& pairs, const Owners& owners, int64_t owner, const Sums& d_key,
                Adder& adder) const {
    const auto query = rows_of(pairs.query, rows.heads, rows.width);
    owners.add(pairs, owner, pairs.products, padded, query, d_key, adder);
  }

  const HeadRows<T> rows;
  const int64_t padded;

 private:
  static constexpr int64_t kKeys = 128;  // of a product

  int64_t heads() const { return rows.heads * rows.width; }

  // Calls f(first, count) with the keys of a block in float, in place if they are.
  template <typename F>
  void each_block(const Operands& pairs, Scratch& scratch, const F& f) const {
    const int64_t n = pairs.slots.size();
    for (int64_t first = 0; first < n; first += kKeys) {
      scratch.keys.resize(std::min(kKeys, n - first));
      for (size_t j = 0; j < scratch.keys.size(); ++j) {
        const KeyMap::Slot& slot = pairs.slots[first + j];
        if constexpr (std::is_same_v<T, float>) {
          scratch.keys[j] = rows.key(slot);
        } else {
          float* to = scratch.widened.data() + j * rows.width;
          rows.load_key(slot, to);
          scratch.keys[j] = to;
        }
      }
      f(first, static_cast<int64_t>(scratch.keys.size()));
    }
  }

  const float* multiply_block(const Operands& pairs, int64_t first, int64_t count,
                              Scratch& scratch) const {
    float* products = pairs.products + first * padded;
    std::fill_n(products, count * padded, 0.0f);
    multiply_panels(scratch.keys, scratch.query.data(), rows.width, padded, products);
    return products;
  }

  void add_block(const Operands& pairs, int64_t first, int64_t count, Scratch& scratch) const {
    float* products = pairs.products + first * padded;
    kernels().index_scores_grad({.products = products,
                                 .n = static_cast<int>(count),
                                 .heads = static_cast<int>(padded),
                                 .weights = pairs.weights,
                                 .d_scores = pairs.d_scores + first,
                                 .d_weights = pairs.d_weights});
    multiply_keys(products, padded, scratch.keys, rows.width,
                  rows_to(pairs.d_query, rows.heads, rows.width));
  }

  int64_t keys_;  // the most of a token's tile
};

// The gradients of products are rounded to bfloat16, sums are float.
class Bf16IndexProducts {
 public:
  using Stored = c10::BFloat16;
  using Logits = Bf16Logits;
  static constexpr bool kByOwner = true;
  template <typename Source>
  Bf16IndexProducts(const IndexGradParams& p, const Source& source)
      : rows(p.sequences.query, p.sequences.key),
        padded(HeadProducts::tiles(rows.heads)),
        kernels_(index_kernels(rows.width)),
        products_(kernels_, rows,
                  {.padded = padded, .columns = padded, .added = kChunk, .packed = 2 * kChunk}),
        keys_(source.keys()),
        kept_(Source::kByPair ? 2 * kKeys : HeadProducts::tiles(keys_)) {}

  struct Operands : Scored {
    uint16_t* masks;  // [16 heads][pair]: the products that are not zero or below, a bit each
    uint32_t* heads;  // query, [group of 16 dims][pair of heads][16]
  };

  int64_t floats() const {
    return masks() + heads() + padded * (rows.width + 2) + HeadProducts::tiles(keys_);
  }

  void place(float* at, Operands& pairs) const {
    pairs.masks = reinterpret_cast<uint16_t*>(at);
    pairs.heads = reinterpret_cast<uint32_t*>(at += masks());
    pairs.d_query = at += heads();
    pairs.weights = at += padded * rows.width;
    pairs.d_weights = at += padded;
    pairs.d_scores = at += padded;
  }

  void load(const Token& token, Operands& pairs) const {
    products_.pack_pairs(HeadProducts::bits(rows.query(token)), rows.width, padded, pairs.heads);
    std::fill_n(pairs.d_query, padded * rows.width, 0.0f);
  }

  struct Scratch : HeadProducts::GradScratch {
    explicit Scratch(const Bf16IndexProducts& op)
        : HeadProducts::GradScratch(op.products_), products(op.kept_ * op.padded) {}
    std::vector<const uint16_t*> rows;  // of all keys
    Floats products;                    // [key][padded head]
  };

  void start(const Token& token, const Operands& pairs, Scratch& scratch) const {
    products_.load_query(token, scratch);
    scratch.rows.resize(pairs.slots.size());
    for (size_t j = 0; j < scratch.rows.size(); ++j) {
      scratch.rows[j] = HeadProducts::bits(rows.key(pairs.slots[j]));
    }
  }

  template <typename F>
  void multiply(const Operands& pairs, Scratch& scratch, const F& f) const {
    const int64_t n = pairs.slots.size();
    Work(*this, pairs, scratch).stages(0).finish();
    for (int64_t first = 0; first < n; first += kKeys) {
      multiply_block(first, Work(*this, pairs, scratch).stages(first + kKeys));
      f(first, std::min(kKeys, n - first), scratch.products.data() + first * padded);
    }
  }

  void add(const Operands& pairs, Scratch& scratch) const {
    const int64_t n = pairs.slots.size();
    for (int64_t first = 0; first < n; first += kKeys) {
      Work(*this, pairs, scratch).stages(first).adds(first).finish();
      add_block(first, pairs, scratch);
    }
  }

  template <typename F>
  void multiply_and_add(const Operands& pairs, Scratch& scratch, const F& f) const {
    const int64_t n = pairs.slots.size();
    Work(*this, pairs, scratch).stages(0).finish();
    for (int64_t first = 0; first < n + kKeys; first += kKeys) {
      Work work(*this, pairs, scratch);
      const int64_t before = first - kKeys;
      if (before >= 0) {
        f(before, std::min(kKeys, n - before));
        work.adds(before);
      }
      if (first < n) {
        multiply_block(first, work.stages(first + kKeys));
      } else {
        work.finish();
      }
      if (before >= 0) add_block(before, pairs, scratch);
    }
  }

  struct Adder : HeadProducts::Adder {
    explicit Adder(const Bf16IndexProducts& op) : HeadProducts::Adder(op.products_) {}
    AlignedVector<uint16_t> gradients;  // of products, [pair][padded head]
  };

  void add_rows(const Operands& pairs, const Owners& owners, int64_t owner, const Sums& d_key,
                Adder& adder) const {
    const int64_t first = pairs.begin[owner], n = pairs.begin[owner + 1] - first;
    adder.gradients.resize(HeadProducts::vectors(n) * padded);
    kernels_->gradients_by_key({.masks = pairs.masks + first,
                                .mask_stride = HeadProducts::tiles(keys_),
                                .n = static_cast<int>(n),
                                .heads = static_cast<int>(padded),
                                .weights = pairs.weights,
                                .d_scores = pairs.d_scores + first,
                                .to = adder.gradients.data(),
                                .stride = padded});
    products_.add_rows(pairs, owners, owner, adder.gradients.data(), padded, pairs.heads, d_key,
                       adder);
  }

  const HeadRows<c10::BFloat16> rows;
  // a multiple of 32, the depth of d_key
  const int64_t padded;

 private:
  static constexpr int64_t kKeys = 32;    // of a block
  static constexpr int64_t kChunk = 256;  // keys that d_query takes at once

  // Vector instructions in steps, which run beside the products of a block: they copy and pack the
  // keys of a later one, and make gradients of an earlier one.
  class Work {
   public:
    Work(const Bf16IndexProducts& op, const Operands& pairs, Scratch& scratch)
        : op_(op), pairs_(pairs), scratch_(scratch) {}

    Work& stages(int64_t first) {
      staged_ = first;
      staged_count_ = count(first);
      return *this;
    }

    Work& adds(int64_t first) {
      added_ = first;
      added_count_ = count(first);
      return *this;
    }

    // Returns whether there was one.
    bool step() {
      const int64_t step = step_++, keys = kStaged * step, head = 16 * (step / 2);
      const bool stages = staged_count_ > 0 && keys < kKeys;
      if (stages) stage(keys);
      const bool adds = added_count_ > 0 && head < op_.padded;
      // apart from each other, so that the masks have arrived in the cache
      if (adds) step % 2 == 0 ? find_masks(head) : make_gradients(head);
      return stages || adds;
    }

    void finish() {
      while (step()) continue;
    }

    Scratch& scratch() const { return scratch_; }

   private:
    static constexpr int64_t kStaged = 4;  // keys of a step

    int64_t count(int64_t first) const {
      return std::clamp<int64_t>(scratch_.rows.size() - first, 0, kKeys);
    }

    void stage(int64_t at) {
      const uint16_t* const* rows = scratch_.rows.data() + staged_;
      const int64_t width = op_.rows.width, n = scratch_.rows.size() - staged_;
      for (int64_t j = at + kKeys; j < std::min(at + kKeys + kStaged, n); ++j) {
        for (int64_t d = 0; d < width; d += 32) __builtin_prefetch(rows[j] + d);
      }
      op_.products_.pack_keys(rows + at, std::clamp<int64_t>(staged_count_ - at, 0, kStaged),
                              kStaged, width, 0, staged_ % (2 * kChunk) + at, scratch_,
                              op_.copy_of(staged_, scratch_) + at * width);
    }

    uint16_t* masks(int64_t h) const {
      return pairs_.masks + h / 16 * HeadProducts::tiles(op_.keys_) + added_;
    }

    void find_masks(int64_t h) {
      op_.kernels_->relu_masks({.products = op_.products(added_, scratch_) + h,
                                .stride = op_.padded,
                                .n = static_cast<int>(added_count_),
                                .heads = static_cast<int>(op_.rows.heads - h),
                                .d_scores = pairs_.d_scores + added_,
                                .d_weights = pairs_.d_weights + h,
                                .masks = masks(h)});
    }

    void make_gradients(int64_t h) {
      const int64_t stride = op_.products_.by_head_stride();
      op_.kernels_->gradients_by_head({.masks = masks(h),
                                       .mask_stride = HeadProducts::tiles(op_.keys_),
                                       .n = static_cast<int>(added_count_),
                                       .heads = 16,
                                       .weights = pairs_.weights + h,
                                       .d_scores = pairs_.d_scores + added_,
                                       .to = scratch_.by_head.data() + h * stride + added_ % kChunk,
                                       .stride = stride});
    }

    const Bf16IndexProducts& op_;
    const Operands& pairs_;
    Scratch& scratch_;
    int64_t staged_ = 0, staged_count_ = 0, added_ = 0, added_count_ = 0;
    int64_t step_ = 0;
  };

  // Products of the staged block from `first` on, and the work beside them.
  void multiply_block(int64_t first, Work& work) const {
    Scratch& scratch = work.scratch();
    const int64_t n = scratch.rows.size();
    cpu::PairProduct product =
        products_.columns(copy_of(first, scratch), rows.width, std::min(kKeys, n - first), scratch);
    product.beside = {.step = [](void* work) { static_cast<Work*>(work)->step(); }, .work = &work};
    kernels_->multiply(product, products(first, scratch), padded, true);
    work.finish();
  }

  // Adds the chunk that ends with the block from `first` on, if one does, to d_query.
  void add_block(int64_t first, const Operands& pairs, Scratch& scratch) const {
    const int64_t end = std::min<int64_t>(first + kKeys, pairs.slots.size());
    if (end % kChunk != 0 && end != static_cast<int64_t>(pairs.slots.size())) return;
    const int64_t chunk = first / kChunk * kChunk;
    products_.add_keys(end - chunk, chunk % (2 * kChunk), nullptr, /*first=*/false, scratch,
                       pairs.d_query);
  }

  // Two blocks have copies at the same time.
  uint16_t* copy_of(int64_t first, Scratch& scratch) const {
    return scratch.keys.data() + first % (2 * kKeys) * rows.width;
  }
  float* products(int64_t first, Scratch& scratch) const {
    return scratch.products.data() + first % kept_ * padded;
  }

  int64_t masks() const { return padded / 32 * HeadProducts::tiles(keys_); }
  int64_t heads() const { return rows.width / 16 * products_.group(); }

  const cpu::Bf16Kernels* kernels_;
  HeadProducts products_;
  int64_t keys_;  // the most of a token's tile
  int64_t kept_;  // whose products are kept at the same time
};

}  // namespace custom_pypto
