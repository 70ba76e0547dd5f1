// Quantizes rows to int8. docs/int8_caches.md
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "../tasks/index_rows.h"
#include "shared_contracts.h"

namespace custom_pypto {

using Quantized = std::tuple<Tensor, Tensor>;  // rows and scales

template <bool computes>
Quantized npu_quant_rows_pto(const Tensor& x, const OptionalTensor& hadamard) {
  check_index_rows("npu_quant_rows_pto", x, hadamard);
  const auto shape = x.sym_sizes();
  const Tensor rows = empty(shape, x.options().dtype(at::kChar));
  const Tensor scales = empty(shape.slice(0, shape.size() - 1), x.options().dtype(at::kHalf));
  if (computes && x.numel() != 0) quantize_rows(x, hadamard, rows, scales);
  return {rows, scales};
}

REGISTER_OP(npu_quant_rows_pto, "(Tensor x, *, Tensor? hadamard=None) -> (Tensor, Tensor)")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl("npu_quant_rows_pto", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
