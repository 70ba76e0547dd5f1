// The k best of a stream of scores. docs/cpu_kernels.md
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "kernel_set.h"

namespace custom_pypto {

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
    if (count_ > capacity()) shrink(capacity() / 8);
  }

  // adds the candidates of another stream, whose positions are below any position pushed later
  void push(const TopK& other) {
    for (int64_t i = 0; i < other.count_; ++i) {
      ranks_[count_] = other.ranks_[i];
      positions_[count_] = other.positions_[i];
      count_ += ranks_[count_] > threshold_;
      if (count_ > capacity()) shrink(capacity() / 8);
    }
  }

  // Drops all candidates but the k best, which stay in order of position, and at most `more`.
  void shrink(int64_t more = 0) {
    if (count_ <= k_ + more) return;
    // bisection: k + more candidates exceed `low`, fewer than k exceed `high`
    uint32_t low = threshold_ ? threshold_ - 1 : 0, high = UINT32_MAX;
    int64_t above_high = 0;
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      const int64_t above = kernels().count(ranks_.get(), count_, middle);
      if (above >= k_ && above <= k_ + more) return keep(middle, 0);
      if (above > k_) {
        low = middle;
      } else {
        high = middle;
        above_high = above;
      }
    }
    keep(high, k_ - above_high);  // the first of equal ranks stay: they have the lower positions
  }

  // Best first, the lower position first among equals, -1 after the last. Writes their scores to
  // `values` unless it is null, and nothing after the last.
  void write(int32_t* out, float* values = nullptr) {
    shrink();
    std::fill(out + count_, out + k_, -1);
    uint32_t best = 0, worst = UINT32_MAX;
    for (int64_t i = 0; i < count_; ++i) {
      best = std::max(best, ranks_[i]);
      worst = std::min(worst, ranks_[i]);
    }
    // radix sort of the distances to the best rank, least significant digit first: stable, so that
    // positions stay in order
    constexpr int kBits = 9;
    constexpr uint32_t kMask = (1u << kBits) - 1;
    std::array<std::array<int32_t, kMask + 1>, 4> starts = {};
    order_.resize(count_);
    sorted_.resize(count_);
    for (int64_t i = 0; i < count_; ++i) {
      const uint32_t distance = best - ranks_[i];
      order_[i] = uint64_t{distance} << 32 | static_cast<uint32_t>(positions_[i]);
      for (int d = 0; d < 4; ++d) ++starts[d][distance >> kBits * d & kMask];
    }
    for (int d = 0; d < 4 && (best - worst) >> kBits * d != 0; ++d) {  // later digits are all 0
      std::exclusive_scan(starts[d].begin(), starts[d].end(), starts[d].begin(), 0);
      for (const uint64_t x : order_) sorted_[starts[d][x >> (32 + kBits * d) & kMask]++] = x;
      order_.swap(sorted_);
    }
    for (int64_t i = 0; i < count_; ++i) out[i] = static_cast<int32_t>(order_[i]);
    for (int64_t i = 0; values && i < count_; ++i) {
      values[i] = score_of(best - static_cast<uint32_t>(order_[i] >> 32));
    }
  }

 private:
  int64_t capacity() const { return 2 * k_ + 1024; }

  // the inverse of the filter's ranks; the rank of NaN is that of one NaN
  static float score_of(uint32_t rank) {
    const uint32_t bits = rank ^ (rank >> 31 ? 0x80000000u : 0xFFFFFFFFu);
    float score;
    std::memcpy(&score, &bits, 4);
    return score;
  }

  void keep(uint32_t above, int64_t equal) {
    threshold_ = above;
    count_ = kernels().keep(ranks_.get(), positions_.get(), count_, above, equal);
  }

  int64_t k_, count_ = 0;
  uint32_t threshold_ = 0;  // a candidate must exceed it: k candidates do, or equal it
  std::unique_ptr<uint32_t[]> ranks_;
  std::unique_ptr<int32_t[]> positions_;
  std::vector<uint64_t> order_, sorted_;  // (distance to the best rank, position)
};

}  // namespace custom_pypto
