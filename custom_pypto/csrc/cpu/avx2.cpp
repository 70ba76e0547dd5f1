#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define VECTOR_BYTES 32
#include "kernel_table.h"
#include "weights_bytes.h"
#include "weights_words.h"

namespace custom_pypto::cpu {
const Kernels kAvx2 = kernel_table</*OTHERS=*/true>("avx2", kInt16Dots<WordUnit>);
const DotsTable kAvx2Int8Dots = kInt8Dots;
}  // namespace custom_pypto::cpu
#endif
