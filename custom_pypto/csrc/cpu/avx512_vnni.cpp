// Integers with VNNI. int8 with vpdpbusd: acc[lane] += sum of four products a[lane][i] *
// b[lane][i], of which a is unsigned, in int32 without saturation. a is a broadcast quad of a key,
// shifted to unsigned; a lane of b is a query row.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,prefer-vector-width=512")
// gcc 12 warns about the deliberately undefined operands inside its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#define VECTOR_BYTES 64
#include <cstring>

#include "avx512.h"
#include "int16_products.h"
#include "vnni_products.h"
#include "weights_bytes.h"

namespace custom_pypto::cpu {
namespace {

// to[j][d] = keys[j][d] + 128
void shift(const int8_t* keys, int64_t stride, int n, int dims, uint8_t* to) {
  const __m512i offset = _mm512_set1_epi8(-128);
  for (int j = 0; j < n; ++j) {
    for (int d = 0; d < dims; d += 64) {
      const __mmask64 lanes = ~0ULL >> (dims - d < 64 ? 64 - (dims - d) : 0);
      const __m512i row = _mm512_maskz_loadu_epi8(lanes, keys + j * stride + d);
      _mm512_mask_storeu_epi8(to + j * dims + d, lanes, _mm512_xor_si512(row, offset));
    }
  }
}

// asm: g++ 12 copies each accumulator around the intrinsic, which takes twice the time
INLINE void add_products(__m512i& acc, __m512i keys, const __m512i& rows) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(keys), "v"(rows));
}

template <int KEYS, int VECS>
INLINE void index_tile_int8(const uint32_t* panel, const float* weights, int dims,
                            const uint8_t* keys, int64_t stride, float* partial) {
  __m512i acc[KEYS][VECS];
  UNROLL for (int j = 0; j < KEYS; ++j) {
    UNROLL for (int v = 0; v < VECS; ++v) acc[j][v] = _mm512_loadu_si512(panel + 16 * v);
  }
  for (int d = 0; d < dims; d += 4) {
    panel += 16 * VECS;
    __m512i q[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) q[v] = _mm512_loadu_si512(panel + 16 * v);
    UNROLL for (int j = 0; j < KEYS; ++j) {
      int32_t quad;
      std::memcpy(&quad, keys + j * stride + d, 4);
      const __m512i k = _mm512_set1_epi32(quad);
      UNROLL for (int v = 0; v < VECS; ++v) add_products(acc[j][v], k, q[v]);
    }
  }
  UNROLL for (int j = 0; j < KEYS; ++j) {
    __m512 sum = load(partial + 16 * j);
    UNROLL for (int v = 0; v < VECS; ++v) {
      const __m512i relu = _mm512_max_epi32(_mm512_setzero_si512(), acc[j][v]);
      sum = _mm512_fmadd_ps(load(weights + 16 * v), _mm512_cvtepi32_ps(relu), sum);
    }
    store(partial + 16 * j, sum);
  }
}

void index_int8(const IndexCall<uint8_t>& call) {
  index_panels(call, 1 + call.dims / 4,
               [&](auto keys, auto vecs, const uint32_t* panel, int row, int j, float* partial)
                   INLINED {
                     index_tile_int8<decltype(keys)::value, decltype(vecs)::value>(
                         panel, call.weights + row, call.dims, call.keys + j * call.key_stride,
                         call.key_stride, partial);
                   });
}

}  // namespace

const Int8Kernels<uint8_t> kAvx512Vnni = {.convert = shift, .index = index_int8};
const Int16Kernels kAvx512VnniInt16 = kInt16Kernels<12>;
const Int8Products kAvx512VnniInt8Products = {
    .round_panel = round_panel,
    .unit = kWeightUnit,
    .most_quads = 4,
    .multiply = {nullptr, multiply_vnni<Int8Weight>, nullptr, multiply_vnni<Int4Weight>,
                 multiply_vnni<Fp4Weight>}};
const DotsTable kAvx512VnniDots = kInt16Dots<ByteUnit>, kAvx512VnniInt8Dots = kInt8Dots;

}  // namespace custom_pypto::cpu
#endif
