// Products of weights of 4 and 8 bits by tile registers. A tile holds values of 16 rows as
// bfloat16, which has each of them; sums of a group meet its scales in float. Included only by
// amx.h.
#pragma once

#include "halves.h"
#include "tile_products.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kSlice = 256;  // values of a row that are unpacked together, into the level-1 cache
constexpr int kTileRows = 16;

// 64 values of a row, or 32, in order, as vectors of 32.
template <class Format>
struct TileUnit;

// low and high bytes of 64 values, whose order of quarters of a lane the caller has undone
INLINE void join_bytes(__m512i low, __m512i high, __m512i* to) {
  to[0] = _mm512_unpacklo_epi8(low, high);
  to[1] = _mm512_unpackhi_epi8(low, high);
}

// 64 bytes, or the first 32, in the order that join_bytes takes
INLINE __m512i load_apart(const uint8_t* p, bool half) {
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  // behind the last row there may be no memory
  return _mm512_permutexvar_epi64(order,
                                  _mm512_maskz_loadu_epi8(half ? UINT32_MAX : UINT64_MAX, p));
}

constexpr ByteHalves kMagnitudes([](int i) { return static_cast<float>(i); });

template <>
struct TileUnit<Int8Weight> {
  static INLINE void unpack(const uint8_t* p, bool half, __m512i* to) {
    const __m512i bytes = load_apart(p, half), magnitude = _mm512_abs_epi8(bytes);
    const __m512i low = ByteHalves::find(kMagnitudes.low, magnitude);
    __m512i high = ByteHalves::find(kMagnitudes.high, magnitude);
    // of -128 the table finds 0
    high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(magnitude), _mm512_set1_epi8(0x43));
    join_bytes(low, high | (bytes & _mm512_set1_epi8(-128)), to);
  }
};

template <>
struct TileUnit<Fp8Weight> {
  static INLINE void unpack(const uint8_t* p, bool half, __m512i* to) {
    const __m512i bytes = load_apart(p, half);
    const __m512i high = ByteHalves::find(kE4m3.high, bytes);
    join_bytes(ByteHalves::find(kE4m3.low, bytes), high | (bytes & _mm512_set1_epi8(-128)), to);
  }
};

template <const Halves& TABLE>
struct TileNibbles {
  static INLINE void unpack(const uint8_t* p, bool half, __m512i* to) {
    to[0] = find(p);
    if (!half) to[1] = find(p + 16);
  }
  static INLINE __m512i find(const uint8_t* p) {
    const __m512i twice =
        _mm512_set_epi8(0, 15, 0, 15, 0, 14, 0, 14, 0, 13, 0, 13, 0, 12, 0, 12, 0, 11, 0, 11, 0, 10,
                        0, 10, 0, 9, 0, 9, 0, 8, 0, 8, 0, 7, 0, 7, 0, 6, 0, 6, 0, 5, 0, 5, 0, 4, 0,
                        4, 0, 3, 0, 3, 0, 2, 0, 2, 0, 1, 0, 1, 0, 0, 0, 0);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m512i words = _mm512_permutexvar_epi8(twice, _mm512_castsi128_si512(bytes));
    const __m512i codes = _mm512_srlv_epi16(words, _mm512_set1_epi32(4 << 16));
    return _mm512_permutexvar_epi16(codes, _mm512_load_si512(TABLE.bits));
  }
};

template <>
struct TileUnit<Int4Weight> : TileNibbles<kIntegers> {};
template <>
struct TileUnit<Fp4Weight> : TileNibbles<kE2m1> {};

// Writes slices of rows as operand a, [32 values][row][value], some values at a time. SCALED: with
// their scales, rounded.
template <class Format, int AT, bool SCALED>
class Unpacked {
 public:
  explicit Unpacked(const Dots& weight)
      : weight_(weight),
        ahead_(weight.weight + weight.n * weight.stride),
        apart_(weight.n * weight.stride / (64 * kStreams) * 64) {}

  // How many steps the values [begin, end) of `count` rows take: one each.
  INLINE int start(int row, int count, int begin, int end, uint16_t* to) {
    from_ = weight_.weight + row * weight_.stride + bytes(begin);
    to_ = to;
    begin_ = begin, end_ = end;
    scales_ = weight_.scales + row * weight_.groups;
    rows_ = count;
    return count;
  }

