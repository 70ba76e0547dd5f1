// Sparse attention as a part of other ops.
#pragma once

#include "../tasks/params.h"

namespace custom_pypto {

// Checks the contract, computes on the CPU, and stores the result in p.out.
void sparse_flash_attention(AttentionParams& p);

}  // namespace custom_pypto
