// The eight tile registers of AMX: 16 rows of 64 bytes each. dot<C, A, B>: C += A times B, where C
// is 16 x 16 floats, A 16 rows of 32 bfloat16, and B 16 pairs of rows, [pair][column] of (even row,
// odd row). dot_int8<C, A, B>: of int32, 64 int8 and quads of rows. With EMULATED_TILES the same in
// AVX-512, equal to tdpbf16ps bit for bit. Included only by a .cpp of this folder.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace custom_pypto::cpu {
namespace {
namespace tile {

#if !defined(EMULATED_TILES)

// load, store and dot need a configuration; torch's own AMX kernels each set theirs
inline void enter() {
  struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static constexpr Configuration configuration;
  asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
}

// a thread with tiles costs the system 8 KiB more per context switch
inline void leave() { asm volatile("tilerelease" ::: "memory"); }

// Asm instead of intrinsics: g++ 12's _tile_loadd lacks the "memory" clobber, so that earlier
// vector stores could move behind it. Strides are in bytes.
template <int T>
INLINE void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
INLINE void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

template <int T>
INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int C, int A, int B>
INLINE void dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

template <int C, int A, int B>
INLINE void dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

struct alignas(64) Register {
  int32_t row[16][16];
};
thread_local Register registers[8];

inline void enter() { std::memset(registers, 0, sizeof registers); }

// all bits set, NaN: a use outside of enter and leave shows
inline void leave() { std::memset(registers, 0xFF, sizeof registers); }

template <int T>
void load(const void* from, int64_t stride) {
  const char* row = static_cast<const char*>(from);
  for (int r = 0; r < 16; ++r) std::memcpy(registers[T].row[r], row + r * stride, 64);
}

template <int T>
void store(void* to, int64_t stride) {
  char* row = static_cast<char*>(to);
  for (int r = 0; r < 16; ++r) std::memcpy(row + r * stride, registers[T].row[r], 64);
}

template <int T>
void zero() {
  std::memset(&registers[T], 0, sizeof(Register));
}

// The order of tdpbf16ps: c + (sum of the even elements + sum of the odd ones), each sum a chain of
// fused multiply-adds from +0. As there, every step rounds to nearest even, subnormal inputs and
// results are 0, and the thread's rounding mode counts for nothing.
template <int C, int A, int B>
__attribute__((noinline)) void dot() {
  constexpr unsigned kRoundingMode = 0x6000, kSubnormalsAreZero = 0x8040;
  const unsigned before = _mm_getcsr();
  _mm_setcsr((before & ~kRoundingMode) | kSubnormalsAreZero);
  asm volatile("" ::: "memory");  // keeps the arithmetic between the two changes of mode
  const int32_t upper = static_cast<int32_t>(0xFFFF0000);
  for (int m = 0; m < 16; ++m) {
    Vec even = {}, odd = {};
    for (int k = 0; k < 16; ++k) {
      const int32_t pair = registers[A].row[m][k];
      const IntVec b = *reinterpret_cast<const IntVec*>(registers[B].row[k]), a = pair - IntVec{};
      even = (Vec)_mm512_fmadd_ps((__m512)(a << 16), (__m512)(b << 16), (__m512)even);
      odd = (Vec)_mm512_fmadd_ps((__m512)(a & upper), (__m512)(b & upper), (__m512)odd);
    }
    Vec& c = *reinterpret_cast<Vec*>(registers[C].row[m]);
    c = c + (even + odd);
  }
  asm volatile("" ::: "memory");
  _mm_setcsr(before);
}

template <int C, int A, int B>
__attribute__((noinline)) void dot_int8() {
  for (int m = 0; m < 16; ++m) {
    IntVec& c = *reinterpret_cast<IntVec*>(registers[C].row[m]);
    for (int k = 0; k < 16; ++k) {
      const int32_t quad = registers[A].row[m][k];
      const IntVec b = *reinterpret_cast<const IntVec*>(registers[B].row[k]);
      UNROLL for (int i = 24; i >= 0; i -= 8) c += (quad << i >> 24) * (b << i >> 24);
    }
  }
}

#endif

}  // namespace tile
}  // namespace
}  // namespace custom_pypto::cpu
