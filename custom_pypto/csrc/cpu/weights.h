// Products with weights as they are stored, in float, written once for all instruction sets.
#pragma once

#include <type_traits>

#include "weight_formats.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kAhead = 8192;  // bytes
constexpr int kUsualGroup = 128;
constexpr int kPart = 512;  // values, a multiple of the usual group; sums do not cross parts
// Rows of x at once, products of these and rows of the weight, and sums of a product: what fits in
// registers. Rows of x may not fit in the level-1 cache; with AVX2, four meet three rows of the
// weight for each load.
#if VECTOR_BYTES == 64
constexpr int kMostRows = 8, kProducts = 8, kSums = 2;
#elif VECTOR_BYTES == 32
constexpr int kMostRows = 4, kProducts = 12, kSums = 1;
#else
constexpr int kMostRows = 2, kProducts = 2, kSums = 4;
#endif

INLINE float sum_of(const Vec& x) {
#if VECTOR_BYTES >= 32
  __m256 parts[VECTOR_BYTES / 32];
  std::memcpy(parts, &x, sizeof parts);
  const __m256 half = VECTOR_BYTES == 64 ? parts[0] + parts[VECTOR_BYTES / 32 - 1] : parts[0];
  __m128 sum = _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
  sum += _mm_movehl_ps(sum, sum);
  return sum[0] + sum[1];
#else
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
#endif
}

// Calls strip(rows, i) for rows of x, up to MOST at a time. A product must not depend on how many.
template <int MOST, typename Strip>
INLINE void each_strip(const Dots& call, const Strip& strip) {
  int i = 0;
  const auto strips = [&](auto rows) INLINED {
    for (; i + decltype(rows)::value <= call.m; i += decltype(rows)::value) strip(rows, i);
  };
  if constexpr (MOST >= 8) strips(std::integral_constant<int, 8>());
  if constexpr (MOST >= 4) {
    strips(std::integral_constant<int, 4>());
    strips(std::integral_constant<int, 3>());
  }
  if constexpr (MOST >= 2) strips(std::integral_constant<int, 2>());
  strips(std::integral_constant<int, 1>());
}

// Calls tile(rows, w, apart) for the rows w, w + apart, ... of the weight, up to MOST at a time,
// which share what they read of x: rows of x may not fit in the level-1 cache. Each is one of MOST
// streams, which go on from call to call: the CPU reads ahead by the page, and rows side by side
// share one. A product must not depend on how many.
template <int MOST, typename Tile>
INLINE void each_tile_of_weight(const Dots& call, const Tile& tile) {
  const int apart = call.n / MOST;
  for (int w = 0; w < apart; ++w) tile(std::integral_constant<int, MOST>(), w, apart);
  if constexpr (MOST > 1) {
    for (int w = apart * MOST; w < call.n; ++w) tile(std::integral_constant<int, 1>(), w, call.n);
  }
}

// Prefetches what follows the rows of a tile: of one stream far ahead, into the level-2 cache; of
// each of several `near` ahead, into level 1.
template <int STREAMS>
class NextRows {
 public:
  INLINE NextRows(const Dots& call, int w, int apart)
      : p_(call.weight + w * call.stride + (STREAMS > 1 ? call.near : kAhead)),
        apart_(apart * call.stride) {
    // behind the last row those of the next task
    if (STREAMS > 1 && w + 1 >= apart) p_ += call.stride - call.near + (STREAMS - 1) * apart_;
  }
  template <int BYTES>
  INLINE void fetch() {
    UNROLL for (int k = 0; k < STREAMS; ++k) {
      UNROLL for (int i = 0; i < BYTES; i += 64) {
        __builtin_prefetch(p_ + k * apart_ + i, 0, STREAMS > 1 ? 3 : 2);
      }
    }
    p_ += BYTES;
  }

 private:
  const uint8_t* p_;
  int64_t apart_;
};

// of int4: value = (q - 8) * scale + zero, of pairs (scale, zero) in bfloat16
INLINE void read_pairs(const IntVec& pairs, Vec* scales, Vec* offsets) {
  *scales = (Vec)(pairs << 16);
  *offsets = (Vec)(pairs & -0x10000) - 8.0f * *scales;
}

