#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define VECTOR_BYTES 32
#include "filter.h"
#include "float32.h"
#include "gradients.h"
#include "weights_int16.h"

namespace custom_pypto::cpu {
const Kernels kAvx2 = {.name = "avx2",
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
                       .weights = kInt16Weights,
                       .add_rows = add_rows_f32};
}
#endif
