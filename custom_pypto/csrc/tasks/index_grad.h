// Gradients of an indexer. Bodies: index_grad.cpp
#pragma once

#include "params.h"

namespace custom_pypto {

// Compute the gradients, which the contract has allocated, and the loss on the CPU. Their bits do
// not depend on the number of threads.
void index_backward(IndexGradParams& p, const Tensor& sparse_indices, const Tensor& d_values);
void index_kl_backward(IndexKlParams& p);

}  // namespace custom_pypto
