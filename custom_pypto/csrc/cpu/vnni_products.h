// Products of weights of 4 and 8 bits with rows of x in int8 by vpdpbusd: some rows of the weight
// become bytes without sign in the level-1 cache, quads of them are broadcast, and lanes are rows
// of x. Included only by avx512_vnni.cpp.
#pragma once

#include <type_traits>

#include "int8_products.h"
#include "weights_bytes.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kStripRows = 24;                                          // of the weight
constexpr int kMostBlock = 512, kMostParts = kMostBlock / kWeightUnit;  // of a row
// bytes between rows, which would else fall in one set of the level-1 cache
constexpr int kStripStride = kMostBlock + 64;

// Writes values of a row plus ByteValues<Format>::kOffset, a unit at a time in its two halves.
template <class Format>
INLINE void unpack_row(const uint8_t* from, int n, uint8_t* to) {
  using Values = ByteValues<Format>;
  const auto put = [&](const uint8_t* unit) INLINED {
    const Values values(unit, false);
    std::memcpy(to, &values.first, kHalf);
    std::memcpy(to + kHalf, &values.second, kHalf);
  };
  for (; n >= kInt16Unit; n -= kInt16Unit, from += Values::kBytes, to += kInt16Unit) put(from);
  if (n == 0) return;
  uint8_t rest[Values::kBytes] = {};  // behind the last row there may be no memory
  std::memcpy(rest, from, n / kWeightUnit * Format::kBytes);
  put(rest);
}

// Some rows of the weight, in a block of the depth.
struct Strip {
  alignas(64) uint8_t bytes[kStripRows][kStripStride];
  // of the groups of the block; behind the last row 0, or those of an earlier strip
  alignas(64) float scales[kStripRows][kMostParts] = {};
  alignas(64) float offsets[kStripRows][kMostParts] = {};
  int row;         // the first
  int begin, end;  // values of the block
  int of_group;    // values of a group
  bool has_offsets;
};

// QUADS consecutive quads, in all lanes
template <int QUADS>
INLINE IntVec broadcast_quads(const uint8_t* bytes) {
  if constexpr (QUADS == 1) {
    int32_t quad;
    std::memcpy(&quad, bytes, 4);
    return (IntVec)_mm512_set1_epi32(quad);
  } else if constexpr (QUADS == 2) {
    int64_t quads;
    std::memcpy(&quads, bytes, 8);
    return (IntVec)_mm512_set1_epi64(quads);
  } else {
    const __m128i quads = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    return (IntVec)_mm512_maskz_broadcast_i32x4(0xFFFF, quads);
  }
}

