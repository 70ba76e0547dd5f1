"""Models whose output for a sequence has the same bits whatever runs beside it, in training, too.

torch sums a product, or a long mean, in another order for another number of rows, and its
exponentials have other last bits where vectors end. So the layers of such a model run inside of
:class:`Invariant`: transformers' own code, with functions in place of these whose result for a row
depends on the row alone. What has no such function is rejected by name.

Shapes: T tokens, E experts, k experts of a token, G groups.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from custom_pypto import layer_ops

from .absorbed import first_derivative
from .compression import pooled_groups
from .one_op import OP_DTYPES, PLAIN_TENSORS, Experts, GroupedLinear, OneOp, derived
from .patched import decoder_layers, text_model
from .projection import change_class, is_sharded

CALLER = "use_custom_pypto: batch_invariant must be False"
# the most terms of a product that is a chain of sums of whole tensors
MOST_TERMS = 32
# of ops that transformers' code may call
NAMESPACES = ("aten", "prims", "custom_pypto")


# ---- functions and their gradients -------------------------------------------------------------


def wanted(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


class Product(torch.autograd.Function):
    """``x @ weight.T`` by the op, with torch's gradients."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return layer_ops.invariant_linear(x, weight)

    @staticmethod
    @first_derivative
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        d_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return d_x, None
        return d_x, grad.flatten(0, -2).T @ x.flatten(0, -2) if grad.dim() > 1 else grad.outer(x)


class ExpertProduct(torch.autograd.Function):
    """Rows ``[T, k, N]`` of ``x [T, K]`` or ``[T, k, K]`` times the matrix of ``weight [E, N, K]``
    that ``ids [T, k]`` names; zeros where there is none."""

    @staticmethod
    def forward(ctx, x, weight, ids):
        ctx.save_for_backward(x, weight, ids)
        return layer_ops.invariant_linear(x, weight, experts=ids)

    @staticmethod
    @first_derivative
    def backward(ctx, grad):
        x, weight, ids = ctx.saved_tensors
        shared = x.dim() == 2
        d_x, d_weight = (
            torch.zeros_like(of) if wants else None
            for of, wants in zip((x, weight), ctx.needs_input_grad, strict=False)
        )
        for expert in ids[(ids >= 0) & (ids < len(weight))].unique().tolist():
            token, place = torch.where(ids == expert)
            g, at = grad[token, place], (token,) if shared else (token, place)
            if d_x is not None:
                d_x.index_put_(at, g @ weight[expert], accumulate=True)
            if d_weight is not None:
                d_weight[expert] = g.T @ x[at]
        return d_x, d_weight, None


class Activation(torch.autograd.Function):
    """``layer_ops.activate``, with the gradient of torch's function of that name."""

    @staticmethod
    def forward(ctx, x, name, formula):
        ctx.save_for_backward(x)
        ctx.formula = formula
        return layer_ops.activate(x, name)

    @staticmethod
    @first_derivative
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.formula(x)
        return *torch.autograd.grad(y, x, grad), None, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    for one in (x, weight):
        if type(one) not in PLAIN_TENSORS:
            raise TypeError(
                "patched model: linear layers of a batch-invariant model must have plain weights "
                f"or those of models.load(weights=...), got a {type(one).__name__}; call "
                "models.use_custom_pypto(model, batch_invariant=False)"
            )
    if wanted(x, weight):
        y = Product.apply(x, weight)
    else:
        y = layer_ops.invariant_linear(x, weight)
    return y if bias is None else y + bias


