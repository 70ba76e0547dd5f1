// Sparse attention over the rows of a latent cache.
#pragma once

#include "params.h"
#include "row_readers.h"

namespace custom_pypto {

// Computes p.out, which the contract has allocated, on the CPU. Rows is the format of the key.
template <template <typename E, typename T> class Rows>
void attend(const AttentionParams& p);

extern template void attend<ModelRows>(const AttentionParams& p);
extern template void attend<Int8Rows>(const AttentionParams& p);

}  // namespace custom_pypto
