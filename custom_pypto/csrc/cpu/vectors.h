// The compiler's vector types. Each .cpp of this folder sets its own target and VECTOR_BYTES before
// it includes the headers with vector code, so all code in these headers has internal linkage.
#pragma once

#include <cstdint>
#if VECTOR_BYTES == 64
#include <immintrin.h>
#endif

namespace custom_pypto::cpu {
namespace {

#define UNROLL _Pragma("GCC unroll 16")
// for functions and lambdas: float32 attention takes 1.5 times as long if one is not inlined
#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED

constexpr int kLanes = VECTOR_BYTES / 4;
// aligned(4): panels and caches guarantee only the alignment of an element
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
