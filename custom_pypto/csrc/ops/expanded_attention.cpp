// The layer op of attention of a prompt to keys and values of every head.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <tuple>

#include "../tasks/expanded.h"
#include "../tasks/kernel_set.h"
#include "contract.h"

namespace custom_pypto {

// The second result, a bool: whether no token names a key twice; if one does, the first is
// undefined.
template <bool computes>
std::tuple<Tensor, Tensor> expanded_attention(const Tensor& q_nope, const OptionalTensor& q_rope,
                                              const Tensor& latent, const OptionalTensor& k_rope,
                                              const Tensor& weight, const Tensor& indices,
                                              const Tensor& ends, double scale) {
  constexpr char kOp[] = "expanded_attention";
  Dim batch("B"), tokens("S"), heads("H"), nope("nope", Dim::kPositive), rope("R");
  Dim keys("n"), latents("L", Dim::kPositive), both("nope + v", Dim::kPositive), count("K");
  ShapeTable table(kOp);
  table.row("q_nope", q_nope, {batch, tokens, heads, nope}).dtype(at::kBFloat16);
  table.row("latent", latent, {batch, keys, latents}).dtype(at::kBFloat16).device_of(q_nope);
  table.row("weight", weight, {heads, both, latents}).dtype(at::kBFloat16).device_of(q_nope);
  CHECK_ARGUMENT(q_rope.has_value() == k_rope.has_value(), kOp, "k_rope",
                 "given if q_rope is, and only then", k_rope ? "a tensor" : "None");
  if (q_rope) {
    table.row("q_rope", *q_rope, {batch, tokens, heads, rope})
        .dtype(at::kBFloat16)
        .device_of(q_nope);
    table.row("k_rope", *k_rope, {batch, keys, rope}).dtype(at::kBFloat16).device_of(q_nope);
  }
  table.row("indices", indices, {batch, tokens, count}).dtype(at::kInt).device_of(q_nope);
  table.row("ends", ends, {batch, tokens}).dtype(at::kLong).device_of(q_nope);
  table.check_sizes();
  CHECK_ARGUMENT(latent.sym_size(2) % 32 == 0, kOp, "latent.size(2)", "a multiple of 32 (L)",
                 latent.sym_size(2));
  const c10::SymInt value = weight.sym_size(1) - q_nope.sym_size(3);
  CHECK_ARGUMENT(value > 0, kOp, "weight.size(1)", "more than nope of q_nope", weight.sym_size(1));
  CHECK_ARGUMENT(scale > 0, kOp, "scale", "positive", scale);
  const Tensor out =
      empty({q_nope.sym_size(0), q_nope.sym_size(1), q_nope.sym_size(2), value}, q_nope.options());
  const Tensor once = at::empty({}, q_nope.options().dtype(at::kBool));
  if (!computes) return {out, once};
  TORCH_CHECK(multiplies_bf16(), kOp, ": needs kernels that multiply bfloat16, got ",
              kernels().name);
  once.fill_(out.numel() == 0 || expanded_attention({.q_nope = q_nope,
                                                     .q_rope = q_rope,
                                                     .latent = latent,
                                                     .k_rope = k_rope,
                                                     .weight = weight,
                                                     .indices = indices,
                                                     .ends = ends,
                                                     .scale = scale,
                                                     .out = out}));
  return {out, once};
}

REGISTER_OP(expanded_attention,
            "(Tensor q_nope, Tensor? q_rope, Tensor latent, Tensor? k_rope, Tensor weight, "
            "Tensor indices, Tensor ends, float scale) -> (Tensor, Tensor)")

TORCH_LIBRARY_IMPL(custom_pypto, Autograd, m) {
  m.impl("expanded_attention", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace custom_pypto
