// Products of weights of 4 and 8 bits with up to 32 rows of x by tile registers. Values are
// unpacked as bfloat16, which has each of them; sums of a group meet its scales in float. Included
// only by amx.h.
#pragma once

#include <memory>
#include <vector>

#include "tile_products.h"
#include "tile_units.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kTileRows = 16;
constexpr int kFewSlice = 128;  // values of a row that are unpacked together
constexpr int kTiles = 2;       // of rows of the weight, below each other
constexpr int kBlock = kTiles * kTileRows;
constexpr int kTileOf32 = kBlock * 32;  // from 32 values of the rows to the next 32

// Sums of a group, of a block of rows of the weight and BT panels of x, until they meet scales.
template <int BT>
struct GroupSums {
  alignas(64) float sums[kBlock][BT][16];
  int group;
};

// sums += those of a group by its scales; offsets meet the sums of x.
template <int BT>
INLINE void add_group(const StoredProduct& call, int row, int count, int panel,
                      const GroupSums<BT>& from) {
  const Dots& weight = call.weight;
  float* to = call.sums + row * call.width + 16 * panel;
  if (!weight.scales) {
    for (int r = 0; r < count; ++r, to += call.width) {
      UNROLL for (int v = 0; v < BT; ++v) {
        store(to + 16 * v, load(to + 16 * v) + load(from.sums[r][v]));
      }
    }
    return;
  }
  const float* scales = weight.scales + row * weight.scale_stride + from.group;
  if (!weight.has_offsets) {
    for (int r = 0; r < count; ++r, scales += weight.scale_stride, to += call.width) {
      const Vec scale = broadcast(*scales);
      UNROLL for (int v = 0; v < BT; ++v) {
        store(to + 16 * v, load(to + 16 * v) + load(from.sums[r][v]) * scale);
      }
    }
    return;
  }
  const float* offsets = weight.offsets + row * weight.groups + from.group;
  Vec of_x[BT];
  UNROLL for (int v = 0; v < BT; ++v) {
    of_x[v] = load(call.group_sums + 16 * ((panel + v) * weight.groups + from.group));
  }
  for (int r = 0; r < count; ++r, to += call.width) {
    const Vec scale = broadcast(scales[r * weight.scale_stride]);
    const Vec offset = broadcast(offsets[r * weight.groups]);
    UNROLL for (int v = 0; v < BT; ++v) {
      const Vec sum = load(to + 16 * v) + load(from.sums[r][v]) * scale;
      store(to + 16 * v, sum + of_x[v] * offset);
    }
  }
}

// out = sums in bfloat16, transposed
INLINE void write_rows(const StoredProduct& call) {
  const int n = call.weight.n;
  for (int w = 0; w < n; w += 16) {
    const __mmask16 lanes = first_lanes(n - w);
    for (int i = 0; i < call.m; i += 16) {
      __m512i x[16];
      UNROLL for (int r = 0; r < 16; ++r) {
        x[r] = w + r < n ? _mm512_loadu_si512(call.sums + (w + r) * call.width + i)
                         : _mm512_setzero_si512();
      }
      transpose16(x);
      for (int r = 0; r < 16 && i + r < call.m; ++r) {
        const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)x[r]);
        _mm256_mask_storeu_epi16(call.out[i + r] + w, lanes, halves);
      }
    }
  }
}

// kFewSlice values of a row, 32 in each tile of 32 values, and the next 32 alone, of a shorter
// slice.
template <class Format>
struct FewBytes {
  static constexpr int kBytes = kFewSlice;
  static INLINE void put(const uint8_t* p, const uint16_t*, uint16_t* to) {
    UNROLL for (int i = 0; i < kFewSlice / 64; ++i, to += 2 * kTileOf32) {
      __m512i values[2];
      TileUnit<Format>::unpack(p + 64 * i, false, values);
      _mm512_store_si512(to, values[0]);
      _mm512_store_si512(to + kTileOf32, values[1]);
    }
  }
  static INLINE __m512i rest(const uint8_t* p, const uint16_t*) {
    __m512i values[2];
    TileUnit<Format>::unpack(p, true, values);
    return values[0];
  }
};

// Word j of a slice holds its values 4 * j to 4 * j + 3, and vector i the values 4 * j + i. A tile
// has LANES lanes of 128 bits of one vector, then those of the next, so that 32 * LANES values that
// share a scale have tiles of their own: the order of arrange_few. A rest is in order.
template <const Halves& TABLE, int LANES>
struct FewWords {
  static constexpr int kBytes = kFewSlice / 2;

