"""Norms, rotations, routers, hyper-connections, experts and linear layers by an op or two each.

For a token, the dozen of torch's ops that transformers takes for a norm or a rotation costs more
time than its numbers, and so does what torch prepares for a product in bfloat16. Outputs equal
transformers' but for the order of sums. Training, whose checkpointed layers run once without
gradients, autocast and other devices have transformers' own code. In compiled graphs the ops stay:
torch would compile its own for longer, and not run them faster.

Shapes: B batch, S new tokens, N heads, D width of a head, R rotated dims.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import SqrtSoftplusActivation

import custom_pypto
from custom_pypto import layer_ops, npu

from .memory import is_transformed
from .projection import wrapped

OP_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN_TENSORS = (Tensor, nn.Parameter)
# for more, torch's product in bfloat16 is as fast or faster
FEW_ROWS = 4


def takes(x: Tensor, *others: Tensor) -> bool:
    """Whether the ops take these tensors here."""
    # runs a dozen times for every layer in every forward: nothing here may be slow
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    dtype = x.dtype
    for y in (x, *others):
        if type(y) not in PLAIN_TENSORS or y.dtype is not dtype or not y.is_cpu:
            return False
    return dtype in OP_DTYPES and not is_transformed()


def takes_layer_op(op: str, x: Tensor, *others) -> bool:
    """Whether a layer op with an NPU kernel takes a call, whose dtypes are those of its contract.

    On an NPU in eager calls only: graphs have torch's operators, which GE needs no kernel for.
    """
    for y in others:
        if isinstance(y, Tensor) and (type(y) not in PLAIN_TENSORS or y.device != x.device):
            return False
    if x.is_cpu and not npu.on_cpu:
        return takes(x)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return False
    on_npu = npu.on_cpu or x.device.type == "npu"
    return on_npu and type(x) in PLAIN_TENSORS and npu.runs(op, x, *others)


class Mixin:
    """For a class of transformers; see :func:`derived`."""

    # not isinstance: after a reload of this package its classes are others
    is_mixed_in = True


class OneOp(Mixin):
    """Mixin that takes ops for what transformers computes."""

    is_one_op = True


@functools.cache
def derived(mixin: type, cls: type) -> type:
    """The class ``cls`` of transformers with a ``mixin``, under its own name, by which device maps
    find layers that stay whole."""

    def reduced(module: nn.Module, protocol):
        if type(module) is not derived(mixin, cls):  # FSDP2 derives another
            return super(made, module).__reduce_ex__(protocol)
        return blank, (mixin, cls), module.__getstate__()  # pickle finds no class made here

    made = type(cls.__name__, (mixin, cls), {"__reduce_ex__": reduced, "__doc__": cls.__doc__})
    return made


def plain_class(cls: type) -> type:
    """The class of transformers of which ``cls`` is :func:`derived`; FSDP2's, if that derived
    another from it since."""
    *others, base = cls.__bases__
    if not hasattr(base, "is_mixed_in"):
        return base
    own = {name: x for name, x in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (*others, plain_class(base)), own)


def blank(mixin: type, cls: type) -> nn.Module:
    """Without its state, for pickle."""
    made = derived(mixin, cls)
    return made.__new__(made)


class Norm(OneOp):
    """An RMS norm that rounds before its product with the weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self.training and takes(hidden_states, weight := self.weight):
            return layer_ops.rms_norm(hidden_states, weight, self.variance_epsilon)
        return super().forward(hidden_states)


class Float32Norm(OneOp):
    """The RMS norm of DeepSeek-V4, whose weight is in float32: it rounds only after the product."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if self.training or not (takes(hidden_states) and takes(weight)):
            return super().forward(hidden_states)
        return layer_ops.rms_norm(hidden_states, weight.float(), self.variance_epsilon)


class UnweightedNorm(OneOp):
    """An RMS norm without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and takes(x):
            return layer_ops.rms_norm(x, None, self.eps)
        return super().forward(x)


