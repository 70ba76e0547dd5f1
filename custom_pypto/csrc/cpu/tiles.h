// The float tiles of the indexer and of attention, written once for all instruction sets.
#pragma once

#include <cmath>

#include "kernels.h"
#include "vectors.h"

namespace custom_pypto::cpu {
namespace {

// Registers of a tile: KEYS x VECS accumulators + VECS row vectors + 1 broadcast. The 32 registers
// of 64 bytes hold 24 + 4 + 1, the 16 of 32 bytes 12 + 2 + 1. aarch64 has 32 of 16 bytes and
// multiplies by one lane of a register, which holds four dims of a key: 20 + 4 + 5.
#if defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = VECTOR_BYTES == 64 ? 32 : 16;
#endif
constexpr int kStripVecs = kRegisters == 32 ? 4 : 2;
constexpr int kStrip = kStripVecs * kLanes;  // rows of the widest tile
template <int VECS>
constexpr int kTileKeys = kRegisters == 16     ? 6
                          : VECTOR_BYTES == 16 ? 5
                          : VECS == 4          ? 6
                          : VECS == 2          ? 12
                                               : 16;

// 2^x for x <= 0, relative error below 2^-22; exactly 0 below -126, NaN stays NaN
INLINE Vec exp2(const Vec& x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec clamped = x < -126.0f ? broadcast(-126.0f) : x;
  const Vec shifted = clamped + magic;
  const Vec f = clamped - (shifted - magic);  // in [-0.5, 0.5]
  Vec p = broadcast(1.53533679e-4f);
  p = p * f + 1.33988744e-3f;
  p = p * f + 9.61843736e-3f;
  p = p * f + 5.55033252e-2f;
  p = p * f + 2.40226433e-1f;
  p = p * f + 6.93147182e-1f;
  p = p * f + 1.0f;
  const IntVec exponent = (IntVec)shifted << 23;
  const Vec result = (Vec)((IntVec)p + exponent);
  const Vec normal = x < -126.0f ? Vec{} : result;
  return x == x ? normal : x;
}

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
    Vec sum = load(partial + j * kLanes);
    UNROLL for (int v = 0; v < VECS; ++v) {
      // the comparison is false for NaN: NaN is kept, so that corruption stays visible
      const Vec relu = acc[j][v] < 0.0f ? Vec{} : acc[j][v];
      const Vec term = load(weights + v * kLanes) * relu;
      // mask padding rows: 0 times an infinite key is NaN
      sum += heads >= VECS * kLanes ? term : lane_index() < heads - v * kLanes ? term : Vec{};
    }
    store(partial + j * kLanes, sum);
  }
}

// lane sums of n vectors, added in a fixed order
INLINE void reduce_lanes(const float* partial, int n, float* scores) {
  for (int j = 0; j < n; ++j) {
    float lane[kLanes];
    store(lane, load(partial + j * kLanes));
    UNROLL for (int half = kLanes / 2; half > 0; half /= 2) {
      UNROLL for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    }
    scores[j] = lane[0];
  }
}

template <typename E>
INLINE void fetch(const E* row, int dims) {
  constexpr int kLine = 64 / sizeof(E);
  for (int d = 0; d < dims; d += kLine) __builtin_prefetch(row + d, 0, 2);
}

// Calls strip(number of vectors, first row) for the strips of a panel.
template <typename Strip>
INLINE void each_strip(int width, const Strip& strip) {
  const auto each = [&](auto vecs) INLINED {
    for (int s = 0; s < width; s += vecs * kLanes) strip(vecs, s);
  };
  if (width >= kStrip) {
    each(std::integral_constant<int, kStripVecs>{});
  } else if (width == 2 * kLanes) {
    each(std::integral_constant<int, 2>{});
  } else {
    each(std::integral_constant<int, 1>{});
  }
}

// Calls tile(number of keys, first key) for n keys, in tiles of KEYS and KEYS - 1, because a tile
// of few keys stalls on its own sums. If n is too small for that, the last keys go one by one.
template <int KEYS, typename Tile>
INLINE void each_tile(int n, const Tile& tile) {
  int smaller = (KEYS - n % KEYS) % KEYS;
  if (smaller * (KEYS - 1) > n) smaller = 0;
  int j = 0;
  for (; j + KEYS <= n - smaller * (KEYS - 1); j += KEYS) {
    tile(std::integral_constant<int, KEYS>{}, j);
  }
  for (; smaller > 0; --smaller, j += KEYS - 1) tile(std::integral_constant<int, KEYS - 1>{}, j);
  for (; j < n; ++j) tile(std::integral_constant<int, 1>{}, j);
}

