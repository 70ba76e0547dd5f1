// The streams of manifold-constrained hyper-connections.
#pragma once

#include "tensor.h"

namespace custom_pypto {

// The weights of a manifold-constrained hyper-connection (arXiv:2512.24880): the streams of a
// token, [N D] times (their mean square + norm_eps)^-0.5, are multiplied by `weight`, then scaled.
// All are float32 and contiguous.
struct StreamWeights {
  const Tensor weight;  // [W, N D]
  const Tensor base;    // [W]
  const Tensor scale;   // a number; of connect_streams [3]: of N pre, N post and N x N comb in W
  float eps, norm_eps;
};

struct HyperConnectionParams {
  const Tensor& streams;  // [B, S, N, D]
  StreamWeights weights;
  int64_t iterations;  // of Sinkhorn-Knopp
  Tensor post;         // [B, S, N] float32, contiguous
  Tensor comb;         // [B, S, N, N] float32, contiguous
  Tensor collapsed;    // [B, S, D] in the dtype of streams, contiguous
};

// pre = sigmoid(.) + eps, post = 2 sigmoid(.), comb = softmax(.) + eps over rows, then normalised:
// columns first, then rows and columns iterations - 1 times, each x / (sum + eps);
// collapsed = sum_n pre[n] * streams[n].
void connect_streams(const HyperConnectionParams& p);

// out = sum_n pre[n] * streams[n] with pre as above, W = N; [B, S, D] in the dtype of streams,
// contiguous.
void collapse_streams(const Tensor& streams, const StreamWeights& weights, const Tensor& out);

// out[n] = post[n] * x + sum_m comb[m, n] * streams[m]: of streams [B, S, N, D] and x [B, S, D] of
// one dtype, to which post [B, S, N] and comb [B, S, N, N], float32 and contiguous, both products
// and their sum are rounded, as in transformers. `out` is contiguous.
void mix_streams(const Tensor& streams, const Tensor& x, const Tensor& post, const Tensor& comb,
                 const Tensor& out);

}  // namespace custom_pypto
