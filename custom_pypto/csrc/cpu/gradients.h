// The float tiles of backward passes, written once for all instruction sets.
#pragma once

#include "kernels.h"
#include "tiles.h"
#include "vectors.h"

namespace custom_pypto::cpu {
namespace {

template <int ROWS, int VECS>
INLINE void product_tile(const Product& p, int i, int column) {
  Vec acc[ROWS][VECS] = {};
  const float* a[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) a[r] = p.a[i + r];
  for (int k = 0; k < p.depth; ++k) {
    const float* row = p.b[k] + column;
    Vec b[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) b[v] = load(row + v * kLanes);
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Vec x = broadcast(a[r][k * p.a_step]);
      UNROLL for (int v = 0; v < VECS; ++v) acc[r][v] += x * b[v];
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float* to = p.out[i + r] + column;
    UNROLL for (int v = 0; v < VECS; ++v) store(to + v * kLanes, load(to + v * kLanes) + acc[r][v]);
  }
}

// A strip of b stays in the level-1 cache while all rows pass.
template <int VECS>
INLINE void product_strip(const Product& p, int column) {
  each_tile<kTileKeys<VECS>>(p.n, [&](auto rows, int i) INLINED {
    product_tile<decltype(rows)::value, VECS>(p, i, column);
  });
}

void multiply_f32(const Product& p) {
  int column = 0;
  for (; column + kStrip <= p.width; column += kStrip) product_strip<kStripVecs>(p, column);
  for (; column < p.width; column += 16) product_strip<16 / kLanes>(p, column);
}

void probabilities_f32(const Probabilities& call) {
  for (int h = 0; h < call.heads; h += kLanes) {
    const Vec max = load(call.max + h), inverse = load(call.inverse + h);
    Vec delta = load(call.delta + h);
    for (int j = 0; j < call.n; ++j) {
      float* score = call.scores + j * call.heads + h;
      // above 0 by rounding, and far above it with statistics of other logits
      const Vec x = load(score) * call.scale - max;
      const Vec power = exp2(x > 127.0f ? broadcast(127.0f) : x);
      const Vec p = (x > 127.0f ? broadcast(INFINITY) : power) * inverse;
      delta += p * load(call.dots + j * call.heads + h);
      store(score, p);
    }
    store(call.delta + h, delta);
  }
}

}  // namespace
}  // namespace custom_pypto::cpu
