// Rearranges bfloat16 in registers, for the sets that multiply it. Included only by a .cpp of this
// folder, after it has set its target.
#pragma once

#include <immintrin.h>

#include <cmath>

#include "avx512.h"
#include "kernels.h"
#include "vectors.h"
#include "weight_formats.h"

namespace custom_pypto::cpu {
namespace {

// pairs (even[i], odd[i]): zip_low of elements 0 to 15, zip_high of elements 16 to 31
INLINE __m512i zip_low(__m512i even, __m512i odd) {
  const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  return _mm512_permutex2var_epi16(even, order, odd);
}

INLINE __m512i zip_high(__m512i even, __m512i odd) {
  const __m512i order =
      _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54,
                       22, 53, 21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
  return _mm512_permutex2var_epi16(even, order, odd);
}

// pairs (x[i], x[i + 16]) of 32 elements
INLINE __m512i interleave(__m512i x) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, x);
}

void pack_panel_bf16(const uint16_t* rows, int64_t stride, int count, int width, int dims,
                     uint32_t* panel) {
  for (int r = 0; r < width; r += 16) {
    for (int d = 0; d < dims; d += 32) {
      const int pair_count = dims - d < 32 ? (dims - d) / 2 : 16;
      __m512i x[16];
      UNROLL for (int i = 0; i < 16; ++i) {
        x[i] = r + i < count
                   ? _mm512_maskz_loadu_epi32(first_lanes(pair_count), rows + (r + i) * stride + d)
                   : _mm512_setzero_si512();
      }
      transpose16(x);
      for (int i = 0; i < pair_count; ++i) {
        _mm512_storeu_si512(panel + (d / 2 + i) * width + r, x[i]);
      }
    }
  }
}

void dequantize_bf16(const int8_t* from, float scale, int n, uint16_t* to) {
  for (int i = 0; i < n; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)) * _mm512_set1_ps(scale);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(x));
  }
}

void narrow_bf16(const float* from, int n, uint16_t* to) {
  for (int i = 0; i < n; i += 32) {
    _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(load(from + i + 16), load(from + i)));
  }
}

template <class Format>
void widen_bf16(const Dots& call, int w, uint16_t* to) {
  each_unit<Format>(call, w, [&](int64_t d, const Vec* unit) INLINED {
    _mm512_storeu_si512(to + d, (__m512i)_mm512_cvtne2ps_pbh(unit[1], unit[0]));
  });
}

constexpr decltype(&widen_bf16<Bfloat16Weight>) kWidenBf16[kWeightFormats] = {
    widen_bf16<Bfloat16Weight>, widen_bf16<Int8Weight>, widen_bf16<Fp8Weight>,
    widen_bf16<Int4Weight>, widen_bf16<Fp4Weight>};

void pack_row_pairs_bf16(const uint16_t* const* rows, int n, int padded, int dims, int64_t stride,
                         uint32_t* to, uint16_t* copies) {
  const auto part = [&](int row, int d, __mmask32 lanes) INLINED {
    return row < n ? _mm512_maskz_loadu_epi16(lanes, rows[row] + d) : _mm512_setzero_si512();
  };
  for (int p = 0; p < padded / 2; ++p, to += 16) {
    uint32_t* pairs = to;
    for (int d = 0; d < dims; d += 32, pairs += 2 * stride) {
      const bool whole = dims - d >= 32;
      const __mmask32 lanes = whole ? 0xFFFFFFFF : 0xFFFF;
      const __m512i even = part(2 * p, d, lanes), odd = part(2 * p + 1, d, lanes);
      _mm512_storeu_si512(pairs, zip_low(even, odd));
      if (whole) _mm512_storeu_si512(pairs + stride, zip_high(even, odd));
      if (!copies) continue;
      _mm512_mask_storeu_epi16(copies + 2 * p * dims + d, lanes, even);
      _mm512_mask_storeu_epi16(copies + (2 * p + 1) * dims + d, lanes, odd);
    }
  }
}

void logit_gradients_bf16(const LogitGradients& call) {
  const auto [of_p, of_dots, n, count, padded, factor, of_delta, by_key, by_head, stride] = call;
  const auto half = [](uint16_t* to, __m256bh x) INLINED {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)x);
  };
  const __m512 scale = _mm512_set1_ps(factor);
  for (int first = 0; first < n; first += 32) {
    for (int h = 0; h < padded; h += 16) {
      const __mmask16 heads = first_lanes(count - h);  // what padding holds may be NaN
      const __m512 delta = _mm512_maskz_loadu_ps(heads, of_delta + h);
      __m512i pairs[16];  // [pair of keys][head]
      UNROLL for (int i = 0; i < 16; ++i) {
        __m512 d[2];
        UNROLL for (int k = 0; k < 2; ++k) {
          const int j = first + 2 * i + k, at = j * padded + h, next = 32 * padded;
          uint16_t* to = by_key + 2 * at - h;
          d[k] = _mm512_setzero_ps();
          if (j >= n) continue;
          __builtin_prefetch(of_p + at + next);
          __builtin_prefetch(of_dots + at + next);
          __builtin_prefetch(to + 2 * next, 1);
          __builtin_prefetch(to + 2 * next + padded, 1);
          const __m512 p = _mm512_maskz_loadu_ps(heads, of_p + at);
          d[k] = scale * p * (_mm512_maskz_loadu_ps(heads, of_dots + at) - delta);
          half(to, _mm512_cvtneps_pbh(d[k]));
          half(to + padded, _mm512_cvtneps_pbh(p));
        }
        pairs[i] = interleave((__m512i)_mm512_cvtne2ps_pbh(d[1], d[0]));
      }
      transpose16(pairs);
      UNROLL for (int i = 0; i < 16; ++i) {
        _mm512_storeu_si512(by_head + (h + i) * stride + first, pairs[i]);
      }
    }
  }
}

