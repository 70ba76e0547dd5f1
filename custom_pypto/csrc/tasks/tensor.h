// The names of torch's types that ops and tasks share.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>

namespace custom_pypto {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline const OptionalTensor kNone;  // the value of an optional argument that a call omits

// at::empty. Of a CPU without torch's dispatcher, whose code the weights of an op before have left
// nothing of in the caches.
inline Tensor empty(c10::SymIntArrayRef shape, const at::TensorOptions& options) {
  const auto sizes = c10::asIntArrayRefSlowOpt(shape);
  if (!sizes || !options.device().is_cpu()) return at::empty_symint(shape, options);
  return at::detail::empty_cpu(*sizes, c10::typeMetaToScalarType(options.dtype()));
}

}  // namespace custom_pypto