// ROWS rows of a strip, from `row` on, times VECS panels of x, from row `i` on.
template <class Format, int QUADS, int ROWS, int VECS>
INLINE void vnni_tile(const Int8Product& p, const Strip& strip, int row, int i, NextBlock& next) {
  constexpr int kOffset = ByteValues<Format>::kOffset;
  const uint32_t* panels = p.panels + i / 16 * p.panel_stride + 4 / QUADS * strip.begin;
  const uint8_t* bytes = strip.bytes[row];
  int32_t* sums = p.sums + static_cast<int64_t>(strip.row + row) * p.width + i;
  const auto ints = [&](int r, int v)
                        INLINED { return reinterpret_cast<IntVec*>(sums + r * p.width + 16 * v); };
  const auto floats = [&](int r, int v) INLINED { return reinterpret_cast<Vec*>(ints(r, v)); };
  IntVec acc[ROWS][VECS];
  const auto add = [&](int from, int n) INLINED {
    UNROLL for (int d = 0; d < n; d += 4 * QUADS, panels += 16) {
      IntVec x[VECS];
      UNROLL for (int v = 0; v < VECS; ++v) {
        x[v] = *reinterpret_cast<const IntVec*>(panels + v * p.panel_stride);
      }
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const IntVec values = broadcast_quads<QUADS>(bytes + r * kStripStride + from + d);
        UNROLL for (int v = 0; v < VECS; ++v) {
          asm("vpdpbusd %2, %1, %0" : "+v"(acc[r][v]) : "v"(values), "v"(x[v]));
        }
      }
    }
  };
  const int values = strip.end - strip.begin;
  if constexpr (Format::kGroup == kWholeRow) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      UNROLL for (int v = 0; v < VECS; ++v) acc[r][v] = *ints(r, v);
    }
    for (int d = 0; d < values; d += kWeightUnit) {
      add(d, kWeightUnit);
      next.step();
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      UNROLL for (int v = 0; v < VECS; ++v) * ints(r, v) = acc[r][v];
    }
    return;
  }
  // of a part of x
  const int64_t of_panel = int64_t{16} * p.parts;
  const int64_t first = i / 16 * of_panel + strip.begin / kWeightUnit * 16;
  const float* scales_of_x = p.x_scales + first;
  const int32_t* sums_of_x = p.x_sums + first;
  const auto scale_of_x = [&](int part, int v)
                              INLINED { return load(scales_of_x + v * of_panel + 16 * part); };
  const auto sum_of_x = [&](int part, int v) INLINED {
    return *reinterpret_cast<const IntVec*>(sums_of_x + v * of_panel + 16 * part);
  };
  Vec total[ROWS][VECS] = {};
  const int parts = values / kWeightUnit, of_group = strip.of_group / kWeightUnit;
  const float *scales = strip.scales[row], *offsets = strip.offsets[row];
  int end = of_group - strip.begin / kWeightUnit % of_group;
  for (int begin = 0; begin < parts; begin = end, end += of_group, ++scales, ++offsets) {
    end = std::min(end, parts);
    for (int part = begin; part < end; ++part) {
      next.step();
      UNROLL for (int v = 0; v < VECS; ++v) {
        IntVec missing = {};
        if (kOffset) missing = sum_of_x(part, v) * -kOffset;
        UNROLL for (int r = 0; r < ROWS; ++r) acc[r][v] = missing;
      }
      const int from = (part & ~3) * kWeightUnit + (part & 3) * (kWeightUnit / 2);
      add(from, kWeightUnit / 2);
      add(from + kHalf, kWeightUnit / 2);
      Vec of_x[VECS];
      UNROLL for (int v = 0; v < VECS; ++v) of_x[v] = scale_of_x(part, v);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const float scale = scales[r * kMostParts];
        UNROLL for (int v = 0; v < VECS; ++v) {
          total[r][v] += __builtin_convertvector(acc[r][v], Vec) * of_x[v] * scale;
        }
      }
    }
    if (!strip.has_offsets) continue;
    UNROLL for (int v = 0; v < VECS; ++v) {
      Vec all = {};
      for (int part = begin; part < end; ++part) {
        all += __builtin_convertvector(sum_of_x(part, v), Vec) * scale_of_x(part, v);
      }
      UNROLL for (int r = 0; r < ROWS; ++r) total[r][v] += all * offsets[r * kMostParts];
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    UNROLL for (int v = 0; v < VECS; ++v) * floats(r, v) += total[r][v];
  }
}

