// bfloat16 with vdpbf16ps: acc[lane] += a[lane][0] * b[lane][0] + a[lane][1] * b[lane][1]. A lane
// of a is a query row: two of its dims (logits) or its weights for two keys (values). b is one
// broadcast pair.
#include "kernels.h"
#if defined(CUSTOM_PYPTO_AVX512_BF16)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,prefer-vector-width=512")
// gcc 12 warns about the deliberately undefined operands inside its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#define VECTOR_BYTES 64
#include <cstring>

#include "avx512_bf16.h"
#include "tiles.h"

namespace custom_pypto::cpu {
namespace {

INLINE __m512bh pairs(const uint32_t* p) { return (__m512bh)_mm512_loadu_si512(p); }

INLINE __m512bh broadcast_pair(const void* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return (__m512bh)_mm512_set1_epi32(pair);
}

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
  __mmask16 counts[VECS];  // masks padding rows: 0 times an infinite key is NaN
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
  index_panels(call, call.dims / 2,
               [&](auto keys, auto vecs, const uint32_t* panel, int row, int j, float* partial)
                   INLINED {
                     index_tile_bf16<decltype(keys)::value, decltype(vecs)::value>(
                         panel, call.weights + row, call.heads - row, call.dims,
                         call.keys + j * call.key_stride, call.key_stride, partial);
                   });
}

// packed[group of 16 dims][key pair][dim] = (value of the even key, value of the odd key); an odd
// last key is paired with zeros
void pack_values(const Chunk<uint16_t>& chunk, uint32_t* packed) {
  const int pair_count = (chunk.n + 1) / 2;
  // the outer loop is over groups: the pairs of a group are consecutive, whereas the groups of a
  // pair are 4 KiB apart and would map to one cache set
  for (int d = 0; d < chunk.latent; d += 32) {
    const __mmask32 whole = chunk.latent - d < 32 ? 0xFFFF : 0xFFFFFFFF;
    uint32_t* low = packed + d / 16 * pair_count * 16;
    uint32_t* high = low + pair_count * 16;
    for (int p = 0; p < pair_count; ++p) {
      const __m512i even = _mm512_maskz_loadu_epi16(whole, chunk.values[2 * p] + d);
      const __m512i odd = 2 * p + 1 < chunk.n
                              ? _mm512_maskz_loadu_epi16(whole, chunk.values[2 * p + 1] + d)
                              : _mm512_setzero_si512();
      _mm512_storeu_si512(low + 16 * p, zip_low(even, odd));
      if (whole == 0xFFFFFFFF) _mm512_storeu_si512(high + 16 * p, zip_high(even, odd));
    }
  }
}

// Keys of a tile of logits. One vector of heads leaves registers for two sums per key, one of even
// pairs and one of odd pairs; the address registers suffice for twelve keys.
template <int VECS>
constexpr int kLogitKeys = VECS == 1 ? 12 : kTileKeys<VECS>;

template <int KEYS, int VECS>
INLINE void logits_tile_bf16(const uint32_t* query, const uint16_t* const* keys,
                             const uint16_t* const* ahead, int ahead_keys, int d0, int steps,
                             bool first, float* scores) {
  constexpr int SUMS = VECS == 1 ? 2 : 1;
  __m512 acc[SUMS][KEYS][VECS];
  UNROLL for (int j = 0; j < KEYS; ++j) {
    UNROLL for (int v = 0; v < VECS; ++v) {
      acc[0][j][v] = first ? _mm512_setzero_ps() : (__m512)load(scores + 16 * (j * VECS + v));
      UNROLL for (int s = 1; s < SUMS; ++s) acc[s][j][v] = _mm512_setzero_ps();
    }
  }
  const uint16_t* key[KEYS];
  UNROLL for (int j = 0; j < KEYS; ++j) key[j] = keys[j] + d0;
  constexpr int kLine = 16;  // pairs
  for (int line = 0; line < steps; line += kLine) {
    // prefetch one line of each row ahead per line of the current rows
    for (int j = 0; j < ahead_keys; ++j) __builtin_prefetch(ahead[j] + d0 + 2 * line, 0, 3);
    const int end = steps - line < kLine ? steps : line + kLine;
    for (int p = line; p < end; p += SUMS) {
      UNROLL for (int s = 0; s < SUMS; ++s) {
        __m512bh q[VECS];
        UNROLL for (int v = 0; v < VECS; ++v) q[v] = pairs(query + 16 * ((p + s) * VECS + v));
        UNROLL for (int j = 0; j < KEYS; ++j) {
          const __m512bh k = broadcast_pair(key[j] + 2 * (p + s));
          UNROLL for (int v = 0; v < VECS; ++v) {
            acc[s][j][v] = _mm512_dpbf16_ps(acc[s][j][v], q[v], k);
          }
        }
      }
    }
  }
  UNROLL for (int j = 0; j < KEYS; ++j) {
    UNROLL for (int v = 0; v < VECS; ++v) {
      __m512 sum = acc[0][j][v];
      UNROLL for (int s = 1; s < SUMS; ++s) sum += acc[s][j][v];
      store(scores + 16 * (j * VECS + v), sum);
    }
  }
}

template <int VECS>
INLINE void logits_bf16(const Chunk<uint16_t>& chunk, const AttendPanel<uint16_t>& panel,
                        const Chunk<uint16_t>* next, float* scores) {
  constexpr int width = 16 * VECS;
  // prefetch twelve rows at a time: memory serves interleaved rows sooner than row after row
  constexpr int kFetchTiles = 12 / kLogitKeys<VECS>;
  constexpr int block = 24576 / (4 * width);  // pairs of dims in 24 KiB of the panel
  auto part = [&](const uint16_t* const* keys, const uint16_t* const* ahead, int ahead_keys,
                  int ahead_dims, int pair_count, const uint32_t* query, bool overwrite) {
    for (int p = 0; p < pair_count; p += block) {
      if (2 * p >= ahead_dims) ahead_keys = 0;
      const int steps = pair_count - p < block ? pair_count - p : block;
      const uint32_t* q = query + p * width;
      const bool first = overwrite && p == 0;
      int fetched = 0;
      each_tile<kLogitKeys<VECS>>(chunk.n, [&](auto count, int j) {
        const int begin = fetched, end = j + kFetchTiles * count;
        if (fetched <= j) fetched = end < ahead_keys ? end : ahead_keys;
        logits_tile_bf16<decltype(count)::value, VECS>(q, keys + j, ahead + begin, fetched - begin,
                                                       2 * p, steps, first, scores + j * width);
      });
    }
  };
  const Chunk<uint16_t>& ahead = next ? *next : chunk;
  const int ahead_keys = next ? next->n : 0;
  part(chunk.keys, ahead.keys, ahead_keys, ahead.latent, chunk.latent / 2, panel.query, true);
  if (chunk.rope) {
    part(chunk.ropes, ahead.ropes, ahead_keys, ahead.rope, chunk.rope / 2,
         panel.query + chunk.latent / 2 * width, false);
  }
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
  for (int p = 0; p < pair_count; ++p, weights += 16 * VECS, values += 16) {
    __m512bh w[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) w[v] = pairs(weights + 16 * v);
    UNROLL for (int i = 0; i < DIMS; ++i) {
      const __m512bh x = broadcast_pair(values + i);
      UNROLL for (int v = 0; v < VECS; ++v) acc[i][v] = _mm512_dpbf16_ps(acc[i][v], w[v], x);
    }
  }
  UNROLL for (int i = 0; i < DIMS; ++i) {
    UNROLL for (int v = 0; v < VECS; ++v) store(out + 16 * (i * VECS + v), acc[i][v]);
  }
}

template <int VECS>
INLINE void attend_width(const Chunk<uint16_t>& chunk, const AttendPanel<uint16_t>& panel,
                         const Chunk<uint16_t>* next, const AttendScratch& scratch) {
  constexpr int width = 16 * VECS;
  logits_bf16<VECS>(chunk, panel, next, scratch.scores);
  const int pair_count = (chunk.n + 1) / 2;
  // the weights overwrite the scores, as [key pair][width] of (even key, odd key)
  uint32_t* weights = reinterpret_cast<uint32_t*>(scratch.scores);
  bool moved = false;
  Vec factor[VECS];
  for (int v = 0; v < VECS; ++v) {
    Vec even = {};
    auto put = [&](int pair, const Vec& odd) {
      const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
      _mm512_storeu_si512(weights + (pair * VECS + v) * 16, interleave(both));
    };
    factor[v] = softmax(chunk.n, panel, scratch.scores, 16 * v, moved, [&](int j, const Vec& p) {
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
    const uint32_t* values = scratch.packed + d * pair_count;
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

void finish_bf16(const float* sums, int width, int count, int dims, const float* factors,
                 uint16_t* rows, int64_t stride) {
  for (int r = 0; r < count; r += 16) {
    const __m512 factor = load(factors + r);
    for (int d = 0; d < dims; d += 16) {
      __m512i x[16];
      UNROLL for (int i = 0; i < 16; ++i) {
        x[i] = (__m512i)((__m512)load(sums + (d + i) * width + r) * factor);
      }
      transpose16(x);
      for (int i = 0; i < 16 && r + i < count; ++i) {
        const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x[i]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + (r + i) * stride + d),
                            (__m256i)narrow);
      }
    }
  }
}

void attend_bf16(const Chunk<uint16_t>& chunk, const AttendPanel<uint16_t>* panels, int count,
                 const AttendScratch& scratch) {
  pack_values(chunk, scratch.packed);
  for (int p = 0; p < count; ++p) {
    const Chunk<uint16_t>* next = p == 0 ? chunk.next : nullptr;  // prefetched once
    each_strip(panels[p].width, [&](auto vecs, int) {
      attend_width<decltype(vecs)::value>(chunk, panels[p], next, scratch);
    });
  }
}

// the sums are [dim][row]
void add_sums_bf16(const float* from, int width, const float* factors, float* to) {
  for (int i = 0; i < 16; ++i) {
    for (int r = 0; r < width; r += 16) {
      const int at = i * width + r;
      store(to + at, load(to + at) + load(from + at) * load(factors + r));
    }
  }
}

// out(i): row i of the results; `adds`: whether these hold something
template <int ROWS, int VECS, typename Out>
INLINE void product_tile_bf16(const PairProduct& p, const Out& out, bool adds, int i, int column,
                              int first, int end) {
  __m512 acc[ROWS][VECS];
  const uint16_t* a[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    a[r] = p.a + (i + r) * p.a_stride;
    __builtin_prefetch(out(i + r) + column, 1);  // rows may be anywhere
    UNROLL for (int v = 0; v < VECS; ++v) acc[r][v] = _mm512_setzero_ps();
  }
  const uint32_t* columns = p.b + column / 16 * p.b_stride;
  for (int k = first; k < end; ++k) {
    __m512bh b[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) b[v] = pairs(columns + v * p.b_stride + 16 * k);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const __m512bh x = broadcast_pair(a[r] + 2 * k);
      UNROLL for (int v = 0; v < VECS; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], b[v], x);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float* to = out(i + r) + column;
    UNROLL for (int v = 0; v < VECS; ++v) {
      const Vec sum = acc[r][v];
      store(to + 16 * v, adds ? load(to + 16 * v) + sum : sum);
    }
  }
}

// Rows of a tile of a product. A set of the level-1 cache has eight lines, and rows may all fall in
// one.
template <int VECS>
constexpr int kProductRows = VECS == 4 ? 6 : 8;

// A strip of b stays in the level-1 cache while all rows pass.
template <int VECS, typename Out>
INLINE void product_strip_bf16(const PairProduct& p, const Out& out, bool adds, int column) {
  constexpr int kPairs = 24576 / (64 * VECS);
  for (int first = 0; first < p.depth / 2; first += kPairs) {
    const int end = p.depth / 2 - first < kPairs ? p.depth / 2 : first + kPairs;
    each_tile<kProductRows<VECS>>(p.n, [&](auto rows, int i) INLINED {
      product_tile_bf16<decltype(rows)::value, VECS>(p, out, adds || first, i, column, first, end);
    });
  }
}

// Strips of 64 columns, then of 48, 32 or 16; a last strip of 16 would keep few sums.
template <typename Out>
INLINE void product_bf16(const PairProduct& p, const Out& out, bool adds) {
  int column = 0;
  const auto strip = [&](auto vecs) INLINED {
    product_strip_bf16<decltype(vecs)::value>(p, out, adds, column);
    column += 16 * vecs;
  };
  while (p.width - column >= 64 && p.width - column != 80) strip(std::integral_constant<int, 4>());
  if (p.width - column >= 48) strip(std::integral_constant<int, 3>());
  if (p.width - column >= 32) strip(std::integral_constant<int, 2>());
  if (p.width - column >= 16) strip(std::integral_constant<int, 1>());
}

void multiply_bf16(const PairProduct& p, float* out, int64_t stride, bool first) {
  product_bf16(p, [&](int i) INLINED { return out + i * stride; }, !first);
}

void multiply_to_rows_bf16(const PairProduct& p, float* const* out) {
  product_bf16(p, [&](int i) INLINED { return out[i]; }, true);
}

}  // namespace

const Bf16Kernels kAvx512Bf16 = {.pack_panel = pack_panel_bf16,
                                 .index = index_bf16,
                                 .attend = attend_bf16,
                                 .add_sums = add_sums_bf16,
                                 .finish = finish_bf16,
                                 .dequantize = dequantize_bf16,
                                 .pack_row_pairs = pack_row_pairs_bf16,
                                 .multiply = multiply_bf16,
                                 .multiply_to_rows = multiply_to_rows_bf16,
                                 .logit_gradients = logit_gradients_bf16,
                                 .softmax_rows = softmax_rows_bf16,
                                 .relu_masks = relu_masks_bf16,
                                 .gradients_by_key = gradients_by_key_bf16,
                                 .gradients_by_head = gradients_by_head_bf16,
                                 .narrow = narrow_bf16,
                                 .widen = kWidenBf16};

}  // namespace custom_pypto::cpu
#endif
