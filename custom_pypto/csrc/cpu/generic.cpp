// Plain C++ for any machine: vectors of 16 bytes, which x86-64 and aarch64 both have.
#define VECTOR_BYTES 16
#include "kernel_table.h"

namespace custom_pypto::cpu {
const Kernels kGeneric = kernel_table<>("generic");
}
