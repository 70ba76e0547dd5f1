#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#define VECTOR_BYTES 64
#include "kernel_table.h"
#include "weights_words.h"

namespace custom_pypto::cpu {
const Kernels kAvx512 = kernel_table</*OTHERS=*/true>("avx512", kInt16Dots<WordUnit>);
}
#endif
