// Products of weights with rows of x in bfloat16, by vdpbf16ps: x needs no rounding, and values of
// 8 and 4 bits are found in tables of bfloat16, where these fit in registers.
#include "kernels.h"
#if defined(CUSTOM_PYPTO_AVX512_BF16)
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,prefer-vector-width=512")
// gcc 12 warns about the deliberately undefined operands inside its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#define VECTOR_BYTES 64
#define HAS_VNNI  // what `target` defines, g++ 12 does not tell the preprocessor
#define HAS_VBMI
#include "halves.h"
#include "weights_bytes.h"
#include "weights_words.h"

namespace custom_pypto::cpu {
namespace {

// Units of a weight in vectors of bfloat16; arrange(): those of x as these find them.
template <class Format>
struct HalfUnit;

template <>
struct HalfUnit<Bfloat16Weight> {
  static constexpr int kValues = kUnit, kBytes = 2 * kUnit;
  static void arrange(const uint16_t* from, uint16_t* to) { std::memcpy(to, from, 2 * kValues); }
  HalfUnit() = default;
  explicit INLINE HalfUnit(const uint8_t* p) : values(_mm512_loadu_si512(p)) {}
  INLINE __m512i vector(int) const { return values; }
  __m512i values;
};

template <>
struct HalfUnit<Fp8Weight> {
  static constexpr int kValues = 128, kBytes = 128;
  static void arrange(const uint16_t* from, uint16_t* to) {
    for (int i = 0; i < kValues; i += 8) {
      std::memcpy(to + i / 64 * 64 + i % 16 / 8 * 32 + i % 64 / 16 * 8, from + i, 16);
    }
  }
  HalfUnit() = default;
  explicit INLINE HalfUnit(const uint8_t* p) {
    UNROLL for (int i = 0; i < 2; ++i) bytes[i] = _mm512_loadu_si512(p + 64 * i);
  }
  INLINE __m512i vector(int i) const {
    const __m512i& found = bytes[i / 2];
    const __m512i low = ByteHalves::find(kE4m3.low, found);
    const __m512i high = ByteHalves::find(kE4m3.high, found) | (found & _mm512_set1_epi8(-128));
    return i % 2 ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high);
  }
  __m512i bytes[2];
};

// not twice: their scales are read as they are stored
constexpr Halves kExactE2m1([](int i) {
  return (i < 8 ? kTwiceE2m1[i] : -kTwiceE2m1[i - 8]) * 0.5f;
});

template <const Halves& TABLE>
struct NibbleUnit {
  static constexpr int kValues = 128, kBytes = 64;
  static void arrange(const uint16_t* from, uint16_t* to) { WordNibbles::arrange(from, to); }
  NibbleUnit() = default;
  explicit INLINE NibbleUnit(const uint8_t* p) : words(_mm512_loadu_si512(p)) {
    asm("" : "+v"(words));  // g++ 12 loads them for each shift else
  }
  INLINE __m512i vector(int i) const {
    const __m512i table = _mm512_load_si512(TABLE.bits);
    return _mm512_permutexvar_epi16(i ? _mm512_srli_epi16(words, 4 * i) : words, table);
  }
  __m512i words;
};

template <>
struct HalfUnit<Int4Weight> : NibbleUnit<kIntegers> {
  HalfUnit() = default;
  explicit INLINE HalfUnit(const uint8_t* p) : NibbleUnit(p) {}
};

template <>
struct HalfUnit<Fp4Weight> : NibbleUnit<kExactE2m1> {
  HalfUnit() = default;
  explicit INLINE HalfUnit(const uint8_t* p) : NibbleUnit(p) {}
};

// Whether a vector of sums belongs to one group, or, of 4 bits, each of its quarters or halves.
template <class Unit>
INLINE bool fits_halves(const Dots& call) {
  if (call.depth % Unit::kValues) return false;
  if (call.groups == 1 || call.group % Unit::kValues == 0) return true;
  return Unit::kBytes < Unit::kValues && Unit::kValues % call.group == 0;
}

// A row of x for `dots`: its values, then the sums of its groups, if they have offsets.
struct HalfRow {
  HalfRow(const Dots& call, const void* x)
      : values(static_cast<const uint16_t*>(x)),
        sums(reinterpret_cast<const float*>(values + call.depth)) {}
  const uint16_t* values;
  const float* sums;
};

template <class Unit>
void prepare_halves(const Dots& call, const float* x, int first, int n, void* to) {
  const HalfRow row(call, to);
  uint16_t* values = const_cast<uint16_t*>(row.values) + first;
  for (int d = 0; d < n; d += Unit::kValues) {
    uint32_t bits[Unit::kValues];
    uint16_t halves[Unit::kValues];
    std::memcpy(bits, x + d, sizeof bits);
    for (int i = 0; i < Unit::kValues; ++i) halves[i] = static_cast<uint16_t>(bits[i] >> 16);
    Unit::arrange(halves, values + d);
  }
  if (call.has_offsets) sum_groups(call, x, first, n, const_cast<float*>(row.sums));
}

// asm: g++ 12 copies accumulators around the intrinsic
INLINE void add_products(Vec& sums, __m512i a, __m512i b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}
INLINE void add_products(Vec& sums, __m512i a, const uint16_t* b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "m"(*reinterpret_cast<const LanePairs*>(b)));
}

