// Products of weights of 4 and 8 bits with rows of x rounded to 16 bits, in integers: to unpack
// values to float takes twice as many instructions, which is more time than to read them. Some
// units of x have the scale of their largest value. Each is rounded by up to half of 1 /
// Unit::kMost of that one, so with U values in these units a product is within sqrt(U) / (2 *
// Unit::kMost) of the norms' product.
#pragma once

#include <cmath>

#include "weights.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kInt16Unit = 2 * VECTOR_BYTES;  // values, four vectors of them in 16 bits
// Units of x with one scale. Where a row of the weight has one, too, their sums stay integers.
template <class Format>
constexpr int kUnitsOfScale = VECTOR_BYTES == 32 && Format::kGroup == kWholeRow ? 4 : 1;

INLINE bool fits_int16(const Dots& call) {
  return call.depth % kInt16Unit == 0 &&
         (call.group % kInt16Unit == 0 || kInt16Unit % call.group == 0);
}

// A row of x for `dots`: its units, their scales, the sums of the weight's groups.
template <class Unit>
struct Int16Row {
  Int16Row(const Dots& call, const void* x)
      : units(static_cast<const char*>(x)),
        scales(reinterpret_cast<const float*>(units + call.depth / kInt16Unit * Unit::kBytesOfX)),
        sums(scales + call.depth / kInt16Unit) {}
  const char* units;
  const float *scales, *sums;
};

