// What the backward passes share. Chunks of tokens take two passes. In the first, tasks own tokens:
// all that ends within a token. In the second, tasks own rows of the cache, to which they add the
// pairs of the chunk in the order of tokens and columns. So every sum has one order, whatever the
// number of threads and of tokens in a chunk.
#pragma once

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "panels.h"
#include "run_tasks.h"
#include "sequences.h"

namespace custom_pypto {

constexpr int64_t kBlock = 64;            // keys of a product
constexpr int64_t kChunkBytes = 2 << 20;  // what the first pass leaves for the second
constexpr int64_t kLeastTokens = 16;      // of a chunk

using Floats = AlignedVector<float>;

struct Token {
  const Sequence* sequence;
  int64_t i;
  int64_t row() const { return sequence->first_token + i; }
};

inline std::vector<Token> tokens_of(const std::vector<Sequence>& sequences) {
  std::vector<Token> tokens;
  for (const Sequence& s : sequences) {
    for (int64_t i = 0; i < s.len_query; ++i) tokens.push_back({&s, i});
  }
  return tokens;
}

// Tokens of a chunk, each of which leaves so many floats.
inline int64_t chunk_of(int64_t floats) {
  const int64_t least = std::max<int64_t>(kLeastTokens, at::get_num_threads());
  return std::max<int64_t>(least, kChunkBytes / (floats * sizeof(float)));
}

// Pointers to `count` rows.
inline std::vector<const float*> rows_of(const float* first, int64_t count, int64_t stride) {
  std::vector<const float*> rows(count);
  for (int64_t i = 0; i < count; ++i) rows[i] = first + i * stride;
  return rows;
}

inline std::vector<float*> rows_to(float* first, int64_t count, int64_t stride) {
  std::vector<float*> rows(count);
  for (int64_t i = 0; i < count; ++i) rows[i] = first + i * stride;
  return rows;
}

// out[key][padded heads] += keys[key] . panels, over `dims` dims
inline void multiply_panels(const std::vector<const float*>& keys, const float* panels,
                            int64_t dims, int64_t padded, float* out) {
  std::vector<float*> to(keys.size());
  for (int64_t h = 0; h < padded; h += cpu::kMaxWidth) {
    const int64_t width = std::min<int64_t>(cpu::kMaxWidth, padded - h);
    const auto b = rows_of(panels, dims, width);
    for (size_t j = 0; j < keys.size(); ++j) to[j] = out + j * padded + h;
    kernels().multiply({.a = keys.data(),
                        .a_step = 1,
                        .n = static_cast<int>(keys.size()),
                        .b = b.data(),
                        .depth = static_cast<int>(dims),
                        .width = static_cast<int>(width),
                        .out = to.data()});
    panels += width * dims;
  }
}

// out[head][width] += the sum over keys of weights[key][head] * keys[key]
inline void multiply_keys(const float* weights, int64_t padded,
                          const std::vector<const float*>& keys, int64_t width,
                          const std::vector<float*>& out) {
  const auto a = rows_of(weights, out.size(), 1);
  kernels().multiply({.a = a.data(),
                      .a_step = padded,
                      .n = static_cast<int>(out.size()),
                      .b = keys.data(),
                      .depth = static_cast<int>(keys.size()),
                      .width = static_cast<int>(width),
                      .out = out.data()});
}

// The rows of a gradient: float32 sums, which become its dtype at the end.
struct Sums {
  Sums(const Tensor& gradient, int64_t row)
      : tensor(gradient.scalar_type() == at::kFloat
                   ? gradient.zero_()
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

// The keys that a token reads, with their owners.
struct Pairs {
  std::vector<KeyMap::Slot> slots;
  std::vector<int64_t> columns;  // of the token's indices
  std::vector<int64_t> order;    // pairs by owner, stable, unless they are stored so
  std::vector<int64_t> begin;    // of each owner, by owner
};

// The owners of the rows of a cache.
class Owners {
 public:
  struct Operands {
    std::vector<const float*> weights;
    std::vector<float*> out;
  };

  explicit Owners(const Tensor& key) : count(tasks()), block_size_(key.size(-3)) {
    const int64_t rows = key.numel() / key.size(-1);
    while (kRanges << shift_ < rows) ++shift_;
  }

  const int64_t count;  // tasks that own the rows of the cache

  // Fills the pairs with what each(f) passes to f(slot, column), in two calls: by owner, stable, or
  // as it comes.
  template <bool kByOwner, typename Each>
  void fill(Pairs& pairs, const Each& each) const {
    int64_t begin[kRanges + 1] = {};
    each([&](const KeyMap::Slot& slot, int64_t) { ++begin[range(slot) + 1]; });
    for (int64_t r = 0; r < kRanges; ++r) begin[r + 1] += begin[r];
    const int64_t n = begin[kRanges];
    pairs.begin.resize(count + 1);
    for (int64_t o = 0; o <= count; ++o) pairs.begin[o] = begin[o * (kRanges / count)];
    pairs.slots.resize(n);
    pairs.columns.resize(n);
    if (!kByOwner) pairs.order.resize(n);
    int64_t next = 0;
    each([&](const KeyMap::Slot& slot, int64_t column) {
      const int64_t place = begin[range(slot)]++, at = kByOwner ? place : next;
      // by members: a copy of the whole would wait for what is written of it just before
      pairs.slots[at] = {.block = slot.block, .row = slot.row, .run = slot.run, .exists = true};
      pairs.columns[at] = column;
      if (!kByOwner) pairs.order[place] = next++;
    });
  }

  // The row of a gradient that belongs to a row of the cache.
  float* row(const Sums& sums, const KeyMap::Slot& slot) const {
    return sums.data + flat(slot) * sums.width;
  }

  // Adds weights[pair] . from, over the rows of `from`, to the row of each pair of an owner.
  void add(const Pairs& pairs, int64_t owner, const float* weights, int64_t padded,
           const std::vector<const float*>& from, const Sums& sums, Operands& operands) const {
    const int64_t* order = pairs.order.data() + pairs.begin[owner];
    const int64_t n = pairs.begin[owner + 1] - pairs.begin[owner];
    operands.weights.resize(n);
    operands.out.resize(n);
    for (int64_t j = 0; j < n; ++j) {
      operands.weights[j] = weights + order[j] * padded;
      operands.out[j] = row(sums, pairs.slots[order[j]]);
    }
    kernels().multiply({.a = operands.weights.data(),
                        .a_step = 1,
                        .n = static_cast<int>(n),
                        .b = from.data(),
                        .depth = static_cast<int>(from.size()),
                        .width = static_cast<int>(sums.width),
                        .out = operands.out.data()});
  }

 private:
  // fewer would own more rows than the level-2 cache holds sums of
  static constexpr int64_t kLeast = 16;
  // Of rows, whose number does not depend on that of threads, as then the order of pairs does not.
  static constexpr int64_t kRanges = 256;
  static int64_t tasks() {
    int64_t count = kLeast;
    while (count < kRanges && count < 2 * at::get_num_threads()) count *= 2;
    return count;
  }
  int64_t range(const KeyMap::Slot& slot) const { return flat(slot) >> shift_; }
  int64_t flat(const KeyMap::Slot& slot) const { return slot.block * block_size_ + slot.row; }
  int64_t block_size_;
  int shift_ = 0;  // log2 of the rows of a range: a division per pair is slow
};

}  // namespace custom_pypto
