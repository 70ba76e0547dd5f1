// Index queries and keys: checks, rotation, and the two ways to store them in int8.
#pragma once

#include <ATen/ops/matmul.h>

#include "../ops/contract.h"

namespace custom_pypto {

// Checks rows x [.., D], and the matrix that rotates them.
inline void check_index_rows(const char* op, const Tensor& x, const OptionalTensor& hadamard) {
  Argument(op, "x", x).dtype(kFloating);
  CHECK_ARGUMENT(x.dim() > 0, op, "x", "of shape [.., D]", x.sym_sizes());
  Argument(op, "x", x).keeps(x.dim() - 1, Dim::kInt8Dims, "D");
  if (!hadamard) return;
  Argument(op, "hadamard", *hadamard)
      .rank(2, "[D, D]")
      .size(0, x.sym_size(-1), "D of x")
      .size(1, x.sym_size(-1), "D of x")
      .dtype(x.scalar_type(), "dtype of x")
      .device_of(x);
}

// x, or x . hadamard with sums in float32, rounded to the dtype of x; returned as contiguous
// float32.
inline Tensor rotated(const Tensor& x, const OptionalTensor& hadamard) {
  Tensor rows = x.to(at::kFloat);
  if (hadamard) rows = at::matmul(rows, hadamard->to(at::kFloat)).to(x.scalar_type());
  return rows.to(at::kFloat).contiguous();
}

// Quantises x [.., D], rotated by `hadamard` if there is one, into contiguous int8 rows [.., D] and
// float16 scales [..].
void quantise_rows(const Tensor& x, const OptionalTensor& hadamard, const Tensor& rows,
                   const Tensor& scales);

// The same into the slots of a cache [blocks, block_size, 1, D] and of [blocks, block_size, 1];
// slots outside are skipped, and of two rows for one slot the later one stays.
void quantise_into_cache(const Tensor& x, const OptionalTensor& hadamard, const Tensor& slots,
                         const Tensor& cache, const Tensor& scale_cache);

}  // namespace custom_pypto
