// Rows of an indexer, rotated and quantized, in the two ways to store them.
#pragma once

#include "tensor.h"

namespace custom_pypto {

// Quantizes x [.., D], rotated by `hadamard` if there is one, into contiguous int8 rows [.., D] and
// float16 scales [..].
void quantize_rows(const Tensor& x, const OptionalTensor& hadamard, const Tensor& rows,
                   const Tensor& scales);

// The same into the slots of a cache [blocks, block_size, 1, D] and of [blocks, block_size, 1];
// slots outside are skipped, and of two rows for one slot the later one stays.
void quantize_into_cache(const Tensor& x, const OptionalTensor& hadamard, const Tensor& slots,
                         const Tensor& cache, const Tensor& scale_cache);

}  // namespace custom_pypto