// Rounds n values to at most `most`; returns the scale.
INLINE float round_to_int16(const float* x, int n, int most, int16_t* to) {
  int32_t magnitude = 0;  // the bits of |x|, ordered as |x|, with NaN above infinity
  for (int i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= INT32_MAX;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  float largest;
  std::memcpy(&largest, &magnitude, 4);
  const bool finite = largest < INFINITY;
  // below, factor or scale would leave the range of normal numbers
  const float factor = largest > 1e-30f && finite ? most / largest : 0.0f;
  for (int i = 0; i < n; ++i) {
    const float scaled = x[i] * factor;
    to[i] = static_cast<int16_t>(std::nearbyint(scaled == scaled ? scaled : 0.0f));
  }
  // an infinity or NaN stays visible
  return finite ? largest / most : NAN;
}

template <class Format, class Unit>
void prepare_int16(const Dots& call, const float* x, int first, int n, void* to) {
  constexpr int kShare = Unit::kShareScale;
  constexpr int kMost = kShare > kInt16Unit ? kShare : kInt16Unit;
  static_assert(kPreparedUnit % kMost == 0, "a unit of x lies in one part");
  const Int16Row<Unit> row(call, to);
  char* units = const_cast<char*>(row.units) + first / kInt16Unit * Unit::kBytesOfX;
  float* sums = const_cast<float*>(row.sums);
  float* scales_of_row = const_cast<float*>(row.scales) + first / kMost;
  if (call.has_offsets && first == 0) std::memset(sums, 0, sizeof(float) * call.groups);
  for (int d = 0; d < n; d += kMost) {
    int16_t values[kMost];
    float scales[kMost / kShare] = {};
    const int count = n - d < kMost ? n - d : kMost;
    for (int i = 0; i < count; i += kShare) {
      const int share = count - i < kShare ? count - i : kShare;
      scales[i / kShare] = round_to_int16(x + d + i, share, Unit::kMost, values + i);
    }
    // Of the rounded values: an offset that cancels the values of a weight must cancel what they
    // were multiplied by.
    for (int i = 0; call.has_offsets && i < count; i += kUnit) {
      int32_t sum = 0;
      for (int j = i; j < i + kUnit; ++j) sum += values[j];
      sums[(first + d + i) / call.group] += scales[i / kShare] * static_cast<float>(sum);
    }
    for (float& scale : scales) scale /= Unit::kTimes;
    for (int i = 0; i < count; i += kInt16Unit, units += Unit::kBytesOfX) {
      Unit::arrange(values + i, scales, units);
    }
    if constexpr (kShare == kMost) *scales_of_row++ = scales[0];
  }
}

// The scales of a weight's units, one after the other. PARTS: groups in a unit, 1 also for longer
// ones; 0: a row is one group, whose sums have its scale.
template <int PARTS>
class UnitScales {
 public:
  static constexpr bool kOfRow = PARTS == 0;
  UnitScales() = default;
  INLINE UnitScales(const Dots& call, int w, int unit) : UnitScales(call, call.scales, w, unit) {}
  INLINE UnitScales(const Dots& call, const float* scales, int w, int unit)
      : next_(scales + w * call.scale_stride), units_(call.group / unit) {}
  INLINE Vec next() {
    if constexpr (PARTS > 1) {
      const float* from = next_;
      next_ += PARTS;
      const auto part = lane_index() / (kLanes / PARTS);
#if VECTOR_BYTES == 64
      // a vector of 64 bytes would lie in two cache lines most of the time
      const __m128 parts = PARTS == 4 ? _mm_loadu_ps(from) : (__m128)_mm_loadu_si64(from);
      return _mm512_maskz_permutexvar_ps(UINT16_MAX, (__m512i)part, _mm512_castps128_ps512(parts));
#else
      const Vec scales = load(from);  // of which there may be fewer
      return __builtin_shuffle(scales, part);
#endif
    }
    float scale_of_unit;  // of pairs not aligned
    std::memcpy(&scale_of_unit, next_, sizeof scale_of_unit);
    const Vec scale = broadcast(scale_of_unit);
    if (++unit_ == units_) ++next_, unit_ = 0;
    return scale;
  }

 private:
  const float* next_ = nullptr;
  int units_ = 0, unit_ = 0;  // of a group
};

#if VECTOR_BYTES == 64
// The same as they are stored: what reads them beforehand takes a tenth of the time of one row of
// x.

// the stored scales of row w, of which those of the next row are prefetched
INLINE const uint8_t* stored_scales_of(const Dots& call, int w, int64_t bytes) {
  const int64_t of_row = call.groups * bytes;
  const uint8_t* from = call.stored_scales + w * of_row;
  for (int64_t i = 0; i < of_row; i += 64) __builtin_prefetch(from + of_row + i, 0, 2);
  return from;
}

// of int4
template <int PARTS>
class StoredPairs {
 public:
  static constexpr bool kOfRow = false;
  StoredPairs() = default;
  INLINE StoredPairs(const Dots& call, int w, int unit)
      : pairs_(call, reinterpret_cast<const float*>(stored_scales_of(call, w, 4)), 0, unit) {}
  INLINE Vec next() { return (Vec)((IntVec)pairs_.next() << 16); }

 private:
  UnitScales<PARTS> pairs_;
};

// of e2m1, four of a unit
class StoredExponents {
 public:
  static constexpr bool kOfRow = false;
  StoredExponents() = default;
  INLINE StoredExponents(const Dots& call, int w, int) : next_(stored_scales_of(call, w, 1)) {}
  INLINE Vec next() {
    int32_t four;
    std::memcpy(&four, next_, 4);
    next_ += 4;
    // each in the highest byte of its lanes, then in the exponent of a float
    const __m512i order = (__m512i)(0x00808080 + 0x01000000 * (lane_index() / 4));
    const __m512i bytes = _mm512_shuffle_epi8(_mm512_set1_epi32(four), order);
    // zero is 2^-127, the first operand, and infinity NaN
    constexpr int kAsItIs = 1, kNan = 3, kOne = 3, kInfinity = 5, kPositive = 7;
    const __m512i table =
        _mm512_set1_epi32(kAsItIs << 4 * kOne | kNan << 4 * kInfinity | kAsItIs << 4 * kPositive);
    return _mm512_fixupimm_ps(_mm512_set1_ps(0x1p-127f), (__m512)_mm512_srli_epi32(bytes, 1), table,
                              0);
  }

 private:
  const uint8_t* next_ = nullptr;
};

template <class Format>
constexpr bool kStoredScales =
    std::is_same_v<Format, Int4Weight> || std::is_same_v<Format, Fp4Weight>;
template <class Format, int PARTS>
using StoredScales = std::conditional_t<
    std::is_same_v<Format, Int4Weight>, StoredPairs<PARTS>,
    std::conditional_t<std::is_same_v<Format, Fp4Weight>, StoredExponents, UnitScales<PARTS>>>;
#else
template <class Format>
constexpr bool kStoredScales = false;
template <class Format, int PARTS>
using StoredScales = UnitScales<PARTS>;
#endif

// f(PARTS) of UnitScales, for units of UNIT values. Of e4m3 g++ 12 makes one row of x a fifth
// slower where the parts that it never has are left out.
template <class Format, int UNIT, typename F>
INLINE void with_parts(const Dots& call, const F& f) {
  if constexpr (Format::kGroup == kWholeRow) {
    f(std::integral_constant<int, 0>());
  } else if constexpr (Format::kGroup != kAnyGroup) {
    f(std::integral_constant<int, UNIT / Format::kGroup>());
  } else if (UNIT / call.group == 4) {
    f(std::integral_constant<int, 4>());
  } else if (UNIT / call.group == 2) {
    f(std::integral_constant<int, 2>());
  } else {
    f(std::integral_constant<int, 1>());
  }
}

// The rows of x from the i-th on that a tile multiplies.
template <class Unit, int ROWS>
struct Int16Rows {
  INLINE Int16Rows(const Dots& call, int i) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Int16Row<Unit> row(call, call.x[i + r]);
      units[r] = row.units;
      scales[r] = row.scales;
    }
  }
  const char* units[ROWS];
  const float* scales[ROWS];
};