// 2^x for x <= 0, relative error below 2^-16, in the named lanes, else 0; NaN stays NaN
INLINE __m512 named_exp2(__mmask16 named, __m512 x) {
  const __m512 magic = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  // far below, rounding to an integer would fail; max returns its second operand if that is NaN
  const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-1000.0f), x);
  const __m512 integer = (clamped + magic) - magic, f = clamped - integer;  // f in [-0.5, 0.5]
  __m512 p = _mm512_set1_ps(9.61843736e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55033252e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226433e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147182e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(named, p, integer);
}

void softmax_rows_bf16(const SoftmaxRows& call) {
  const __m512 lowest = _mm512_set1_ps(-INFINITY);
  for (int i = 0; i < call.n; ++i) {
    const float* scores = call.scores + i * call.stride;
    const uint16_t* named = call.named + i * call.named_stride;
    __m512 most[2] = {lowest, lowest};
    for (int j = 0; j < call.keys; j += 32) {
      UNROLL for (int v = 0; v < 2; ++v) {
        most[v] =
            _mm512_mask_max_ps(most[v], named[j / 16 + v], most[v], load(scores + j + 16 * v));
      }
    }
    const float before = call.first ? -INFINITY : call.max[i];
    const float here = _mm512_reduce_max_ps(_mm512_max_ps(most[0], most[1])) * call.scale;
    const float max = here > before ? here : before;
    call.max[i] = max;
    // avoids -Inf - -Inf if no key is named yet or all logits are -Inf
    const Vec shift = broadcast(max == -INFINITY ? 0.0f : max), scale = broadcast(call.scale);
    const float factor = exp2(broadcast(before) - shift)[0];
    Vec sum[2] = {};
    uint16_t* to = call.p + i * call.p_stride;
    for (int j = 0; j < call.keys; j += 32) {
      Vec p[2];
      UNROLL for (int v = 0; v < 2; ++v) {
        p[v] =
            (Vec)named_exp2(named[j / 16 + v], (__m512)(load(scores + j + 16 * v) * scale - shift));
        sum[v] += p[v];
      }
      _mm512_storeu_si512(to + j, (__m512i)_mm512_cvtne2ps_pbh((__m512)p[1], (__m512)p[0]));
    }
    const float total = _mm512_reduce_add_ps((__m512)(sum[0] + sum[1]));
    call.total[i] = call.first ? total : call.total[i] * factor + total;
    if (call.first || factor == 1.0f) continue;
    float* sums = call.sums + i * call.dims;
    for (int d = 0; d < call.dims; d += 16) store(sums + d, load(sums + d) * factor);
  }
}

void relu_masks_bf16(const ReluMasks& call) {
  const __m512 zero = _mm512_setzero_ps();
  const __mmask16 heads = first_lanes(call.heads);  // what padding holds may be NaN
  __m512 sums[2] = {load(call.d_weights), zero};    // of even and odd keys
  const auto add = [&](int j, __m512& sum) INLINED {
    const __m512 product = _mm512_maskz_loadu_ps(heads, call.products + j * call.stride);
    // max returns its second operand if either is NaN: NaN is kept
    sum = _mm512_fmadd_ps(_mm512_max_ps(zero, product), _mm512_set1_ps(call.d_scores[j]), sum);
    call.masks[j] = _mm512_cmp_ps_mask(product, zero, _CMP_NLE_UQ);
  };
  int j = 0;
  for (; j + 2 <= call.n; j += 2) add(j, sums[0]), add(j + 1, sums[1]);
  if (j < call.n) add(j, sums[0]);
  store(call.d_weights, sums[0] + sums[1]);
}

void gradients_by_key_bf16(const MaskedGradients& call) {
  for (int h = 0; h < call.heads; h += 16) {
    const __m512 weights = load(call.weights + h);
    const uint16_t* masks = call.masks + h / 16 * call.mask_stride;
    uint16_t* to = call.to + h;
    for (int j = 0; j < call.n; ++j, to += call.stride) {
      const __m512 d = weights * _mm512_set1_ps(call.d_scores[j]);
      const __m256i rounded = _mm256_maskz_mov_epi16(masks[j], (__m256i)_mm512_cvtneps_pbh(d));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
    }
  }
}

void gradients_by_head_bf16(const MaskedGradients& call) {
  for (int first = 0; first < call.n; first += 32) {
    const int n = call.n - first;
    const __mmask16 low = first_lanes(n), high = first_lanes(n - 16);
    const __m512 d0 = _mm512_maskz_loadu_ps(low, call.d_scores + first);
    const __m512 d1 = _mm512_maskz_loadu_ps(high, call.d_scores + first + 16);
    const __mmask32 keys = low | static_cast<__mmask32>(high) << 16;
    for (int h = 0; h < call.heads; ++h) {
      const uint16_t* of_heads = call.masks + h / 16 * call.mask_stride + first;
      const __m512i masks = _mm512_maskz_loadu_epi16(keys, of_heads);
      const __m512 weight = _mm512_set1_ps(call.weights[h]);
      const __mmask32 active = _mm512_test_epi16_mask(masks, _mm512_set1_epi16(1 << h % 16));
      const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(d1 * weight, d0 * weight);
      _mm512_storeu_si512(call.to + h * call.stride + first,
                          _mm512_maskz_mov_epi16(active, rounded));
    }
  }
}

}  // namespace
}  // namespace custom_pypto::cpu
