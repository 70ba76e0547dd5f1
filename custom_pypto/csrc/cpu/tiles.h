// The float kernels, written once with the compiler's vector types. Each .cpp of this folder sets
// its target, defines VECTOR_BYTES and includes this file, so everything here has internal linkage.
#pragma once

#include <cmath>
#include <cstring>
#if VECTOR_BYTES == 64
#include <immintrin.h>
#endif

#include "kernels.h"

namespace custom_pypto::cpu {
namespace {

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE inline __attribute__((always_inline))

constexpr int kLanes = VECTOR_BYTES / 4;
// aligned(4): panels and caches promise no more than their element's alignment
typedef float Vec __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

// Accumulators of a tile are KEYS x VECS vectors; with the row vectors and one broadcast they fill
// the registers: 32 of 64 bytes hold 24 + 4 + 1, 16 of 32 bytes hold 12 + 2 + 1. aarch64 has 32 of
// 16 bytes and multiplies by one lane of a register, which holds four dims of a key: 20 + 4 + 5.
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

INLINE IntVec lane_index() {
  IntVec lanes = {};
  UNROLL for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

INLINE Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
INLINE void store(float* p, const Vec& v) { *reinterpret_cast<Vec*>(p) = v; }
INLINE Vec broadcast(float x) { return x - Vec{}; }

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

// ---- lightning indexer -----------------------------------------------------------------------

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
      // a comparison that is false for NaN keeps it, so that corruption is seen
      const Vec relu = acc[j][v] < 0.0f ? Vec{} : acc[j][v];
      const Vec term = load(weights + v * kLanes) * relu;
      // a row that only fills the panel is not 0 for an infinite key, but NaN
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

// Calls tile(number of keys, first key) for n keys: tiles of KEYS, and as many with one key less as
// let them come out even, because a tile of few keys waits for its own sums. Only where n is too
// small for that are the last keys alone.
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
    auto strips = [&](auto vecs) {
      constexpr int VECS = decltype(vecs)::value;
      for (int s = 0; s < width; s += VECS * kLanes) {
        index_strip<VECS>(call, row + s == 0 ? call.ahead : nullptr, [&](auto keys, int j) {
          index_tile<decltype(keys)::value, VECS>(
              panel + s, width, call.weights + row + s, call.heads - row - s, call.dims,
              call.keys + j * call.key_stride, call.key_stride, partial + j * kLanes);
        });
      }
    };
    if (width >= kStrip) {
      strips(std::integral_constant<int, kStripVecs>{});
    } else if (width == 2 * kLanes) {
      strips(std::integral_constant<int, 2>{});
    } else {
      strips(std::integral_constant<int, 1>{});
    }
    panel += static_cast<int64_t>(width) * call.dims;
    row += width;
  }
  reduce_lanes(partial, call.n, call.scores);
}

#if VECTOR_BYTES == 64
// g++ 12 takes a mask for 32 bits with zeros above, but may spill it as 16: then what is read back
// is half of it what was on the stack (seen at -O1 -fsanitize=thread). A register has the zeros.
INLINE unsigned bits_of(__mmask16 mask) {
  unsigned bits;
  asm("kmovw %1, %0" : "=r"(bits) : "k"(mask));
  return bits;
}

INLINE int append(const IntVec& rank, uint32_t above, int32_t first, uint32_t* ranks,
                  int32_t* positions) {
  const __mmask16 kept = _mm512_cmpgt_epu32_mask((__m512i)rank, _mm512_set1_epi32(above));
  const __m512i position = (__m512i)(lane_index() + first);
  // without a branch, which would often be mispredicted; and compressed in registers, because a
  // compressing store to memory is slow on some CPUs
  _mm512_storeu_si512(ranks, _mm512_maskz_compress_epi32(kept, (__m512i)rank));
  _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(kept, position));
  return __builtin_popcount(bits_of(kept));
}

