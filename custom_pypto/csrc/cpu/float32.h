// The float tiles of the indexer and of attention, written once for all instruction sets.
#pragma once

#include "kernels.h"
#include "tiles.h"
#include "vectors.h"

namespace custom_pypto::cpu {
namespace {

// partial[j] += weights * relu(keys[j] . rows), per lane of the first `heads` rows
template <int KEYS, int VECS>
INLINE void index_tile(const float* panel, int width, const float* weights, int heads, int dims,
                       const float* keys, int64_t stride, float* partial) {
  Vec acc[KEYS][VECS] = {};
  for (int d = 0; d < dims; ++d) {
    Vec q[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) q[v] = load(panel + d * width + v * kLanes);
    UNROLL for (int j = 0; j < KEYS; ++j) {
      const Vec k = broadcast(keys[j * stride + d]);
      UNROLL for (int v = 0; v < VECS; ++v) acc[j][v] += q[v] * k;
    }
  }
  UNROLL for (int j = 0; j < KEYS; ++j) {
    const Vec sum = load(partial + j * kLanes);
    store(partial + j * kLanes, add_heads(sum, acc[j], weights, heads));
  }
}

void index_f32(const IndexCall<float>& call) {
  alignas(64) float partial[kMaxKeys * kLanes];
  for (int i = 0; i < call.n * kLanes; ++i) partial[i] = 0.0f;
  const float* panel = call.panels;
  for (int row = 0; row < call.rows;) {
    const int width = panel_width(call.rows - row);
    each_strip(width, [&](auto vecs, int s) INLINED {
      constexpr int VECS = decltype(vecs)::value;
      index_strip<VECS>(call, row + s == 0 ? call.ahead : nullptr, [&](auto keys, int j) {
        index_tile<decltype(keys)::value, VECS>(
            panel + s, width, call.weights + row + s, call.heads - row - s, call.dims,
            call.keys + j * call.key_stride, call.key_stride, partial + j * kLanes);
      });
    });
    panel += static_cast<int64_t>(width) * call.dims;
    row += width;
  }
  reduce_lanes(partial, call.n, call.scores);
}

// scores[j] (+)= rows . keys[j] over the dims [d0, d0 + dims)
template <int KEYS, int VECS>
INLINE void logits_tile(const float* query, int width, const float* const* keys, int d0, int dims,
                        bool first, float* scores) {
  Vec acc[KEYS][VECS];
  UNROLL for (int j = 0; j < KEYS; ++j) {
    UNROLL for (int v = 0; v < VECS; ++v) {
      acc[j][v] = first ? Vec{} : load(scores + j * width + v * kLanes);
    }
  }
  const float* key[KEYS];
  UNROLL for (int j = 0; j < KEYS; ++j) key[j] = keys[j] + d0;
  for (int d = 0; d < dims; ++d) {
    Vec q[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) q[v] = load(query + d * width + v * kLanes);
    UNROLL for (int j = 0; j < KEYS; ++j) {
      const Vec k = broadcast(key[j][d]);
      UNROLL for (int v = 0; v < VECS; ++v) acc[j][v] += q[v] * k;
    }
  }
  UNROLL for (int j = 0; j < KEYS; ++j) {
    UNROLL for (int v = 0; v < VECS; ++v) store(scores + j * width + v * kLanes, acc[j][v]);
  }
}

// scores = query . keys, in blocks of dims whose part of the panel fits in the level-1 cache
template <int VECS>
INLINE void logits(const Chunk<float>& chunk, const AttendPanel<float>& panel, int strip,
                   float* scores) {
  const int width = panel.width;
  const int block = 16384 / (4 * VECS * kLanes);
  auto part = [&](const float* const* keys, int dims, const float* query, bool overwrite) {
    for (int d = 0; d < dims; d += block) {
      const int len = dims - d < block ? dims - d : block;
      const float* q = query + d * width + strip;
      const bool first = overwrite && d == 0;
      each_tile<kTileKeys<VECS>>(chunk.n, [&](auto count, int j) {
        logits_tile<decltype(count)::value, VECS>(q, width, keys + j, d, len, first,
                                                  scores + j * width + strip);
      });
    }
  };
  part(chunk.keys, chunk.latent, panel.query, true);
  if (chunk.rope) part(chunk.ropes, chunk.rope, panel.query + chunk.latent * width, false);
}

template <int DIMS, int VECS>
INLINE void values_tile(const float* weights, int width, const float* const* values, int n, int d,
                        Carry carry, const Vec* factor, float* out) {
  Vec acc[DIMS][VECS];
  UNROLL for (int i = 0; i < DIMS; ++i) {
    UNROLL for (int v = 0; v < VECS; ++v) {
      acc[i][v] = carry == Carry::kNothing ? Vec{} : load(out + i * width + v * kLanes);
      if (carry == Carry::kRescale) acc[i][v] *= factor[v];
    }
  }
  for (int j = 0; j < n; ++j) {
    Vec p[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) p[v] = load(weights + j * width + v * kLanes);
    UNROLL for (int i = 0; i < DIMS; ++i) {
      const Vec x = broadcast(values[j][d + i]);
      UNROLL for (int v = 0; v < VECS; ++v) acc[i][v] += p[v] * x;
    }
  }
  UNROLL for (int i = 0; i < DIMS; ++i) {
    UNROLL for (int v = 0; v < VECS; ++v) store(out + i * width + v * kLanes, acc[i][v]);
  }
}

template <int VECS>
INLINE void attend_strip(const Chunk<float>& chunk, const AttendPanel<float>& panel, int strip,
                         float* scores) {
  const int width = panel.width;
  logits<VECS>(chunk, panel, strip, scores);
  bool moved = false;
  Vec factor[VECS];
  for (int v = 0; v < VECS; ++v) {
    const int lane = strip + v * kLanes;
    factor[v] = softmax(chunk.n, panel, scores, lane, moved,
                        [&](int j, const Vec& p) { store(scores + j * width + lane, p); });
  }
  const Carry carry = panel.first ? Carry::kNothing : moved ? Carry::kRescale : Carry::kKeep;
  constexpr int DIMS = VECTOR_BYTES < 64 || VECS == 4 ? 4 : 8;  // divides latent
  for (int d = 0; d < chunk.latent; d += DIMS) {
    values_tile<DIMS, VECS>(scores + strip, width, chunk.values, chunk.n, d, carry, factor,
                            panel.out + d * width + strip);
  }
}

void attend_f32(const Chunk<float>& chunk, const AttendPanel<float>* panels, int count,
                const AttendScratch& scratch) {
  for (int p = 0; p < count; ++p) {
    each_strip(panels[p].width, [&](auto vecs, int strip) INLINED {
      attend_strip<decltype(vecs)::value>(chunk, panels[p], strip, scratch.scores);
    });
  }
}

// to the nearest bfloat16, ties to even
INLINE Vec to_bfloat16(const Vec& x) {
  const IntVec bits = (IntVec)x;
  const Vec rounded = (Vec)((bits + 0x7FFF + (bits >> 16 & 1)) & ~0xFFFF);
  return x == x ? rounded : x;
}

// to the nearest float16, ties to even
INLINE Vec to_float16(const Vec& x) {
  const IntVec bits = (IntVec)x;
  const Vec infinity = broadcast(INFINITY);
  Vec rounded = (Vec)((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF);
  rounded = x >= 65520.0f ? infinity : x <= -65520.0f ? -infinity : rounded;
  // the spacing of floats at 0.75 is that of subnormal float16
  const Vec subnormal = (x + 0.75f) - 0.75f;
  rounded = x > -0x1p-14f ? x < 0x1p-14f ? subnormal : rounded : rounded;
  return x == x ? rounded : x;
}

template <Rounding ROUNDING>
INLINE void dequantize_to(const int8_t* from, float scale, int n, float* to) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));
  for (int i = 0; i < n; i += kLanes) {
    const Bytes bytes = *reinterpret_cast<const Bytes*>(from + i);
    const IntVec integers = __builtin_convertvector(bytes, IntVec);
    const Vec x = __builtin_convertvector(integers, Vec) * scale;
    store(to + i, ROUNDING == Rounding::kBfloat16 ? to_bfloat16(x) : to_float16(x));
  }
}

void dequantize_f32(const int8_t* from, float scale, int n, Rounding rounding, float* to) {
  rounding == Rounding::kBfloat16 ? dequantize_to<Rounding::kBfloat16>(from, scale, n, to)
                                  : dequantize_to<Rounding::kFloat16>(from, scale, n, to);
}

}  // namespace
}  // namespace custom_pypto::cpu
