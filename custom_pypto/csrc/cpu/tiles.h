// What the loops of the indexer and of attention share in every instruction set: tile sizes and the
// softmax.
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

// sum + weights * relu(dots), per lane of the first `heads` rows
template <int VECS>
INLINE Vec add_heads(Vec sum, const Vec (&dots)[VECS], const float* weights, int heads) {
  UNROLL for (int v = 0; v < VECS; ++v) {
    // the comparison is false for NaN: NaN is kept, so that corruption stays visible
    const Vec relu = dots[v] < 0.0f ? Vec{} : dots[v];
    const Vec term = load(weights + v * kLanes) * relu;
    // mask padding rows: 0 times an infinite key is NaN. Without a branch, which the compiler would
    // turn into fused multiply-adds here and not there: float and int8 tiles give the same bits
    sum += lane_index() < heads - v * kLanes ? term : Vec{};
  }
  return sum;
}

// calls tile(number of keys, first key) for all keys of the call
template <int VECS, typename E, typename Tile>
INLINE void index_strip(const IndexCall<E>& call, const E* ahead, const Tile& tile) {
  each_tile<kTileKeys<VECS>>(call.n, [&](auto keys, int j) {
    if (ahead) {
      for (int i = j; i < j + keys; ++i) fetch(ahead + i * call.ahead_stride, call.dims);
    }
    tile(keys, j);
  });
}

// Passes the softmax weights of scores[j][lane] and its neighbours to emit(j, weights). Returns the
// factor that rescales earlier sums to the new maximum; sets `moved` if the maximum has changed.
template <typename E, typename Emit>
INLINE Vec softmax(int n, const AttendPanel<E>& panel, const float* scores, int lane, bool& moved,
                   const Emit& emit) {
  const int width = panel.width;
  const Vec lowest = broadcast(-INFINITY);
  const Vec before = panel.first ? lowest : load(panel.max + lane);
  Vec max = before;
  for (int j = 0; j < n; ++j) {
    Vec s = load(scores + j * width + lane);
    if (panel.counts) s = load(panel.counts + j * width + lane) > 0.0f ? s : lowest;
    max = s > max ? s : max;
  }
  store(panel.max + lane, max);
  // avoids -Inf - -Inf if nothing is selected yet or all logits are -Inf
  const Vec shift = max == lowest ? Vec{} : max;
  const Vec factor = exp2((before - shift) * panel.scale);
  Vec sum = panel.first ? Vec{} : load(panel.sum + lane) * factor;
  for (int j = 0; j < n; ++j) {
    Vec p = exp2((load(scores + j * width + lane) - shift) * panel.scale);
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

enum class Carry { kNothing, kKeep, kRescale };  // how to treat the sums of earlier chunks

}  // namespace
}  // namespace custom_pypto::cpu