// One strip of rows of the weight times all rows of x.
template <class Format>
INLINE void vnni_strip(const Int8Product& p, const Strip& strip, int rows, const uint8_t* ahead) {
  const int n = strip.end - strip.begin;
  const int most_tiles = kStripRows / 12 * std::max(p.width / 32, 1);
  NextBlock next(ahead, p.weight.stride, kStripRows, n / kWeightUnit * Format::kBytes,
                 most_tiles * (n / kWeightUnit));
  const auto tiles = [&](auto quads, auto most, auto vecs, int i) INLINED {
    constexpr int QUADS = decltype(quads)::value, ROWS = decltype(most)::value;
    for (int r = 0; r < rows; r += ROWS) {
      vnni_tile<Format, QUADS, ROWS, decltype(vecs)::value>(p, strip, r, i, next);
    }
  };
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Four = std::integral_constant<int, 4>;
  // registers keep integers, and floats beside them where a row has several scales
  constexpr bool kOneScale = Format::kGroup == kWholeRow;
  if constexpr (kOneScale) {
    if (p.quads == 4) return tiles(Four{}, std::integral_constant<int, 12>{}, One{}, 0);
    if (p.quads == 2) return tiles(Two{}, std::integral_constant<int, 12>{}, One{}, 0);
  }
  constexpr int kVecs = kOneScale ? 4 : 3;  // four and floats make the compiler load x for each row
  int i = 0;
  for (; i + 16 * kVecs <= p.width; i += 16 * kVecs) {
    tiles(One{}, std::integral_constant<int, kOneScale ? 6 : 4>{},
          std::integral_constant<int, kVecs>{}, i);
  }
  const int left = p.width - i;
  if constexpr (kVecs == 4) {
    if (left == 48) {
      return tiles(One{}, std::integral_constant<int, 8>{}, std::integral_constant<int, 3>{}, i);
    }
  }
  if (left == 32) {
    tiles(One{}, std::integral_constant<int, kOneScale ? 12 : 6>{}, Two{}, i);
  } else if (left == 16) {
    tiles(One{}, std::integral_constant<int, 12>{}, One{}, i);
  }
}

template <class Format>
void multiply_vnni(const Int8Product& p) {
  constexpr bool kOneScale = Format::kGroup == kWholeRow;
  const Dots& weight = p.weight;
  std::memset(p.sums, 0, sizeof(int32_t) * weight.n * p.width);
  Strip strip;
  strip.of_group = weight.group;
  strip.has_offsets = weight.has_offsets;
  // of the depth, so that x of 64 rows and a strip fit in the level-1 cache
  const int most = p.width <= 16 ? kMostBlock : kMostBlock / 2;
  const auto bytes_of = [](int64_t n) INLINED { return n / kWeightUnit * Format::kBytes; };
  // `ahead`: bytes to what will be read next
  const auto block = [&](int row, int d, int64_t ahead) INLINED {
    strip.row = row;
    strip.begin = d;
    strip.end = std::min(d + most, weight.depth);
    const int n = strip.end - d, group = d / weight.group;
    const int rows = std::min(kStripRows, weight.n - row);
    const __mmask16 groups = first_lanes((strip.end - 1) / weight.group + 1 - group);
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* from = weight.weight + (row + r) * weight.stride + bytes_of(d);
      unpack_row<Format>(from, n, strip.bytes[r]);
      if (kOneScale) continue;
      const int64_t scales = (row + r) * weight.groups + group;
      const auto copy = [&](const float* of_rows, float* to) INLINED {
        store(to, (Vec)_mm512_maskz_loadu_ps(groups, of_rows + scales));
      };
      copy(weight.scales, strip.scales[r]);
      if (weight.has_offsets) copy(weight.offsets, strip.offsets[r]);
    }
    const uint8_t* next = weight.weight + row * weight.stride + bytes_of(d) + ahead;
    vnni_strip<Format>(p, strip, rows, next);
  };
  const int64_t next_strip = kStripRows * weight.stride;
  if (p.width <= 64) {  // x of the whole depth stays in the level-2 cache
    for (int row = 0; row < weight.n; row += kStripRows) {
      for (int d = 0; d < weight.depth; d += most) {
        const bool last = d + most >= weight.depth;
        block(row, d, last ? next_strip - bytes_of(d) : bytes_of(most));
      }
    }
  } else {
    for (int d = 0; d < weight.depth; d += most) {
      for (int row = 0; row < weight.n; row += kStripRows) block(row, d, next_strip);
    }
  }
  if constexpr (kOneScale) {
    write_scaled_rows(p, -ByteValues<Format>::kOffset);
  } else {
    write_rows(p, [&](const __m512i* sums, int, int, __mmask16) INLINED { return (__m512)*sums; });
  }
}

}  // namespace
}  // namespace custom_pypto::cpu
