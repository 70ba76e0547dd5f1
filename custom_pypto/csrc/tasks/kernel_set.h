// The choice of the micro-kernels, by the instructions of this CPU.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../cpu/kernels.h"

namespace custom_pypto {

// The inner loops for this CPU, selected once; CUSTOM_PYPTO_CPU_ISA selects another set.
const cpu::Kernels& kernels();

// Whether the CPU multiplies bfloat16 faster than float32.
inline bool multiplies_bf16() { return kernels().tiles || (kernels().bf16 && !kernels().widens); }

// The bfloat16 kernels for a shape, tiles or vectors; null: its elements are widened.
inline const cpu::Bf16Kernels* index_kernels(int64_t dims) {
  if (kernels().tiles && cpu::fills_tiles(dims)) return kernels().tiles;
  return kernels().widens ? nullptr : kernels().bf16;
}
inline const cpu::Bf16Kernels* attention_kernels(int64_t latent, int64_t rope) {
  return kernels().tiles && cpu::fills_tiles(latent, rope) ? kernels().tiles : kernels().bf16;
}
inline const cpu::Bf16Kernels* attention_grad_kernels(int64_t latent, int64_t rope) {
  const cpu::Bf16Kernels* found = attention_kernels(latent, rope);
  return found != kernels().tiles && kernels().widens ? nullptr : found;
}
// The kernels that multiply int8 as E.
template <typename E>
const cpu::Int8Kernels<E>* int8_kernels() {
  if constexpr (std::is_same_v<E, uint8_t>) {
    return kernels().int8_as_uint8;
  } else {
    return kernels().int8_as_int16;
  }
}

// Holds a thread's tile registers while kernels use them. Torch's own kernels change them, so none
// may run meanwhile.
class TileRegisters {
 public:
  explicit TileRegisters(const cpu::Bf16Kernels* kernels) {
    if (!kernels || !kernels->enter) return;
    kernels->enter();
    leave_ = kernels->leave;
  }
  ~TileRegisters() {
    if (leave_) leave_();
  }
  TileRegisters(const TileRegisters&) = delete;

 private:
  void (*leave_)() = nullptr;
};

}  // namespace custom_pypto
