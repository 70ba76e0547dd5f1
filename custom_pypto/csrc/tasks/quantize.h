// The quantizer of every int8 op: symmetric, one scale per row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace custom_pypto {

// The largest |x|, with NaN above infinity.
inline float largest_magnitude(const float* x, int64_t n) {
  int32_t magnitude = 0;  // its bits, ordered as |x|
  for (int64_t i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    magnitude = std::max(magnitude, bits & INT32_MAX);
  }
  float largest;
  std::memcpy(&largest, &magnitude, 4);
  return largest;
}

// Writes y[i] = x[i] * (127 / a), a = max(|x|, 1e-4), rounded to nearest, ties to even, and returns
// the scale a / 127. The minimum keeps a row of zeros from 0 / 0, and the scale above 0 in float16;
// it is that of act_quant in DeepSeek-V3.2's inference code. An infinite or NaN x makes the scale
// infinite or NaN, so that corruption stays visible; a product that is NaN becomes 0.
inline float quantize(const float* x, int64_t n, int8_t* y) {
  float a = largest_magnitude(x, n);
  if (a < 1e-4f) a = 1e-4f;
  const float factor = 127.0f / a;
  for (int64_t i = 0; i < n; ++i) {
    // within -127 and 127, because a * (127 / a) is at most 127.00001
    const float rounded = std::rint(x[i] * factor);
    y[i] = rounded == rounded ? static_cast<int8_t>(rounded) : 0;
  }
  return a / 127.0f;
}

}  // namespace custom_pypto