template <class Unit, int PARTS, int WEIGHTS, int ROWS>
INLINE void dots_int16_tile(const Dots& call, int w, int apart, int i) {
  const uint8_t* p = call.weight + w * call.stride;
  const int64_t next_row = apart * call.stride;
  using Scales = typename Unit::template Scales<PARTS>;
  Scales scales[WEIGHTS];
  UNROLL for (int k = 0; k < WEIGHTS; ++k) scales[k] = Scales(call, w + k * apart, kInt16Unit);
  const Int16Rows<Unit, ROWS> x(call, i);
  NextRows<WEIGHTS> next(call, w, apart);
  Vec total[WEIGHTS][ROWS] = {};
  const int64_t units = call.depth / kInt16Unit;
  for (int64_t u = 0; u < units; ++u, p += Unit::kBytes) {
    next.template fetch<Unit::kBytes>();
    UNROLL for (int k = 0; k < WEIGHTS; ++k) {
      const Unit unit(p + k * next_row, WEIGHTS * ROWS == 1);
      Vec scale = {};
      if constexpr (PARTS) scale = scales[k].next();
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const IntVec sums = unit.products(x.units[r] + u * Unit::kBytesOfX);
        // the scale of x first: with that of the weight an integer may overflow
        const Vec scale_of_x = Unit::scale(x.units[r] + u * Unit::kBytesOfX, x.scales[r] + u);
        const Vec products = __builtin_convertvector(sums, Vec) * scale_of_x;
        total[k][r] += PARTS ? products * scale : products;
      }
    }
  }
  finish_tile<Int16Row<Unit>>(call, w, apart, i, total, /*scaled=*/PARTS != 0);
}

