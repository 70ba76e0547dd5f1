// The contract of a weight as it is stored, under the names that an op has for it.
#pragma once

#include "../tasks/stored_weight.h"
#include "contract.h"

namespace custom_pypto {

struct StoredNames {
  const char* op;
  const char* weight;
  const char* scales;
};

// The format with the dtypes of codes and scales. `rounded`: one of those that floats are rounded
// to; messages begin with the dtypes of `others`.
const WeightFacts& check_weight_format(const StoredNames& names, const Tensor& weight,
                                       const OptionalTensor& scales, bool rounded = false,
                                       const char* others = "");

// Checks the shape of the scales of a weight [N, K] or [E, N, K]; block: rows and values of a
// square block, where a block has a scale.
void check_scales(const StoredNames& names, const WeightFacts& facts, const Tensor& weight,
                  const Tensor& scales, const c10::SymInt& depth, const c10::SymInt& block);

}  // namespace custom_pypto
