// The rows of an int8 latent cache. This file alone states their bytes:
//
//   from        bytes   content
//   0           L       the latent dims: int8, a multiple of kScaleGroup
//   L           2 R     the RoPE dims, not quantized: the 16 bits of the query's dtype
//   L + 2 R     L / 32  a float32 scale for each group of kScaleGroup latent dims, in order
//
// Numbers have the byte order of the machine. Nothing is aligned: a row starts at any byte, because
// a cache may have any strides. All but the int8 is therefore read and written by memcpy.
#pragma once

#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernel_set.h"
#include "tensor.h"

namespace custom_pypto {

constexpr int64_t kScaleGroup = 128;  // latent dims that share a scale
constexpr char kRowBytes[] = "bytes of a row: L of int8, 2 R of RoPE, L / 32 of scales";

template <typename Size>  // int64_t or SymInt
struct Int8RowLayout {
  Size latent, rope;  // L and R

  Size rope_at() const { return latent; }
  Size scales_at() const { return latent + rope * 2; }
  Size bytes() const { return scales_at() + latent / kScaleGroup * 4; }
};

// Unpacks a row to latent + rope elements: each int8 times the scale of its group, rounded to the
// storage type T. E is the compute type.
template <typename E, typename T>
void dequantize_row(const int8_t* row, const Int8RowLayout<int64_t>& layout,
                    const cpu::Bf16Kernels* bf16, E* to) {
  const int8_t *ropes = row + layout.rope_at(), *scales = row + layout.scales_at();
  for (int64_t l = 0; l < layout.latent; l += kScaleGroup, scales += sizeof(float)) {
    float scale;
    std::memcpy(&scale, scales, sizeof(scale));
    if constexpr (std::is_same_v<E, uint16_t>) {
      bf16->dequantize(row + l, scale, kScaleGroup, to + l);
    } else {
      const auto rounding =
          std::is_same_v<T, c10::Half> ? cpu::Rounding::kFloat16 : cpu::Rounding::kBfloat16;
      kernels().dequantize(row + l, scale, kScaleGroup, rounding, to + l);
    }
  }
  if constexpr (std::is_same_v<E, uint16_t>) {
    std::memcpy(to + layout.latent, ropes, layout.rope * sizeof(T));
  } else {
    for (int64_t i = 0; i < layout.rope; ++i) {
      T x;
      std::memcpy(&x, ropes + i * sizeof(T), sizeof(T));
      to[layout.latent + i] = static_cast<float>(x);
    }
  }
}

// Quantizes latent [.., L] and copies rope [.., R] into the rows of a cache [blocks, block_size, 1,
// bytes] at `slots`; slots outside are skipped, and of two rows for one slot the later one stays.
void write_int8_rows(const Tensor& latent, const Tensor& rope, const Tensor& slots,
                     const Tensor& cache);

}  // namespace custom_pypto
