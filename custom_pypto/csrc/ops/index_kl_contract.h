// The contracts of the ops that train an indexer on the attention it selects for.
#pragma once

#include <c10/util/OptionalArrayRef.h>

#include "shared_contracts.h"

namespace custom_pypto {

using HostLengths = at::OptionalSymIntArrayRef;  // as torch_npu's ops of these names take them

// Queries and keys in one layout, with such lengths.
class HostSequences {
 public:
  // Checks that 'TND' comes with lengths. Reads them only if the op computes.
  HostSequences(const KeyNames& names, const Tensor& query, const HostLengths& query_lengths,
                const HostLengths& key_lengths, std::string_view layout, int64_t sparse_mode,
                int64_t cmp_ratio, bool computes);
  SequenceParams of(const Tensor& query, const Tensor& key) const;

 private:
  OptionalTensor query_lengths_, key_lengths_;
  std::string_view layout_;
  int64_t sparse_mode_, cmp_ratio_;
};

// Checks the attention and the indexer of a divergence, and allocates gradients and loss.
void check_index_kl(const KeyNames& names, SequenceParams& attention, IndexKlParams& p);

}  // namespace custom_pypto