  // Calls change(values) for each vector, before it is written.
  template <typename Change>
  static INLINE void each_vector(const uint8_t* p, uint16_t* to, const Change& change) {
    const __m512i table = _mm512_load_si512(TABLE.bits);
    __m512i codes = _mm512_loadu_si512(p);
    asm("" : "+v"(codes));  // g++ 12 loads them for each shift else
    __m512i x[4];
    UNROLL for (int i = 0; i < 4; ++i) {
      x[i] = _mm512_permutexvar_epi16(i ? _mm512_srli_epi16(codes, 4 * i) : codes, table);
      change(x[i]);
    }
    if constexpr (LANES < 4) {
      const __m512i low = _mm512_shuffle_i64x2(x[0], x[1], 0x44);
      const __m512i high = _mm512_shuffle_i64x2(x[0], x[1], 0xEE);
      x[1] = _mm512_shuffle_i64x2(x[2], x[3], 0x44);
      x[3] = _mm512_shuffle_i64x2(x[2], x[3], 0xEE);
      x[0] = low, x[2] = high;
    }
    if constexpr (LANES == 1) {
      UNROLL for (int i = 0; i < 4; i += 2) {
        const __m512i even = _mm512_shuffle_i64x2(x[i], x[i + 1], 0x88);
        x[i + 1] = _mm512_shuffle_i64x2(x[i], x[i + 1], 0xDD);
        x[i] = even;
      }
    }
    UNROLL for (int i = 0; i < 4; ++i) _mm512_store_si512(to + i * kTileOf32, x[i]);
  }
};

template <int LANES>
struct FewIntegers : FewWords<kIntegers, LANES> {
  static INLINE void put(const uint8_t* p, const uint16_t*, uint16_t* to) {
    FewIntegers::each_vector(p, to, [](__m512i&) INLINED {});
  }
  static INLINE __m512i rest(const uint8_t* p, const uint16_t*) {
    return TileNibbles<kIntegers>::find(p);
  }
};

// of a tile, by the values that share a scale
INLINE int lanes_of(WeightFormat format, int group) {
  return format == kFp4Weight || group % 128 == 0 ? 4 : group % 64 == 0 ? 2 : 1;
}

// Values of e2m1 over 2 to the power by which their scale is below the largest of the row: exact,
// as differences of bits with saturation, for which zeros stay zeros.
struct FewE2m1 : FewWords<kE2m1, 4> {
  static INLINE void put(const uint8_t* p, const uint16_t* below, uint16_t* to) {
    const __m512i order = _mm512_set4_epi32(0x01000100, 0x01000100, 0x01000100, 0x01000100);
    const __m512i groups = _mm512_set_epi32(
        0x06060606, 0x06060606, 0x06060606, 0x06060606, 0x04040404, 0x04040404, 0x04040404,
        0x04040404, 0x02020202, 0x02020202, 0x02020202, 0x02020202, 0, 0, 0, 0);
    int64_t four;
    std::memcpy(&four, below, sizeof four);
    const __m512i bits =
        _mm512_shuffle_epi8(_mm512_set1_epi64(four), _mm512_add_epi8(order, groups));
    each_vector(p, to, [&](__m512i& values) INLINED { values = _mm512_subs_epu16(values, bits); });
  }
  static INLINE __m512i rest(const uint8_t* p, const uint16_t* below) {
    return _mm512_subs_epu16(TileNibbles<kE2m1>::find(p),
                             _mm512_set1_epi16(static_cast<int16_t>(*below)));
  }
};

// Of each row of e2m1 the largest scale, halved, as the table has twice the values, and of each
// group what FewE2m1 subtracts.
class RowScales {
 public:
  explicit RowScales(const Dots& weight) : largest(weight.n), below(new uint16_t[size(weight)]) {
    for (int row = 0; row < weight.n; ++row) {
      const uint8_t* exponents = weight.stored_scales + static_cast<int64_t>(row) * weight.groups;
      const int top = fill(exponents, weight.groups, below.get() + row * weight.groups);
      // of 0 and 1 the halves are no normal numbers; 255 is NaN
      const uint32_t bits = top == 255 ? 0x7FC00000 : top > 1 ? (top - 1) << 23 : 0x200000u << top;
      std::memcpy(&largest[row], &bits, sizeof bits);
    }
  }
  std::vector<float> largest;
  std::unique_ptr<uint16_t[]> below;  // not a vector, which would write zeros first

