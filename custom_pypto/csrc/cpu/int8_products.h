// What products of rows of x in int8 share: panels of these rows, and their output. Included only
// by a .cpp of this folder, after it has set its target.
#pragma once

#include <algorithm>
#include <cstring>

#include "avx512.h"

namespace custom_pypto::cpu {
namespace {

// Rounds n values, a multiple of 32, to at most 127 with the scale of the largest, to their sum.
INLINE float round_values(const uint16_t* x, int n, int8_t* to, int32_t* sum) {
  __m512i most = _mm512_setzero_si512();  // bits of |x|, ordered as |x|, with NaN above infinity
  for (int d = 0; d < n; d += 32) {
    const __m512i bits = _mm512_loadu_si512(x + d) & _mm512_set1_epi16(INT16_MAX);
    most = _mm512_max_epu16(most, bits);
  }
  const __m512i pairs =
      _mm512_max_epu32(_mm512_slli_epi32(most, 16), most & _mm512_set1_epi32(-65536));
  const uint32_t bits = _mm512_reduce_max_epu32(pairs);
  float largest;
  std::memcpy(&largest, &bits, 4);
  const bool finite = largest < INFINITY;
  // below, factor or scale would leave the range of normal numbers
  const Vec factor = broadcast(largest > 1e-30f && finite ? 127.0f / largest : 0.0f);
  __m512i sums = _mm512_setzero_si512();
  for (int d = 0; d < n; d += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + d));
    const Vec values = (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    // the lanes of NaN have the largest negative integer, as those of its products with zero
    const __m512i nearest = _mm512_cvtps_epi32((__m512)(values * factor));
    const __m128i bytes = _mm512_cvtsepi32_epi8(nearest);
    sums = _mm512_add_epi32(sums, _mm512_cvtepi8_epi32(bytes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d), bytes);
  }
  *sum = _mm512_reduce_add_epi32(sums);
  // an infinity or NaN stays visible
  return finite ? largest / 127.0f : NAN;
}

// 32 values: those of the low bits of bytes, then those of the high bits.
INLINE void put_nibbles_apart(int8_t* values) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  const __m256i apart =
      _mm256_shuffle_epi8(pairs, _mm256_broadcastsi128_si256(_mm_set_epi8(
                                     15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm256_permute4x64_epi64(apart, 0xD8));
}

void round_panel(const Int8Rows& rows, int8_t* values, uint32_t* panel, float* scales,
                 int32_t* sums) {
  const int depth = rows.depth, part = rows.part;
  for (int r = 0; r < 16; ++r) {
    int8_t* to = values + static_cast<int64_t>(r) * depth;
    for (int d = 0, p = r; d < depth; d += part, p += 16) {
      if (r < rows.count) {
        scales[p] = round_values(rows.x + r * rows.stride + d, part, to + d, sums + p);
        if (rows.nibbles) put_nibbles_apart(to + d);
      } else {
        scales[p] = 0.0f;
        sums[p] = 0;
        std::memset(to + d, 0, part);
      }
    }
  }
  if (rows.quads > 1) {
    const int bytes = 4 * rows.quads, count = 16 / rows.quads;
    auto* to = reinterpret_cast<int8_t*>(panel);
    for (int d = 0; d < depth; d += bytes) {
      for (int64_t r = 0; r < count; ++r, to += bytes) {
        std::memcpy(to, values + r * depth + d, bytes);
      }
    }
    return;
  }
  for (int d = 0; d < depth; d += 64, panel += 256) {
    const int here = std::min(16, (depth - d) / 4);
    __m512i quads[16];
    UNROLL for (int r = 0; r < 16; ++r) {
      quads[r] =
          _mm512_maskz_loadu_epi32(first_lanes(here), values + static_cast<int64_t>(r) * depth + d);
    }
    transpose16(quads);
    UNROLL for (int k = 0; k < 16; ++k) {
      if (k < here) _mm512_storeu_si512(panel + 16 * k, quads[k]);
    }
  }
}

// Requests the lines of the next block of rows of the weight while one is multiplied.
class NextBlock {
 public:
  INLINE NextBlock(const uint8_t* from, int64_t stride, int rows, int bytes, int steps)
      : from_(from), stride_(stride), lines_(bytes / 64), left_(rows * lines_) {
    each_ = (left_ + steps - 1) / steps;
  }
  INLINE void step() {
    for (int i = std::min(each_, left_); i > 0; --i, --left_) {
      __builtin_prefetch(from_ + 64 * line_, 0, 2);
      if (++line_ == lines_) line_ = 0, from_ += stride_;
    }
  }

 private:
  const uint8_t* from_;
  int64_t stride_;
  int lines_, left_, each_, line_ = 0;
};

// Writes the rows of the output. value(sums, row of x, row of the weight, lanes) makes floats of
// the sums of a row of x, or of its `quads` lanes, of 16 rows of the weight.
template <typename Value>
INLINE void write_rows(const Int8Product& p, const Value& value) {
  for (int w = 0; w < p.weight.n; w += 16) {
    const __mmask16 lanes = first_lanes(p.weight.n - w);
    for (int i = 0; i < p.m; i += 16) {
      __m512i x[16];
      UNROLL for (int r = 0; r < 16; ++r) {
        x[r] = _mm512_loadu_si512(p.sums + static_cast<int64_t>(w + r) * p.width + i);
      }
      transpose16(x);
      for (int r = 0; r < 16 && i + r < p.m; ++r) {
        const __m512i bits = (__m512i)value(x + r * p.quads, i + r, w, lanes);
        const __m512i odd = _mm512_srli_epi32(bits, 16) & _mm512_set1_epi32(1);
        // to the nearest, and to the even one of two; a NaN stays one
        const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(INT16_MAX));
        const __m512i nearest = _mm512_add_epi32(bits, half);
        const __mmask16 nan = _mm512_cmp_ps_mask((__m512)bits, (__m512)bits, _CMP_UNORD_Q);
        const __m512i rounded = _mm512_mask_mov_epi32(nearest, nan, _mm512_set1_epi32(0x7FC00000));
        const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
        _mm256_mask_storeu_epi16(p.out[i + r] + w, lanes, halves);
      }
    }
  }
}

// Of a weight with one scale for each row; `offset` times the values of x is missing.
INLINE void write_scaled_rows(const Int8Product& p, int offset) {
  write_rows(p, [&](const __m512i* sums, int i, int w, __mmask16 lanes) INLINED {
    __m512i sum = _mm512_mullo_epi32(_mm512_set1_epi32(p.x_sums[i]), _mm512_set1_epi32(offset));
    for (int k = 0; k < p.quads; ++k) sum = _mm512_add_epi32(sum, sums[k]);
    // the scale of x first: with that of the weight an integer may overflow
    const __m512 scaled = _mm512_cvtepi32_ps(sum) * _mm512_set1_ps(p.x_scales[i]);
    return scaled * _mm512_maskz_loadu_ps(lanes, p.weight.scales + w);
  });
}

}  // namespace
}  // namespace custom_pypto::cpu
