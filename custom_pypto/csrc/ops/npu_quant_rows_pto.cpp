// Quantises rows to int8. docs/int8_caches.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <algorithm>
#include <cstddef>
#include <tuple>

#include "../tasks/index_rows.h"
#include "../tasks/kernel_set.h"
#include "../tasks/quantise.h"

namespace custom_pypto {

// a prompt has 64 rows per token: rotated in float32 at once they would take more than the cache
constexpr int64_t kRowsAtOnce = 4096;
constexpr int64_t kRowsPerTask = 64;

using Quantised = std::tuple<Tensor, Tensor>;  // rows and scales

void quantise_rows(const Tensor& x, const OptionalTensor& hadamard, const Tensor& rows,
                   const Tensor& scales) {
  int8_t* to = rows.mutable_data_ptr<int8_t>();
  auto* scale = scales.mutable_data_ptr<c10::Half>();
  const int64_t dims = x.size(-1), count = scales.numel();
  const Tensor flat = x.reshape({count, dims});
  for (int64_t first = 0; first < count; first += kRowsAtOnce) {
    const int64_t some = std::min(kRowsAtOnce, count - first);
    const Tensor source = rotated(flat.narrow(0, first, some), hadamard);
    const float* from = source.const_data_ptr<float>();
    const auto task = [&](std::nullptr_t, int64_t t) {
      const int64_t begin = t * kRowsPerTask, end = std::min(begin + kRowsPerTask, some);
      for (int64_t i = begin; i < end; ++i) {
        scale[first + i] = quantise(from + i * dims, dims, to + (first + i) * dims);
      }
    };
    run_tasks((some + kRowsPerTask - 1) / kRowsPerTask, [] { return nullptr; }, task);
  }
}

template <bool computes>
Quantised npu_quant_rows_pto(const Tensor& x, const OptionalTensor& hadamard) {
  check_index_rows("npu_quant_rows_pto", x, hadamard);
  const auto shape = x.sym_sizes();
  const Tensor rows = at::empty_symint(shape, x.options().dtype(at::kChar));
  const Tensor scales =
      at::empty_symint(shape.slice(0, shape.size() - 1), x.options().dtype(at::kHalf));
  if (computes && x.numel() != 0) quantise_rows(x, hadamard, rows, scales);
  return {rows, scales};
}

REGISTER_CPU_AND_META(npu_quant_rows_pto)

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl("npu_quant_rows_pto", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
