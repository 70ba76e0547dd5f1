// Units of weights of 4 and 8 bits as bytes, times x in two bytes, x = 256 high + low: fewer
// instructions than words take; or times x in int8. Where these multiply bytes without sign, values
// have an offset, whose products with x each unit of x has.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "weights_int16.h"

namespace custom_pypto::cpu {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
typedef uint16_t BytePairs __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
constexpr int kHalf = kInt16Unit / 2;

INLINE Bytes load_bytes(const void* p) { return *static_cast<const Bytes*>(p); }

#if defined(__aarch64__)
constexpr bool kSigned = true;

// sums += the products of both halves of a unit
INLINE void add_products(IntVec& sums, const Bytes& first, const Bytes& second, const char* x) {
  const auto values = [](const Bytes& bytes) { return (int8x16_t)bytes; };
  sums = (IntVec)vdotq_s32((int32x4_t)sums, values(first), values(load_bytes(x)));
  sums = (IntVec)vdotq_s32((int32x4_t)sums, values(second), values(load_bytes(x + kHalf)));
}

// table[i % 16]
INLINE Bytes find(const uint8_t* table, const Bytes& i) {
  return (Bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)(i & 15));
}
#else
constexpr bool kSigned = false;

INLINE void add_products(IntVec& sums, const Bytes& first, const Bytes& second, const char* x) {
#if VECTOR_BYTES == 64
  // asm: g++ 12 copies accumulators around the intrinsic
  const Bytes* of_x = reinterpret_cast<const Bytes*>(x);
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(first), "m"(of_x[0]));
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(second), "m"(of_x[1]));
#else
  // of 4 bits alone: the sum of four products of larger values may not fit 16 bits
  const auto pairs = [&](const Bytes& values, const char* of_x) INLINED {
    return _mm256_maddubs_epi16((__m256i)values, (__m256i)load_bytes(of_x));
  };
  const __m256i fours = _mm256_add_epi16(pairs(first, x), pairs(second, x + kHalf));
  sums += (IntVec)_mm256_madd_epi16(fours, _mm256_set1_epi16(1));
#endif
}

INLINE Bytes find(const uint8_t* table, const Bytes& i) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
#if defined(HAS_VBMI)
  // by six bits, of which the table does not tell the upper two apart
  return (Bytes)_mm512_permutexvar_epi8((__m512i)i, _mm512_maskz_broadcast_i32x4(0xFFFF, values));
#elif VECTOR_BYTES == 64
  const __m512i found = _mm512_maskz_broadcast_i32x4(0xFFFF, values);
  return (Bytes)_mm512_shuffle_epi8(found, (__m512i)(i & 15));
#else
  return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)(i & 15));
#endif
}
#endif

// The values of a unit plus kOffset, in two halves; value(h, i): which is value i of half h.
template <class Format>
struct ByteValues;

template <>
struct ByteValues<Int8Weight> {
  static constexpr int kBytes = kInt16Unit, kOffset = kSigned ? 0 : 128;
  static constexpr int value(int h, int i) { return h * kHalf + i; }
  INLINE ByteValues(const uint8_t* p, bool)
      : first(load_bytes(p) ^ kOffset), second(load_bytes(p + kHalf) ^ kOffset) {}
  Bytes first, second;
};

// of 4 bits, below others: 0, 2, 4, ... are in the first half
struct ByteNibbles {
  static constexpr int kBytes = kHalf;
  static constexpr int value(int h, int i) { return 2 * i + h; }
  INLINE ByteNibbles(const uint8_t* p, [[maybe_unused]] bool once) : first(load_bytes(p)) {
#if VECTOR_BYTES == 64
    if (once) asm("" : "+v"(first));  // g++ 12 loads them twice, where others need the registers
#endif
    second = (Bytes)((BytePairs)first >> 4);
  }
  Bytes first, second;
};

template <>
struct ByteValues<Int4Weight> : ByteNibbles {
  static constexpr int kOffset = 0;
  INLINE ByteValues(const uint8_t* p, bool once) : ByteNibbles(p, once) {
    first &= 15;
    second &= 15;
  }
};

// the values of e2m1, twice, plus an offset
struct E2m1Bytes {
  constexpr explicit E2m1Bytes(int offset) : values() {
    for (int i = 0; i < 16; ++i) {
      values[i] = static_cast<uint8_t>(offset + (i < 8 ? kTwiceE2m1[i] : -kTwiceE2m1[i - 8]));
    }
  }
  uint8_t values[16];
};
constexpr int kE2m1Offset = kSigned ? 0 : 12;
constexpr E2m1Bytes kE2m1Bytes(kE2m1Offset);

