// Locates the tokens and keys of a sequence. The CPU kernels read lengths and block ids on the host
// and trust none: lengths are clamped to the tensors' sizes, prefix sums to a non-decreasing
// series, and a position whose block id is outside the cache does not exist.
#pragma once

#include <algorithm>
#include <vector>

#include "params.h"

namespace custom_pypto {

struct Sequence {
  int64_t index;
  int64_t first_token;  // its first query token, among the tokens of all sequences
  int64_t len_query, len_key;
  int64_t first_key;        // where its keys start in a TND tensor
  int64_t keys, cmp_ratio;  // len_key tokens are compressed into len_key / cmp_ratio keys

  // query token i sees the keys [0, visible), whose tokens are not after its own
  int64_t visible(int64_t i, int64_t sparse_mode) const {
    if (sparse_mode == 0) return keys;
    return std::clamp<int64_t>((len_key - len_query + i + 1) / cmp_ratio, 0, keys);
  }
};

std::vector<Sequence> read_sequences(const SequenceParams& p);

// Maps key positions to cache rows. Every layout is treated as paged: BSND has one block per
// sequence, TND one block for all sequences.
class KeyMap {
 public:
  explicit KeyMap(const SequenceParams& p);

  struct Slot {
    int64_t block, row;
    int64_t run;  // positions left in the block, this one included
    bool exists;
  };
  // inlined: a slot that is returned in memory is read before its members have arrived there
  [[gnu::always_inline]] Slot find(const Sequence& sequence, int64_t position) const {
    const int64_t p = sequence.first_key + position;
    const int64_t page = shift_ >= 0 ? p >> shift_ : p / block_size_, row = p - page * block_size_;
    int64_t block = layout_ == Layout::kBsnd ? sequence.index : 0;
    if (layout_ == Layout::kPaged) block = blocks_of_[sequence.index * pages_ + page];
    return Slot{.block = block,
                .row = row,
                .run = block_size_ - row,
                .exists = block >= 0 && block < blocks_};
  }

 private:
  Layout layout_;
  int64_t blocks_, block_size_;
  int shift_ = -1;  // log2 of a power-of-two block_size_: find() runs per key, a division is slow
  Tensor table_;
  const int32_t* blocks_of_ = nullptr;
  int64_t pages_ = 0;  // blocks of a sequence
};

// Calls f(position, column) for every index in columns [begin, end) of a row that sees the keys [0,
// visible). -1 ends the row, other positions that it does not see are skipped.
template <typename F>
void for_each_index(const int32_t* row, int64_t begin, int64_t end, int64_t visible, const F& f) {
  for (int64_t c = begin; c < end && row[c] != -1; ++c) {
    if (row[c] >= 0 && row[c] < visible) f(int64_t{row[c]}, c);
  }
}

// Row offsets, in elements, of a cache with any strides.
struct Rows {
  explicit Rows(const Tensor& cache)
      : block_stride(cache.dim() == 4 ? cache.stride(0) : 0), stride(cache.stride(-3)) {}
  int64_t offset(const KeyMap::Slot& slot) const {
    return slot.block * block_stride + slot.row * stride;
  }
  int64_t block_stride, stride;
};

template <typename T>
struct Cache : Rows {
  explicit Cache(const Tensor& cache)
      : Rows(cache), data(static_cast<const T*>(cache.const_data_ptr())) {}
  const T* row(const KeyMap::Slot& slot) const { return data + offset(slot); }
  const T* data;
};

}  // namespace custom_pypto
