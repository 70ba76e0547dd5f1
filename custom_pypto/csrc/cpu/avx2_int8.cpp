// Integers with vpmaddwd: acc[lane] += sum of two products of int16, exact in int32. In the indexer
// a broadcast pair of a key, widened to int16, meets a pair of dims of each query row.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#include <immintrin.h>
#define VECTOR_BYTES 32
#include <cstring>

#include "int16_products.h"
#include "tiles.h"

namespace custom_pypto::cpu {
namespace {

void widen(const int8_t* keys, int64_t stride, int n, int dims, int16_t* to) {
  for (int j = 0; j < n; ++j) {
    for (int d = 0; d < dims; d += 16) {
      const __m128i bytes =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + j * stride + d));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j * dims + d),
                          _mm256_cvtepi8_epi16(bytes));
    }
  }
}

// partial[j] += weights * relu(keys[j] . rows), per lane of the first `heads` rows, with the bits
// of index_tile in float32.h
template <int KEYS, int VECS>
INLINE void index_tile(const uint32_t* panel, int width, const float* weights, int heads, int dims,
                       const int16_t* keys, int64_t stride, float* partial) {
  IntVec acc[KEYS][VECS] = {};
  for (int d = 0; d < dims; d += 2) {
    IntVec q[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) {
      q[v] = *reinterpret_cast<const IntVec*>(panel + v * kLanes);
    }
    panel += width;
    UNROLL for (int j = 0; j < KEYS; ++j) {
      int32_t pair;
      std::memcpy(&pair, keys + j * stride + d, 4);
      const IntVec k = pair - IntVec{};
      UNROLL for (int v = 0; v < VECS; ++v) { add_pairs(acc[j][v], k, q[v]); }
    }
  }
  UNROLL for (int j = 0; j < KEYS; ++j) {
    Vec dots[VECS];
    UNROLL for (int v = 0; v < VECS; ++v) dots[v] = __builtin_convertvector(acc[j][v], Vec);
    const Vec sum = load(partial + j * kLanes);
    store(partial + j * kLanes, add_heads(sum, dots, weights, heads));
  }
}

void index_int8(const IndexCall<int16_t>& call) {
  alignas(64) float partial[kMaxKeys * kLanes];
  for (int i = 0; i < call.n * kLanes; ++i) partial[i] = 0.0f;
  const uint32_t* panel = call.panels;
  for (int row = 0; row < call.rows;) {
    const int width = panel_width(call.rows - row);
    each_strip(width, [&](auto vecs, int s) INLINED {
      constexpr int VECS = decltype(vecs)::value;
      each_tile<kTileKeys<VECS>>(call.n, [&](auto keys, int j) INLINED {
        index_tile<decltype(keys)::value, VECS>(
            panel + s, width, call.weights + row + s, call.heads - row - s, call.dims,
            call.keys + j * call.key_stride, call.key_stride, partial + j * kLanes);
      });
    });
    panel += static_cast<int64_t>(width) * (call.dims / 2);
    row += width;
  }
  reduce_lanes(partial, call.n, call.scores);
}

}  // namespace

const Int8Kernels<int16_t> kAvx2Int8 = {.convert = widen, .index = index_int8};
const Int16Kernels kAvx2Int16 = kInt16Kernels<6>;

}  // namespace custom_pypto::cpu
#endif
