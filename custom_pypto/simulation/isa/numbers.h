// half and bfloat16_t of the AI cores: 16 bits in memory, float in arithmetic. Older compilers have
// neither type.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace isa {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// to nearest, ties to even
inline uint16_t bfloat16_bits(float value) {
  uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// to nearest, ties to even; from 65520 on infinity
inline uint16_t half_bits(float value) {
  uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (size >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  // below 2^-14: the sum's last place is that of a subnormal half
  if (size < 0x38800000)
    return static_cast<uint16_t>(sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f)));
  return static_cast<uint16_t>(sign | (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
}

inline float float_of_half(uint16_t bits) {
  uint32_t sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
  if (size >= 0x7c00) return float_of(sign | 0x7f800000 | (size & 0x3ff) << 13);
  if (size >= 0x400) return float_of(sign | ((size << 13) + 0x38000000));
  float value = static_cast<float>(size) * 0x1p-24f;
  return sign ? -value : value;
}

}  // namespace isa

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
  bfloat16_t(Number value) : bits(isa::bfloat16_bits(static_cast<float>(value))) {}
  operator float() const { return isa::float_of(static_cast<uint32_t>(bits) << 16); }
};

struct half {
  uint16_t bits;
  half() = default;
  template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
  half(Number value) : bits(isa::half_bits(static_cast<float>(value))) {}
  operator float() const { return isa::float_of_half(bits); }
};
