// The formats in which weights are stored: their values as floats, and floats rounded to them.
#pragma once

#if defined(__x86_64__) && VECTOR_BYTES >= 32
#include <immintrin.h>
#endif

#include <cstring>
#include <limits>

#include "kernels.h"
#include "vectors.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kUnit = kWeightUnit;         // values that are unpacked together
constexpr int kUnitVecs = kUnit / kLanes;  // vectors of them
// of bfloat16, in memory that is aligned for one
typedef int32_t LanePairs __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
typedef uint16_t LaneHalves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef uint8_t Bytes16 __attribute__((vector_size(16), aligned(1), may_alias));

INLINE Bytes16 load16(const uint8_t* p) { return *reinterpret_cast<const Bytes16*>(p); }

// kLanes int8
INLINE IntVec load_int8(const void* p) {
#if VECTOR_BYTES == 64
  // g++ 12 warns of the one without a mask
  return (IntVec)_mm512_maskz_cvtepi8_epi32(0xFFFF,
                                            _mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif defined(__x86_64__) && VECTOR_BYTES == 32
  // g++ 12 converts 8 bytes by a dozen instructions
  return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#else
  typedef int8_t Lanes __attribute__((vector_size(kLanes), aligned(1), may_alias));
  return __builtin_convertvector(*static_cast<const Lanes*>(p), IntVec);
#endif
}

// low[0], high[0], low[1], ...
INLINE void interleave(const Bytes16& low, const Bytes16& high, Bytes16* to) {
  const Bytes16 first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  to[0] = __builtin_shuffle(low, high, first);
  to[1] = __builtin_shuffle(low, high, first + 8);
}

INLINE void unpack_pairs(const Bytes16& low, const Bytes16& high, Vec* to) {
  Bytes16 bytes[2];
  interleave(low, high, bytes);
  UNROLL for (int i = 0; i < kUnitVecs; ++i) {
    const IntVec values = load_int8(reinterpret_cast<const uint8_t*>(bytes) + i * kLanes);
    to[i] = __builtin_convertvector(values, Vec);
  }
}

// kGroup: values that share a scale and an offset
constexpr int kWholeRow = 0, kAnyGroup = -1;

struct Bfloat16Weight {
  static constexpr int kBytes = 64;  // of a unit
  static constexpr int kGroup = kWholeRow;
  static INLINE void unpack(const uint8_t* p, Vec* to) {
    UNROLL for (int i = 0; i < kUnitVecs; ++i) {
      const LaneHalves bits = *reinterpret_cast<const LaneHalves*>(p + 2 * i * kLanes);
      to[i] = (Vec)(__builtin_convertvector(bits, IntVec) << 16);
    }
  }
};

struct Int8Weight {
  static constexpr int kBytes = 32, kGroup = kWholeRow;
  static INLINE void unpack(const uint8_t* p, Vec* to) {
    UNROLL for (int i = 0; i < kUnitVecs; ++i) {
      to[i] = __builtin_convertvector(load_int8(p + i * kLanes), Vec);
    }
  }
};

// e4m3 times 2^-8: its bits, shifted, are those of float16, whose exponent has another bias.
struct Fp8Weight {
  static constexpr int kBytes = 32, kGroup = kAnyGroup;
  static INLINE void unpack(const uint8_t* p, Vec* to) {
#if VECTOR_BYTES == 64
    UNROLL for (int i = 0; i < 2; ++i) {
      const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16 * i)));
      const __m256i bits = _mm256_slli_epi16(wide, 7) & _mm256_set1_epi16((short)0xBFFF);
      to[i] = (Vec)_mm512_maskz_cvtph_ps(0xFFFF, bits);
    }
#elif defined(__x86_64__) && VECTOR_BYTES == 32
    UNROLL for (int i = 0; i < 2; ++i) {
      const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16 * i)));
      const __m256i bits = _mm256_slli_epi16(wide, 7) & _mm256_set1_epi16((short)0xBFFF);
      to[2 * i] = (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(bits));
      to[2 * i + 1] = (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
    }
#else
    UNROLL for (int i = 0; i < kUnitVecs; ++i) {
      const IntVec byte = load_int8(p + i * kLanes);
      const IntVec normal = ((byte & 0x7F) << 20) + (112 << 23);
      const Vec subnormal = __builtin_convertvector(byte & 7, Vec) * 0x1p-17f;
      to[i] = (Vec)((byte & INT32_MIN) | ((byte & 0x78) == 0 ? (IntVec)subnormal : normal));
    }
#endif
  }
};

struct Int4Weight {
  static constexpr int kBytes = 16, kGroup = kAnyGroup;
  static INLINE void unpack(const uint8_t* p, Vec* to) {
    const Bytes16 bytes = load16(p);
    unpack_pairs(bytes & 15, bytes >> 4, to);
  }
};

