// Tables of bfloat16 that the CPU searches by the values of a weight of 4 or 8 bits. Included only
// by a .cpp of this folder, after it has set its target, with VBMI.
#pragma once

#include "weight_formats.h"

namespace custom_pypto::cpu {
namespace {

// of a normal number in bfloat16, or 0
constexpr uint16_t half_bits(float x) {
  const uint16_t sign = x < 0 ? 0x8000 : 0;
  if (x < 0) x = -x;
  if (x == 0) return sign;
  int exponent = 127;
  for (; x >= 2; x /= 2) ++exponent;
  for (; x < 1; x *= 2) --exponent;
  return sign | exponent << 7 | static_cast<int>((x - 1) * 128);
}

struct Halves {  // by five bits, of which the fifth does not count
  template <typename F>
  constexpr explicit Halves(const F& value) : bits() {
    for (int i = 0; i < 32; ++i) bits[i] = half_bits(value(i % 16));
  }
  alignas(64) uint16_t bits[32];
};
constexpr Halves kIntegers([](int i) { return static_cast<float>(i); });
constexpr Halves kE2m1([](int i) {
  return static_cast<float>(i < 8 ? kTwiceE2m1[i] : -kTwiceE2m1[i - 8]);
});

struct ByteHalves {  // by seven bits
  template <typename F>
  constexpr explicit ByteHalves(const F& value) : low(), high() {
    for (int i = 0; i < 128; ++i) {
      low[i] = static_cast<uint8_t>(half_bits(value(i)));
      high[i] = static_cast<uint8_t>(half_bits(value(i)) >> 8);
    }
  }
  static INLINE __m512i find(const uint8_t* table, __m512i i) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), i, _mm512_load_si512(table + 64));
  }
  alignas(64) uint8_t low[128], high[128];
};
constexpr ByteHalves kE4m3([](int i) {  // times 2^-8
  float value = (i < 8 ? i : 8 + i % 8) * 0x1p-17f;
  for (int e = 1; e < i / 8; ++e) value *= 2;
  return value;
});

}  // namespace
}  // namespace custom_pypto::cpu
