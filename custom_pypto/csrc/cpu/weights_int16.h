// Products of weights of 4 and 8 bits with rows of x rounded to 16 bits, in integers: to unpack
// values to float takes twice as many instructions, which is more time than to read them. A unit of
// values of x has the scale of its largest one. Each is rounded by up to half a step of 2^-15 of
// that one, so a product is within sqrt(kInt16Unit) * 2^-16 of the norms' product.
#pragma once

#include <immintrin.h>

#include <cmath>

#include "weights.h"

namespace custom_pypto::cpu {
namespace {

typedef uint16_t Shorts __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
constexpr int kInt16Unit = 2 * VECTOR_BYTES;  // values, four vectors of them in 16 bits

INLINE bool fits_int16(const Dots& call) {
  return call.depth % kInt16Unit == 0 &&
         (call.group % kInt16Unit == 0 || kInt16Unit % call.group == 0);
}

// A row of x for `dots`: the values, the scales of units, the sums of the weight's groups.
struct Int16Row {
  Int16Row(const Dots& call, const void* x)
      : values(static_cast<const int16_t*>(x)),
        scales(reinterpret_cast<const float*>(values + call.depth)),
        sums(scales + call.depth / kInt16Unit) {}
  const int16_t* values;
  const float *scales, *sums;
};

// Rounds n values, of which i goes to place(i); returns the scale.
template <typename Place>
INLINE float round_to_int16(const float* x, int n, int16_t* to, const Place& place) {
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
  const float factor = largest > 1e-30f && finite ? 32767.0f / largest : 0.0f;
  for (int i = 0; i < n; ++i) {
    const float scaled = x[i] * factor;
    to[place(i)] = static_cast<int16_t>(std::nearbyint(scaled == scaled ? scaled : 0.0f));
  }
  // an infinity or NaN stays visible
  return finite ? largest / 32767.0f : NAN;
}

void round_part(const float* x, int n, int16_t* to, float* scale, float* sum) {
  *scale = round_to_int16(x, n, to, [](int i) INLINED { return i; });
  int32_t total = 0;
  for (int i = 0; i < n; ++i) total += to[i];
  *sum = *scale * static_cast<float>(total);
}

template <class Format>
void pack_int16(const Dots& call, int first, int rows, int d, int count, int width, int32_t* to) {
  typedef int16_t LaneShorts __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
  for (int r = 0; r < width; ++r) {
    const uint8_t* p = call.weight + (first + r) * call.stride + d / kUnit * Format::kBytes;
    for (int i = 0; i < count; i += kUnit, p += Format::kBytes) {
      Vec unit[kUnitVecs] = {};
      if (r < rows) Format::unpack(p, unit);
      int32_t pairs[kUnit / 2];
      UNROLL for (int v = 0; v < kUnitVecs; ++v) {
        const IntVec values = __builtin_convertvector(unit[v], IntVec);
        reinterpret_cast<LaneShorts*>(pairs)[v] = __builtin_convertvector(values, LaneShorts);
      }
      UNROLL for (int j = 0; j < kUnit / 2; ++j) to[(i / 2 + j) * width + r] = pairs[j];
    }
  }
}

INLINE IntVec multiply_add(const Shorts& a, const int16_t* b) {
#if VECTOR_BYTES == 64
  return (IntVec)_mm512_madd_epi16((__m512i)a, _mm512_loadu_si512(b));
#else
  return (IntVec)_mm256_madd_epi16((__m256i)a, _mm256_loadu_si256((const __m256i*)b));
#endif
}

// The values of a unit, a quarter at a time; place(i): where `dots` finds value i of x.
template <class Format>
struct Int16Unit;

template <>
struct Int16Unit<Int8Weight> {
  static constexpr int kBytes = kInt16Unit;
  static constexpr int place(int i) { return i; }
  // into the level-2 cache: these are read so fast that the level-1 cache would lose some
  static INLINE void prefetch(const uint8_t* p) {
    UNROLL for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(p + i + 2 * kAhead, 0, 2);
  }
  explicit INLINE Int16Unit(const uint8_t* p) : bytes(p) {}
  INLINE Shorts values(int i) const {
#if VECTOR_BYTES == 64
    return (Shorts)_mm512_maskz_cvtepi8_epi16(
        UINT32_MAX, _mm256_loadu_si256((const __m256i*)(bytes + i * kInt16Unit / 4)));
#else
    return (Shorts)_mm256_cvtepi8_epi16(
        _mm_loadu_si128((const __m128i*)(bytes + i * kInt16Unit / 4)));
#endif
  }
  const uint8_t* bytes;
};

// of 4 bits: 0, 4, 8, ... are in front, then 1, 5, 9, ...
struct Int16Nibbles {
  static constexpr int kBytes = kInt16Unit / 2;
  static constexpr int place(int i) { return i % 4 * (kInt16Unit / 4) + i / 4; }
  static INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p + kAhead); }
};

template <>
struct Int16Unit<Int4Weight> : Int16Nibbles {
  explicit INLINE Int16Unit(const uint8_t* p) : bits(*reinterpret_cast<const Shorts*>(p)) {}
  INLINE Shorts values(int i) const { return i == 3 ? bits >> 12 : (bits >> 4 * i) & 15; }
  Shorts bits;
};

