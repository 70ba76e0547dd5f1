// Products of matrices by tile registers. Included only by amx.h.
#pragma once

#include <algorithm>
#include <type_traits>

#include "ahead.h"
#include "kernels.h"
#include "tile_registers.h"
#include "vectors.h"

namespace custom_pypto::cpu {
namespace {

// Calls f(std::integral_constant) for 0 to N - 1.
template <int N, typename F>
INLINE void each(const F& f) {
  if constexpr (N > 0) {
    each<N - 1>(f);
    f(std::integral_constant<int, N - 1>{});
  }
}

// Four sums, AT tiles of A below each other times BT tiles of B beside each other: tile a * BT + b.
// Distances are in bytes: `stride` from row to row, `down` and `right` from tile to tile.
template <int AT, int BT, typename F>
INLINE void each_sum(int64_t down, int64_t right, const F& f) {
  each<AT * BT>([&](auto c) INLINED { f(c, c / BT * down + c % BT * right); });
}

template <int AT, int BT>
INLINE void load_sums(const float* from, int64_t stride, int64_t down, int64_t right) {
  const char* base = reinterpret_cast<const char*>(from);
  each_sum<AT, BT>(down, right, [&](auto c, int64_t at) INLINED {
    tile::load<decltype(c)::value>(base + at, stride);
  });
}

template <int AT, int BT>
INLINE void store_sums(float* to, int64_t stride, int64_t down, int64_t right) {
  char* base = reinterpret_cast<char*>(to);
  each_sum<AT, BT>(down, right, [&](auto c, int64_t at) INLINED {
    tile::store<decltype(c)::value>(base + at, stride);
  });
}

template <int AT, int BT>
INLINE void add_products(const uint16_t* a, int64_t a_stride, int64_t down, const uint32_t* b,
                         int64_t b_stride, int64_t right) {
  const char* rows = reinterpret_cast<const char*>(a);
  const char* columns = reinterpret_cast<const char*>(b);
  each<AT>([&](auto i) INLINED { tile::load<4 + decltype(i)::value>(rows + i * down, a_stride); });
  each<BT>([&](auto j) INLINED {
    constexpr int J = decltype(j)::value, B = 6 + J % 2;
    tile::load<B>(columns + j * right, b_stride);
    each<AT>([&](auto i) INLINED {
      constexpr int I = decltype(i)::value;
      tile::dot<I * BT + J, 4 + I, B>();
    });
  });
}

// Calls f(number of tiles of rows, of columns, first row, first column) for up to four tiles at
// once.
template <typename F>
INLINE void each_tiles(const PairProduct& p, const F& f) {
  const auto columns = [&](auto rows, int i) INLINED {
    constexpr int BT = 4 / decltype(rows)::value;
    int c = 0;
    for (; c + 16 * BT <= p.width; c += 16 * BT) f(rows, std::integral_constant<int, BT>{}, i, c);
    for (; c < p.width; c += 16) f(rows, std::integral_constant<int, 1>{}, i, c);
  };
  int i = 0;
  for (; i + 16 < p.n; i += 32) columns(std::integral_constant<int, 2>{}, i);
  if (i < p.n) columns(std::integral_constant<int, 1>{}, i);
}

template <int AT, int BT, typename Step>
INLINE void add_depth(const PairProduct& p, int i, int column, const Step& step) {
  const uint16_t* a = p.a + i * p.a_stride;
  const uint32_t* b = p.b + column / 16 * p.b_stride;
  for (int k = 0; k < p.depth; k += kStep) {
    add_products<AT, BT>(a + k, 2 * p.a_stride, 32 * p.a_stride, b + 8 * k, 64, 4 * p.b_stride);
    step();
  }
}

// In blocks of the depth, of which rows of a and columns of b fit in the level-1 cache.
void multiply_amx(const PairProduct& p, float* out, int64_t stride, bool first) {
  constexpr int kDepth = 288;
  Ahead ahead(p.next, (p.n + 31) / 32 * ((p.width + 31) / 32) * (p.depth / kStep));
  for (int k = 0; k < p.depth; k += kDepth) {
    PairProduct block = p;
    block.a += k;
    block.b += 8 * k;
    block.depth = std::min(kDepth, p.depth - k);
    each_tiles(block, [&](auto rows, auto columns, int i, int column) INLINED {
      constexpr int AT = decltype(rows)::value, BT = decltype(columns)::value;
      float* sums = out + i * stride + column;
      if (first && k == 0) {
        each<AT * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
      } else {
        load_sums<AT, BT>(sums, 4 * stride, 64 * stride, 64);
      }
      add_depth<AT, BT>(block, i, column, [&]() INLINED { ahead.step(); });
      store_sums<AT, BT>(sums, 4 * stride, 64 * stride, 64);
    });
  }
}

// The vector instructions that add tiles to the rows stand between the dots of the next tiles,
// which run at the same time.
void multiply_to_rows_amx(const PairProduct& p, float* const* out) {
  alignas(64) float sums[2][4][16][16];  // of the latest tiles and of those before
  int latest = 0, first = 0, end = 0, at = 0,
      beside = 0;  // rows [first, end), columns from `at` on
  const auto add_latest = [&] {
    for (int i = first; i < end; ++i) {
      const int r = i - first;
      float* to = out[i] + at;
      for (int v = 0; v < beside; ++v) {
        const float* from = sums[latest][r / 16 * beside + v][r % 16];
        store(to + 16 * v, load(to + 16 * v) + load(from));
      }
    }
  };
  each_tiles(p, [&](auto rows, auto columns, int i, int column) INLINED {
    constexpr int AT = decltype(rows)::value, BT = decltype(columns)::value;
    const int last = std::min(i + 16 * AT, p.n);
    const int steps = p.depth / kStep, share = (last - i + steps - 1) / steps;
    int fetched = i;  // rows may be anywhere; all requests at once would hold up the tiles' loads
    each<AT * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
    add_depth<AT, BT>(p, i, column, [&]() INLINED {
      for (const int to = std::min(fetched + share, last); fetched < to; ++fetched) {
        UNROLL for (int v = 0; v < BT; ++v) {
          __builtin_prefetch(out[fetched] + column + 16 * v, 1);
        }
      }
    });
    add_latest();
    latest = 1 - latest, first = i, end = last, at = column, beside = BT;
    store_sums<AT, BT>(sums[latest][0][0], 64, BT * 1024, 1024);
  });
  add_latest();
}

}  // namespace
}  // namespace custom_pypto::cpu
