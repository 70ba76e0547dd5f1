// Attention to keys and values of every head, which are expanded from latents.
#pragma once

#include "tensor.h"

namespace custom_pypto {

struct ExpandedParams {
  const Tensor& q_nope;          // [B, S, H, nope]
  const OptionalTensor& q_rope;  // [B, S, H, R]
  const Tensor& latent;          // [B, n, L]
  const OptionalTensor& k_rope;  // [B, n, R]
  const Tensor& weight;          // [H, nope + v, L]
  const Tensor& indices;         // [B, S, K] int32
  const Tensor& ends;            // [B, S] int64
  double scale;
  Tensor out;  // [B, S, H, v], contiguous
};

// Returns whether no token names a key twice; if one does, `out` is undefined.
bool expanded_attention(const ExpandedParams& p);

}  // namespace custom_pypto
