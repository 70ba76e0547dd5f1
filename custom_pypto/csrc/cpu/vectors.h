// The compiler's vector types. Each .cpp of this folder sets its target, defines VECTOR_BYTES and
// includes the headers that use them, so everything in these has internal linkage.
#pragma once

#include <cstdint>
#if VECTOR_BYTES == 64
#include <immintrin.h>
#endif

namespace custom_pypto::cpu {
namespace {

#define UNROLL _Pragma("GCC unroll 16")
// of functions, and of lambdas: attention in float32 takes half as long again where one is a call
#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED

constexpr int kLanes = VECTOR_BYTES / 4;
// aligned(4): panels and caches promise no more than their element's alignment
typedef float Vec __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

INLINE IntVec lane_index() {
  IntVec lanes = {};
  UNROLL for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

INLINE Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
INLINE void store(float* p, const Vec& v) { *reinterpret_cast<Vec*>(p) = v; }
INLINE Vec broadcast(float x) { return x - Vec{}; }

}  // namespace
}  // namespace custom_pypto::cpu
