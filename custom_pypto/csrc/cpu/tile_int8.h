// Products of int8 weights with rows of x in int8 (W8A8) by tile registers: nothing is unpacked,
// and sums stay integers. Included only by amx.h.
#pragma once

#include <algorithm>

#include "int8_products.h"
#include "tile_products.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kQuads = 16;  // of a row of a tile, 64 values

// sums[row][row of x] += AT tiles of rows, from `a` on, times BT panels, from `x` on
template <int AT, int BT>
INLINE void add_int8(const uint8_t* a, int64_t stride, const uint32_t* x, int64_t panel_stride,
                     int depth, bool first, int32_t* sums, int64_t width, NextBlock& next) {
  float* to = reinterpret_cast<float*>(sums);  // 32 bits of either
  if (first) {
    each<AT * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
  } else {
    load_sums<AT, BT>(to, 4 * width, 64 * width, 64);
  }
  for (int d = 0; d < depth; d += 4 * kQuads) {
    each<AT>([&](auto i)
                 INLINED { tile::load<4 + decltype(i)::value>(a + 16 * i * stride + d, stride); });
    each<BT>([&](auto j) INLINED {
      constexpr int J = decltype(j)::value, B = 6 + J % 2;
      tile::load<B>(x + J * panel_stride + 4 * d, 64);
      each<AT>([&](auto i) INLINED {
        constexpr int I = decltype(i)::value;
        tile::dot_int8<I * BT + J, 4 + I, B>();
      });
    });
    next.step();
  }
  store_sums<AT, BT>(to, 4 * width, 64 * width, 64);
}

// In blocks of the depth, of which 32 rows and two panels fit in the level-1 cache.
void multiply_int8_amx(const Int8Product& p) {
  constexpr int kDepth = 512;
  alignas(64) uint8_t rest[16 * kDepth];  // behind the last row there may be no memory
  const Dots& weight = p.weight;
  const uint8_t* values = weight.weight;
  for (int d = 0; d < weight.depth; d += kDepth) {
    const int depth = std::min(kDepth, weight.depth - d);
    const auto block = [&](auto rows, int row) INLINED {
      constexpr int AT = decltype(rows)::value;
      const uint8_t* a = values + row * weight.stride + d;
      int64_t stride = weight.stride;
      const int steps = (p.width + 31) / 32 * ((depth + 63) / 64);
      const int after = row + 16 * AT;
      const bool last = after >= weight.n;
      const uint8_t* ahead = !last                       ? values + after * weight.stride + d
                             : d + kDepth < weight.depth ? values + d + kDepth
                                                         : values + weight.n * weight.stride;
      NextBlock next(ahead, weight.stride, 16 * AT, depth, steps);
      if (row + 16 * AT > weight.n) {
        std::memset(rest, 0, sizeof rest);
        for (int r = row; r < weight.n; ++r) {
          std::memcpy(rest + (r - row) * kDepth, values + r * weight.stride + d, depth);
        }
        a = rest;
        stride = kDepth;
      }
      const uint32_t* x = p.panels + 4 * d;
      int32_t* sums = p.sums + static_cast<int64_t>(row) * p.width;
      int i = 0;
      for (; i + 32 <= p.width; i += 32, x += 2 * p.panel_stride) {
        add_int8<AT, 2>(a, stride, x, p.panel_stride, depth, d == 0, sums + i, p.width, next);
      }
      if (i < p.width) {
        add_int8<AT, 1>(a, stride, x, p.panel_stride, depth, d == 0, sums + i, p.width, next);
      }
    };
    int row = 0;
    for (; row + 32 <= weight.n; row += 32) block(std::integral_constant<int, 2>{}, row);
    for (; row < weight.n; row += 16) block(std::integral_constant<int, 1>{}, row);
  }
  write_scaled_rows(p, 0);
}

}  // namespace
}  // namespace custom_pypto::cpu
