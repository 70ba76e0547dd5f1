// Products of weights of 4 bits with rows of x rounded to 16 bits, in integers: to unpack values to
// float takes twice as many instructions, which is more time than to read them. A group of G values
// of x has the scale of its largest one. Each is rounded by up to half a step of 2^-15 of that one,
// so a product is within sqrt(G) * 2^-16 of the norms' product.
#pragma once

#include <immintrin.h>

#include <cmath>

#include "weights.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kInt16Unit = 64;         // values that are unpacked together
constexpr int kMostInt16Group = 4096;  // 15 * 32767 * 4096 / 8 lanes is below 2^31

// values of x that share a scale
template <class Format>
INLINE int int16_group(const Dots& call) {
  return std::is_same_v<Format, Int4Weight> ? call.group : kInt16Unit;
}

template <class Format>
INLINE bool fits_int16(const Dots& call) {
  const int group = int16_group<Format>(call);
  return call.depth % kInt16Unit == 0 && group % kInt16Unit == 0 && group <= kMostInt16Group;
}

// A row of x for `dots`: the sums of the weight's groups, a scale for each group of x, the values.
template <class Format>
struct Int16Row {
  Int16Row(const Dots& call, const void* x) : sums(static_cast<const float*>(x)) {
    const int group = int16_group<Format>(call);
    scales = sums + (call.offsets ? call.groups : 0);
    values = reinterpret_cast<const int16_t*>(scales + (call.depth + group - 1) / group);
  }
  const float *sums, *scales;
  const int16_t* values;
};