class Router(OneOp):
    """The router of DeepSeek-V3: the best experts of the best groups, by sigmoids and a bias."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = hidden_states.view(-1, self.hidden_dim), self.weight
        few = x.size(0) <= FEW_ROWS
        # from transformers 5.24 on, a model in bfloat16 has routers in float32
        if self.training or not (few and takes(x) and takes(weight)):
            return super().forward(hidden_states)
        x = x.float()
        if weight.dtype == torch.bfloat16 and self.hidden_dim % 32 == 0:
            # transformers widens the weight in every forward
            logits = custom_pypto.weight_only_linear(x, weight)
        else:
            logits = nn.functional.linear(x, weight.float())
        return logits, *layer_ops.route(
            logits,
            self.e_score_correction_bias.float(),
            self.num_group,
            self.topk_group,
            self.top_k,
            self.norm_topk_prob,
            self.routed_scaling_factor,
        )


class RootRouter(OneOp):
    """The router of DeepSeek-V4: the best experts by square roots of softplus and a bias."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = hidden_states.reshape(-1, self.hidden_dim), self.weight
        bias = self.e_score_correction_bias
        has_op = type(self.score_fn) is SqrtSoftplusActivation and bias.dtype == torch.float32
        few = has_op and x.size(0) <= FEW_ROWS
        if self.training or not (few and takes(x, weight)):
            return super().forward(hidden_states)
        if weight.dtype == torch.bfloat16 and self.hidden_dim % 32 == 0:
            logits = custom_pypto.weight_only_linear(x, weight)
        else:
            logits = nn.functional.linear(x, weight)
        return logits, *layer_ops.route_roots(logits, bias, self.top_k, self.routed_scaling_factor)


class HyperConnection(OneOp):
    """The manifold-constrained hyper-connection of DeepSeek-V4: its norm, its product and the
    iterations of Sinkhorn-Knopp."""

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.training or not is_one_op(self.input_norm):
            return super().forward(hidden_streams)
        call = (
            hidden_streams,
            *(weight.float() for weight in (self.fn, self.base, self.scale)),
            self.hc_sinkhorn_iters,
            self.hc_eps,
            self.input_norm.eps,
        )
        if not takes_layer_op("hyper_connection", *call):
            return super().forward(hidden_streams)
        return layer_ops.hyper_connection(*call)


class HyperHead(OneOp):
    """The sum of DeepSeek-V4's streams before the last norm."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.hc_fn, self.hc_base, self.hc_scale
        if self.training or not streams_take(self.input_norm, x, *weights):
            return super().forward(x)
        return layer_ops.collapse_streams(
            x, *(weight.float() for weight in weights), self.eps, self.input_norm.eps
        )


class StreamsLayer(OneOp):
    """A decoder layer of DeepSeek-V4: an op adds to the streams what attention and experts give."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **others) -> Tensor:
        if self.training or not takes(hidden_states):
            return super().forward(hidden_states, input_ids=input_ids, **others)
        post, comb, x = self.attn_hc(hidden_states)
        x, _ = self.self_attn(self.input_layernorm(x), **others)
        streams = layer_ops.mix_streams(hidden_states, x, post, comb)
        post, comb, x = self.ffn_hc(streams)
        x = self.mlp(self.post_attention_layernorm(x), input_ids=input_ids)
        return layer_ops.mix_streams(streams, x, post, comb)


