// The k best of a stream of scores. docs/cpu_kernels.md
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "ops_common.h"

namespace custom_pypto {

struct Rank {
  uint32_t value;
  int64_t equal;  // how many of the k largest ranks equal it; further ranks may equal it too
};

// The k-th largest of n ranks, digit by digit from the top; 1 <= k <= n.
inline Rank kth_largest(const uint32_t* ranks, int64_t n, int64_t k) {
  uint32_t found = 0;  // the result's digits above the current one
  int above = 32;      // number of bits below `found`
  for (const int bits : {11, 11, 10}) {
    const int shift = above - bits;
    const uint32_t mask = (1u << bits) - 1;
    // two histograms: neighbours often hit one bin, and an increment waits for the previous one;
    // bin 2048 takes ranks with other upper digits: a branch would often be mispredicted
    int32_t counts[2049][2] = {};
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t digits = ranks[i];
      ++counts[digits >> above == found ? digits >> shift & mask : 2048][i & 1];
    }
    uint32_t digit = mask;
    for (; k > counts[digit][0] + counts[digit][1]; --digit) {
      k -= counts[digit][0] + counts[digit][1];
    }
    found = found << bits | digit;
    above = shift;
  }
  return {found, k};
}

// The k best of a stream of scores whose positions ascend. Buffers up to 2 k + 1024 candidates and
// never stores a score that cannot be among the k best.
class TopK {
 public:
  // buffers are uninitialised: most elements may never be used
  explicit TopK(int64_t k)
      : k_(k),
        ranks_(new uint32_t[capacity() + cpu::kMaxKeys + cpu::kLineElements]),
        positions_(new int32_t[capacity() + cpu::kMaxKeys + cpu::kLineElements]) {}

  void clear() {
    count_ = 0;
    threshold_ = 0;
  }

  void push(const float* scores, int n, int64_t first_position) {
    count_ += kernels().filter(scores, n, threshold_, static_cast<int32_t>(first_position),
                               ranks_.get() + count_, positions_.get() + count_);
    if (count_ > capacity()) shrink();
  }

  // adds the candidates of another stream, whose positions are below any position pushed later
  void push(const TopK& other) {
    for (int64_t i = 0; i < other.count_; ++i) {
      ranks_[count_] = other.ranks_[i];
      positions_[count_] = other.positions_[i];
      count_ += ranks_[count_] > threshold_;
      if (count_ > capacity()) shrink();
    }
  }

  // drops all candidates but the k best, which stay in order of position
  void shrink() {
    if (count_ <= k_) return;
    const Rank worst = kth_largest(ranks_.get(), count_, k_);
    threshold_ = worst.value;
    // the first of equal ranks stay: they have the lower positions
    count_ = kernels().keep(ranks_.get(), positions_.get(), count_, worst.value, worst.equal);
  }

  // best first, the lower position first among equals, -1 after the last
  void write(int32_t* out) {
    shrink();
    // radix sort, least significant byte first: stable, so that positions stay in order
    std::array<std::array<int32_t, 257>, 4> starts = {};  // of each byte's bins, largest rank first
    order_.resize(count_);
    sorted_.resize(count_);
    for (int64_t i = 0; i < count_; ++i) {
      const uint32_t falling = ~ranks_[i];
      order_[i] = uint64_t{falling} << 32 | static_cast<uint32_t>(positions_[i]);
      for (int b = 0; b < 4; ++b) ++starts[b][(falling >> 8 * b & 255) + 1];
    }
    for (int b = 0; b < 4; ++b) {
      std::partial_sum(starts[b].begin(), starts[b].end(), starts[b].begin());
      for (const uint64_t x : order_) sorted_[starts[b][x >> (32 + 8 * b) & 255]++] = x;
      order_.swap(sorted_);
    }
    for (int64_t i = 0; i < count_; ++i) out[i] = static_cast<int32_t>(order_[i]);
    std::fill(out + count_, out + k_, -1);
  }

 private:
  int64_t capacity() const { return 2 * k_ + 1024; }

  int64_t k_, count_ = 0;
  uint32_t threshold_ = 0;  // k-th best rank, once k are kept: a candidate must exceed it
  std::unique_ptr<uint32_t[]> ranks_;
  std::unique_ptr<int32_t[]> positions_;
  std::vector<uint64_t> order_, sorted_;  // (inverted rank, position)
};

}  // namespace custom_pypto
