#include <ATen/ops/add.h>
#include <torch/csrc/autograd/custom_function.h>

#include "contract.h"

namespace custom_pypto {
namespace {

// the names of CANN's tutorial, whose kernel package is then one for this op
constexpr char kOp[] = "add_custom";

template <bool computes>
Tensor add_custom(const Tensor& x, const Tensor& y) {
  const Argument first(kOp, "x", x), second(kOp, "y", y);
  // the floating-point types that torch can add: types of 8 bits or fewer are unsupported
  first.dtype({at::kBFloat16, at::kHalf, at::kFloat, at::kDouble});
  second.dtype(x.scalar_type(), "dtype of x").device_of(x);
  CHECK_ARGUMENT(x.sym_sizes() == y.sym_sizes(), kOp, "y",
                 c10::str("of shape ", x.sym_sizes(), " (shape of x; no broadcasting)"),
                 y.sym_sizes());
  Tensor z = empty(x.sym_sizes(), x.options());
  if (computes) at::add_out(z, x, y);
  return z;
}

// d(x + y) = (1, 1): two clones, since an op may not return the same tensor twice. Of torch's ops
// alone, into which every backend takes it apart, so that no device and no graph mode needs its
// own.
std::tuple<Tensor, Tensor> add_custom_backward(const Tensor& grad) {
  return {grad.clone(), grad.clone()};
}

class AddCustom : public torch::autograd::Function<AddCustom> {
 public:
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x, const Tensor& y) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("custom_pypto::add_custom", "")
                         .typed<Tensor(const Tensor&, const Tensor&)>();
    return op.call(x, y);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("custom_pypto::add_custom_backward", "")
                         .typed<std::tuple<Tensor, Tensor>(const Tensor&)>();
    const auto [x, y] = op.call(grads[0]);
    return {x, y};
  }
};

Tensor add_custom_autograd(const Tensor& x, const Tensor& y) {
  // reject None first: apply() queries the device of each argument
  Argument(kOp, "x", x), Argument(kOp, "y", y);
  return AddCustom::apply(x, y);
}

}  // namespace

REGISTER_OP(add_custom, "(Tensor x, Tensor y) -> Tensor")
TORCH_LIBRARY_FRAGMENT(custom_pypto, m) {
  m.def("add_custom_backward(Tensor grad) -> (Tensor, Tensor)", &add_custom_backward);
}
TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) { m.impl(kOp, &add_custom_autograd); }

}  // namespace custom_pypto
