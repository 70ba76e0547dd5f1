// The names of torch's types that ops and tasks share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace custom_pypto {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline const OptionalTensor kNone;  // the value of an optional argument that a call omits

}  // namespace custom_pypto