def expert_product(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    if wanted(x, weight):
        return ExpertProduct.apply(x, weight, ids)
    return layer_ops.invariant_linear(x, weight, experts=ids)


def by_heads(x: Tensor, weight: Tensor) -> Tensor:
    """``[.., H, B]``: rows ``[.., H, A]`` times the matrix of their head, of ``[H, B, A]``."""
    rows = x.flatten(0, -3) if x.dim() > 3 else x
    heads = torch.arange(len(weight), device=x.device).expand(rows.shape[:-1])
    y = expert_product(rows, weight, heads)
    return y.unflatten(0, x.shape[:-2]) if x.dim() > 3 else y


def einsum(equation: str, *operands: Tensor) -> Tensor:
    if equation in ("...ha,hba->...hb", "thl,hvl->thv"):
        return by_heads(*operands)
    raise unknown(f"torch.einsum({equation!r})")


def matmul(a: Tensor, b: Tensor) -> Tensor:
    if b.dim() == 2 and a.dim() >= 2:
        return product(a, b.mT)
    terms = a.size(-1)
    if b.dim() < 3 or terms > MOST_TERMS:
        raise unknown("torch.matmul of matrices")
    dtype, a, b = a.dtype, a.float(), b.float()
    total = a[..., :, :1] * b[..., :1, :]
    for i in range(1, terms):
        total = total + a[..., :, i : i + 1] * b[..., i : i + 1, :]
    return total.to(dtype)


def activation(name: str, formula: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def activate(x: Tensor, **others) -> Tensor:
        # F.silu's inplace needs no answer; F.softplus has one that others do not
        if any(value for key, value in others.items() if key != "inplace"):
            raise unknown(f"{name} with {', '.join(others)}")
        if wanted(x):
            return Activation.apply(x, name, formula)
        return layer_ops.activate(x, name)

    return activate


def mean(x: Tensor, dim=None, keepdim: bool = False, **others) -> Tensor:
    """torch's, of the last dim a product with ones: of 2^15 numbers and more torch's own depends on
    how many rows there are."""
    dims = [dim] if isinstance(dim, int) else dim
    if others or dims is None or [*dims] not in ([-1], [x.dim() - 1]):
        return torch.mean(x, dim, keepdim, **others)
    total = product(x, x.new_ones(1, x.size(-1))) / x.size(-1)
    return total if keepdim else total.squeeze(-1)


def softmax(x: Tensor, dim: int, **others) -> Tensor:
    """torch's, along rows."""
    if dim in (-1, x.dim() - 1):
        return torch.softmax(x, dim, **others)
    return torch.softmax(x.movedim(dim, -1).contiguous(), -1, **others).movedim(-1, dim)


def rsqrt(x: Tensor) -> Tensor:
    """torch's in bfloat16 rounds once in vectors, and twice where they end."""
    return torch.rsqrt(x.float()).to(x.dtype)


def attention(*args, **kwargs) -> Tensor:
    """Sparse attention whose tokens share no work: else they are multiplied with the keys of their
    neighbours, in the order of these."""
    return ops.npu_sparse_flash_attention_pto.by_token(*args, **kwargs)[0]


def of_groups(*args) -> tuple[Tensor, Tensor]:
    with Invariant():  # as in training, which calls it inside
        return pooled_groups(*args)


def unknown(name: str) -> TypeError:
    return TypeError(
        f"patched model: the layers of a batch-invariant model must not call {name}, whose bits "
        "for a row may depend on other rows; remove what does, or call "
        "models.use_custom_pypto(model, batch_invariant=False)"
    )


def rejected(name: str) -> Callable:
    def reject(*args, **kwargs):
        raise unknown(name)

    return reject


def stored_linear(*args, int8_x: bool = False, **kwargs) -> Tensor:
    if int8_x:
        raise unknown("weight_only_linear with int8_x")
    return layer_ops.invariant_linear(*args, **kwargs)


ops = torch.ops.custom_pypto
sigmoid = activation("sigmoid", torch.sigmoid)
silu = activation("silu", functional.silu)
softplus = activation("softplus", functional.softplus)
FUNCTIONS: dict[Callable, Callable] = {
    functional.linear: product,
    torch.einsum: einsum,
    torch.sigmoid: sigmoid,
    Tensor.sigmoid: sigmoid,
    functional.silu: silu,
    functional.softplus: softplus,
    torch.mean: mean,
    Tensor.mean: mean,
    torch.softmax: softmax,
    Tensor.softmax: softmax,
    functional.softmax: softmax,
    torch.rsqrt: rsqrt,
    Tensor.rsqrt: rsqrt,
    ops.weight_only_linear.default: stored_linear,
    ops.npu_sparse_flash_attention_pto.default: attention,
    ops.npu_sparse_flash_attention_pto.softmax_lse: ops.npu_sparse_flash_attention_pto.by_token,
    ops.npu_kv_quant_sparse_flash_attention_pto.default: (
        ops.npu_kv_quant_sparse_flash_attention_pto.by_token
    ),
    ops.pool_groups.default: of_groups,
} | dict.fromkeys([torch.matmul, Tensor.matmul, Tensor.__matmul__], matmul)
# products, and what torch computes by them; some are of newer versions of torch alone
SUMS = "mm bmm mv dot inner vdot addmm addmv addbmm baddbmm tensordot cdist _grouped_mm __rmatmul__"
OF_LAYERS = "bilinear conv1d conv2d conv3d scaled_dot_product_attention grouped_mm"
OF_LAYERS += " multi_head_attention_forward"
OTHERS = [getattr(owner, name, None) for owner in (torch, Tensor) for name in SUMS.split()]
OTHERS += [getattr(functional, name, None) for name in OF_LAYERS.split()]
OTHERS += [torch.linalg.matmul, torch.linalg.multi_dot, torch.linalg.vecdot]
FUNCTIONS |= {x: rejected(f"torch's {x.__name__}") for x in OTHERS if x is not None}


class Invariant(TorchFunctionMode):
    """Inside, :data:`FUNCTIONS` are in place of torch's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (own := FUNCTIONS.get(func)) is not None:
            return own(*args, **(kwargs or {}))
        if isinstance(func, OpOverload) and func.namespace not in NAMESPACES:
            raise unknown(str(func))
        if func is Tensor.unflatten:  # torch.compile takes its Python from no mode
            func = torch.unflatten
        return func(*args, **(kwargs or {}))


# ---- modules -----------------------------------------------------------------------------------


class InvariantLayer(OneOp):
    """A part of the model, inside of :class:`Invariant`. Not the model as a whole: checkpointed
    layers run again in the backward."""

    def forward(self, *args, **kwargs):
        with Invariant():
            return super().forward(*args, **kwargs)


class InvariantExperts(OneOp):
    """Experts with plain weights; the sum of a token's has the order of its experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gated = self._apply_gate(expert_product(hidden_states, self.gate_up_proj, top_k_index))
        outputs = expert_product(gated, self.down_proj, top_k_index)
        total = top_k_weights[:, :1].float() * outputs[:, 0].float()
        for i in range(1, outputs.size(1)):
            total = total + top_k_weights[:, i : i + 1].float() * outputs[:, i].float()
        return total.to(hidden_states.dtype)


class InvariantGroups(OneOp):
    """A block-diagonal projection with a plain weight."""

    def forward(self, x: Tensor) -> Tensor:
        return by_heads(x, self.weight.unflatten(0, (self.n_groups, -1)))


MIXINS = {Experts: InvariantExperts, GroupedLinear: InvariantGroups}


def make_invariant(model, paged: type) -> None:
    """Gives the parts of a patched model their classes. Nothing here can fail."""
    text = text_model(model)
    for module in list(text.modules()):
        mixin = MIXINS.get(paged.one_op.get(type(module)))
        if mixin is not None and getattr(module, "kind", None) is None:
            change_class(module, derived(mixin, type(module)))
    others = nn.ModuleList, nn.Embedding
    parts = [part for part in text.children() if not isinstance(part, others)]
    for layer in decoder_layers(text):  # may be inside somebody's wrapper
        parts.append(next(x for x in layer.modules() if "self_attn" in x._modules))
    for part in (*parts, model.get_output_embeddings()):
        change_class(part, derived(InvariantLayer, type(part)))


def check_invariant(model, paged: type, training: str, context_parallel: bool) -> None:
    """Rejects what a batch-invariant model cannot have.

    Raises:
        ValueError: names the reason and the remedy.
    """
    text = text_model(model)
    if training == "upstream":
        raise ValueError(f"{CALLER} with training='upstream', got True; pass training='ops'")
    if context_parallel:
        raise ValueError(f"{CALLER} with context_parallel=True, got True; pass one of the two")
    if paged.upstream_layers:
        raise ValueError(
            f"{CALLER} for {type(model).__name__}, whose linear attention takes prompts by another "
            "rule than tokens, got True; omit it"
        )
    if text.dtype not in OP_DTYPES or text.device.type != "cpu":
        raise ValueError(
            f"{CALLER} but for a model in bfloat16, float16 or float32 on the CPU, got True and "
            f"one in {text.dtype} on {text.device}; omit it"
        )
    for name, module in model.named_modules():
        shared = any(isinstance(x, DTensor) for x in module._parameters.values())
        if shared or is_sharded(module):
            raise ValueError(
                f"{CALLER} for a model that ranks share, got True and {name}; load the model "
                "without tensor_parallel, expert_parallel and FSDP"
            )
        if getattr(module, "int8_x", False):
            raise ValueError(
                f"{CALLER} for a model that rounds activations, which depends on the number of "
                f"tokens, got True and {name}; load the model without activations"
            )
        if hasattr(module, "streamed"):
            raise ValueError(
                f"{CALLER} for a model whose experts are in its files, got True and {name}; load "
                "it without memory"
            )


def check_forward(step) -> None:
    """Rejects a forward of a batch-invariant model that would take another path.

    Raises:
        ValueError: names the reason and the remedy.
    """
    found = None
    if step is None:
        found = "one on transformers' path (sequences packed into a row, transforms of torch.func)"
    elif torch.is_autocast_enabled("cpu"):
        found = "one inside of autocast"
    if found:
        raise ValueError(
            "patched model: forwards of a batch-invariant model must run on the ops in the dtype "
            f"of the model, got {found}; call models.use_custom_pypto(model, batch_invariant=False)"
        )
