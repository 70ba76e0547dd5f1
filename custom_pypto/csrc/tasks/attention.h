// Sparse attention over the rows of a latent cache.
#pragma once

#include "params.h"
#include "row_readers.h"

namespace custom_pypto {

// Computes p.out, which the contract has allocated, on the CPU. Rows is the format of the key.
// by_token: the bits of a token depend on no other, as tokens share neither keys nor the split of
// their indices.
template <template <typename E, typename T> class Rows>
void attend(const AttentionParams& p, bool by_token);

extern template void attend<ModelRows>(const AttentionParams& p, bool by_token);
extern template void attend<Int8Rows>(const AttentionParams& p, bool by_token);

}  // namespace custom_pypto