  INLINE void step(int count) {
    for (; count > 0 && rows_ > 0; --count, --rows_) {
      UNROLL for (int k = 0; k < kStreams; ++k) __builtin_prefetch(ahead_ + k * apart_, 0, 2);
      ahead_ += bytes(kSlice / kStreams);
      SCALED ? put_scaled() : put();
      from_ += weight_.stride;
      to_ += 32;
      scales_ += weight_.groups;
    }
  }
  INLINE void finish() { step(rows_); }

 private:
  static constexpr int kTileOf32 = AT * kTileRows * 32;
  static constexpr int kStreams = 4;  // the CPU reads ahead by the page, in several at once faster
  static constexpr int64_t bytes(int values) { return values / kUnit * Format::kBytes; }

  // Pointers of a row stay in registers.
  INLINE void put() const {
    const uint8_t* from = from_;
    uint16_t* to = to_;
    __m512i values[2];
    int left = end_ - begin_;
    for (; left >= 64; left -= 64, from += bytes(64), to += 2 * kTileOf32) {
      TileUnit<Format>::unpack(from, false, values);
      _mm512_store_si512(to, values[0]);
      _mm512_store_si512(to + kTileOf32, values[1]);
    }
    if (left == 0) return;
    TileUnit<Format>::unpack(from, true, values);
    _mm512_store_si512(to, values[0]);
  }

  // With the scales of groups, which are multiples of 32 values.
  INLINE void put_scaled() const {
    const uint8_t* from = from_;
    uint16_t* to = to_;
    int group = begin_ / weight_.group;
    for (int d = begin_; d < end_; ++group) {
      const int stop = std::min(end_, (group + 1) * weight_.group);
      const Vec scale = broadcast(scales_[group]);
      Vec offset = {};
      if (weight_.offsets) {
        offset = broadcast(scales_[weight_.offsets - weight_.scales + group]);
      }
      for (; d < stop; d += 32, from += bytes(32), to += kTileOf32) {
        Vec x[2];
        Format::unpack(from, x);
        UNROLL for (int v = 0; v < 2; ++v) x[v] = x[v] * scale + offset;
        _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]));
      }
    }
  }

  const Dots& weight_;
  const uint8_t* ahead_;  // the next task, which is prefetched as streams side by side
  int64_t apart_;         // the streams
  // of the next row
  const uint8_t* from_ = nullptr;
  uint16_t* to_ = nullptr;
  const float* scales_ = nullptr;
  int begin_ = 0, end_ = 0, rows_ = 0;  // how many rows are left
};

// Sums of a group, of AT tiles of rows of the weight and BT panels of x, until they meet scales.
template <int AT, int BT>
struct GroupSums {
  alignas(64) float sums[AT * kTileRows][BT][16];
  int group;
};