 private:
  // kernels read four
  static size_t size(const Dots& weight) {
    return static_cast<size_t>(weight.n) * weight.groups + 4;
  }

  static INLINE int fill(const uint8_t* exponents, int groups, uint16_t* to) {
    const auto load = [&](int g) INLINED {
      const __mmask32 own = groups - g < 32 ? (1u << (groups - g)) - 1 : UINT32_MAX;
      return _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(own, exponents + g));
    };
    __m512i most = _mm512_setzero_si512();
    for (int g = 0; g < groups; g += 32) most = _mm512_max_epu16(most, load(g));
    const __m256i halves =
        _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m128i quarters =
        _mm_max_epu16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    // SSE has the least alone, so of the complements
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarters, _mm_set1_epi16(-1)));
    const int top = ~_mm_cvtsi128_si32(least) & 0xFFFF;
    const __m512i tops = _mm512_set1_epi16(static_cast<int16_t>(top));
    for (int g = 0; g < groups; g += 32) {
      const __m512i steps = _mm512_sub_epi16(tops, load(g));
      // below the range of bfloat16: zeros
      const __mmask32 tiny = _mm512_cmpgt_epu16_mask(steps, _mm512_set1_epi16(126));
      const __m512i bits = _mm512_mask_set1_epi16(_mm512_slli_epi16(steps, 7), tiny, -1);
      const __mmask32 own = groups - g < 32 ? (1u << (groups - g)) - 1 : UINT32_MAX;
      _mm512_mask_storeu_epi16(to + g, own, bits);
    }
    return top;
  }
};

// Writes slices of rows as operand a, [32 values][row][value], some rows at a time.
template <class Unit>
class FewRows {
 public:
  FewRows(const Dots& weight, const uint16_t* below)
      : weight_(weight), all_below_(below), of_unit_(below ? 1 : 0) {
    const int64_t size = weight.n * weight.stride;
    for (int k = 0; k < kStreams; ++k) {
      ahead_[k] = weight.weight + size + size / (64 * kStreams) * 64 * k;
    }
  }

  // The slice from value `begin` on.
  INLINE void start(int row, int begin, uint16_t* to) {
    from_ = weight_.weight + row * weight_.stride + bytes(begin);
    below_ = all_below_ + (row * units_ + begin / kWeightUnit) * of_unit_;
    to_ = to;
    count_ = std::min(kFewSlice, weight_.depth - begin);
    rows_ = std::min(kBlock, weight_.n - row);
  }

  INLINE void step(int most) {
    const int rows = std::min(most, rows_);
    rows_ -= rows;
    if (count_ == kFewSlice) {
      put(rows, [&](const uint8_t* from, const uint16_t* below, uint16_t* to)
                    INLINED { Unit::put(from, below, to); });
    } else {
      put(rows, [&](const uint8_t* from, const uint16_t* below, uint16_t* to) INLINED {
        for (int d = 0; d < count_; d += 32, to += kTileOf32) {
          _mm512_store_si512(to, Unit::rest(from + bytes(d), below + d / kWeightUnit * of_unit_));
        }
      });
    }
  }
  INLINE void finish() { step(rows_); }

 private:
  static constexpr int64_t bytes(int64_t values) { return values * Unit::kBytes / kFewSlice; }
  // the next task is prefetched as so many streams: the CPU reads ahead by the page
  static constexpr int64_t kStreams = 4;

  // Pointers stay in registers.
  template <typename Put>
  INLINE void put(int rows, const Put& put_row) {
    const uint8_t* from = from_;
    const uint16_t* below = below_;
    uint16_t* to = to_;
#pragma GCC unroll 1
    for (int i = 0; i < rows; ++i) {
      const uint8_t*& ahead = ahead_[i % kStreams];
      UNROLL for (int k = 0; k < Unit::kBytes; k += 64) __builtin_prefetch(ahead + k, 0, 2);
      ahead += Unit::kBytes;
      put_row(from, below, to);
      from += stride_;
      below += units_ * of_unit_;
      to += 32;
    }
    from_ = from, below_ = below, to_ = to;
  }

  const Dots& weight_;
  int64_t stride_ = weight_.stride;
  const uint16_t* all_below_;
  int64_t of_unit_;                              // how many of them: null + 0 is null
  int64_t units_ = weight_.depth / kWeightUnit;  // of a row
  const uint8_t* ahead_[kStreams];
  // of the next row
  const uint8_t* from_ = nullptr;
  const uint16_t* below_ = nullptr;
  uint16_t* to_ = nullptr;
  int count_ = 0, rows_ = 0;  // values of a row; rows that are left
};