// returns the scale
INLINE float round_to_int16(const float* x, int n, int16_t* to) {
  int32_t magnitude = 0;  // the bits of |x|, ordered as |x|, with NaN above infinity
  for (int i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= INT32_MAX;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  float largest;
  std::memcpy(&largest, &magnitude, 4);
  const bool finite = largest < INFINITY;
  // below, factor or scale would leave the range of normal numbers
  const float factor = largest > 1e-30f && finite ? 32767.0f / largest : 0.0f;
  // the values 0, 4, 8, ... of a unit, then 1, 5, 9, ...
  for (int i = 0; i < n; ++i) {
    const int at = i / kInt16Unit * kInt16Unit + i % 4 * 16 + i % kInt16Unit / 4;
    const float scaled = x[i] * factor;
    to[at] = static_cast<int16_t>(std::nearbyint(scaled == scaled ? scaled : 0.0f));
  }
  // an infinity or NaN stays visible
  return finite ? largest / 32767.0f : NAN;
}

// The sum of a group. Of the rounded values: an offset that cancels the values of a weight must
// cancel what they were multiplied by.
INLINE float sum_of_int16(const int16_t* values, int n, float scale) {
  int32_t sum = 0;
  for (int i = 0; i < n; ++i) sum += values[i];
  return scale * static_cast<float>(sum);
}

template <class Format>
void prepare_int16(const Dots& call, const float* x, void* to) {
  if (!fits_int16<Format>(call)) return prepare_f32(call, x, to);
  const Int16Row<Format> row(call, to);
  float* sums = const_cast<float*>(row.sums);
  float* scales = const_cast<float*>(row.scales);
  const int group = int16_group<Format>(call);
  for (int d = 0, g = 0; d < call.depth; d += group, ++g) {
    int16_t* values = const_cast<int16_t*>(row.values) + d;
    scales[g] = round_to_int16(x + d, group, values);
    // a group of x is one of the weight, if its groups have offsets
    if (call.offsets) sums[g] = sum_of_int16(values, group, scales[g]);
    if (std::is_same_v<Format, Fp4Weight>) scales[g] *= 1.0f / 256;  // of the values
  }
}

INLINE __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// kInt16Unit values, 16 at a time.
template <class Format>
struct Int16Unit;

template <>
struct Int16Unit<Int4Weight> {
  explicit INLINE Int16Unit(const uint8_t* p) : bits(load256(p)) {}
  INLINE __m256i values(int i) const {
    return i == 3 ? _mm256_srli_epi16(bits, 12)
                  : _mm256_srli_epi16(bits, 4 * i) & _mm256_set1_epi16(15);
  }
  __m256i bits;
};

template <>
struct Int16Unit<Fp4Weight> {
  explicit INLINE Int16Unit(const uint8_t* p) {
    const __m256i bits = load256(p), last = _mm256_set1_epi8(15);
    const __m256i twice = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    low = _mm256_shuffle_epi8(twice, bits & last);
    high = _mm256_shuffle_epi8(twice, _mm256_srli_epi16(bits, 4) & last);
  }
  // times 256
  INLINE __m256i values(int i) const {
    const __m256i bytes = i % 2 ? high : low;
    return i < 2 ? _mm256_slli_epi16(bytes, 8) : bytes & _mm256_set1_epi16(-256);
  }
  __m256i low, high;
};

INLINE float sum_of_256(__m256 x) {
  __m128 sum = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  sum += _mm_movehl_ps(sum, sum);
  return sum[0] + sum[1];
}

template <class Format, int GROUP, int ROWS>
INLINE void dots_int16_tile(const Dots& call, int w, int i) {
  const int group = int16_group<Format>(call);
  const uint8_t* p = call.weight + w * call.stride;
  const float* scales = call.scales + w * call.groups;
  const int16_t* x[ROWS];
  const float* x_scales[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Int16Row<Format> row(call, call.x[i + r]);
    x[r] = row.values;
    x_scales[r] = row.scales;
  }
  __m256 total[ROWS] = {};
  for (int d = 0, g = 0; d < call.depth; ++g) {
    const int rest = call.depth - d, n = GROUP ? GROUP : rest < group ? rest : group;
    __m256i acc[ROWS] = {};
    for (const int end = d + n; d < end; d += kInt16Unit) {
      const Int16Unit<Format> unit(p);
      __builtin_prefetch(p + kAhead);
      p += Format::kBytes * kInt16Unit / kUnit;
      UNROLL for (int v = 0; v < kInt16Unit / 16; ++v) {
        const __m256i values = unit.values(v);
        UNROLL for (int r = 0; r < ROWS; ++r) {
          const __m256i product = _mm256_madd_epi16(values, load256(x[r] + d + 16 * v));
          acc[r] = _mm256_add_epi32(acc[r], product);
        }
      }
    }
    __m256 scale;
    if constexpr (std::is_same_v<Format, Int4Weight>) {
      scale = _mm256_set1_ps(scales[g]);
    } else {  // of a unit's two groups
      scale = _mm256_set_m128(_mm_set1_ps(scales[2 * g + 1]), _mm_set1_ps(scales[2 * g]));
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      // the scale of x first: with that of the weight an integer may overflow
      total[r] += _mm256_cvtepi32_ps(acc[r]) * _mm256_set1_ps(x_scales[r][g]) * scale;
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    float sum = sum_of_256(total[r]);
    if (call.offsets) sum += offset_of(call, w, Int16Row<Format>(call, call.x[i + r]).sums);
    call.out[i + r][w] = sum;
  }
}

template <class Format>
void dots_int16(const Dots& call) {
  if (!fits_int16<Format>(call)) return dots_f32<Format>(call);
  constexpr int USUAL = std::is_same_v<Format, Fp4Weight> ? kInt16Unit : kUsualGroup;
  const bool even = int16_group<Format>(call) == USUAL && call.depth % USUAL == 0;
  each_dots_tile<4>(call, [&](auto rows, int w, int i) INLINED {
    constexpr int ROWS = decltype(rows)::value;
    even ? dots_int16_tile<Format, USUAL, ROWS>(call, w, i)
         : dots_int16_tile<Format, 0, ROWS>(call, w, i);
  });
}

template <class Format>
constexpr WeightKernels kInt16Weight = {
    .prepare = prepare_int16<Format>, .dots = dots_int16<Format>, .widen = widen_f32<Format>};

}  // namespace
}  // namespace custom_pypto::cpu
