// Matrices for torch.mm, and one thread for it.
#pragma once

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <type_traits>

#include "panels.h"
#include "tensor.h"

// of MKL, which torch brings on x86
extern "C" int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));

namespace custom_pypto {

// Keeps torch.mm on the calling thread. torch.set_num_threads also sets MKL's number, and MKL then
// divides a product by it inside of a parallel region too: the bits depend on it.
class OneMklThread {
 public:
  OneMklThread() {
    if (MKL_Set_Num_Threads_Local) before_ = MKL_Set_Num_Threads_Local(1);
  }
  ~OneMklThread() {
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before_);
  }
  OneMklThread(const OneMklThread&) = delete;
  OneMklThread& operator=(const OneMklThread&) = delete;

 private:
  int before_ = 0;
};

// Operands of a product in type E.
template <typename E>
struct Slices {
  AlignedVector<E> weight, x, out;
};

template <typename E>
Tensor matrix(const E* values, int64_t rows, int64_t columns, int64_t stride) {
  return at::from_blob(const_cast<E*>(values), {rows, columns}, {stride, 1},
                       c10::CppTypeToScalarType<E>::value);
}

template <typename From, typename To>
void convert(const From* from, int64_t n, To* to) {
  if constexpr (std::is_same_v<From, To>) {
    std::copy_n(from, n, to);
  } else if constexpr (std::is_same_v<To, float>) {
    widen(from, n, to);
  } else {
    narrow(from, n, to);
  }
}

}  // namespace custom_pypto
