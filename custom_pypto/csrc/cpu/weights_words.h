// Units of weights of 4 and 8 bits as words, times words of x.
#pragma once

#include <immintrin.h>

#include "weights_int16.h"

namespace custom_pypto::cpu {
namespace {

typedef uint16_t Shorts __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));

// sums += the products of pairs
INLINE void add_pairs(IntVec& sums, const Shorts& a, const char* b) {
#if defined(HAS_VNNI)
  // asm: g++ 12 copies accumulators around the intrinsic
  asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "m"(*reinterpret_cast<const Shorts*>(b)));
#elif VECTOR_BYTES == 64
  sums += (IntVec)_mm512_madd_epi16((__m512i)a, _mm512_loadu_si512(b));
#else
  sums += (IntVec)_mm256_madd_epi16((__m256i)a, _mm256_loadu_si256((const __m256i*)b));
#endif
}

// The values of a unit, a quarter at a time; arrange(): those of x as these find them.
template <class Format>
struct WordValues;

template <>
struct WordValues<Int8Weight> {
  static constexpr int kBytes = kInt16Unit;
  static void arrange(const void* from, void* to) { std::memcpy(to, from, 2 * kInt16Unit); }
  explicit INLINE WordValues(const uint8_t* p) : bytes(p) {}
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
struct WordNibbles {
  static constexpr int kBytes = kInt16Unit / 2;
  static void arrange(const void* from, void* to) {
    uint64_t fours[kInt16Unit / 4];
    uint16_t quarters[4][kInt16Unit / 4];
    std::memcpy(fours, from, sizeof fours);
    UNROLL for (int q = 0; q < 4; ++q) {
      for (int i = 0; i < kInt16Unit / 4; ++i) {
        quarters[q][i] = static_cast<uint16_t>(fours[i] >> 16 * q);
      }
    }
    std::memcpy(to, quarters, sizeof quarters);
  }
};

template <>
struct WordValues<Int4Weight> : WordNibbles {
  explicit INLINE WordValues(const uint8_t* p) : bits(*reinterpret_cast<const Shorts*>(p)) {}
  INLINE Shorts values(int i) const { return i == 3 ? bits >> 12 : (bits >> 4 * i) & 15; }
  Shorts bits;
};

template <>
struct WordValues<Fp4Weight> : WordNibbles {
  explicit INLINE WordValues(const uint8_t* p) {
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
struct WordUnit : WordValues<Format> {
  using Values = WordValues<Format>;
  INLINE WordUnit(const uint8_t* p, bool) : Values(p) {}
  static constexpr int kBytesOfX = 2 * kInt16Unit, kMost = INT16_MAX;
  static constexpr int kShareScale = kUnitsOfScale<Format> * kInt16Unit;
  static constexpr int kTimes = std::is_same_v<Format, Fp4Weight> ? 256 : 1;
  static constexpr bool kStoredScales = false;
  template <int PARTS>
  using Scales = UnitScales<PARTS>;

  static void arrange(const int16_t* values, const float*, char* to) {
    Values::arrange(values, to);
  }
  static INLINE Vec scale(const char*, const float* of_unit) { return broadcast(*of_unit); }

  INLINE IntVec products(const char* x) const {
    IntVec sums = {};
    UNROLL for (int q = 0; q < 4; ++q) { add_pairs(sums, this->values(q), x + q * VECTOR_BYTES); }
    return sums;
  }
};

}  // namespace
}  // namespace custom_pypto::cpu