template <>
struct Int16Unit<Fp4Weight> : Int16Nibbles {
  explicit INLINE Int16Unit(const uint8_t* p) {
    const Shorts bits = *reinterpret_cast<const Shorts*>(p);
    low = twice(bits & 0x0F0F);
    high = twice((bits >> 4) & 0x0F0F);
  }
  // times 256
  INLINE Shorts values(int i) const {
    const Shorts& bytes = i % 2 ? high : low;
    return i < 2 ? bytes << 8 : bytes & 0xFF00;
  }
  // the values of e2m1
  static INLINE Shorts twice(const Shorts& bits) {
    const __m128i values = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
#if VECTOR_BYTES == 64
    const __m512i table = _mm512_maskz_broadcast_i32x4(0xFFFF, values);
    return (Shorts)_mm512_shuffle_epi8(table, (__m512i)bits);
#else
    return (Shorts)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)bits);
#endif
  }
  Shorts low, high;
};

template <class Format>
void prepare_int16(const Dots& call, const float* x, void* to) {
  if (!fits_int16(call)) return prepare_f32<Format>(call, x, to);
  const Int16Row row(call, to);
  float* sums = const_cast<float*>(row.sums);
  float* scales = const_cast<float*>(row.scales);
  int16_t* values = const_cast<int16_t*>(row.values);
  if (call.offsets) std::memset(sums, 0, sizeof(float) * call.groups);
  for (int d = 0; d < call.depth; d += kInt16Unit, values += kInt16Unit, ++scales) {
    const float scale = round_to_int16(x + d, kInt16Unit, values, Int16Unit<Format>::place);
    // Of the rounded values: an offset that cancels the values of a weight must cancel what they
    // were multiplied by.
    for (int i = 0; call.offsets && i < kInt16Unit; i += kUnit) {
      int32_t sum = 0;
      for (int j = i; j < i + kUnit; ++j) sum += values[Int16Unit<Format>::place(j)];
      sums[(d + i) / call.group] += scale * static_cast<float>(sum);
    }
    // the values of e2m1 count 256 times in `dots`
    *scales = std::is_same_v<Format, Fp4Weight> ? scale * (1.0f / 256) : scale;
  }
}

// The scales of a weight's units, one after the other. PARTS: groups in a unit, 1 also for longer
// ones.
template <int PARTS>
class UnitScales {
 public:
  INLINE UnitScales(const Dots& call, int w)
      : next_(call.scales + w * call.groups), units_(call.group / kInt16Unit) {}
  INLINE Vec next() {
    if constexpr (PARTS > 1) {
      const Vec scales = load(next_);  // of which there may be fewer
      next_ += PARTS;
      return __builtin_shuffle(scales, lane_index() / (kLanes / PARTS));
    }
    const Vec scale = broadcast(*next_);
    if (++unit_ == units_) ++next_, unit_ = 0;
    return scale;
  }

 private:
  const float* next_;
  int units_, unit_ = 0;  // of a group
};

template <class Format, int PARTS, int ROWS>
INLINE void dots_int16_row(const Dots& call, int w, int i) {
  const uint8_t* p = call.weight + w * call.stride;
  UnitScales<PARTS> scales(call, w);
  const int16_t* x[ROWS];
  const float* x_scales[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Int16Row row(call, call.x[i + r]);
    x[r] = row.values;
    x_scales[r] = row.scales;
  }
  Vec total[ROWS] = {};
  const int64_t units = call.depth / kInt16Unit;
  _Pragma("GCC unroll 2") for (int64_t u = 0; u < units; ++u) {
    const Int16Unit<Format> unit(p);
    unit.prefetch(p);
    p += unit.kBytes;
    const Vec scale = scales.next();
    IntVec sums[ROWS] = {};
    UNROLL for (int q = 0; q < 4; ++q) {
      const Shorts values = unit.values(q);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        sums[r] += multiply_add(values, x[r] + u * kInt16Unit + q * (kInt16Unit / 4));
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      // the scale of x first: with that of the weight an integer may overflow
      total[r] += __builtin_convertvector(sums[r], Vec) * broadcast(x_scales[r][u]) * scale;
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    float sum = sum_of(total[r]);
    if (call.offsets) sum += offset_of(call, w, Int16Row(call, call.x[i + r]).sums);
    call.out[i + r][w] = sum;
  }
}

template <class Format>
void dots_int16(const Dots& call) {
  if (!fits_int16(call)) return dots_f32<Format>(call);
  constexpr int kMost = VECTOR_BYTES == 64 ? 8 : 4;  // a row of x has one sum
  each_strip<kMost>(call, [&](auto rows, int i) INLINED {
    constexpr int ROWS = decltype(rows)::value;
    for (int w = 0; w < call.n; ++w) {
      switch (kInt16Unit / call.group) {
        case 4:
          dots_int16_row<Format, 4, ROWS>(call, w, i);
          break;
        case 2:
          dots_int16_row<Format, 2, ROWS>(call, w, i);
          break;
        default:
          dots_int16_row<Format, 1, ROWS>(call, w, i);
      }
    }
  });
}

template <class Format>
constexpr WeightKernels kInt16Weight = {.prepare = prepare_int16<Format>,
                                        .dots = dots_int16<Format>,
                                        .widen = widen<Format>,
                                        .read_scales = kReadScales<Format>,
                                        .pack_int16 = pack_int16<Format>,
                                        .round_int16 = round_part};

constexpr WeightKernels kInt16Weights[kWeightFormats] = {
    kFloatWeight<Bfloat16Weight>, kInt16Weight<Int8Weight>, kFloatWeight<Fp8Weight>,
    kInt16Weight<Int4Weight>, kInt16Weight<Fp4Weight>};

}  // namespace
}  // namespace custom_pypto::cpu