// What groups with an offset add to a product. Inlined, it makes loops of e4m3, which has none, an
// eighth slower: g++ 12.
__attribute__((noinline)) float offset_of(const Dots& call, int w, const float* sums) {
#if VECTOR_BYTES == 64
  if (call.stored_scales) {
    const uint8_t* pairs = call.stored_scales + static_cast<int64_t>(w) * call.groups * 4;
    Vec sum = {};
    for (int g = 0; g < call.groups; g += kLanes, pairs += VECTOR_BYTES) {
      const int left = call.groups - g;
      const __mmask16 lanes = left < kLanes ? (1 << left) - 1 : UINT16_MAX;
      Vec scales, offsets;
      read_pairs((IntVec)_mm512_maskz_loadu_epi32(lanes, pairs), &scales, &offsets);
      sum += offsets * (Vec)_mm512_maskz_loadu_ps(lanes, sums + g);
    }
    return sum_of(sum);
  }
#endif
  const float* offsets = call.offsets + w * call.groups;
  Vec sum = {};
  int g = 0;
  for (; g + kLanes <= call.groups; g += kLanes) sum += load(offsets + g) * load(sums + g);
  float rest = 0.0f;
  for (; g < call.groups; ++g) rest += offsets[g] * sums[g];
  return sum_of(sum) + rest;
}

// Writes the products of a tile. Row: of x, for the sums of its groups; `scaled`: whether the sums
// have met the scales, of which a row has one else.
template <class Row, int WEIGHTS, int ROWS>
INLINE void finish_tile(const Dots& call, int w, int apart, int i,
                        const Vec (&total)[WEIGHTS][ROWS], bool scaled) {
  UNROLL for (int k = 0; k < WEIGHTS; ++k, w += apart) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      float sum = sum_of(total[k][r]);
      if (!scaled) sum *= call.scales[w * call.scale_stride];
      if (call.has_offsets) sum += offset_of(call, w, Row(call, call.x[i + r]).sums);
      call.out[i + r][w] = sum;
    }
  }
}

// A row of x for `dots`: its values, then the sums of its groups, if they have offsets.
struct FloatRow {
  FloatRow(const Dots& call, const void* x)
      : values(static_cast<const float*>(x)), sums(values + call.depth) {}
  const float *values, *sums;
};

// Values of a weight that `dots` unpacks together; place(i): where it finds value i of x.
template <class Format>
struct InOrder {
  static constexpr int kValues = kUnit, kBytes = Format::kBytes;
  static constexpr int place(int i) { return i; }
  static INLINE void unpack(const uint8_t* p, Vec* to) { Format::unpack(p, to); }
};

// Of two vectors the values 0, 2, 4, ..., then 1, 3, 5, ...: half the instructions.
struct Bfloat16Pairs {
  static constexpr int kValues = kUnit, kBytes = Bfloat16Weight::kBytes;
  static constexpr int place(int i) {
    return i / (2 * kLanes) * 2 * kLanes + i % 2 * kLanes + i % (2 * kLanes) / 2;
  }
  static INLINE void unpack(const uint8_t* p, Vec* to) {
    UNROLL for (int i = 0; i < kUnitVecs; i += 2) {
      const IntVec pairs = *reinterpret_cast<const LanePairs*>(p + 2 * i * kLanes);
      to[i] = (Vec)(pairs << 16);
      to[i + 1] = (Vec)(pairs & -0x10000);
    }
  }
};

// Of the groups of values first, .., first + n - 1 of a row of x.
INLINE void sum_groups(const Dots& call, const float* x, int first, int n, float* sums) {
  for (int d = 0; d < n;) {
    const int g = (first + d) / call.group, begin = g * call.group - first;
    const int end = n - begin < call.group ? n : begin + call.group;
    const bool begins = d == begin;
    Vec sum = {};
    for (; d < end; d += kLanes) sum += load(x + d);
    sums[g] = begins ? sum_of(sum) : sums[g] + sum_of(sum);
  }
}

