#include "prolog.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace custom_pypto {
namespace {

// float32 holds the sum of so many products of bytes, in any order
constexpr int64_t kExactInFloat = 1024;

// Rotates the pairs (first[i], second[i]) of [.., N, R / 2]; sin and cos [.., R] hold every angle
// twice.
Tensor rotate(const Tensor& first, const Tensor& second, const Tensor& sin, const Tensor& cos) {
  const int64_t half = sin.size(-1) / 2;
  const Tensor s = sin.narrow(-1, 0, half).to(at::kFloat).unsqueeze(-2);
  const Tensor c = cos.narrow(-1, 0, half).to(at::kFloat).unsqueeze(-2);
  const Tensor a = first.to(at::kFloat), b = second.to(at::kFloat);
  return at::cat({a * c - b * s, b * c + a * s}, -1).to(first.scalar_type());
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& gamma, double eps) {
  const Tensor x32 = x.to(at::kFloat);
  const Tensor scale = at::rsqrt(x32.square().mean(-1, /*keepdim=*/true) + eps);
  return (x32 * scale).to(x.scalar_type()) * gamma;
}

Tensor rope_interleaved(const Tensor& x, const Tensor& sin, const Tensor& cos) {
  return rotate(x.slice(-1, 0, std::nullopt, 2), x.slice(-1, 1, std::nullopt, 2), sin, cos);
}

Tensor rope_half_split(const Tensor& x, const Tensor& sin, const Tensor& cos) {
  const int64_t half = sin.size(-1) / 2;
  const Tensor rotated = rotate(x.narrow(-1, 0, half), x.narrow(-1, half, half), sin, cos);
  return at::cat({rotated, x.narrow(-1, 2 * half, x.size(-1) - 2 * half)}, -1);
}

Tensor normed_index_key(const Tensor& key, const Tensor& gamma, const Tensor& beta, double eps) {
  return at::layer_norm(key.to(at::kFloat), {key.size(-1)}, gamma.to(at::kFloat),
                        beta.to(at::kFloat), eps)
      .to(key.scalar_type());
}

Tensor index_weights(const Tensor& x, const Tensor& w, int64_t dims) {
  return at::matmul(x.to(at::kFloat), w.to(at::kFloat)) * scale_of(w.size(1) * dims);
}

Tensor int8_product(const Tensor& a, const Tensor& b) {
  Tensor sums = at::zeros({a.size(0), b.size(1)}, a.options().dtype(at::kInt));
  for (int64_t first = 0; first < b.size(0); first += kExactInFloat) {
    const int64_t some = std::min(kExactInFloat, b.size(0) - first);
    sums +=
        at::matmul(a.narrow(1, first, some).to(at::kFloat), b.narrow(0, first, some).to(at::kFloat))
            .to(at::kInt);
  }
  return sums;
}

}  // namespace custom_pypto
