// Softmax sums of sparse attention: merges partial sums and writes output rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "panels.h"

namespace custom_pypto {

// Sums for the rows of a task, in panels.
struct SoftmaxSums {
  void start(int64_t rows, int64_t latent) {
    max.resize(panel_rows(rows));
    sum.resize(panel_rows(rows));
    out.resize(panel_rows(rows) * latent);
    any = false;
  }

  AlignedVector<float> max, sum, out;
  bool any = false;  // whether a key has been added
};

// to += factors[row] * from, for the sums of 16 dims of a panel, which float kernels keep as
// [dim][row].
inline void add_sums(const float* from, int64_t width, const float* factors, float* to) {
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t r = 0; r < width; ++r) to[i * width + r] += from[i * width + r] * factors[r];
  }
}

// Rescales the partial sums of one token to a common maximum and adds them in order. `bf16` are the
// kernels that made them, null: those of float.
inline SoftmaxSums combine(const SoftmaxSums* parts, int64_t count, int64_t heads, int64_t latent,
                           float scale, const cpu::Bf16Kernels* bf16) {
  const int64_t padded = panel_rows(heads);
  SoftmaxSums total;
  total.max.assign(padded, -INFINITY);
  total.sum.assign(padded, 0.0f);
  total.out.resize(padded * latent);
  std::vector<const SoftmaxSums*> added;
  for (int64_t p = 0; p < count; ++p) {
    if (parts[p].any) added.push_back(&parts[p]);
  }
  total.any = !added.empty();
  for (const SoftmaxSums* part : added) {
    for (int64_t r = 0; r < padded; ++r) total.max[r] = std::max(total.max[r], part->max[r]);
  }
  AlignedVector<float> factors(added.size() * cpu::kMaxWidth);
  for (int64_t first = 0; first < heads; first += cpu::kMaxWidth) {
    const int64_t width = cpu::panel_width(std::min<int64_t>(heads - first, cpu::kMaxWidth));
    float* factor = factors.data();
    for (const SoftmaxSums* part : added) {
      for (int64_t r = 0; r < width; ++r, ++factor) {
        const float max = total.max[first + r];
        *factor = std::exp2((part->max[first + r] - (max == -INFINITY ? 0 : max)) * scale);
        total.sum[first + r] += part->sum[first + r] * *factor;
      }
    }
    for (int64_t l = 0; l < latent; l += 16) {
      const int64_t at = first * latent + l * width;
      float* to = total.out.data() + at;
      std::fill_n(to, 16 * width, 0.0f);
      factor = factors.data();
      for (const SoftmaxSums* part : added) {
        bf16 ? bf16->add_sums(part->out.data() + at, width, factor, to)
             : add_sums(part->out.data() + at, width, factor, to);
        factor += width;
      }
    }
  }
  return total;
}

// The results of a task's rows (query token, head).
template <typename T>
struct Results {
  T* out;                        // [row][latent]
  float* softmax_max = nullptr;  // [row], or null
  float* softmax_sum = nullptr;
  const float* sinks = nullptr;  // [head], or null
  double scale;                  // of the logits
};

// Divides by the sums and writes the results. `seen` is the number of keys each token attended to;
// without keys, its outputs are 0 and its maximum and sum stay as they are.
template <typename E, typename T>
void write_rows(const SoftmaxSums& sums, const std::vector<int64_t>& seen, int64_t heads,
                int64_t latent, const cpu::Bf16Kernels* bf16, const Results<T>& to) {
  const int64_t rows = static_cast<int64_t>(seen.size()) * heads;
  if (!sums.any) {
    std::fill_n(to.out, rows * latent, T(0));
    return;
  }
  for (int64_t first = 0; first < rows; first += cpu::kMaxWidth) {
    const int64_t count = std::min<int64_t>(rows - first, cpu::kMaxWidth);
    const int64_t width = cpu::panel_width(count);
    // a token without keys has a sum of 0: its factor stays 0
    float factors[cpu::kMaxWidth] = {};
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = first + r;
      if (!seen[row / heads]) continue;
      float max = static_cast<float>(sums.max[row] * to.scale), sum = sums.sum[row], rescale = 1;
      if (to.sinks) {  // one more logit, without a value
        const float sink = to.sinks[row % heads];
        max = std::max(max, sink);
        const float shift = max == -INFINITY ? 0 : max;  // avoids -Inf - -Inf
        rescale = std::exp(static_cast<float>(sums.max[row] * to.scale) - shift);
        sum = sum * rescale + std::exp(sink - shift);
      }
      factors[r] = rescale / sum;
      if (to.softmax_max) {
        to.softmax_max[row] = max;
        to.softmax_sum[row] = sum;
      }
    }
    const float* panel = sums.out.data() + first * latent;
    T* out = to.out + first * latent;
    if constexpr (std::is_same_v<E, uint16_t>) {
      bf16->finish(panel, width, count, latent, factors, out, latent);
    } else {
      T block[16 * cpu::kMaxWidth];  // round while rows sit in lanes, then transpose
      for (int64_t l = 0; l < latent; l += 16) {
        for (int64_t i = 0; i < 16; ++i) {
          float x[cpu::kMaxWidth];
          for (int64_t r = 0; r < width; ++r) x[r] = panel[(l + i) * width + r] * factors[r];
          narrow(x, width, block + i * width);
        }
        for (int64_t r = 0; r < count; ++r) {
          for (int64_t i = 0; i < 16; ++i) out[r * latent + l + i] = block[i * width + r];
        }
      }
    }
  }
}

}  // namespace custom_pypto
