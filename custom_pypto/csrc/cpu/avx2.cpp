#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define VECTOR_BYTES 32
#include "filter.h"
#include "float32.h"

namespace custom_pypto::cpu {
const Kernels kAvx2 = {"avx2", index_f32, attend_f32, dequantise_f32, filter, count, keep};
}
#endif
