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

enum class Activation { kSigmoid, kSilu, kSoftplus };

// out = f(x) of each value by itself, in float32 and rounded once; contiguous, in one dtype.
void activate_values(const Tensor& x, Activation f, const Tensor& out);

}  // namespace custom_pypto
