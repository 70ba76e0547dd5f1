// What the sets of AVX-512 share. Included only by a .cpp of this folder, after it has set its
// target.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels.h"
#include "tiles.h"
#include "vectors.h"

namespace custom_pypto::cpu {
namespace {

// out[i] = sum of the 16 lanes of vector i
INLINE __m512 reduce16(const float* in) {
  __m512 a[8], b[4], c[2];
  UNROLL for (int i = 0; i < 8; ++i) {  // quarters of row i and i + 8 side by side
    const __m512 x = load(in + 16 * i), y = load(in + 16 * (i + 8));
    a[i] = _mm512_shuffle_f32x4(x, y, 0x44) + _mm512_shuffle_f32x4(x, y, 0xEE);
  }
  UNROLL for (int i = 0; i < 4; ++i) {  // quarters now belong to rows i, i + 8, i + 4, i + 12
    b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88) + _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD);
  }
  UNROLL for (int i = 0; i < 2; ++i) {
    c[i] = _mm512_unpacklo_ps(b[i], b[i + 2]) + _mm512_unpackhi_ps(b[i], b[i + 2]);
  }
  const __m512 sum = _mm512_unpacklo_ps(c[0], c[1]) + _mm512_unpackhi_ps(c[0], c[1]);
  return _mm512_shuffle_f32x4(sum, sum, 0xD8);
}

// transposes 16 x 16 elements
INLINE void transpose16(__m512i* r) {
  __m512i t[16];
  UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  // quarter q of r[i + c] is now column 4 q + c of the rows i to i + 3
  UNROLL for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  UNROLL for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x44);
    t[c] = _mm512_shuffle_i32x4(a, b, 0x88);
    t[c + 4] = _mm512_shuffle_i32x4(a, b, 0xDD);
    const __m512i d = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xEE);
    const __m512i e = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xEE);
    t[c + 8] = _mm512_shuffle_i32x4(d, e, 0x88);
    t[c + 12] = _mm512_shuffle_i32x4(d, e, 0xDD);
  }
  UNROLL for (int i = 0; i < 16; ++i) r[i] = t[i];
}

INLINE __mmask16 first_lanes(int n) { return n >= 16 ? 0xFFFF : n <= 0 ? 0 : (1u << n) - 1; }

// The scores of a call whose panels have `steps` elements per row. tile(keys, vecs, panel, row, j,
// partial) adds to the 16 partial sums of each of the keys j, j + 1, ... the terms of a panel,
// which begins at `row`.
template <typename E, typename Tile>
INLINE void index_panels(const IndexCall<E>& call, int steps, const Tile& tile) {
  alignas(64) float partial[kMaxKeys * 16];
  const int padded = (call.n + 15) / 16 * 16;
  for (int i = 0; i < padded * 16; ++i) partial[i] = 0.0f;
  const uint32_t* panel = call.panels;
  for (int row = 0; row < call.rows;) {
    const int width = panel_width(call.rows - row);
    each_strip(width, [&](auto vecs, int) INLINED {
      index_strip<decltype(vecs)::value>(
          call, row == 0 ? call.ahead : nullptr,
          [&](auto keys, int j) INLINED { tile(keys, vecs, panel, row, j, partial + 16 * j); });
    });
    panel += static_cast<int64_t>(width) * steps;
    row += width;
  }
  alignas(64) float sums[kMaxKeys];
  for (int j = 0; j < padded; j += 16) store(sums + j, reduce16(partial + 16 * j));
  std::memcpy(call.scores, sums, sizeof(float) * call.n);
}

}  // namespace
}  // namespace custom_pypto::cpu
