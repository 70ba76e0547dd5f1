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
// once, of up to ROWS tiles of rows.
template <int ROWS, typename F>
INLINE void each_tiles(const PairProduct& p, const F& f) {
  const auto columns = [&](auto rows, int i) INLINED {
    constexpr int BT = 4 / decltype(rows)::value;
    int c = 0;
    for (; c + 16 * BT <= p.width; c += 16 * BT) f(rows, std::integral_constant<int, BT>{}, i, c);
    for (; c < p.width; c += 16) f(rows, std::integral_constant<int, 1>{}, i, c);
  };
  int i = 0;
  if constexpr (ROWS == 2) {
    for (; i + 16 < p.n; i += 32) columns(std::integral_constant<int, 2>{}, i);
  }
  for (; i < p.n; i += 16) columns(std::integral_constant<int, 1>{}, i);
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
    each_tiles<2>(block, [&](auto rows, auto columns, int i, int column) INLINED {
      constexpr int AT = decltype(rows)::value, BT = decltype(columns)::value;
      float* sums = out + i * stride + column;
      if (first && k == 0) {
        each<AT * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
      } else {
        load_sums<AT, BT>(sums, 4 * stride, 64 * stride, 64);
      }
      add_depth<AT, BT>(block, i, column, [&]() INLINED {
        ahead.step();
        if (p.beside.step) p.beside.step(p.beside.work);
      });
      store_sums<AT, BT>(sums, 4 * stride, 64 * stride, 64);
    });
  }
}

// rows[i][column + c] += sums[i][c] for 16 * BT columns
template <int BT>
INLINE void add_to_rows(const float* sums, float* const* rows, int count, int column) {
  for (int i = 0; i < count; ++i, sums += 16 * BT) {
    float* to = rows[i] + column;
    UNROLL for (int v = 0; v < BT; ++v) store(to + 16 * v, load(to + 16 * v) + load(sums + 16 * v));
  }
}

// The vector instructions that add tiles to the rows stand between the dots of the next tiles,
// which run at the same time. FETCH: requests the rows of `out` before, which may be anywhere; all
// at once would hold up the tiles' loads. Else the next rows of a.
template <int ROWS, bool FETCH>
void add_to_rows_amx(const PairProduct& p, float* const* out) {
  struct Block {
    int first = 0, count = 0, column = 0, beside = 0;
  };
  alignas(64) float sums[2][64 * 16];  // of the latest tiles and of those before
  Block latest;
  int current = 0;
  const auto add_latest = [&]() INLINED {
    const float* from = sums[1 - current];
    float* const* rows = out + latest.first;
    if (latest.beside == 2) {
      add_to_rows<2>(from, rows, latest.count, latest.column);
    } else if (latest.beside == 4) {
      add_to_rows<4>(from, rows, latest.count, latest.column);
    } else {
      add_to_rows<1>(from, rows, latest.count, latest.column);
    }
  };
  each_tiles<ROWS>(p, [&](auto rows, auto columns, int i, int column) INLINED {
    constexpr int AT = decltype(rows)::value, BT = decltype(columns)::value;
    const int last = std::min(i + 16 * AT, p.n);
    const int steps = p.depth / kStep, share = (last - i + steps - 1) / steps;
    int fetched = i;
    if (!FETCH && column == 0) {
      for (int next = last; next < std::min(last + 16 * AT, p.n); ++next) {
        for (int d = 0; d < p.depth; d += kStep) __builtin_prefetch(p.a + next * p.a_stride + d);
      }
    }
    each<AT * BT>([](auto c) INLINED { tile::zero<decltype(c)::value>(); });
    add_depth<AT, BT>(p, i, column, [&]() INLINED {
      if constexpr (FETCH) {
        for (const int to = std::min(fetched + share, last); fetched < to; ++fetched) {
          UNROLL for (int v = 0; v < BT; ++v) {
            __builtin_prefetch(out[fetched] + column + 16 * v, 1);
          }
        }
      }
    });
    add_latest();
    latest = {.first = i, .count = last - i, .column = column, .beside = BT};
    store_sums<AT, BT>(sums[current], 64 * BT, 1024 * BT, 64);
    current = 1 - current;
  });
  add_latest();
}

void multiply_to_rows_amx(const PairProduct& p, float* const* out) {
  constexpr int kSmall = 24576;  // b stays in the level-1 cache
  if (2 * p.depth * p.width <= kSmall) {
    add_to_rows_amx<1, false>(p, out);
  } else {
    add_to_rows_amx<2, true>(p, out);
  }
}

}  // namespace
}  // namespace custom_pypto::cpu