// total += the products of a unit of each of WEIGHTS rows of a weight, which share what they read
// of x.
template <class Unit, class Scales, int WEIGHTS, int ROWS>
INLINE void add_units(const uint8_t* p, int64_t stride, const uint16_t* const (&x)[ROWS], int64_t d,
                      Scales* scales, Vec (*total)[ROWS]) {
  Unit units[WEIGHTS];
  UNROLL for (int k = 0; k < WEIGHTS; ++k) units[k] = Unit(p + k * stride);
  Vec sums[WEIGHTS][ROWS] = {};
  Vec(*to)[ROWS] = Scales::kOfRow ? total : sums;
  UNROLL for (int v = 0; v < Unit::kValues / 32; ++v) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const uint16_t* part = x[r] + d + 32 * v;
      if constexpr (WEIGHTS == 1) {
        add_products(to[0][r], units[0].vector(v), part);
      } else {
        const __m512i shared = _mm512_loadu_si512(part);
        UNROLL for (int k = 0; k < WEIGHTS; ++k) {
          add_products(to[k][r], units[k].vector(v), shared);
        }
      }
    }
  }
  if constexpr (!Scales::kOfRow) {
    UNROLL for (int k = 0; k < WEIGHTS; ++k) {
      const Vec scale = scales[k].next();
      UNROLL for (int r = 0; r < ROWS; ++r) total[k][r] += sums[k][r] * scale;
    }
  }
}

template <class Unit, class Scales, int WEIGHTS, int ROWS>
INLINE void dots_halves_tile(const Dots& call, int w, int apart, int i) {
  // rows of the weight that share x: sums must fit in registers; of one row of x, and with values
  // that need no unpacking, the CPU reads the weight slower then
  constexpr bool kShares = ROWS > 1 && Unit::kValues > kUnit;
  constexpr int kShared = !kShares ? 1 : ROWS > 2 && WEIGHTS > 2 ? 2 : WEIGHTS;
  const uint8_t* p = call.weight + w * call.stride;
  const int64_t next_row = apart * call.stride;
  Scales scales[WEIGHTS];
  UNROLL for (int k = 0; k < WEIGHTS; ++k) scales[k] = Scales(call, w + k * apart, Unit::kValues);
  const uint16_t* x[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) x[r] = HalfRow(call, call.x[i + r]).values;
  NextRows<WEIGHTS> next(call, w, apart);
  Vec total[WEIGHTS][ROWS] = {};
  const auto step = [&](int64_t d) INLINED {
    next.template fetch<Unit::kBytes>();
    UNROLL for (int k = 0; k < WEIGHTS; k += kShared) {
      add_units<Unit, Scales, kShared>(p + k * next_row, next_row, x, d, scales + k, total + k);
    }
    p += Unit::kBytes;
  };
  int64_t d = 0;
  // The CPU reads ahead by the addresses that a load had before: loops must stay rolled, so that
  // loads repeat often. g++ 12 unrolls them in spite of the pragma around a loop of one step with
  // UNROLL.
  if constexpr (WEIGHTS == 1) {
#pragma GCC unroll 1
    for (; d + 2 * Unit::kValues <= call.depth; d += 2 * Unit::kValues) {
      step(d);
      step(d + Unit::kValues);
    }
  }
#pragma GCC unroll 1
  for (; d < call.depth; d += Unit::kValues) step(d);
  finish_tile<HalfRow>(call, w, apart, i, total, /*scaled=*/!Scales::kOfRow);
}

template <class Format, class Unit = HalfUnit<Format>>
void dots_halves(const Dots& call) {
  each_strip<4>(call, [&](auto rows, int i) INLINED {
    constexpr int ROWS = decltype(rows)::value;
    const auto tile = [&](auto weights, int w, int apart) INLINED {
      constexpr int WEIGHTS = decltype(weights)::value;
      with_parts<Format, Unit::kValues>(call, [&](auto parts) INLINED {
        using Scales = StoredScales<Format, decltype(parts)::value>;
        dots_halves_tile<Unit, Scales, WEIGHTS, ROWS>(call, w, apart, i);
      });
    };
    if (ROWS == 1 && call.in_turn()) return each_tile_of_weight<1>(call, tile);
    each_tile_of_weight<4>(call, tile);
  });
}

template <class Format, class Unit = HalfUnit<Format>>
constexpr DotsKernels kHalves = {.fits = fits_halves<Unit>,
                                 .prepare = prepare_halves<Unit>,
                                 .dots = dots_halves<Format>,
                                 .stored_scales = kStoredScales<Format>};

constexpr DotsKernels kHalvesDots[kWeightFormats] = {
    kHalves<Bfloat16Weight>, kInt16<Int8Weight, WordUnit>, kHalves<Fp8Weight>, kHalves<Int4Weight>,
    kHalves<Fp4Weight>};

// Values of 4 bits are left to the products of integers of the next table, which are faster there.
constexpr DotsKernels kIntelDots[kWeightFormats] = {
    kHalves<Bfloat16Weight>, kInt16<Int8Weight, WordUnit>, kHalves<Fp8Weight>, {}, {}};

}  // namespace

const DotsTable kAvx512Bf16Dots = kHalvesDots, kIntelBf16Dots = kIntelDots,
                kAvx512Bf16Int8Dots = kInt8Dots;

}  // namespace custom_pypto::cpu
#endif
