// The lightning indexers.
#pragma once

#include "params.h"

namespace custom_pypto {

// Computes p.out, which the contract has allocated, on the CPU.
void select_keys(const IndexerParams& p);

// The same for query and key of int8, each of whose rows has a scale: [.., N1] for a query,
// [.., 1] for a key.
void select_int8_keys(const IndexerParams& p, const Tensor& query_scale, const Tensor& key_scale);

// Statistics of the softmax of each token's scores over every key that it sees; float32.
void index_statistics(const SequenceParams& p, const Tensor& weights, const Tensor& max,
                      const Tensor& sum);

}  // namespace custom_pypto
