#include <torch/csrc/autograd/custom_function.h>

#include "ops_common.h"

namespace custom_pypto {
namespace {

constexpr char kOp[] = "add_custom";

void check_operands(const Tensor& self, const Tensor& other) {
  check_given(kOp, "self", self);
  check_given(kOp, "other", other);
}

Tensor add_custom_contract(const Tensor& self, const Tensor& other) {
  check_operands(self, other);
  const auto dtype = self.scalar_type();
  // of the floating-point types, those that torch adds: not the ones of 8 bits or fewer
  CHECK_ARGUMENT(
      dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat || dtype == at::kDouble,
      kOp, "self.dtype", "bfloat16, float16, float32 or float64", dtype_name(dtype));
  check_dtype(kOp, "other", other, dtype, "dtype of self");
  check_device(kOp, "other", other, self);
  CHECK_ARGUMENT(self.sym_sizes() == other.sym_sizes(), kOp, "other",
                 c10::str("of shape ", self.sym_sizes(), " (that of self; no broadcast)"),
                 other.sym_sizes());
  return at::empty_symint(self.sym_sizes(), self.options());
}

Tensor add_custom_cpu(const Tensor& self, const Tensor& other) {
  Tensor out = add_custom_contract(self, other);
  at::add_out(out, self, other);
  return out;
}

// d(self + other) = (1, 1): two tensors, since an op may not return one twice
std::tuple<Tensor, Tensor> add_custom_backward(const Tensor& grad) {
  return {grad.clone(), grad.clone()};
}

class AddCustom : public torch::autograd::Function<AddCustom> {
 public:
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& self,
                        const Tensor& other) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("custom_pypto::add_custom", "")
                         .typed<Tensor(const Tensor&, const Tensor&)>();
    return op.call(self, other);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list grads) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("custom_pypto::add_custom_backward", "")
                         .typed<std::tuple<Tensor, Tensor>(const Tensor&)>();
    const auto [self, other] = op.call(grads[0]);
    return {self, other};
  }
};

Tensor add_custom_autograd(const Tensor& self, const Tensor& other) {
  check_operands(self, other);  // apply() asks each for its device
  return AddCustom::apply(self, other);
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_pypto, CPU, m) {
  m.impl("add_custom", &add_custom_cpu);
  m.impl("add_custom_backward", &add_custom_backward);
}

TORCH_LIBRARY_IMPL(custom_pypto, Meta, m) {
  m.impl("add_custom", &add_custom_contract);
  m.impl("add_custom_backward", &add_custom_backward);
}

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) { m.impl("add_custom", &add_custom_autograd); }

}  // namespace custom_pypto