// sums += those of a group by its scales; offsets meet the sums of x.
template <int AT, int BT>
INLINE void add_group(const StoredProduct& call, int row, int count, int panel,
                      const GroupSums<AT, BT>& from) {
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
  const float* scales = weight.scales + row * weight.groups + from.group;
  if (!weight.offsets) {
    for (int r = 0; r < count; ++r, scales += weight.groups, to += call.width) {
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
    const Vec scale = broadcast(scales[r * weight.groups]);
    const Vec offset = broadcast(offsets[r * weight.groups]);
    UNROLL for (int v = 0; v < BT; ++v) {
      const Vec sum = load(to + 16 * v) + load(from.sums[r][v]) * scale;
      store(to + 16 * v, sum + of_x[v] * offset);
    }
  }
}

// The values [begin, end) of unpacked rows times BT panels. The vector instructions for a group
// stand between the dots of the next one, which run at the same time.
template <int AT, int BT, typename Step>
INLINE void multiply_slice(const StoredProduct& call, int row, int count, int panel, int begin,
                           int end, const uint16_t* values, const Step& step) {
  const int group = call.weight.group;
  const uint32_t* x = call.panels + panel * call.panel_stride;
  GroupSums<AT, BT> latest[2];
  int current = 0;
  bool any = false;
  for (int d = begin; d < end;) {
    const int g = d / group;
    const int64_t stop = std::min<int64_t>(end, static_cast<int64_t>(g + 1) * group);
    each<AT * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
    for (; d < stop; d += 32) {
      add_products<AT, BT>(values + (d - begin) * AT * kTileRows, 64, 64 * kTileRows, x + 8 * d, 64,
                           4 * call.panel_stride);
      step();
    }
    if (any) add_group<AT, BT>(call, row, count, panel, latest[1 - current]);
    store_sums<AT, BT>(latest[current].sums[0][0], 64 * BT, 64 * BT * kTileRows, 64);
    latest[current].group = g;
    current = 1 - current;
    any = true;
  }
  add_group<AT, BT>(call, row, count, panel, latest[1 - current]);
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

// Of blocks of up to 16 * AT rows, and slices of all of them.
template <class Format, int AT, bool SCALED>
void multiply_rows(const StoredProduct& product) {
  constexpr int kRows = AT * kTileRows;
  alignas(64) uint16_t values[2][kRows * kSlice];
  const Dots& weight = product.weight;
  StoredProduct call = product;
  if (SCALED) {
    call.weight.scales = call.weight.offsets = nullptr;
    call.weight.group = weight.depth;
  }
  struct Block {
    int row, begin, count, end;
  };
  const auto block = [&](int row, int begin) INLINED {
    return Block{row, begin, std::min(kRows, weight.n - row),
                 std::min(begin + kSlice, weight.depth)};
  };
  Unpacked<Format, AT, SCALED> unpacked(weight);
  Block now = block(0, 0);
  unpacked.start(now.row, now.count, now.begin, now.end, values[0]);
  unpacked.finish();
  for (int current = 0; now.begin < weight.depth; current = 1 - current) {
    const bool last = now.row + kRows >= weight.n;
    const Block next = last ? block(0, now.begin + kSlice) : block(now.row + kRows, now.begin);
    int each = 0;
    if (next.begin < weight.depth) {
      const int steps =
          unpacked.start(next.row, next.count, next.begin, next.end, values[1 - current]);
      const int calls = (call.m + 31) / 32 * ((now.end - now.begin) / 32);
      each = (steps + calls - 1) / calls;
    }
    const auto multiply = [&](auto panels, int p) INLINED {
      multiply_slice<AT, decltype(panels)::value>(call, now.row, now.count, p, now.begin, now.end,
                                                  values[current],
                                                  [&]() INLINED { unpacked.step(each); });
    };
    int p = 0;
    for (; 16 * (p + 1) < call.m; p += 2) multiply(std::integral_constant<int, 2>{}, p);
    if (16 * p < call.m) multiply(std::integral_constant<int, 1>{}, p);
    unpacked.finish();
    now = next;
  }
}

// Rows of x up to which 16 rows of the weight are unpacked at a time, and values without the scales
// of their groups, which sums meet then: more often than with more rows pays.
constexpr int kFewRows = 32;

template <class Format>
void multiply_stored(const StoredProduct& call) {
  constexpr bool kGroups = Format::kGroup != kWholeRow;
  std::memset(call.sums, 0, sizeof(float) * call.weight.n * call.width);
  // of rows that do not exist the sums are not read
  if (call.m > kFewRows) {
    multiply_rows<Format, 2, kGroups>(call);
  } else {
    multiply_rows<Format, 1, false>(call);
  }
  write_rows(call);
}

// to[group][row] = the sums of the values of a panel's rows
void sum_groups_amx(const uint32_t* panel, int depth, int group, float* to) {
  for (int64_t d = 0; d < depth; d += group, to += 16) {
    const int64_t end = std::min<int64_t>(d + group, depth);
    Vec even = {}, odd = {};
    for (int64_t k = d / 2; k < end / 2; ++k) {
      const IntVec pairs = *reinterpret_cast<const IntVec*>(panel + 16 * k);
      even += (Vec)(pairs << 16);
      odd += (Vec)(pairs & -0x10000);
    }
    store(to, even + odd);
  }
}

// Of bfloat16 there is nothing to unpack.
constexpr StoredKernel kStoredTiles[kWeightFormats] = {
    nullptr, multiply_stored<Int8Weight>, multiply_stored<Fp8Weight>, multiply_stored<Int4Weight>,
    multiply_stored<Fp4Weight>};

}  // namespace
}  // namespace custom_pypto::cpu
