// Gradients of sparse attention. Bodies: attention_grad.cpp
#pragma once

#include "params.h"

namespace custom_pypto {

// Computes the gradients, which the contract has allocated, on the CPU. Their bits do not depend on
// the number of threads.
void attend_backward(AttentionGradParams& p);

}  // namespace custom_pypto
