// bfloat16 with vdpbf16ps: acc[lane] += a[lane][0] * b[lane][0] + a[lane][1] * b[lane][1]. A lane
// is a query row, the pair is two dims of it (logits) or its weights for two keys (values), and b
// is one pair broadcast.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,prefer-vector-width=512")
// gcc 12 warns about the deliberately undefined operands inside its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#define VECTOR_BYTES 64
#include <cstring>

#include "tiles.h"

namespace custom_pypto::cpu {
namespace {

INLINE __m512bh pairs(const uint32_t* p) { return (__m512bh)_mm512_loadu_si512(p); }

INLINE __m512bh broadcast_pair(const void* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// pairs (x[i], x[i + 16]) of 32 elements
INLINE __m512i interleave(__m512i x) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, x);
}

// out[i] = the 16 lanes of in[i] added up
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

INLINE __mmask16 first_lanes(int n) { return n >= 16 ? 0xFFFF : n <= 0 ? 0 : (1u << n) - 1; }

template <int KEYS, int VECS>
INLINE void index_tile_bf16(const uint32_t* panel, const float* weights, int heads, int dims,
                            const uint16_t* keys, int64_t stride, float* partial) {
  __m512 acc[KEYS][VECS];
  UNROLL for (int j = 0; j < KEYS; ++j) {
    UNROLL for (int v = 0; v < VECS; ++v) acc[j][v] = _mm512_setzero_ps();
  }
  for (int d = 0; d < dims; d += 2) {
    __m512bh q[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) q[v] = pairs(panel + (d / 2) * 16 * VECS + 16 * v);
    UNROLL for (int j = 0; j < KEYS; ++j) {
      const __m512bh k = broadcast_pair(keys + j * stride + d);
      UNROLL for (int v = 0; v < VECS; ++v) acc[j][v] = _mm512_dpbf16_ps(acc[j][v], q[v], k);
    }
  }
  const __m512 zero = _mm512_setzero_ps();
  __mmask16 counts[VECS];  // a row that only fills the panel is not 0 for an infinite key, but NaN
  UNROLL for (int v = 0; v < VECS; ++v) counts[v] = first_lanes(heads - 16 * v);
  UNROLL for (int j = 0; j < KEYS; ++j) {
    __m512 sum = load(partial + 16 * j);
    UNROLL for (int v = 0; v < VECS; ++v) {
      // max returns its second operand if either is NaN: NaN is kept
      sum = _mm512_mask3_fmadd_ps(load(weights + 16 * v), _mm512_max_ps(zero, acc[j][v]), sum,
                                  counts[v]);
    }
    store(partial + 16 * j, sum);
  }
}

void index_bf16(const IndexCall<uint16_t>& call) {
  alignas(64) float partial[kMaxKeys * 16];
  const int rounded = (call.n + 15) / 16 * 16;
  for (int i = 0; i < rounded * 16; ++i) partial[i] = 0.0f;
  const uint32_t* panel = call.panels;
  for (int row = 0; row < call.rows;) {
    const int width = panel_width(call.rows - row);
    auto strip = [&](auto vecs) {
      constexpr int VECS = decltype(vecs)::value;
      index_strip<VECS>(call, row == 0 ? call.ahead : nullptr, [&](auto keys, int j) {
        index_tile_bf16<decltype(keys)::value, VECS>(panel, call.weights + row, call.heads - row,
                                                     call.dims, call.keys + j * call.key_stride,
                                                     call.key_stride, partial + 16 * j);
      });
    };
    if (width == 64) {
      strip(std::integral_constant<int, 4>{});
    } else if (width == 32) {
      strip(std::integral_constant<int, 2>{});
    } else {
      strip(std::integral_constant<int, 1>{});
    }
    panel += static_cast<int64_t>(width) * (call.dims / 2);
    row += width;
  }
  alignas(64) float sums[kMaxKeys];
  for (int j = 0; j < rounded; j += 16) store(sums + j, reduce16(partial + 16 * j));
  std::memcpy(call.scores, sums, sizeof(float) * call.n);
}

// ---- sparse attention ------------------------------------------------------------------------

// packed[group of 16 dims][key pair][dim] = (value of the even key, value of the odd key); an odd
// last key is paired with zeros
void pack_values_bf16(const Chunk<uint16_t>& chunk) {
  alignas(64) static const uint16_t kZeros[16] = {};
  const int pair_count = (chunk.n + 1) / 2;
  for (int p = 0; p < pair_count; ++p) {
    const uint16_t* even = chunk.values[2 * p];
    const bool last = 2 * p + 1 == chunk.n;
    const uint16_t* odd = last ? nullptr : chunk.values[2 * p + 1];
    for (int d = 0; d < chunk.latent; d += 16) {
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + d));
      const __m256i b =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(last ? kZeros : odd + d));
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
      _mm512_storeu_si512(chunk.packed + (d / 16 * pair_count + p) * 16, interleave(both));
    }
  }
}

template <int KEYS, int VECS>
INLINE void logits_tile_bf16(const uint32_t* query, const uint16_t* const* keys, int d0, int steps,
                             bool first, float* scores) {
  __m512 acc[KEYS][VECS];
  UNROLL for (int j = 0; j < KEYS; ++j) {
    UNROLL for (int v = 0; v < VECS; ++v) {
      acc[j][v] = first ? _mm512_setzero_ps() : (__m512)load(scores + 16 * (j * VECS + v));
    }
  }
  const uint16_t* key[KEYS];
  UNROLL for (int j = 0; j < KEYS; ++j) key[j] = keys[j] + d0;
  for (int p = 0; p < steps; ++p) {
    __m512bh q[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) q[v] = pairs(query + 16 * (p * VECS + v));
    UNROLL for (int j = 0; j < KEYS; ++j) {
      const __m512bh k = broadcast_pair(key[j] + 2 * p);
      UNROLL for (int v = 0; v < VECS; ++v) acc[j][v] = _mm512_dpbf16_ps(acc[j][v], q[v], k);
    }
  }
  UNROLL for (int j = 0; j < KEYS; ++j) {
    UNROLL for (int v = 0; v < VECS; ++v) store(scores + 16 * (j * VECS + v), acc[j][v]);
  }
}

