// The lightning indexer as a part of other ops.
#pragma once

#include "../tasks/params.h"

namespace custom_pypto {

// Checks the contract, computes on the CPU, and stores the result in p.out.
void lightning_indexer(IndexerParams& p);

}  // namespace custom_pypto
