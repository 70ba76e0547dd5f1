// Products of weights of 4 and 8 bits by tile registers, whose values are in bfloat16, times the
// scales of their groups, if a row has several. Included only by amx.h.
#pragma once

#include "tile_few.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kSlice = 256;  // values of a row that are unpacked together, into the level-1 cache
// whether values meet the scales of their groups before the products, rounded
template <class Format>
constexpr bool kScaled = Format::kGroup != kWholeRow;

// Writes slices of rows as operand a, [32 values][row][value], some values at a time.
template <class Format>
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
    scales_ = weight_.scales + row * weight_.scale_stride;
    rows_ = count;
    return count;
  }

  INLINE void step(int count) {
    for (; count > 0 && rows_ > 0; --count, --rows_) {
      UNROLL for (int k = 0; k < kStreams; ++k) __builtin_prefetch(ahead_ + k * apart_, 0, 2);
      ahead_ += bytes(kSlice / kStreams);
      if constexpr (kScaled<Format>) {
        put_scaled();
      } else {
        put();
      }
      from_ += weight_.stride;
      to_ += 32;
      scales_ += weight_.scale_stride;
    }
  }
  INLINE void finish() { step(rows_); }

 private:
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
      if (weight_.has_offsets) {
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

// The values [begin, end) of unpacked rows times BT panels.
template <int BT, typename Step>
INLINE void multiply_slice(const StoredProduct& call, int row, int count, int panel, int begin,
                           int end, const uint16_t* values, const Step& step) {
  const uint32_t* x = call.panels + panel * call.panel_stride;
  GroupSums<BT> sums;
  sums.group = 0;
  each<kTiles * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
  for (int d = begin; d < end; d += 32) {
    add_products<kTiles, BT>(values + (d - begin) * kBlock, 64, 64 * kTileRows, x + 8 * d, 64,
                             4 * call.panel_stride);
    step();
  }
  store_sums<kTiles, BT>(sums.sums[0][0], 64 * BT, 64 * BT * kTileRows, 64);
  add_group<BT>(call, row, count, panel, sums);
}

// Of blocks of rows, and slices of all of them.
template <class Format>
void multiply_rows(const StoredProduct& product) {
  alignas(64) uint16_t values[2][kBlock * kSlice];
  const Dots& weight = product.weight;
  StoredProduct call = product;
  if (kScaled<Format>) {
    call.weight.scales = nullptr;
    call.weight.has_offsets = false;
  }
  struct Block {
    int row, begin, count, end;
  };
  const auto block = [&](int row, int begin) INLINED {
    return Block{row, begin, std::min(kBlock, weight.n - row),
                 std::min(begin + kSlice, weight.depth)};
  };
  Unpacked<Format> unpacked(weight);
  Block now = block(0, 0);
  unpacked.start(now.row, now.count, now.begin, now.end, values[0]);
  unpacked.finish();
  for (int current = 0; now.begin < weight.depth; current = 1 - current) {
    const bool last = now.row + kBlock >= weight.n;
    const Block next = last ? block(0, now.begin + kSlice) : block(now.row + kBlock, now.begin);
    int each = 0;
    if (next.begin < weight.depth) {
      const int steps =
          unpacked.start(next.row, next.count, next.begin, next.end, values[1 - current]);
      const int calls = (call.m + 31) / 32 * ((now.end - now.begin) / 32);
      each = (steps + calls - 1) / calls;
    }
    const auto multiply = [&](auto panels, int p) INLINED {
      multiply_slice<decltype(panels)::value>(call, now.row, now.count, p, now.begin, now.end,
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

template <class Format>
void multiply_stored(const StoredProduct& call) {
  std::memset(call.sums, 0, sizeof(float) * call.weight.n * call.width);
  // of rows that do not exist the sums are not read
  call.m > kFewRows ? multiply_rows<Format>(call) : multiply_few_of<Format>(call);
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
