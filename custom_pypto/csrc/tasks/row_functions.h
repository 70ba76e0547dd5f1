// Functions of rows that transformers computes in a dozen of torch's ops: for a few tokens these
// cost more time than their numbers.
#pragma once

#include "tensor.h"

namespace custom_pypto {

// out = weight * (x * (mean(x^2) + eps)^-0.5) over the last dim of x [.., D], contiguous in the
// dtype of x. Rounded before the product with a weight [D] of that dtype, only after it if the
// weight is in float32; without a weight the root is rounded.
void norm_rows(const Tensor& x, const OptionalTensor& weight, double eps, const Tensor& out);

struct RotationParams {
  const Tensor& x;           // [B, S, N, D]
  const Tensor& cos;         // [B, S, R], of rotate_pair_rows [B, S, R / 2]
  const Tensor& sin;         // as cos
  int64_t first;             // of the R dims that are rotated
  bool interleaved = false;  // of rotate_rows: pairs (x_2i, x_2i+1) become (y_i, y_i+R/2); else
                             // (x_i, x_i+R/2)
  Tensor out;                // [B, S, N, D], contiguous
};

// Rounds each product, as torch does.
void rotate_rows(const RotationParams& p);

// Pairs (x_2i, x_2i+1) become (y_2i, y_2i+1), rounded once.
void rotate_pair_rows(const RotationParams& p);

struct RouteParams {
  const Tensor& logits;  // [T, E] float32, contiguous
  const Tensor& bias;    // [E] float32, contiguous: added to the scores for the choice alone
  int64_t groups, kept;  // the experts are of the groups with the largest two scores in sum
  bool normalize;        // the weights to a sum of 1
  double scale;          // of the weights
  Tensor weights;        // [T, k] float32, contiguous
  Tensor experts;        // [T, k] int64, contiguous, best first
};

// The k experts of a token with the largest sigmoid(logits) + bias, and weights from the sigmoids.
void route_rows(const RouteParams& p);

struct RootRouteParams {
  const Tensor& logits;  // [T, E], contiguous
  const Tensor& bias;    // [E] float32, contiguous: added to the scores for the choice alone
  double scale;          // of the weights
  Tensor weights;        // [T, k] in the dtype of logits, contiguous
  Tensor experts;        // [T, k] int64, contiguous, best first
};

// The k experts of a token with the largest sqrt(softplus(logits)) + bias, and weights from the
// roots, with a sum of `scale`.
void route_root_rows(const RootRouteParams& p);

// out[t] = sum_i weights[t, i] * x[t, i] in float32, in the order of i; x [T, k, D] and weights
// [T, k] float32 contiguous, out [T, D] in the dtype of x, contiguous.
void add_weighted_rows(const Tensor& x, const Tensor& weights, const Tensor& out);

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

struct GroupParams {
  const Tensor& state;    // [blocks, ring, 1, W], contiguous: token t of a sequence in row t % ring
  const Tensor& blocks;   // [B] int32, contiguous: of each sequence; it may be any number
  const Tensor& values;   // [B, S, W] in the dtype of state: new tokens, padding first
  const Tensor& bias;     // [r, W / 2] float32, contiguous
  const Tensor& start;    // [B] int32, contiguous: tokens before the new ones
  const Tensor& lengths;  // [B] int32, contiguous: with them
  Tensor sums;            // [B, n, D] float32, contiguous: D = W / 2, with overlap W / 4
  Tensor complete;        // [B, n] bool, contiguous
};

// The rows of the groups of r tokens that the new tokens complete, as in
// custom_pypto/rows/compressed.py; 0 for those that they leave incomplete.
void pool_groups(const GroupParams& p);

struct SlotParams {
  const Tensor& table;  // [B, blocks] int32, contiguous: of each sequence
  const Tensor& rows;   // [B, n] int64, contiguous: of the sequence
  const Tensor& valid;  // [B, n] bool, contiguous
  int64_t block;        // rows of a block
  Tensor slots;         // [B, n] int64, contiguous
};

// The place of each row in the blocks of its sequence; 0 for those that are not valid or do not
// fit.
void find_slots(const SlotParams& p);

struct WindowParams {
  const Tensor& positions;        // [B, S] int64, contiguous
  const Tensor& valid;            // [B, S] bool, contiguous
  const OptionalTensor& indices;  // [B, S, K] int32, contiguous: rows; or null: the first K
  int64_t window, ring;           // tokens before and with each one; rows of the ring
  int64_t rate;                   // tokens of a row behind the ring
  Tensor out;                     // [B, S, window + K] int32, contiguous
};

// The rows that each token sees: of its window in the ring, -2 for none, which attention skips;
// then behind the ring, -1 for none.
void find_rows(const WindowParams& p);

}  // namespace custom_pypto
