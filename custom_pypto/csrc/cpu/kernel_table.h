// The kernels that are written once for all instruction sets, as a table. Included only by a .cpp
// of this folder, after it has set its target and VECTOR_BYTES.
#pragma once

#include "filter.h"
#include "float32.h"
#include "gradients.h"
#include "weight_table.h"

namespace custom_pypto::cpu {
namespace {

// dots: of integers of 4 and 8 bits, where there are OTHERS than in float
template <bool OTHERS = false>
constexpr Kernels kernel_table(const char* name, DotsTable dots = nullptr) {
  return {.name = name,
          .index = index_f32,
          .attend = attend_f32,
          .multiply = multiply_f32,
          .dot = dot_f32,
          .probabilities = probabilities_f32,
          .head_sums = head_sums_f32,
          .index_scores = index_scores_f32,
          .index_scores_grad = index_scores_grad_f32,
          .dequantize = dequantize_f32,
          .filter = filter,
          .count = count,
          .keep = keep,
          .weights = kWeights,
          .dots = {dots, kFloatDots<OTHERS>},
          .add_rows = add_rows_f32};
}

}  // namespace
}  // namespace custom_pypto::cpu