template <class Unit>
void prepare_f32(const Dots& call, const float* x, int first, int n, void* to) {
  float* row = static_cast<float*>(to);
  for (int d = 0; d < n; d += Unit::kValues) {
    for (int i = 0; i < Unit::kValues; ++i) row[first + d + Unit::place(i)] = x[d + i];
  }
  if (call.has_offsets) sum_groups(call, x, first, n, row + call.depth);
}

// Of each group the sums, then those of the groups. Indices have 64 bits: -fwrapv would make the
// compiler compute the address of each load from an int. GROUP: that of the call, if all groups
// have this length; 0: any.
template <class Unit, int GROUP, int WEIGHTS, int ROWS>
INLINE void dots_tile(const Dots& call, int w, int apart, int i) {
  constexpr int kVecs = Unit::kValues / kLanes;
  const float* x[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) x[r] = FloatRow(call, call.x[i + r]).values;
  const uint8_t* p = call.weight + w * call.stride;
  const float* scale = call.scales + w * call.scale_stride;
  const int64_t next_row = apart * call.stride, next_scales = apart * call.scale_stride;
  const int64_t group = GROUP ? GROUP : call.group;
  int64_t of_group = group;
  NextRows<WEIGHTS> next(call, w, apart);
  Vec total[WEIGHTS][ROWS] = {};
  for (int64_t d = 0; d < call.depth;) {
    int64_t count = GROUP;
    if (!GROUP) {
      const int64_t of_part = kPart - d % kPart, left = call.depth - d;
      const int64_t rest = left < of_part ? left : of_part;
      count = of_group < rest ? of_group : rest;
    }
    const int64_t stop = d + count;
    Vec acc[WEIGHTS][ROWS][kSums] = {};
    for (; d < stop; d += Unit::kValues, p += Unit::kBytes) {
      next.template fetch<Unit::kBytes>();
      UNROLL for (int v = 0; v < kVecs; ++v) {
        Vec values[WEIGHTS];
        UNROLL for (int k = 0; k < WEIGHTS; ++k) {
          Vec unit[kVecs];  // unpacked once: here, so that g++ 12 keeps few of them in registers
          Unit::unpack(p + k * next_row, unit);
          values[k] = unit[v];
        }
        UNROLL for (int r = 0; r < ROWS; ++r) {
          const Vec of_x = load(x[r] + d + v * kLanes);
          UNROLL for (int k = 0; k < WEIGHTS; ++k) acc[k][r][v % kSums] += values[k] * of_x;
        }
      }
    }
    UNROLL for (int k = 0; k < WEIGHTS; ++k) {
      UNROLL for (int r = 0; r < ROWS; ++r) {
        Vec sum = acc[k][r][0];
        UNROLL for (int s = 1; s < kSums; ++s) sum += acc[k][r][s];
        total[k][r] += sum * broadcast(scale[k * next_scales]);
      }
    }
    of_group -= count;
    if (of_group == 0) ++scale, of_group = group;
  }
  finish_tile<FloatRow>(call, w, apart, i, total, /*scaled=*/true);
}

// OFTEN: what shapes that models have are compiled for; else for any, in less time and code.
template <class Unit, bool OFTEN>
void dots_f32(const Dots& call) {
  const bool even = OFTEN && call.group == kUsualGroup && call.depth % kUsualGroup == 0;
  each_strip<OFTEN ? kMostRows : 1>(call, [&](auto rows, int i) INLINED {
    constexpr int ROWS = decltype(rows)::value;
    constexpr int kWeights = kProducts / ROWS < 4 ? kProducts / ROWS : 4;
    each_tile_of_weight<kWeights>(call, [&](auto weights, int w, int apart) INLINED {
      constexpr int WEIGHTS = decltype(weights)::value;
      even ? dots_tile<Unit, OFTEN ? kUsualGroup : 0, WEIGHTS, ROWS>(call, w, apart, i)
           : dots_tile<Unit, 0, WEIGHTS, ROWS>(call, w, apart, i);
    });
  });
}

INLINE bool fits_any(const Dots&) { return true; }

template <class Unit, bool OFTEN = true>
constexpr DotsKernels kFloat = {
    .fits = fits_any, .prepare = prepare_f32<Unit>, .dots = dots_f32<Unit, OFTEN>};

}  // namespace
}  // namespace custom_pypto::cpu