constexpr int kTwiceE2m1[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // of the magnitudes

// e2m1 times 2
struct Fp4Weight {
  static constexpr int kBytes = 16, kGroup = kFp4Group;
  static INLINE void unpack(const uint8_t* p, Vec* to) {
    const Bytes16 values = {0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
    const Bytes16 bytes = load16(p);
    unpack_pairs(__builtin_shuffle(values, bytes & 15), __builtin_shuffle(values, bytes >> 4), to);
  }
};

// Calls put(d, unit) for the values of row w from the first on, a unit at a time.
template <class Format, typename Put>
INLINE void each_unit(const Dots& call, int w, const Put& put) {
  const uint8_t* p = call.weight + w * call.stride;
  const float* scales = call.scales + w * call.scale_stride;
  for (int64_t d = 0, g = 0; d < call.depth; ++g) {
    const int64_t end = call.depth - d < call.group ? call.depth : d + call.group;
    const Vec scale = broadcast(scales[g]);
    const Vec offset = broadcast(call.has_offsets ? call.offsets[w * call.groups + g] : 0.0f);
    for (; d < end; d += kUnit, p += Format::kBytes) {
      Vec unit[kUnitVecs];
      Format::unpack(p, unit);
      UNROLL for (int v = 0; v < kUnitVecs; ++v) unit[v] = unit[v] * scale + offset;
      put(d, unit);
    }
  }
}

// ---- from floats --------------------------------------------------------------------------------

INLINE uint16_t bfloat16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x == x ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0;
}

// to the nearest, ties to even
inline void round_bf16(const float* from, int64_t n, int64_t, void* bits_of_row, void*) {
  auto* to = static_cast<uint16_t*>(bits_of_row);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec x = load(from + i);
    const IntVec bits = (IntVec)x, nearest = bits + 0x7FFF + (bits >> 16 & 1);
    const IntVec rounded = (x == x ? nearest : IntVec{} + 0x7FC00000) >> 16;
    *reinterpret_cast<LaneHalves*>(to + i) = __builtin_convertvector(rounded, LaneHalves);
  }
  for (; i < n; ++i) to[i] = bfloat16_bits(from[i]);
}

typedef uint8_t Codes __attribute__((vector_size(kLanes), aligned(1), may_alias));
constexpr float kLeastScale = std::numeric_limits<float>::min();  // of zeros, or of one value

// x to the nearest integers, ties to even, from `least` to `most`, plus an even `offset`. NaN
// counts as `least`.
INLINE void store_codes(const Vec& x, float least, float most, float offset, uint8_t* to) {
  const Vec low = x > least ? x : broadcast(least);
  const Vec inside = low < most ? low : broadcast(most);
  // floats of this magnitude are integers, with those of the sum in their low bits
  const IntVec bits = (IntVec)(inside + (0x1.8p23f + offset));
  // in two steps: g++ 12 converts 32 bits to 8 value by value
  *reinterpret_cast<Codes*>(to) =
      __builtin_convertvector(__builtin_convertvector(bits, LaneHalves), Codes);
}

// Codes of zero for NaN, which the scale then is, too.
inline void round_int8(const float* from, int64_t n, int64_t, void* codes, void* scale_of_row) {
  auto* to = static_cast<uint8_t*>(codes);
  IntVec most = {};  // the bits of |x|, ordered as |x|, with NaN above infinity
  for (int64_t i = 0; i < n; i += kLanes) {
    const IntVec bits = (IntVec)load(from + i) & INT32_MAX;
    most = bits > most ? bits : most;
  }
  int32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits = bits < most[lane] ? most[lane] : bits;
  float largest;
  std::memcpy(&largest, &bits, 4);
  const float scale = (largest < kLeastScale ? kLeastScale : largest) / 127.0f;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec x = load(from + i) / broadcast(scale);
    store_codes(x == x ? x : Vec{}, -127.0f, 127.0f, 0.0f, to + i);
  }
  *static_cast<float*>(scale_of_row) = scale;
}

INLINE float widened(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

// Integers in the order of floats, with NaN at the end of its sign; twice gives x.
INLINE IntVec ordered(const IntVec& x) { return x ^ ((x >> 31) & INT32_MAX); }

// A group with NaN has it for scale and zero.
INLINE void round_int4_group(const float* from, int64_t n, uint8_t* to, uint16_t* scales) {
  IntVec least = ordered((IntVec)load(from)), most = least;
  for (int64_t i = kLanes; i < n; i += kLanes) {
    const IntVec x = ordered((IntVec)load(from + i));
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  UNROLL for (int width = kLanes / 2; width > 0; width /= 2) {
    const IntVec other = lane_index() ^ width;
    const IntVec low = __builtin_shuffle(least, other), high = __builtin_shuffle(most, other);
    least = low < least ? low : least;
    most = high > most ? high : most;
  }
  const Vec low = (Vec)ordered(least), step = ((Vec)ordered(most) - low) / 15.0f;
  scales[0] = bfloat16_bits(step[0] < kLeastScale ? kLeastScale : step[0]);
  const float scale = widened(scales[0]);
  scales[1] = bfloat16_bits(low[0] + 8.0f * scale);
  const float zero = widened(scales[1]);
  typedef uint16_t Pairs __attribute__((vector_size(kUnit)));
  for (int64_t i = 0; i < n; i += kUnit) {
    Pairs pairs;
    UNROLL for (int v = 0; v < kUnitVecs; ++v) {
      const Vec x = (load(from + i + v * kLanes) - broadcast(zero)) / broadcast(scale);
      store_codes(x, -8.0f, 7.0f, 8.0f, reinterpret_cast<uint8_t*>(&pairs) + v * kLanes);
    }
    *reinterpret_cast<Bytes16*>(to + i / 2) = __builtin_convertvector(pairs | pairs >> 4, Bytes16);
  }
}

inline void round_int4(const float* from, int64_t n, int64_t group, void* codes, void* pairs) {
  auto* scales = static_cast<uint16_t*>(pairs);
  for (int64_t i = 0; i < n; i += group, scales += 2) {
    round_int4_group(from + i, group, static_cast<uint8_t*>(codes) + i / 2, scales);
  }
}

// of WeightKernels; null: nobody rounds to the format
template <class Format>
constexpr auto kRound = decltype(WeightKernels::round)();
template <>
constexpr auto kRound<Bfloat16Weight> = round_bf16;
template <>
constexpr auto kRound<Int8Weight> = round_int8;
template <>
constexpr auto kRound<Int4Weight> = round_int4;

}  // namespace
}  // namespace custom_pypto::cpu
