// Products of weights of few bits with many rows of x rounded to 16 bits, in integers: a vector has
// twice as many products as of float. Included only by a .cpp of this folder, after it has set its
// target: AVX2, or AVX-512 with VNNI.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "vectors.h"

namespace custom_pypto::cpu {
namespace {

constexpr int kPanelVecs = 2;

// acc[lane] += a's pair . b's pair of int16. asm: g++ 12 copies each accumulator around the
// intrinsic, or would multiply all before it adds, and keep half of the sums in memory.
INLINE void add_pairs(IntVec& acc, const IntVec& a, const IntVec& b) {
#if VECTOR_BYTES == 64
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#else
  IntVec products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(products) : "x"(a), "x"(b));
#endif
}

// The rows i, i + 1, ... of x and a panel. Sums fit in int32: 512 products of an int16 and an int8.
template <int ROWS>
INLINE void int16_tile(const Int16Product& call, int panel, int i) {
  const int32_t* b = call.panels + static_cast<int64_t>(panel) * call.pairs * kPanelVecs * kLanes;
  // a base for three rows, which differ by what an address can add
  const char* bases[(ROWS + 2) / 3];
  const int64_t stride = call.x_stride * 2;
  UNROLL for (int r = 0; r < ROWS; r += 3) {
    bases[r / 3] = reinterpret_cast<const char*>(call.x) + (i + r) * stride;
  }
  IntVec acc[ROWS][kPanelVecs] = {};
  for (int64_t k = 0; k < call.pairs; ++k, b += kPanelVecs * kLanes) {
    IntVec columns[kPanelVecs];
    UNROLL for (int v = 0; v < kPanelVecs; ++v) {
      columns[v] = *reinterpret_cast<const IntVec*>(b + v * kLanes);
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      int32_t pair;
      std::memcpy(&pair, bases[r / 3] + r % 3 * stride + 4 * k, 4);
      const IntVec row = pair - IntVec{};
      UNROLL for (int v = 0; v < kPanelVecs; ++v) add_pairs(acc[r][v], row, columns[v]);
    }
  }
  const int first = panel * kPanelVecs * kLanes;
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Vec scale = broadcast(call.x_scales[(i + r) * call.x_parts]);
    const Vec sum = broadcast(call.x_sums[(i + r) * call.x_parts]);
    float* out = call.out + (i + r) * call.out_stride + first;
    UNROLL for (int v = 0; v < kPanelVecs; ++v) {
      // the scale of x first: with that of the weight an integer may overflow
      const Vec product = __builtin_convertvector(acc[r][v], Vec) * scale;
      Vec terms = product * load(call.scales + first + v * kLanes);
      if (call.offsets) terms += sum * load(call.offsets + first + v * kLanes);
      store(out + v * kLanes, load(out + v * kLanes) + terms);
    }
  }
}

template <int MOST>
void multiply_int16(const Int16Product& call) {
  int i = 0;
  const auto strips = [&](auto rows) INLINED {
    constexpr int ROWS = decltype(rows)::value;
    for (; i + ROWS <= call.m; i += ROWS) {
      for (int panel = 0; panel < call.n_panels; ++panel) int16_tile<ROWS>(call, panel, i);
    }
  };
  strips(std::integral_constant<int, MOST>());
  if constexpr (MOST > 4) strips(std::integral_constant<int, 4>());
  strips(std::integral_constant<int, 1>());
}

template <int MOST>
constexpr Int16Kernels kInt16Kernels = {.panel_width = kPanelVecs * kLanes,
                                        .multiply = multiply_int16<MOST>};

}  // namespace
}  // namespace custom_pypto::cpu
