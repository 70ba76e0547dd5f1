// Whether threads of a parallel region wait for one that another process keeps from its core.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace custom_pypto {

// A region ends when its last thread does. If that one has lost its core, the others wait for
// milliseconds, and one thread alone would have been faster. After such a wait regions have one
// thread for some time: short after a single wait, long where waits follow each other.
class Crowd {
 public:
  using Time = int64_t;  // nanoseconds

  static Time now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }

  bool crowded(Time time) const { return time < alone_until_.load(kRelaxed); }

  // A region of so many threads began and ended; the calling thread had no task left at `idle`.
  void report(Time begin, Time idle, Time end, int64_t threads) {
    const Time own = idle - begin, lost = end - idle - own * (threads - 1);
    int64_t factor = factor_.load(kRelaxed);
    if (lost > kLate) {
      factor = std::min(2 * factor, kMostFactor);
      alone_until_.store(end + factor * lost, kRelaxed);
      good_.store(0, kRelaxed);
    } else if (factor > 1 && good_.fetch_add(own, kRelaxed) + own > kGood) {
      factor /= 2;
      good_.store(0, kRelaxed);
    }
    factor_.store(factor, kRelaxed);
  }

 private:
  static constexpr Time kLate = 100'000, kGood = 10'000'000;
  static constexpr int64_t kMostFactor = 32;
  static constexpr std::memory_order kRelaxed = std::memory_order_relaxed;
  // calls of several Python threads may mix theirs: only speed depends on it
  std::atomic<Time> alone_until_{0}, good_{0};
  std::atomic<int64_t> factor_{1};
};

inline Crowd& crowd() {
  static Crowd crowd;
  return crowd;
}

}  // namespace custom_pypto
