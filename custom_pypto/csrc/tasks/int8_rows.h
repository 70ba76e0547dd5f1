// Rows of an int8 latent cache, nope | rope | scales: L int8, R elements of 2 bytes, and a float32
// scale per kTile of the int8.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "panels.h"

namespace custom_pypto {

constexpr int64_t kTile = 128;  // elements per scale
constexpr char kRowBytes[] = "bytes of a row: L of int8, 2 R of RoPE, L / 32 of scales";

template <typename Size>  // int64_t or SymInt
Size quantised_row_bytes(const Size& latent, const Size& rope) {
  return latent + rope * 2 + latent / kTile * 4;
}

// Unpacks a row to latent + rope elements: each int8 times the scale of its tile, rounded to the
// storage type T. E is the compute type. The row has any alignment, as L + 2 R need not be a
// multiple of the vectors' size.
template <typename E, typename T>
void dequantise_row(const int8_t* row, int64_t latent, int64_t rope, const cpu::Bf16Kernels* bf16,
                    E* to) {
  const int8_t* ropes = row + latent;
  const int8_t* scales = ropes + rope * sizeof(T);
  for (int64_t l = 0; l < latent; l += kTile, scales += sizeof(float)) {
    float scale;
    std::memcpy(&scale, scales, sizeof(scale));
    if constexpr (std::is_same_v<E, uint16_t>) {
      bf16->dequantise(row + l, scale, kTile, to + l);
    } else {
      const auto rounding =
          std::is_same_v<T, c10::Half> ? cpu::Rounding::kFloat16 : cpu::Rounding::kBfloat16;
      kernels().dequantise(row + l, scale, kTile, rounding, to + l);
    }
  }
  if constexpr (std::is_same_v<E, uint16_t>) {
    std::memcpy(to + latent, ropes, rope * sizeof(T));
  } else {
    for (int64_t i = 0; i < rope; ++i) {
      T x;
      std::memcpy(&x, ropes + i * sizeof(T), sizeof(T));
      to[latent + i] = static_cast<float>(x);
    }
  }
}

}  // namespace custom_pypto
