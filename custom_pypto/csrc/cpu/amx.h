// bfloat16 with the tile registers of AMX. The loops of amx.cpp, and of amx_emulated.cpp, which
// defines EMULATED_TILES; TILE_KERNELS is the name of the set. docs/cpu_kernels.md
#include "kernels.h"
#if defined(CUSTOM_PYPTO_AMX)
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx2,fma,prefer-vector-width=512")
// gcc 12 warns about the deliberately undefined operands inside its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#define VECTOR_BYTES 64
#include <algorithm>
#include <cstring>

#include "ahead.h"
#include "avx512_bf16.h"
#include "tile_int8.h"
#include "tile_products.h"
#include "tile_weights.h"
#include "tiles.h"

namespace custom_pypto::cpu {
namespace {

// ---- lightning indexer -----------------------------------------------------------------------

// Elements of a row of a tile of keys, and what a tile of products holds.
template <typename E>
struct Keys {
  static constexpr int kElements = 64 / sizeof(E);
  using Product = std::conditional_t<std::is_same_v<E, int8_t>, int32_t, float>;
};

template <typename E, int C, int A, int B>
INLINE void dot_keys() {
  if constexpr (std::is_same_v<E, int8_t>) {
    tile::dot_int8<C, A, B>();
  } else {
    tile::dot<C, A, B>();
  }
}

// max(0, x) as floats
INLINE __m512 relu(const float* x) {
  // max returns its second operand if either is NaN: NaN is kept
  return _mm512_max_ps(_mm512_setzero_ps(), load(x));
}
INLINE __m512 relu(const int32_t* x) {
  return _mm512_cvtepi32_ps(_mm512_max_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(x)));
}

// Products of 16 keys and 16 rows of a panel, in tile C. Keys of up to four tiles stay in the tiles
// 4 to 7 for all rows.
template <typename E, int C>
INLINE void multiply_keys(const E* keys, int64_t stride, const uint32_t* rows, int width,
                          int steps) {
  tile::zero<C>();
  for (int s = 0; s < steps; s += 4) {
    each<4>([&](auto i) INLINED {
      constexpr int A = 4 + decltype(i)::value, B = 2 + decltype(i)::value % 2;
      if (s + i >= steps) return;
      if (steps > 4) tile::load<A>(keys + Keys<E>::kElements * (s + i), sizeof(E) * stride);
      tile::load<B>(rows + 16 * (s + i) * width, 4 * width);
      dot_keys<E, C, A, B>();
    });
  }
}

// Adds a panel, which begins at `row`, to the 16 partial sums of each key; after the last panel,
// adds these up to scores. `rest` is a copy of the last keys, padded to 16. The vector instructions
// for a tile of products stand between the dots of later tiles, which run at the same time.
template <int VECS, typename E>
INLINE void index_panel(const IndexCall<E>& call, const uint32_t* panel, int row, const E* rest,
                        float* partial, float* scores) {
  constexpr int kWidth = 16 * VECS, kShare = 16 / VECS;  // keys between two tiles
  const int steps = call.dims / Keys<E>::kElements, blocks = (call.n + 15) / 16;
  const bool last = row + kWidth == call.rows;
  // of a block of 16 keys and of the one before
  alignas(64) typename Keys<E>::Product products[2][VECS][16][16];
  __m512 weights[VECS];
  __mmask16 heads[VECS];  // masks padding rows: 0 times an infinite key is NaN
  UNROLL for (int v = 0; v < VECS; ++v) {
    weights[v] = load(call.weights + row + 16 * v);
    heads[v] = first_lanes(call.heads - row - 16 * v);
  }
  const auto reduce = [&](int block, int begin, int end) INLINED {
    float* to = partial + 256 * block;
    UNROLL for (int j = begin; j < end; ++j) {
      __m512 sum = row == 0 ? _mm512_setzero_ps() : (__m512)load(to + 16 * j);
      UNROLL for (int v = 0; v < VECS; ++v) {
        sum = _mm512_mask3_fmadd_ps(weights[v], relu(products[block & 1][v][j]), sum, heads[v]);
      }
      store(to + 16 * j, sum);
    }
    if (last && end == 16) store(scores + 16 * block, reduce16(to));
  };
  for (int b = 0; b < blocks; ++b) {
    const bool whole = 16 * b + 16 <= call.n;
    const E* keys = whole ? call.keys + 16 * b * call.key_stride : rest;
    const int64_t stride = whole ? call.key_stride : call.dims;
    each<4>([&](auto i) INLINED {
      if (i < steps && steps <= 4) {
        tile::load<4 + decltype(i)::value>(keys + Keys<E>::kElements * i, sizeof(E) * stride);
      }
    });
    const E* ahead = row == 0 && call.ahead ? call.ahead + 16 * b * call.ahead_stride : nullptr;
    each<VECS>([&](auto v) INLINED {
      constexpr int C = decltype(v)::value % 2;
      for (int j = kShare * v; ahead && j < kShare * (v + 1); ++j) {
        fetch(ahead + j * call.ahead_stride, call.dims);
      }
      multiply_keys<E, C>(keys, stride, panel + 16 * v, kWidth, steps);
      if (b > 0) reduce(b - 1, kShare * v, kShare * (v + 1));
      tile::store<C>(products[b & 1][v], 64);
    });
  }
  reduce(blocks - 1, 0, 16);
}

// Keys are read where the cache holds them.
template <typename E>
void index_amx(const IndexCall<E>& call) {
  alignas(64) float partial[kMaxKeys * 16], scores[kMaxKeys];
  alignas(64) E rest[16 * kMostTiledIndexDims];
  const int whole = call.n / 16 * 16, bytes = static_cast<int>(sizeof(E)) * call.dims;
  if (whole < call.n) std::memset(rest, 0, 16 * bytes);
  for (int j = whole; j < call.n; ++j) {
    std::memcpy(rest + (j - whole) * call.dims, call.keys + j * call.key_stride, bytes);
  }
  const uint32_t* panel = call.panels;
  for (int row = 0; row < call.rows;) {
    const int width = panel_width(call.rows - row);
    each_strip(width, [&](auto vecs, int) INLINED {
      index_panel<decltype(vecs)::value>(call, panel, row, rest, partial, scores);
    });
    panel += static_cast<int64_t>(width) * (bytes / 4);
    row += width;
  }
  std::memcpy(call.scores, scores, sizeof(float) * call.n);
}

// ---- sparse attention ------------------------------------------------------------------------

// A power of two as distance would put the lines of a tile into few sets of the cache.
constexpr int kWeightsStride = kMaxKeys + kStep;  // elements, from row to row
constexpr int kGroup = (kMaxKeys / 2 + 1) * 16;   // packed pairs of 16 dims

constexpr int padded(int keys) { return (keys + kStep - 1) / kStep * kStep; }

// Copies the rows of kStagedKeys keys, which then are A operands, and interleaves their values,
// which then are B operands: [group of 16 dims][key pair][dim]. Missing keys become zeros.
void stage(const Chunk<uint16_t>& chunk, int first, const AttendScratch& scratch) {
  const int dims = chunk.latent + chunk.rope;
  const auto row = [&](const uint16_t* const* rows, int j)
                       INLINED { return j < chunk.n ? rows[j] : nullptr; };
  const auto part = [&](const uint16_t* row, int d) INLINED {
    return row ? _mm512_loadu_si512(row + d) : _mm512_setzero_si512();
  };
  for (int j = first; j < first + kStagedKeys; j += 2) {
    const uint16_t *key = row(chunk.keys, j), *key1 = row(chunk.keys, j + 1);
    const uint16_t *value = row(chunk.values, j), *value1 = row(chunk.values, j + 1);
    uint16_t *to = scratch.staged + (j - first) * dims, *to1 = to + dims;
    uint32_t* pairs = scratch.packed + j / 2 * 16;
    for (int d = 0; d < chunk.latent; d += kStep, pairs += 2 * kGroup) {
      __m512i even = part(key, d), odd = part(key1, d);
      _mm512_storeu_si512(to + d, even);
      _mm512_storeu_si512(to1 + d, odd);
      if (value != key) even = part(value, d), odd = part(value1, d);
      _mm512_storeu_si512(pairs, zip_low(even, odd));
      _mm512_storeu_si512(pairs + kGroup, zip_high(even, odd));
    }
    for (int d = 0; d < chunk.rope; d += kStep) {
      _mm512_storeu_si512(to + chunk.latent + d, part(row(chunk.ropes, j), d));
      _mm512_storeu_si512(to1 + chunk.latent + d, part(row(chunk.ropes, j + 1), d));
    }
  }
}

// scores[key][row] of the staged keys and one panel
template <int VECS>
INLINE void staged_logits(const uint16_t* staged, int dims, const uint32_t* query, Ahead& ahead,
                          float* scores) {
  constexpr int AT = kStagedKeys / 16, BT = VECS == 1 ? 1 : 2, kWidth = 16 * VECS;
  for (int v = 0; v < VECS; v += BT) {
    each<AT * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
    for (int d = 0; d < dims; d += kStep) {
      add_products<AT, BT>(staged + d, 2 * dims, 32 * dims, query + d / 2 * kWidth + 16 * v,
                           4 * kWidth, 64);
      ahead.step();
    }
    store_sums<AT, BT>(scores + 16 * v, 4 * kWidth, 64 * kWidth, 64);
  }
}

// Softmax weights of 16 rows, as A operand [row][key]; rescales the earlier sums of these rows.
template <int VECS>
INLINE void softmax_rows(const Chunk<uint16_t>& chunk, const AttendPanel<uint16_t>& panel, int v,
                         const float* scores, Ahead& ahead, uint16_t* weights) {
  alignas(64) __m512i pairs[16] = {};  // [pair of keys][row]
  Vec even = {};
  const auto put = [&](int pair, const Vec& odd) INLINED {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    pairs[pair % 16] = interleave(both);
    ahead.step();
    if (pair % 16 < 15 && 2 * pair + 2 < chunk.n) return;
    transpose16(pairs);
    uint16_t* to = weights + pair / 16 * kStep;
    UNROLL for (int i = 0; i < 16; ++i) {
      _mm512_storeu_si512(to + i * kWeightsStride, pairs[i]);
      pairs[i] = _mm512_setzero_si512();
    }
  };
  bool moved = false;
  const Vec factor = softmax(chunk.n, panel, scores, 16 * v, moved, [&](int j, const Vec& p) {
    if (j & 1) {
      put(j / 2, p);
    } else {
      even = p;
      if (j + 1 == chunk.n) put(j / 2, Vec{});
    }
  });
  if (panel.first || !moved) return;
  for (int i = 0; i < 16; ++i) {
    if (factor[i] == 1.0f) continue;
    float* sums = panel.out + 16 * (16 * v + i);
    for (int d = 0; d < chunk.latent; d += 16) {
      store(sums + d * panel.width, load(sums + d * panel.width) * factor[i]);
    }
  }
}

// sums[group of 16 dims][row][dim] += weights times values
template <int VECS>
INLINE void add_values(const Chunk<uint16_t>& chunk, const AttendPanel<uint16_t>& panel,
                       const uint16_t* weights, const uint32_t* packed, Ahead& ahead) {
  constexpr int AT = VECS == 1 ? 1 : 2, BT = 4 / AT, kWidth = 16 * VECS;
  constexpr int64_t kLine = 64, kDown = 16 * kLine, kRight = kWidth * kLine;
  for (int d = 0; d < chunk.latent; d += 16 * BT) {
    for (int v = 0; v < VECS; v += AT) {
      float* sums = panel.out + d * kWidth + 256 * v;
      if (panel.first) {
        each<AT * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
      } else {
        load_sums<AT, BT>(sums, kLine, kDown, kRight);
      }
      for (int j = 0; j < chunk.n; j += kStep) {
        add_products<AT, BT>(weights + 16 * v * kWeightsStride + j, 2 * kWeightsStride,
                             32 * kWeightsStride, packed + d / 16 * kGroup + j / 2 * 16, kLine,
                             4 * kGroup);
        ahead.step();
      }
      store_sums<AT, BT>(sums, kLine, kDown, kRight);
    }
  }
}

// How often attend_amx calls Ahead::step.
int steps_of(const Chunk<uint16_t>& chunk, const AttendPanel<uint16_t>* panels, int count) {
  const int dims = chunk.latent + chunk.rope, blocks = padded(chunk.n) / kStep;
  int steps = 0;
  for (int p = 0; p < count; ++p) {
    const int vecs = panels[p].width / 16;
    steps += blocks * (vecs + 1) / 2 * dims / kStep;   // logits
    steps += vecs * (chunk.n + 1) / 2;                 // softmax
    steps += blocks * vecs * chunk.latent / (16 * 4);  // values
  }
  return steps;
}

// Each 32 keys are copied and multiplied by all panels at once, while the copy is in the level-1
// cache.
void attend_amx(const Chunk<uint16_t>& chunk, const AttendPanel<uint16_t>* panels, int count,
                const AttendScratch& scratch) {
  alignas(64) uint16_t weights[kMaxWidth * kWeightsStride];
  Ahead ahead(chunk.next, steps_of(chunk, panels, count));
  for (int j = 0; j < chunk.n; j += kStagedKeys) {
    stage(chunk, j, scratch);
    float* scores = scratch.scores;
    for (int p = 0; p < count; ++p) {
      const int width = panels[p].width;
      each_strip(width, [&](auto vecs, int) INLINED {
        staged_logits<decltype(vecs)::value>(scratch.staged, chunk.latent + chunk.rope,
                                             panels[p].query, ahead, scores + j * width);
      });
      scores += kMaxKeys * width;
    }
  }
  const float* scores = scratch.scores;
  for (int p = 0; p < count; ++p) {
    each_strip(panels[p].width, [&](auto vecs, int) INLINED {
      constexpr int VECS = decltype(vecs)::value;
      for (int v = 0; v < VECS; ++v) {
        softmax_rows<VECS>(chunk, panels[p], v, scores, ahead, weights + 16 * v * kWeightsStride);
      }
      add_values<VECS>(chunk, panels[p], weights, scratch.packed, ahead);
    });
    scores += kMaxKeys * panels[p].width;
  }
}

void add_sums_amx(const float* from, int width, const float* factors, float* to) {
  for (int r = 0; r < width; ++r) {
    store(to + 16 * r, load(to + 16 * r) + load(from + 16 * r) * factors[r]);
  }
}

void finish_amx(const float* sums, int width, int count, int dims, const float* factors,
                uint16_t* rows, int64_t stride) {
  for (int d = 0; d < dims; d += 32) {
    for (int r = 0; r < count; ++r) {
      const __m512 low = (__m512)(load(sums + d * width + 16 * r) * factors[r]);
      const __m512 high = (__m512)(load(sums + (d + 16) * width + 16 * r) * factors[r]);
      _mm512_storeu_si512(rows + r * stride + d, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

}  // namespace

const Bf16Kernels TILE_KERNELS = {.pack_panel = pack_panel_bf16,
                                  .index = index_amx<uint16_t>,
                                  .index_int8 = index_amx<int8_t>,
                                  .attend = attend_amx,
                                  .add_sums = add_sums_amx,
                                  .finish = finish_amx,
                                  .dequantize = dequantize_bf16,
                                  .pack_row_pairs = pack_row_pairs_bf16,
                                  .multiply = multiply_amx,
                                  .multiply_to_rows = multiply_to_rows_amx,
                                  .logit_gradients = logit_gradients_bf16,
                                  .softmax_rows = softmax_rows_bf16,
                                  .relu_masks = relu_masks_bf16,
                                  .gradients_by_key = gradients_by_key_bf16,
                                  .gradients_by_head = gradients_by_head_bf16,
                                  .narrow = narrow_bf16,
                                  .widen = kWidenBf16,
                                  .stored = kStoredTiles,
                                  .arrange_few = arrange_few,
                                  .sum_groups = sum_groups_amx,
                                  .enter = tile::enter,
                                  .leave = tile::leave};
const Int8Products TILE_INT8 = {.round_panel = round_panel,
                                .unit = 64,
                                .most_quads = 1,
                                .multiply = {nullptr, multiply_int8_amx}};

}  // namespace custom_pypto::cpu
#endif
