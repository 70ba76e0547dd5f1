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
  UNROLL for (int r = 0; r < ROWS; ++r) {
    a[r] = p.a[i + r];
    __builtin_prefetch(p.out[i + r] + column, 1);  // rows of `out` may be anywhere
  }
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
    if (column == 0 && p.a_step == 1) {  // rows of `a` may be anywhere, too
      for (int next = i + rows; next < i + 2 * rows && next < p.n; ++next) {
        fetch(p.a[next], p.depth);
      }
    }
    product_tile<decltype(rows)::value, VECS>(p, i, column);
  });
}

void multiply_f32(const Product& p) {
  int column = 0;
  for (; column + kStrip <= p.width; column += kStrip) product_strip<kStripVecs>(p, column);
  for (; column < p.width; column += 16) product_strip<16 / kLanes>(p, column);
}

// exp2(x) for any x: above 0 by rounding, and far above it with statistics of other logits
INLINE Vec power(const Vec& x) {
  const Vec near = exp2(x > 127.0f ? broadcast(127.0f) : x);
  return x > 127.0f ? broadcast(INFINITY) : near;
}

void probabilities_f32(const Probabilities& call) {
  for (int h = 0; h < call.heads; h += kLanes) {
    const Vec max = load(call.max + h), inverse = load(call.inverse + h);
    Vec delta = load(call.delta + h);
    for (int j = 0; j < call.n; ++j) {
      float* score = call.scores + j * call.heads + h;
      const Vec p = power(load(score) * call.scale - max) * inverse;
      delta += p * load(call.dots + j * call.heads + h);
      store(score, p);
    }
    store(call.delta + h, delta);
  }
}

void head_sums_f32(const HeadSums& call) {
  for (int j = 0; j < call.n; ++j) {
    Vec sum = {};
    for (int h = 0; h < call.heads; h += kLanes) {
      const Vec score = load(call.scores + j * call.heads + h);
      sum += power(score * call.scale - load(call.max + h)) * load(call.inverse + h);
    }
    float lanes[kLanes];
    store(lanes, sum);
    reduce_lanes(lanes, 1, call.out + j);
  }
}

void index_scores_f32(const IndexScores& call) {
  for (int j = 0; j < call.n; ++j) {
    Vec sum = {};
    for (int h = 0; h < call.heads; h += kLanes) {
      const Vec product = load(call.products + j * call.padded + h);
      const Vec relu = product < 0.0f ? Vec{} : product;  // NaN stays visible
      const Vec term = load(call.weights + h) * relu;
      // mask padding: 0 times an infinite key is NaN
      sum += lane_index() < call.heads - h ? term : Vec{};
    }
    float lanes[kLanes];
    store(lanes, sum);
    reduce_lanes(lanes, 1, call.scores + j);
  }
}

void index_scores_grad_f32(const IndexScoresGrad& call) {
  for (int h = 0; h < call.heads; h += kLanes) {
    const Vec weight = load(call.weights + h);
    Vec d_weight = load(call.d_weights + h);
    for (int j = 0; j < call.n; ++j) {
      float* at = call.products + j * call.heads + h;
      const Vec product = load(at);
      const float d_score = call.d_scores[j];
      d_weight += (product < 0.0f ? Vec{} : product) * d_score;
      store(at, product <= 0.0f ? Vec{} : weight * d_score);  // NaN stays visible
    }
    store(call.d_weights + h, d_weight);
  }
}

}  // namespace
}  // namespace custom_pypto::cpu