template <>
struct ByteValues<Fp4Weight> : ByteNibbles {
  static constexpr int kOffset = kE2m1Offset;
  INLINE ByteValues(const uint8_t* p, bool once) : ByteNibbles(p, once) {
    first = find(kE2m1Bytes.values, first);
    second = find(kE2m1Bytes.values, second);
  }
};

// A unit of a weight, and how its scales are read.
template <class Format>
struct StoredBytes : ByteValues<Format> {
  using Values = ByteValues<Format>;
  INLINE StoredBytes(const uint8_t* p, bool once) : Values(p, once) {}
  static constexpr bool kStoredScales = custom_pypto::cpu::kStoredScales<Format>;
  template <int PARTS>
  using Scales = StoredScales<Format, PARTS>;
  // e2m1 counts twice
  static constexpr int kTimes = kStoredScales && std::is_same_v<Format, Fp4Weight> ? 2 : 1;

  // Writes what the lanes of sums have too little.
  static void write_missing(const int16_t* values, char* to) {
    int32_t missing[kLanes] = {};
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < kHalf; ++i) {
        missing[i / 4] -= Values::kOffset * values[Values::value(h, i)];
      }
    }
    std::memcpy(to, missing, sizeof missing);
  }
};

// A unit of x: the high bytes, the low ones, and what is missing.
template <class Format>
struct ByteUnit : StoredBytes<Format> {
  using Values = ByteValues<Format>;
  INLINE ByteUnit(const uint8_t* p, bool once) : StoredBytes<Format>(p, once) {}
  static constexpr int kBytesOfX = 2 * kInt16Unit + (Values::kOffset ? VECTOR_BYTES : 0);
  // No more than 127 * 256 + 127. Of such numbers its inverse is almost a float, which keeps
  // products with one exact.
  static constexpr int kMost = 32601, kShareScale = kUnitsOfScale<Format> * kInt16Unit;

  static void arrange(const int16_t* values, const float*, char* to) {
    if constexpr (Values::kOffset) ByteUnit::write_missing(values, to + 2 * kInt16Unit);
    for (int h = 0; h < 2; ++h, to += kHalf) {
      for (int i = 0; i < kHalf; ++i) {
        const int16_t value = values[Values::value(h, i)];
        const int8_t low = static_cast<int8_t>(value);
        to[i] = static_cast<char>((value - low) >> 8);
        to[kInt16Unit + i] = static_cast<char>(low);
      }
    }
  }

  INLINE IntVec products(const char* x) const {
    IntVec sums = {};
    add_products(sums, this->first, this->second, x);
    sums <<= 8;
    add_products(sums, this->first, this->second, x + kInt16Unit);
    if constexpr (Values::kOffset) sums += *reinterpret_cast<const IntVec*>(x + 2 * kInt16Unit);
    return sums;
  }
  static INLINE Vec scale(const char*, const float* of_unit) { return broadcast(*of_unit); }
};

// A unit of x in int8, where 32 values share a scale: bytes, the scales of lanes, and what is
// missing. Of weights of 4 bits, whose lanes have 8 values in a row.
template <class Format>
struct Int8Unit : StoredBytes<Format> {
  using Values = ByteValues<Format>;
  static_assert(std::is_base_of_v<ByteNibbles, Values>);
  INLINE Int8Unit(const uint8_t* p, bool once) : StoredBytes<Format>(p, once) {}
  static constexpr int kMissing = kInt16Unit + VECTOR_BYTES;
  static constexpr int kBytesOfX = kMissing + (Values::kOffset ? VECTOR_BYTES : 0);
  static constexpr int kMost = INT8_MAX, kShareScale = kUnit;

  static void arrange(const int16_t* values, const float* scales, char* to) {
    float of_lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) of_lanes[i] = scales[8 * i / kUnit];
    std::memcpy(to + kInt16Unit, of_lanes, sizeof of_lanes);
    if constexpr (Values::kOffset) Int8Unit::write_missing(values, to + kMissing);
    for (int h = 0; h < 2; ++h, to += kHalf) {
      for (int i = 0; i < kHalf; ++i) to[i] = static_cast<char>(values[Values::value(h, i)]);
    }
  }

  INLINE IntVec products(const char* x) const {
    IntVec sums = {};
    if constexpr (Values::kOffset) sums = *reinterpret_cast<const IntVec*>(x + kMissing);
    add_products(sums, this->first, this->second, x);
    return sums;
  }
  static INLINE Vec scale(const char* x, const float*) {
    return load(reinterpret_cast<const float*>(x + kInt16Unit));
  }
};

constexpr DotsKernels kInt8Dots[kWeightFormats] = {
    {}, {}, {}, kInt16<Int4Weight, Int8Unit>, kInt16<Fp4Weight, Int8Unit>};

}  // namespace
}  // namespace custom_pypto::cpu
