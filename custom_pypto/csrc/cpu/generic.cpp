// Plain C++ for any machine: vectors of 16 bytes, which x86-64 and aarch64 both have.
#define VECTOR_BYTES 16
#include "filter.h"
#include "float32.h"
#include "gradients.h"
#include "weights.h"

namespace custom_pypto::cpu {
const Kernels kGeneric = {.name = "generic",
                          .index = index_f32,
                          .attend = attend_f32,
                          .multiply = multiply_f32,
                          .probabilities = probabilities_f32,
                          .head_sums = head_sums_f32,
                          .index_scores = index_scores_f32,
                          .index_scores_grad = index_scores_grad_f32,
                          .dequantize = dequantize_f32,
                          .filter = filter,
                          .count = count,
                          .keep = keep,
                          .weights = kFloatWeights,
                          .add_rows = add_rows_f32};
}