int keep(uint32_t* ranks, int32_t* positions, int n, uint32_t above, int equal) {
  const __m512i limit = _mm512_set1_epi32(above);
  int count = 0;
  for (int j = 0; j < n; j += 16) {
    const __m512i rank = _mm512_loadu_si512(ranks + j),
                  position = _mm512_loadu_si512(positions + j);
    const __mmask16 valid = n - j < 16 ? (1u << (n - j)) - 1 : 0xFFFF;
    unsigned ties = bits_of(_mm512_mask_cmpeq_epu32_mask(valid, rank, limit));
    int more = __builtin_popcount(ties);
    for (; more > equal; --more) ties &= ~(0x80000000u >> __builtin_clz(ties));
    equal -= more;
    const __mmask16 kept = _mm512_mask_cmpgt_epu32_mask(valid, rank, limit) | ties;
    _mm512_storeu_si512(ranks + count, _mm512_maskz_compress_epi32(kept, rank));
    _mm512_storeu_si512(positions + count, _mm512_maskz_compress_epi32(kept, position));
    count += __builtin_popcount(bits_of(kept));
  }
  return count;
}
#else
INLINE int append(const IntVec& rank, uint32_t above, int32_t first, uint32_t* ranks,
                  int32_t* positions) {
  const IntVec lowest = lane_index() * 0 + INT32_MIN;  // flipped, unsigned order is signed order
  const IntVec kept = (rank ^ lowest) > (lowest ^ static_cast<int32_t>(above));
  int32_t any = 0;
  UNROLL for (int i = 0; i < kLanes; ++i) any |= kept[i];
  if (!any) return 0;
  int count = 0;
  UNROLL for (int i = 0; i < kLanes; ++i) {
    ranks[count] = rank[i];
    positions[count] = first + i;
    count -= kept[i];
  }
  return count;
}

int keep(uint32_t* ranks, int32_t* positions, int n, uint32_t above, int equal) {
  int count = 0;
  for (int j = 0; j < n; ++j) {  // without a branch, which would often be mispredicted
    const int tie = ranks[j] == above;
    const int kept = (ranks[j] > above) | (tie & (equal > 0));
    equal -= tie;
    ranks[count] = ranks[j];
    positions[count] = positions[j];
    count += kept;
  }
  return count;
}
#endif

INLINE uint32_t rank_of(float score) {
  if (score != score) return 0xFFFFFFFFu;
  score += 0.0f;  // -0 becomes +0
  uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

// mostly nothing is above the rank of the k-th best so far
int filter(const float* scores, int n, uint32_t above, int32_t first, uint32_t* ranks,
           int32_t* positions) {
  int count = 0, j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    const Vec score = load(scores + j) + 0.0f;  // -0 becomes +0
    const IntVec bits = (IntVec)score;
    const IntVec rank = score == score ? bits ^ (bits >> 31 | INT32_MIN) : lane_index() * 0 - 1;
    count += append(rank, above, first + j, ranks + count, positions + count);
  }
  for (; j < n; ++j) {
    ranks[count] = rank_of(scores[j]);
    positions[count] = first + j;
    count += ranks[count] > above;
  }
  return count;
}

// ---- sparse attention ------------------------------------------------------------------------

// scores[j] (+)= rows . keys[j] over np panel steps
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

// scores = query . keys; dims in blocks that keep the part of the panel in use in the level-1 cache
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

// Softmax weights of the lanes at `lane`, handed to emit(j, weights). Returns the factor that
// brings what was summed before to the new maximum; `moved` tells whether it is other than 1.
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
  // where nothing is selected yet, or all logits are -Inf: avoids -Inf - -Inf
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

enum class Carry { kNothing, kKeep, kRescale };  // what becomes of the sums of earlier chunks

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
  auto strips = [&](auto vecs) {
    constexpr int VECS = decltype(vecs)::value;
    for (int s = 0; s < panel.width; s += VECS * kLanes) attend_strip<VECS>(chunk, panel, s);
  };
  if (panel.width >= kStrip) {
    strips(std::integral_constant<int, kStripVecs>{});
  } else if (panel.width == 2 * kLanes) {
    strips(std::integral_constant<int, 2>{});
  } else {
    strips(std::integral_constant<int, 1>{});
  }
}

}  // namespace
}  // namespace custom_pypto::cpu
