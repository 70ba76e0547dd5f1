#include "prolog.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/matmul.h>

#include <cmath>

#include "../tasks/row_functions.h"

namespace custom_pypto {

double scale_of(int64_t dims) { return 1.0 / std::sqrt(static_cast<double>(dims)); }

Tensor angles(const Tensor& twice) {
  const Tensor half = twice.narrow(-1, 0, twice.size(-1) / 2).to(at::kFloat);
  return at::cat({half, half}, -1);
}

void rotate_in_place(const Tensor& x, const Tensor& sin, const Tensor& cos, bool neighbours) {
  const Tensor rows = x.narrow(-1, 0, cos.size(-1));
  const Tensor rotated = at::empty(rows.sizes(), rows.options().dtype(at::kFloat));
  // of rows in float32, since it rounds products to the dtype of its rows
  rotate_rows({.x = rows.to(at::kFloat),
               .cos = cos,
               .sin = sin,
               .first = 0,
               .interleaved = neighbours,
               .out = rotated});
  rows.copy_(rotated);
}

Tensor index_key(const IndexKeyParams& p) {
  const Tensor key = at::matmul(p.x, p.w).to(at::kFloat);
  const Tensor rows =
      at::layer_norm(key, {key.size(-1)}, p.gamma.to(at::kFloat), p.beta.to(at::kFloat), p.eps)
          .to(p.x.scalar_type())
          .unsqueeze(-2);
  rotate_in_place(rows, p.sin, p.cos, /*neighbours=*/false);
  return rows;
}

Tensor index_weights(const Tensor& x, const Tensor& w, int64_t dims) {
  return at::matmul(x.to(at::kFloat), w.to(at::kFloat)).mul_(scale_of(w.size(1) * dims));
}

}  // namespace custom_pypto