template <int VECS>
INLINE void logits_bf16(const Chunk<uint16_t>& chunk, const AttendPanel<uint16_t>& panel) {
  constexpr int KEYS = kTileKeys<VECS>;
  constexpr int width = 16 * VECS;
  constexpr int block = 24576 / (4 * width);  // pairs of dims whose part of the panel is 24 KiB
  auto part = [&](const uint16_t* const* keys, int pair_count, const uint32_t* query,
                  bool overwrite) {
    for (int p = 0; p < pair_count; p += block) {
      const int steps = pair_count - p < block ? pair_count - p : block;
      const uint32_t* q = query + p * width;
      const bool first = overwrite && p == 0;
      int j = 0;
      for (; j + KEYS <= chunk.n; j += KEYS) {
        logits_tile_bf16<KEYS, VECS>(q, keys + j, 2 * p, steps, first, panel.scores + j * width);
      }
      for (; j < chunk.n; ++j) {
        logits_tile_bf16<1, VECS>(q, keys + j, 2 * p, steps, first, panel.scores + j * width);
      }
    }
  };
  part(chunk.keys, chunk.latent / 2, panel.query, true);
  if (chunk.rope) part(chunk.ropes, chunk.rope / 2, panel.query + chunk.latent / 2 * width, false);
}

template <int DIMS, int VECS>
INLINE void values_tile_bf16(const uint32_t* weights, const uint32_t* values, int pair_count,
                             Carry carry, const Vec* factor, float* out) {
  __m512 acc[DIMS][VECS];
  UNROLL for (int i = 0; i < DIMS; ++i) {
    UNROLL for (int v = 0; v < VECS; ++v) {
      acc[i][v] =
          carry == Carry::kNothing ? _mm512_setzero_ps() : (__m512)load(out + 16 * (i * VECS + v));
      if (carry == Carry::kRescale) acc[i][v] *= (__m512)factor[v];
    }
  }
  for (int p = 0; p < pair_count; ++p) {
    __m512bh w[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) w[v] = pairs(weights + 16 * (p * VECS + v));
    UNROLL for (int i = 0; i < DIMS; ++i) {
      const __m512bh x = broadcast_pair(values + 16 * p + i);
      UNROLL for (int v = 0; v < VECS; ++v) acc[i][v] = _mm512_dpbf16_ps(acc[i][v], w[v], x);
    }
  }
  UNROLL for (int i = 0; i < DIMS; ++i) {
    UNROLL for (int v = 0; v < VECS; ++v) store(out + 16 * (i * VECS + v), acc[i][v]);
  }
}

template <int VECS>
INLINE void attend_width(const Chunk<uint16_t>& chunk, const AttendPanel<uint16_t>& panel) {
  constexpr int width = 16 * VECS;
  logits_bf16<VECS>(chunk, panel);
  const int pair_count = (chunk.n + 1) / 2;
  // the weights replace the scores, pair by pair of keys: [key pair][width] of (even key, odd key)
  uint32_t* weights = reinterpret_cast<uint32_t*>(panel.scores);
  bool moved = false;
  Vec factor[VECS];
  for (int v = 0; v < VECS; ++v) {
    Vec even = {};
    auto put = [&](int pair, const Vec& odd) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
      _mm512_storeu_si512(weights + (pair * VECS + v) * 16, interleave(both));
    };
    factor[v] = softmax(chunk.n, panel, 16 * v, moved, [&](int j, const Vec& p) {
      if (j & 1) {
        put(j / 2, p);
      } else {
        even = p;
        if (j + 1 == chunk.n) put(j / 2, Vec{});
      }
    });
  }
  const Carry carry = panel.first ? Carry::kNothing : moved ? Carry::kRescale : Carry::kKeep;
  for (int d = 0; d < chunk.latent; d += 16) {
    const uint32_t* values = chunk.packed + d * pair_count;
    float* out = panel.out + d * width;
    if constexpr (VECS == 4) {
      values_tile_bf16<6, VECS>(weights, values, pair_count, carry, factor, out);
      values_tile_bf16<5, VECS>(weights, values + 6, pair_count, carry, factor, out + 6 * width);
      values_tile_bf16<5, VECS>(weights, values + 11, pair_count, carry, factor, out + 11 * width);
    } else if constexpr (VECS == 2) {
      values_tile_bf16<8, VECS>(weights, values, pair_count, carry, factor, out);
      values_tile_bf16<8, VECS>(weights, values + 8, pair_count, carry, factor, out + 8 * width);
    } else {
      values_tile_bf16<16, VECS>(weights, values, pair_count, carry, factor, out);
    }
  }
}

void attend_bf16(const Chunk<uint16_t>& chunk, const AttendPanel<uint16_t>& panel) {
  if (panel.width == 64) {
    attend_width<4>(chunk, panel);
  } else if (panel.width == 32) {
    attend_width<2>(chunk, panel);
  } else {
    attend_width<1>(chunk, panel);
  }
}

}  // namespace

const Kernels kAvx512Bf16 = {"avx512_bf16", index_f32,        attend_f32,
                             index_bf16,    pack_values_bf16, attend_bf16};

}  // namespace custom_pypto::cpu
#endif
