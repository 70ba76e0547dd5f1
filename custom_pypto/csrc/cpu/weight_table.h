// What the ways of all formats share: values as floats or small integers, and scales. Only tables
// of kernels have them.
#pragma once

#include "weight_rows.h"
#include "weights_int16.h"

namespace custom_pypto::cpu {
namespace {

// a . b
float dot_f32(const float* a, const float* b, int64_t n) {
  constexpr int kStep = 4 * kLanes;
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    UNROLL for (int s = 0; s < 4; ++s) {
      sums[s] += load(a + i + s * kLanes) * load(b + i + s * kLanes);
    }
  }
  float sum = sum_of(sums[0] + sums[1] + (sums[2] + sums[3]));
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

template <class Format>
void widen(const Dots& call, int w, float* to) {
  each_unit<Format>(call, w, [&](int64_t d, const Vec* unit) INLINED {
    UNROLL for (int v = 0; v < kUnitVecs; ++v) store(to + d + v * kLanes, unit[v]);
  });
}

// out += x * row
INLINE void add_row(const uint16_t* row, float x, int width, float* out) {
  const Vec factor = broadcast(x);
  int l = 0;
  for (; l + 2 * kLanes <= width; l += 2 * kLanes) {
    UNROLL for (int i = l; i < l + 2 * kLanes; i += kLanes) {
      const LaneHalves bits = *reinterpret_cast<const LaneHalves*>(row + i);
      store(out + i, load(out + i) + factor * (Vec)(__builtin_convertvector(bits, IntVec) << 16));
    }
  }
  // behind the last row there may be no memory
  for (; l < width; ++l) {
    const uint32_t bits = static_cast<uint32_t>(row[l]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    out[l] += x * value;
  }
}

// One row after another: rows are short, and several at once are streams that the CPU does not
// prefetch.
void add_rows_f32(const uint16_t* rows, int64_t stride, const void* const* x, int m, int depth,
                  int width, float* const* out) {
  for (int i = 0; i < m; ++i) std::memset(out[i], 0, sizeof(float) * width);
  for (int d = 0; d < depth; ++d, rows += stride) {
    for (int i = 0; i < m; ++i) {
      add_row(rows, static_cast<const float*>(x[i])[d], width, out[i]);
    }
  }
}

// Calls read(p, values) for vectors of stored scales of BYTES each, whose PARTS vectors of values
// go to arrays of `count`.
template <int BYTES, int PARTS, typename Read>
INLINE void each_scale(const void* from, int64_t count, float* scales, const Read& read) {
  const char* p = static_cast<const char*>(from);
  Vec values[PARTS];
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes, p += BYTES * kLanes) {
    read(p, values);
    UNROLL for (int part = 0; part < PARTS; ++part) store(scales + part * count + i, values[part]);
  }
  if (i == count) return;
  // behind the last one there may be no memory
  char last[BYTES * kLanes] = {};
  std::memcpy(last, p, BYTES * (count - i));
  read(last, values);
  for (int part = 0; part < PARTS; ++part) {
    std::memcpy(scales + part * count + i, values + part, sizeof(float) * (count - i));
  }
}

void read_int4_scales(const void* from, int64_t count, float* scales) {
  each_scale<4, 2>(from, count, scales, [](const char* p, Vec* values) INLINED {
    read_pairs(*reinterpret_cast<const LanePairs*>(p), values, values + 1);
  });
}

// of fp4: half of 2^(bits - 127), as the kernels' values of e2m1 count twice, and NaN for 255
void read_fp4_scales(const void* from, int64_t count, float* scales) {
  each_scale<1, 1>(from, count, scales, [](const char* p, Vec* values) INLINED {
    const IntVec exponent = load_int8(p) & 0xFF;
    const IntVec subnormal = exponent == 0 ? IntVec{} + (1 << 21) : IntVec{} + (1 << 22);
    const IntVec bits = exponent > 1 ? (exponent - 1) << 23 : subnormal;
    values[0] = (Vec)(exponent == 255 ? IntVec{} + 0x7FC00000 : bits);
  });
}

void round_part(const float* x, int n, int16_t* to, float* scale, float* sum) {
  *scale = round_to_int16(x, n, INT16_MAX, to);
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

template <class Format>
constexpr auto kReadScales = std::is_same_v<Format, Int4Weight>  ? read_int4_scales
                             : std::is_same_v<Format, Fp4Weight> ? read_fp4_scales
                                                                 : nullptr;

template <class Format>
constexpr WeightKernels kFloats = {.widen = widen<Format>,
                                   .read_scales = kReadScales<Format>,
                                   .pack_int16 = nullptr,
                                   .round_int16 = nullptr,
                                   .dequantize = kDequantize<Format>,
                                   .round = kRound<Format>};

template <class Format>
constexpr WeightKernels kIntegers = {.widen = widen<Format>,
                                     .read_scales = kReadScales<Format>,
                                     .pack_int16 = pack_int16<Format>,
                                     .round_int16 = round_part,
                                     .dequantize = kDequantize<Format>,
                                     .round = kRound<Format>};

constexpr WeightKernels kWeights[kWeightFormats] = {kFloats<Bfloat16Weight>, kIntegers<Int8Weight>,
                                                    kFloats<Fp8Weight>, kIntegers<Int4Weight>,
                                                    kIntegers<Fp4Weight>};

// BEHIND: whether another way takes integers of 4 and 8 bits, but for odd shapes.
template <bool BEHIND>
constexpr DotsKernels kFloatDots[kWeightFormats] = {
    kFloat<Bfloat16Pairs>, kFloat<InOrder<Int8Weight>, !BEHIND>, kFloat<InOrder<Fp8Weight>>,
    kFloat<InOrder<Int4Weight>, !BEHIND>, kFloat<InOrder<Fp4Weight>, !BEHIND>};

}  // namespace
}  // namespace custom_pypto::cpu
