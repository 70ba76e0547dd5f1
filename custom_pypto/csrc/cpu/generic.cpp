// Plain C++ for any machine: vectors of 16 bytes, which x86-64 and aarch64 both have.
#define VECTOR_BYTES 16
#include "filter.h"
#include "float32.h"

namespace custom_pypto::cpu {
const Kernels kGeneric = {"generic", index_f32, attend_f32, dequantise_f32, filter, count, keep};
}
