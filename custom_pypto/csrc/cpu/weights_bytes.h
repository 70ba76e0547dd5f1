// Units of weights of 4 and 8 bits as bytes, times x in two bytes, x = 256 high + low: fewer
// instructions than words take. Where these multiply bytes without sign, values have an offset,
// whose products with x each unit of x has.
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

INLINE void add_products(IntVec& acc, const Bytes& values, const char* x) {
  acc = (IntVec)vdotq_s32((int32x4_t)acc, (int8x16_t)values, (int8x16_t)load_bytes(x));
}

// table[i] of 16 bytes
INLINE Bytes find(const uint8_t* table, const Bytes& i) {
  return (Bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)i);
}
#else
constexpr bool kSigned = false;

INLINE void add_products(IntVec& acc, const Bytes& values, const char* x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(values), "m"(*reinterpret_cast<const Bytes*>(x)));
}

INLINE Bytes find(const uint8_t* table, const Bytes& i) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Bytes)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xFFFF, values), (__m512i)i);
}
#endif

// The values of a unit plus kOffset, in two halves; value(h, i): which is value i of half h.
template <class Format>
struct ByteValues;

template <>
struct ByteValues<Int8Weight> {
  static constexpr int kBytes = kInt16Unit, kOffset = kSigned ? 0 : 128;
  static constexpr int value(int h, int i) { return h * kHalf + i; }
  explicit INLINE ByteValues(const uint8_t* p)
      : first(load_bytes(p) ^ kOffset), second(load_bytes(p + kHalf) ^ kOffset) {}
  Bytes first, second;
};

// of 4 bits: 0, 2, 4, ... are in the first half
struct ByteNibbles {
  static constexpr int kBytes = kHalf;
  static constexpr int value(int h, int i) { return 2 * i + h; }
  explicit INLINE ByteNibbles(const uint8_t* p) {
    const Bytes bytes = load_bytes(p);
    first = bytes & 15;
    second = (Bytes)((BytePairs)bytes >> 4) & 15;
  }
  Bytes first, second;
};

template <>
struct ByteValues<Int4Weight> : ByteNibbles {
  static constexpr int kOffset = 0;
  explicit INLINE ByteValues(const uint8_t* p) : ByteNibbles(p) {}
};

// the values of e2m1, twice, plus an offset
struct E2m1Table {
  constexpr explicit E2m1Table(int offset) : values() {
    for (int i = 0; i < 16; ++i) {
      values[i] = static_cast<uint8_t>(offset + (i < 8 ? kTwiceE2m1[i] : -kTwiceE2m1[i - 8]));
    }
  }
  uint8_t values[16];
};
constexpr int kE2m1Offset = kSigned ? 0 : 12;
constexpr E2m1Table kE2m1(kE2m1Offset);

template <>
struct ByteValues<Fp4Weight> : ByteNibbles {
  static constexpr int kOffset = kE2m1Offset;
  explicit INLINE ByteValues(const uint8_t* p) : ByteNibbles(p) {
    first = find(kE2m1.values, first);
    second = find(kE2m1.values, second);
  }
};

// A unit of x: the high bytes, the low ones, and what the lanes of sums have too little.
template <class Format>
struct ByteUnit : ByteValues<Format> {
  using Values = ByteValues<Format>;
  explicit INLINE ByteUnit(const uint8_t* p) : Values(p) {}
  static constexpr int kBytesOfX = 2 * kInt16Unit + (Values::kOffset ? VECTOR_BYTES : 0);
#if VECTOR_BYTES == 64
  static constexpr bool kStoredScales = std::is_same_v<Format, Fp4Weight>;
  template <int PARTS>
  using Scales = std::conditional_t<kStoredScales, StoredScales, UnitScales<PARTS>>;
#else
  static constexpr bool kStoredScales = false;
  template <int PARTS>
  using Scales = UnitScales<PARTS>;
#endif
  static constexpr int kTimes = kStoredScales ? 2 : 1;  // e2m1 counts twice
  // No more than 127 * 256 + 127. Of such numbers its inverse is almost a float, which keeps
  // products with one exact.
  static constexpr int kMost = 32601;

  static void arrange(const int16_t* values, char* to) {
    int32_t missing[kLanes] = {};
    for (int h = 0; h < 2; ++h, to += kHalf) {
      for (int i = 0; i < kHalf; ++i) {
        const int16_t value = values[Values::value(h, i)];
        const int8_t low = static_cast<int8_t>(value);
        to[i] = static_cast<char>((value - low) >> 8);
        to[kInt16Unit + i] = static_cast<char>(low);
        missing[i / 4] -= Values::kOffset * value;
      }
    }
    if constexpr (Values::kOffset) std::memcpy(to + kInt16Unit, missing, sizeof missing);
  }

  INLINE IntVec products(const char* x) const {
    IntVec sums = {};
    add_products(sums, this->first, x);
    add_products(sums, this->second, x + kHalf);
    sums <<= 8;
    add_products(sums, this->first, x + kInt16Unit);
    add_products(sums, this->second, x + kInt16Unit + kHalf);
    if constexpr (Values::kOffset) sums += *reinterpret_cast<const IntVec*>(x + 2 * kInt16Unit);
    return sums;
  }
};

}  // namespace
}  // namespace custom_pypto::cpu
