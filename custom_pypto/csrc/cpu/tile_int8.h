// Products of int8 weights with rows of x in int8 (W8A8) by tile registers: nothing is unpacked,
// and sums stay integers. Included only by amx.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "tile_products.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kQuads = 16;  // of a row of a tile, 64 values

// Rounds a row to at most 127 with the scale of its largest value; to[value].
INLINE float round_row(const uint16_t* row, int depth, int8_t* to) {
  __m512i most = _mm512_setzero_si512();  // bits of |x|, ordered as |x|, with NaN above infinity
  for (int d = 0; d < depth; d += 32) {
    const __m512i bits = _mm512_loadu_si512(row + d) & _mm512_set1_epi16(INT16_MAX);
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
  for (int d = 0; d < depth; d += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + d));
    const Vec x = (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    const __m512i nearest = _mm512_cvtps_epi32((__m512)(x * factor));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d), _mm512_cvtsepi32_epi8(nearest));
  }
  // an infinity or NaN stays visible
  return finite ? largest / 127.0f : NAN;
}

// panel[quad][row] of 16 rows, zeros behind the last; scales[row]
void round_panel_amx(const uint16_t* rows, int64_t stride, int count, int depth, int8_t* values,
                     uint32_t* panel, float* scales) {
  for (int r = 0; r < 16; ++r) {
    int8_t* to = values + static_cast<int64_t>(r) * depth;
    if (r < count) {
      scales[r] = round_row(rows + r * stride, depth, to);
    } else {
      scales[r] = 0.0f;
      std::memset(to, 0, depth);
    }
  }
  for (int d = 0; d < depth; d += 4 * kQuads, panel += 16 * kQuads) {
    __m512i quads[16];
    UNROLL for (int r = 0; r < 16; ++r) {
      quads[r] = _mm512_loadu_si512(values + static_cast<int64_t>(r) * depth + d);
    }
    transpose16(quads);
    UNROLL for (int k = 0; k < kQuads; ++k) _mm512_storeu_si512(panel + 16 * k, quads[k]);
  }
}

// Requests the lines of the next block of rows of the weight while one is multiplied.
class NextBlock {
 public:
  INLINE NextBlock(const int8_t* from, int64_t stride, int rows, int bytes, int steps)
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
  const int8_t* from_;
  int64_t stride_;
  int lines_, left_, each_, line_ = 0;
};

// sums[row][row of x] += AT tiles of rows, from `a` on, times BT panels, from `x` on
template <int AT, int BT>
INLINE void add_int8(const int8_t* a, int64_t stride, const uint32_t* x, int64_t panel_stride,
                     int depth, bool first, int32_t* sums, int64_t width, NextBlock& next) {
  float* to = reinterpret_cast<float*>(sums);  // 32 bits of either
  if (first) {
    each<AT * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
  } else {
    load_sums<AT, BT>(to, 4 * width, 64 * width, 64);
  }
  for (int d = 0; d < depth; d += 4 * kQuads) {
    each<AT>([&](auto i)
                 INLINED { tile::load<4 + decltype(i)::value>(a + 16 * i * stride + d, stride); });
    each<BT>([&](auto j) INLINED {
      constexpr int J = decltype(j)::value, B = 6 + J % 2;
      tile::load<B>(x + J * panel_stride + 4 * d, 64);
      each<AT>([&](auto i) INLINED {
        constexpr int I = decltype(i)::value;
        tile::dot_int8<I * BT + J, 4 + I, B>();
      });
    });
    next.step();
  }
  store_sums<AT, BT>(to, 4 * width, 64 * width, 64);
}

// out = sums times the scales of both, transposed
INLINE void write_int8(const Int8Product& p) {
  for (int w = 0; w < p.n; w += 16) {
    const __mmask16 lanes = first_lanes(p.n - w);
    const __m512 of_rows = _mm512_maskz_loadu_ps(lanes, p.scales + w);
    for (int i = 0; i < p.m; i += 16) {
      __m512i x[16];
      UNROLL for (int r = 0; r < 16; ++r) {
        x[r] = _mm512_loadu_si512(p.sums + static_cast<int64_t>(w + r) * p.width + i);
      }
      transpose16(x);
      for (int r = 0; r < 16 && i + r < p.m; ++r) {
        // the scale of x first: with that of the weight an integer may overflow
        const __m512 scaled = _mm512_cvtepi32_ps(x[r]) * _mm512_set1_ps(p.x_scales[i + r]);
        const __m256i halves = (__m256i)_mm512_cvtneps_pbh(scaled * of_rows);
        _mm256_mask_storeu_epi16(p.out[i + r] + w, lanes, halves);
      }
    }
  }
}

// In blocks of the depth, of which 32 rows and two panels fit in the level-1 cache.
void multiply_int8_amx(const Int8Product& p) {
  constexpr int kDepth = 512;
  alignas(64) int8_t rest[16 * kDepth];  // behind the last row there may be no memory
  for (int d = 0; d < p.depth; d += kDepth) {
    const int depth = std::min(kDepth, p.depth - d);
    const auto block = [&](auto rows, int row) INLINED {
      constexpr int AT = decltype(rows)::value;
      const int8_t* a = p.weight + row * p.stride + d;
      int64_t stride = p.stride;
      const int steps = (p.width + 31) / 32 * ((depth + 63) / 64);
      const int after = row + 16 * AT;
      const bool last = after >= p.n;
      const int8_t* ahead = !last                  ? p.weight + after * p.stride + d
                            : d + kDepth < p.depth ? p.weight + d + kDepth
                                                   : p.weight + p.n * p.stride;
      NextBlock next(ahead, p.stride, 16 * AT, depth, steps);
      if (row + 16 * AT > p.n) {
        std::memset(rest, 0, sizeof rest);
        for (int r = row; r < p.n; ++r) {
          std::memcpy(rest + (r - row) * kDepth, p.weight + r * p.stride + d, depth);
        }
        a = rest;
        stride = kDepth;
      }
      const uint32_t* x = p.panels + 4 * d;
      int32_t* sums = p.sums + static_cast<int64_t>(row) * p.width;
      int i = 0;
      for (; i + 32 <= p.width; i += 32, x += 2 * p.panel_stride) {
        add_int8<AT, 2>(a, stride, x, p.panel_stride, depth, d == 0, sums + i, p.width, next);
      }
      if (i < p.width) {
        add_int8<AT, 1>(a, stride, x, p.panel_stride, depth, d == 0, sums + i, p.width, next);
      }
    };
    int row = 0;
    for (; row + 32 <= p.n; row += 32) block(std::integral_constant<int, 2>{}, row);
    for (; row < p.n; row += 16) block(std::integral_constant<int, 1>{}, row);
  }
  write_int8(p);
}

}  // namespace
}  // namespace custom_pypto::cpu
