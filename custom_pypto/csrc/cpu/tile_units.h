// Values of weights of 4 and 8 bits as bfloat16, which has each of them, for tile registers.
// Included only by amx.h.
#pragma once

#include "halves.h"

namespace custom_pypto::cpu {
namespace {

// 64 bytes of a row, or 32, in order, as vectors of 32 values.
template <class Format>
struct TileUnit;

// low and high bytes of 64 values, whose order of quarters of a lane the caller has undone
INLINE void join_bytes(__m512i low, __m512i high, __m512i* to) {
  to[0] = _mm512_unpacklo_epi8(low, high);
  to[1] = _mm512_unpackhi_epi8(low, high);
}

// 64 bytes, or the first 32, in the order that join_bytes takes
INLINE __m512i load_apart(const uint8_t* p, bool half) {
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  // behind the last row there may be no memory
  return _mm512_permutexvar_epi64(order,
                                  _mm512_maskz_loadu_epi8(half ? UINT32_MAX : UINT64_MAX, p));
}

constexpr ByteHalves kMagnitudes([](int i) { return static_cast<float>(i); });

template <>
struct TileUnit<Int8Weight> {
  static INLINE void unpack(const uint8_t* p, bool half, __m512i* to) {
    const __m512i bytes = load_apart(p, half), magnitude = _mm512_abs_epi8(bytes);
    const __m512i low = ByteHalves::find(kMagnitudes.low, magnitude);
    __m512i high = ByteHalves::find(kMagnitudes.high, magnitude);
    // of -128 the table finds 0
    high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(magnitude), _mm512_set1_epi8(0x43));
    join_bytes(low, high | (bytes & _mm512_set1_epi8(-128)), to);
  }
};

template <>
struct TileUnit<Fp8Weight> {
  static INLINE void unpack(const uint8_t* p, bool half, __m512i* to) {
    const __m512i bytes = load_apart(p, half);
    const __m512i high = ByteHalves::find(kE4m3.high, bytes);
    join_bytes(ByteHalves::find(kE4m3.low, bytes), high | (bytes & _mm512_set1_epi8(-128)), to);
  }
};

// 32 values of 4 bits, in order
template <const Halves& TABLE>
struct TileNibbles {
  static INLINE __m512i find(const uint8_t* p) {
    const __m512i twice =
        _mm512_set_epi8(0, 15, 0, 15, 0, 14, 0, 14, 0, 13, 0, 13, 0, 12, 0, 12, 0, 11, 0, 11, 0, 10,
                        0, 10, 0, 9, 0, 9, 0, 8, 0, 8, 0, 7, 0, 7, 0, 6, 0, 6, 0, 5, 0, 5, 0, 4, 0,
                        4, 0, 3, 0, 3, 0, 2, 0, 2, 0, 1, 0, 1, 0, 0, 0, 0);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m512i words = _mm512_permutexvar_epi8(twice, _mm512_castsi128_si512(bytes));
    const __m512i codes = _mm512_srlv_epi16(words, _mm512_set1_epi32(4 << 16));
    return _mm512_permutexvar_epi16(codes, _mm512_load_si512(TABLE.bits));
  }
};

}  // namespace
}  // namespace custom_pypto::cpu