// calls tile(number of keys, first key) for all keys of the call
template <int VECS, typename E, typename Tile>
INLINE void index_strip(const IndexCall<E>& call, const E* ahead, const Tile& tile) {
  each_tile<kTileKeys<VECS>>(call.n, [&](auto keys, int j) {
    if (ahead) {
      for (int i = j; i < j + keys; ++i) fetch(ahead + i * call.key_stride, call.dims);
    }
    tile(keys, j);
  });
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
INLINE void logits(const Chunk<float>& chunk, const AttendPanel<float>& panel, int strip) {
  const int width = panel.width;
  const int block = 16384 / (4 * VECS * kLanes);
  auto part = [&](const float* const* keys, int dims, const float* query, bool overwrite) {
    for (int d = 0; d < dims; d += block) {
      const int len = dims - d < block ? dims - d : block;
      const float* q = query + d * width + strip;
      const bool first = overwrite && d == 0;
      each_tile<kTileKeys<VECS>>(chunk.n, [&](auto count, int j) {
        logits_tile<decltype(count)::value, VECS>(q, width, keys + j, d, len, first,
                                                  panel.scores + j * width + strip);
      });
    }
  };
  part(chunk.keys, chunk.latent, panel.query, true);
  if (chunk.rope) part(chunk.ropes, chunk.rope, panel.query + chunk.latent * width, false);
}

// Passes the softmax weights of the lanes at `lane` to emit(j, weights). Returns the factor that
// rescales earlier sums to the new maximum; sets `moved` if the maximum has changed.
template <typename E, typename Emit>
INLINE Vec softmax(int n, const AttendPanel<E>& panel, int lane, bool& moved, const Emit& emit) {
  const int width = panel.width;
  const Vec lowest = broadcast(-INFINITY);
  const Vec before = panel.first ? lowest : load(panel.max + lane);
  Vec max = before;
  for (int j = 0; j < n; ++j) {
    Vec s = load(panel.scores + j * width + lane);
    if (panel.counts) s = load(panel.counts + j * width + lane) > 0.0f ? s : lowest;
    max = s > max ? s : max;
  }
  store(panel.max + lane, max);
  // avoids -Inf - -Inf if nothing is selected yet or all logits are -Inf
  const Vec shift = max == lowest ? Vec{} : max;
  const Vec factor = exp2((before - shift) * panel.scale);
  Vec sum = panel.first ? Vec{} : load(panel.sum + lane) * factor;
  for (int j = 0; j < n; ++j) {
    Vec p = exp2((load(panel.scores + j * width + lane) - shift) * panel.scale);
    if (panel.counts) {
      const Vec count = load(panel.counts + j * width + lane);
      p = count > 0.0f ? p * count : Vec{};
    }
    sum += p;
    emit(j, p);
  }
  store(panel.sum + lane, sum);
  const IntVec changed = before != max;
  for (int i = 0; i < kLanes; ++i) moved |= changed[i] != 0;
  return factor;
}

enum class Carry { kNothing, kKeep, kRescale };  // how to treat the sums of earlier chunks

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
INLINE void attend_strip(const Chunk<float>& chunk, const AttendPanel<float>& panel, int strip) {
  const int width = panel.width;
  logits<VECS>(chunk, panel, strip);
  bool moved = false;
  Vec factor[VECS];
  for (int v = 0; v < VECS; ++v) {
    const int lane = strip + v * kLanes;
    factor[v] = softmax(chunk.n, panel, lane, moved,
                        [&](int j, const Vec& p) { store(panel.scores + j * width + lane, p); });
  }
  const Carry carry = panel.first ? Carry::kNothing : moved ? Carry::kRescale : Carry::kKeep;
  constexpr int DIMS = VECTOR_BYTES < 64 || VECS == 4 ? 4 : 8;  // divides latent
  for (int d = 0; d < chunk.latent; d += DIMS) {
    values_tile<DIMS, VECS>(panel.scores + strip, width, chunk.values, chunk.n, d, carry, factor,
                            panel.out + d * width + strip);
  }
}

void attend_f32(const Chunk<float>& chunk, const AttendPanel<float>& panel) {
  each_strip(panel.width, [&](auto vecs, int strip) INLINED {
    attend_strip<decltype(vecs)::value>(chunk, panel, strip);
  });
}

}  // namespace
}  // namespace custom_pypto::cpu
