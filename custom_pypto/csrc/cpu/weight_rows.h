// Rows of a weight between float and their formats, and their sums, written once for all
// instruction sets. Only tables of kernels have them.
#pragma once

#include <cmath>
#include <limits>
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

INLINE uint16_t bfloat16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x == x ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0;
}

// to the nearest, ties to even
void round_bf16(const float* from, int64_t n, uint16_t* to) {
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
float round_int8(const float* from, int64_t n, int8_t* to) {
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
    store_codes(x == x ? x : Vec{}, -127.0f, 127.0f, 0.0f, reinterpret_cast<uint8_t*>(to + i));
  }
  return scale;
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

void round_int4(const float* from, int64_t n, int64_t group, uint8_t* to, uint16_t* scales) {
  for (int64_t i = 0; i < n; i += group, scales += 2) {
    round_int4_group(from + i, group, to + i / 2, scales);
  }
}

constexpr RowKernels kRows = {.dequantize_fp8 = dequantize_row<Fp8Weight>,
                              .dequantize_fp4 = dequantize_row<Fp4Weight>,
                              .round_bf16 = round_bf16,
                              .round_int8 = round_int8,
                              .round_int4 = round_int4};

}  // namespace
}  // namespace custom_pypto::cpu
