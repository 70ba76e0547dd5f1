// Rows of a published weight as floats, written once for all instruction sets. Only tables of
// kernels have them.
#pragma once

#include <cmath>
#include <type_traits>

#include "weight_formats.h"

namespace custom_pypto::cpu {
namespace {

template <class Format>
INLINE void dequantize_unit(const uint8_t* from, float scale, float* to) {
  Vec unit[kUnitVecs];
  if constexpr (std::is_same_v<Format, Fp4Weight>) {  // each as e4m3, which has -0
    const Bytes16 e4m3 = {0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C,
                          0x80, 0xB0, 0xB8, 0xBC, 0xC0, 0xC4, 0xC8, 0xCC};
    const Bytes16 pairs = load16(from);
    Bytes16 bytes[2];
    interleave(__builtin_shuffle(e4m3, pairs & 15), __builtin_shuffle(e4m3, pairs >> 4), bytes);
    Fp8Weight::unpack(reinterpret_cast<const uint8_t*>(bytes), unit);
  } else {
    Fp8Weight::unpack(from, unit);
  }
  UNROLL for (int v = 0; v < kUnitVecs; ++v) {
    const Vec x = unit[v] * 256.0f, nan = broadcast(NAN);
    const Vec value = x * x == 480.0f * 480.0f ? nan : x;  // e4m3 has no 480
    store(to + v * kLanes, value * broadcast(scale));
  }
}

// Consecutive values share a scale.
template <class Format>
void dequantize_row(const uint8_t* from, const float* scales, int64_t n, int64_t block, float* to) {
  constexpr int kPerByte = kUnit / Format::kBytes;
  for (int64_t i = 0; i < n; ++scales) {
    const int64_t end = n - i < block ? n : i + block;
    for (; i + kUnit <= end; i += kUnit) {
      dequantize_unit<Format>(from + i / kPerByte, *scales, to + i);
    }
    if (i == end) continue;
    // behind the last value there may be no memory
    uint8_t bytes[Format::kBytes] = {};
    float rest[kUnit];
    std::memcpy(bytes, from + i / kPerByte, (end - i) / kPerByte);
    dequantize_unit<Format>(bytes, *scales, rest);
    std::memcpy(to + i, rest, (end - i) * sizeof(float));
    i = end;
  }
}

// of WeightKernels
template <class Format>
constexpr auto kDequantize = decltype(WeightKernels::dequantize)();
template <>
constexpr auto kDequantize<Fp8Weight> = dequantize_row<Fp8Weight>;
template <>
constexpr auto kDequantize<Fp4Weight> = dequantize_row<Fp4Weight>;

}  // namespace
}  // namespace custom_pypto::cpu
