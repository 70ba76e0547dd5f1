// What functions of rows share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "panels.h"
#include "run_tasks.h"

namespace custom_pypto {

constexpr int64_t kPerTask = 1 << 14;  // numbers; fewer cost less than waking a thread

// f(begin, end) for parts of `count` rows of so many numbers
template <typename F>
void for_rows(int64_t count, int64_t numbers, const F& f) {
  const int64_t rows = std::max<int64_t>(1, kPerTask / std::max<int64_t>(1, numbers));
  run_tasks((count + rows - 1) / rows, [] { return nullptr; },
            [&](std::nullptr_t, int64_t t) { f(t * rows, std::min(count, (t + 1) * rows)); });
}

// with a contiguous last dim
inline Tensor dense(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

// f of a value of the type
template <typename F>
void with_type(at::ScalarType dtype, const F& f) {
  if (dtype == at::kFloat) {
    f(float{});
  } else if (dtype == at::kHalf) {
    f(c10::Half{});
  } else {
    f(c10::BFloat16{});
  }
}

template <typename T>
float rounded(float x) {
  return static_cast<float>(static_cast<T>(x));
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace custom_pypto
