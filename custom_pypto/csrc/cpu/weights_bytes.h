// Units of weights of 4 and 8 bits as bytes, times x in two bytes, x = 256 high + low: half of the
// instructions that words take. vpdpbusd multiplies bytes without sign, so values have an offset,
// whose products with x each unit of x has.
#pragma once

#include "weights_int16.h"

namespace custom_pypto::cpu {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(64), aligned(1), may_alias));
constexpr int kHalf = kInt16Unit / 2;

INLINE void add_products(IntVec& acc, const Bytes& values, const char* x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(values), "m"(*reinterpret_cast<const Bytes*>(x)));
}

// The values of a unit plus kOffset, in two halves; value(h, i): which is value i of half h.
template <class Format>
struct ByteValues;

template <>
struct ByteValues<Int8Weight> {
  static constexpr int kBytes = kInt16Unit, kOffset = 128;
  static constexpr int value(int h, int i) { return h * kHalf + i; }
  explicit INLINE ByteValues(const uint8_t* p)
      : first(*reinterpret_cast<const Bytes*>(p) ^ 128),
        second(*reinterpret_cast<const Bytes*>(p + kHalf) ^ 128) {}
  Bytes first, second;
};

// of 4 bits: 0, 2, 4, ... are in the first half
struct ByteNibbles {
  static constexpr int kBytes = kHalf;
  static constexpr int value(int h, int i) { return 2 * i + h; }
  explicit INLINE ByteNibbles(const uint8_t* p) {
    const Bytes bytes = *reinterpret_cast<const Bytes*>(p);
    first = bytes & 15;
    second = (Bytes)_mm512_srli_epi16((__m512i)bytes, 4) & 15;
  }
  Bytes first, second;
};

template <>
struct ByteValues<Int4Weight> : ByteNibbles {
  static constexpr int kOffset = 0;
  explicit INLINE ByteValues(const uint8_t* p) : ByteNibbles(p) {}
};

template <>
struct ByteValues<Fp4Weight> : ByteNibbles {
  static constexpr int kOffset = 12;
  explicit INLINE ByteValues(const uint8_t* p) : ByteNibbles(p) {
    // the values of e2m1 count twice
    const __m512i values = _mm512_maskz_broadcast_i32x4(
        0xFFFF, _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    first = (Bytes)_mm512_shuffle_epi8(values, (__m512i)first);
    second = (Bytes)_mm512_shuffle_epi8(values, (__m512i)second);
  }
};

// A unit of x: the high bytes, the low ones, and what the lanes of sums have too little.
template <class Format>
struct ByteUnit : ByteValues<Format> {
  using Values = ByteValues<Format>;
  explicit INLINE ByteUnit(const uint8_t* p) : Values(p) {}
  static constexpr int kBytesOfX = 2 * kInt16Unit + 64, kTimes = 1;
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
    std::memcpy(to + kInt16Unit, missing, sizeof missing);
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

constexpr WeightKernels kByteWeights[kWeightFormats] = {
    kFloatWeight<Bfloat16Weight, Bfloat16Pairs>, kInt16Weight<Int8Weight, ByteUnit>,
    kFloatWeight<Fp8Weight>, kInt16Weight<Int4Weight, ByteUnit>, kInt16Weight<Fp4Weight, ByteUnit>};

}  // namespace
}  // namespace custom_pypto::cpu