// Of rows of a weight with one scale each, and UNITS of x with one scale.
template <class Unit, int UNITS, int WEIGHTS, int ROWS>
INLINE void dots_int16_rows(const Dots& call, int w, int apart, int i) {
  const uint8_t* p = call.weight + w * call.stride;
  const int64_t next_row = apart * call.stride;
  const Int16Rows<Unit, ROWS> x(call, i);
  NextRows<WEIGHTS> next(call, w, apart);
  Vec total[WEIGHTS][ROWS] = {};
  const int64_t units = call.depth / kInt16Unit;
  for (int64_t u = 0, part = 0; u < units; ++part) {
    const int64_t end = units - u < UNITS ? units : u + UNITS;
    IntVec sums[WEIGHTS][ROWS] = {};
    for (; u < end; ++u, p += Unit::kBytes) {
      next.template fetch<Unit::kBytes>();
      UNROLL for (int k = 0; k < WEIGHTS; ++k) {
        const Unit unit(p + k * next_row, WEIGHTS * ROWS == 1);
        UNROLL for (int r = 0; r < ROWS; ++r) {
          sums[k][r] += unit.products(x.units[r] + u * Unit::kBytesOfX);
        }
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Vec scale = broadcast(x.scales[r][part]);
      UNROLL for (int k = 0; k < WEIGHTS; ++k) {
        total[k][r] += __builtin_convertvector(sums[k][r], Vec) * scale;
      }
    }
  }
  finish_tile<Int16Row<Unit>>(call, w, apart, i, total, /*scaled=*/false);
}

template <class Format, class Unit>
void dots_int16(const Dots& call) {
  constexpr int kUnits = kUnitsOfScale<Format>;
  if constexpr (kUnits > 1) {
    // each load of x, which may not fit in the level-1 cache, for four rows of the weight
    each_strip<2>(call, [&](auto rows, int i) INLINED {
      each_tile_of_weight<4>(call, [&](auto weights, int w, int apart) INLINED {
        dots_int16_rows<Unit, kUnits, decltype(weights)::value, decltype(rows)::value>(call, w,
                                                                                       apart, i);
      });
    });
  } else {
    constexpr int kMost = VECTOR_BYTES == 64 ? 8 : 4;  // rows of x
    constexpr int kSums = VECTOR_BYTES == 64 ? 16 : 4;
    each_strip<kMost>(call, [&](auto rows, int i) INLINED {
      constexpr int ROWS = decltype(rows)::value;
      constexpr int kWeights = kSums / ROWS < 8 ? kSums / ROWS : 8;
      const auto tile = [&](auto weights, int w, int apart) INLINED {
        constexpr int WEIGHTS = decltype(weights)::value;
        with_parts<Format, kInt16Unit>(call, [&](auto parts) INLINED {
          dots_int16_tile<Unit, decltype(parts)::value, WEIGHTS, ROWS>(call, w, apart, i);
        });
      };
      if (ROWS == 1 && call.in_turn()) return each_tile_of_weight<1>(call, tile);
      if (ROWS == 1 && call.depth <= call.most_by_four) return each_tile_of_weight<4>(call, tile);
      each_tile_of_weight<kWeights>(call, tile);
    });
  }
}

// UNIT<Format>: a unit of a weight, and what it multiplies:
//   kBytes, kBytesOfX       of a unit
//   kMost                   the largest |value| of x
//   kShareScale             values of x that share a scale: of a part of a unit, or of units
//   kTimes                  how many times its products count
//   Scales<PARTS>           reads those of the weight; kStoredScales: as they are stored
//   arrange(values, scales, to)  writes a unit of x
//   products(x)             with a unit of x: sums of which each lane belongs to one group
//   scale(x, of_unit)       of x, of each lane
template <class Format, template <class> class UNIT>
constexpr DotsKernels kInt16 = {.fits = fits_int16,
                                .prepare = prepare_int16<Format, UNIT<Format>>,
                                .dots = dots_int16<Format, UNIT<Format>>,
                                .stored_scales = UNIT<Format>::kStoredScales};

template <template <class> class UNIT>
constexpr DotsKernels kInt16Dots[kWeightFormats] = {
    {}, kInt16<Int8Weight, UNIT>, {}, kInt16<Int4Weight, UNIT>, kInt16<Fp4Weight, UNIT>};

}  // namespace
}  // namespace custom_pypto::cpu