class Experts(OneOp):
    """Experts whose plain weights are read as they are: for a few tokens, transformers' sorting by
    expert costs more."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        up, down = self.gate_up_proj, self.down_proj
        few = hidden_states.size(0) <= FEW_ROWS and up.dtype == torch.bfloat16
        whole = up.dim() == 3 and up.size(-1) % 32 == 0 and down.size(-1) % 32 == 0
        if self.training or not (few and whole and takes(hidden_states, up, down)):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return layer_ops.experts(
            hidden_states, (up, None), (down, None), top_k_index, top_k_weights, self._apply_gate
        )


class MLP(OneOp):
    """The gated MLP of dense layers and of shared experts."""

    def forward(self, x: Tensor) -> Tensor:
        gated = self.act_fn(linear(self.gate_proj, x)) * linear(self.up_proj, x)
        return linear(self.down_proj, gated)


class BoundedMLP(OneOp):
    """The same with bounds on what is multiplied."""

    bound: float

    def forward(self, x: Tensor) -> Tensor:
        gate = linear(self.gate_proj, x).clamp(max=self.bound)
        up = linear(self.up_proj, x).clamp(min=-self.bound, max=self.bound)
        return linear(self.down_proj, self.act_fn(gate) * up)


class GroupedLinear(OneOp):
    """A block-diagonal projection: each of ``n_groups`` has features and rows of its own."""

    def forward(self, x: Tensor) -> Tensor:
        width, weight = x.size(-1), self.weight
        few = x.numel() <= FEW_ROWS * self.n_groups * width and width % 32 == 0
        if self.training or x.dtype != torch.bfloat16 or not (few and takes(x, weight)):
            return super().forward(x)
        return of_groups(x, weight.unflatten(0, (self.n_groups, -1)))


class Head(OneOp, nn.Linear):
    """The projection to the vocabulary."""

    def forward(self, x: Tensor) -> Tensor:
        if multiplies(self, x):
            return custom_pypto.weight_only_linear(x, self._parameters["weight"])
        return super().forward(x)


class Rotation(NamedTuple):
    """RoPE of queries and keys in an architecture."""

    #: transformers' function, which requires a query and a key
    upstream: Callable
    #: whether pairs (x_0, x_1), (x_2, x_3), .. become the halves of the output; False: x has the
    #: halves, too; None: a rotation that the op lacks
    interleaved: bool | None = None

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, first: int = 0) -> Tensor:
        """``[B, S, N, D]`` with R dims from the ``first`` on rotated.

        Args:
            cos: ``[B, S, R]``, as sin.
        """
        if self.interleaved is not None and takes(x, cos, sin):
            return layer_ops.rotate(x, cos, sin, first, self.interleaved)
        before, rope, after = x.tensor_split([first, first + cos.size(-1)], -1)
        rope = self.upstream(rope, rope[:, :, :1], cos, sin, unsqueeze_dim=2)[0]
        parts = [part for part in (before, rope, after) if part.size(-1)]
        return torch.cat(parts, -1) if len(parts) > 1 else rope


def streams_take(norm: nn.Module, streams: Tensor, *weights: Tensor) -> bool:
    """Whether an op norms streams and multiplies them by weights of a hyper-connection."""
    return is_one_op(norm) and takes(streams) and all(takes(weight) for weight in weights)


def is_one_op(module: nn.Module) -> bool:
    return hasattr(type(module), "is_one_op") and not has_hooks(module)


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer(x)`` of a linear layer that may be wrapped, quantized or somebody's adapter."""
    if type(layer) is nn.Linear and multiplies(layer, x) and not has_hooks(layer):
        return custom_pypto.weight_only_linear(x, layer._parameters["weight"])
    return layer(x)


def of_groups(
    x: Tensor, weight: Tensor, scales: Tensor | None = None, int8_x: bool = False
) -> Tensor:
    """``[.., G, N]``: rows ``[.., G, K]`` times the weight of their group, of ``[G, N, K]``."""
    groups = torch.arange(len(weight), device=x.device).expand(x.shape[:-1])
    return custom_pypto.weight_only_linear(x, weight, scales, experts=groups, int8_x=int8_x)


def multiplies(layer: nn.Linear, x: Tensor) -> bool:
    """Whether an op multiplies ``x`` by the weight."""
    if layer.training or x.dtype != torch.bfloat16:
        return False
    parameters, width = layer._parameters, x.size(-1)
    few = x.numel() <= FEW_ROWS * width and width % 32 == 0
    return few and parameters["bias"] is None and takes(x, parameters["weight"])


def has_hooks(layer: nn.Module) -> bool:
    """Whether a call of ``layer`` runs more than the forward of its class."""
    return "forward" in layer.__dict__ or wrapped(layer) or _has_any_global_hook()
