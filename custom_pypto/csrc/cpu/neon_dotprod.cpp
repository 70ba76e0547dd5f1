// Weights of 4 and 8 bits with the dot product of bytes, which ARMv8.2 added; the rest as in the
// set `generic`.
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod")
#define VECTOR_BYTES 16
#include "weights_bytes.h"

namespace custom_pypto::cpu {
const DotsTable kDotprodDots = kInt16Dots<ByteUnit>, kDotprodInt8Dots = kInt8Dots;
}
#endif