// BT panels of x. The vector instructions that unpack a slice stand between the dots of the one
// before, those for sums of a group between the dots of the next group.
template <class Unit, int BT>
void multiply_few(const StoredProduct& call, const uint16_t* below) {
  const auto zero = []() INLINED {
    each<kTiles * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
  };
  alignas(64) uint16_t values[2][kBlock * kFewSlice];
  const Dots& weight = call.weight;
  FewRows<Unit> rows(weight, below);
  rows.start(0, 0, values[0]);
  rows.finish();
  int slice = 0;
  for (int row = 0; row < weight.n; row += kBlock) {
    const int count = std::min(kBlock, weight.n - row);
    GroupSums<BT> latest[2];
    int current = 0, group = 0, left = weight.group;
    zero();
    for (int begin = 0; begin < weight.depth; begin += kFewSlice, ++slice) {
      const int end = std::min(begin + kFewSlice, weight.depth);
      if (end < weight.depth) {
        rows.start(row, end, values[1 - slice % 2]);
      } else if (row + kBlock < weight.n) {
        rows.start(row + kBlock, 0, values[1 - slice % 2]);
      }
      const int of_step = (kBlock * 32 + end - begin - 1) / (end - begin);
      for (int d = begin; d < end; d += 32) {
        add_products<kTiles, BT>(values[slice % 2] + (d - begin) / 32 * kTileOf32, 64,
                                 64 * kTileRows, call.panels + 8 * d, 64, 4 * call.panel_stride);
        rows.step(of_step);
        left -= 32;
        if (left > 0 && d + 32 < weight.depth) continue;
        if (group) add_group<BT>(call, row, count, 0, latest[1 - current]);
        store_sums<kTiles, BT>(latest[current].sums[0][0], 64 * BT, 64 * BT * kTileRows, 64);
        latest[current].group = group++;
        current = 1 - current;
        left = weight.group;
        zero();
      }
      rows.finish();
    }
    add_group<BT>(call, row, count, 0, latest[1 - current]);
  }
}

template <class Unit>
void multiply_few(const StoredProduct& call, const uint16_t* below = nullptr) {
  call.m > 16 ? multiply_few<Unit, 2>(call, below) : multiply_few<Unit, 1>(call, below);
}

template <class Format>
void multiply_few_of(const StoredProduct& product) {
  const Dots& weight = product.weight;
  if constexpr (std::is_same_v<Format, Fp4Weight>) {
    const RowScales scales(weight);
    StoredProduct call = product;
    call.weight.scales = scales.largest.data();
    call.weight.group = weight.depth;
    call.weight.groups = call.weight.scale_stride = 1;
    multiply_few<FewE2m1>(call, scales.below.get());
  } else if constexpr (std::is_same_v<Format, Int4Weight>) {
    switch (lanes_of(kInt4Weight, weight.group)) {
      case 1:
        return multiply_few<FewIntegers<1>>(product);
      case 2:
        return multiply_few<FewIntegers<2>>(product);
      default:
        return multiply_few<FewIntegers<4>>(product);
    }
  } else {
    multiply_few<FewBytes<Format>>(product);
  }
}

// A panel of x in order, in the order of FewWords for a weight of 4 bits.
inline void arrange_few(WeightFormat format, int group, uint32_t* panel, int depth) {
  if (format != kInt4Weight && format != kFp4Weight) return;
  constexpr int kPairs = kFewSlice / 2;
  const int of_lanes = 4 * lanes_of(format, group);  // pairs of a vector in a tile
  for (; depth >= kFewSlice; depth -= kFewSlice, panel += 16 * kPairs) {
    IntVec pairs[kPairs];
    std::memcpy(pairs, panel, sizeof pairs);
    for (int pair = 0; pair < kPairs / 4; ++pair) {
      uint32_t* to = panel + 16 * (pair / of_lanes * 4 * of_lanes + pair % of_lanes);
      UNROLL for (int i = 0; i < 2; ++i) {
        const IntVec &even = pairs[4 * pair + i], &odd = pairs[4 * pair + 2 + i];
        const IntVec low = (even & 0xFFFF) | odd << 16;
        const IntVec high = (IntVec)((__v16su)even >> 16) | (odd & -0x10000);
        std::memcpy(to + 16 * 2 * i * of_lanes, &low, sizeof low);
        std::memcpy(to + 16 * (2 * i + 1) * of_lanes, &high, sizeof high);
      }
    }
  }
}

}  // namespace
}  // namespace custom_pypto::cpu
