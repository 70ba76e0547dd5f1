"""The loss that trains the indexers: how far their scores are from where attention looks
(DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

A layer with an indexer of its own adds the divergence KL(target || softmax(scores)) of each real
token. The target is the sum over heads of the attention's probabilities, a constant, and so are the
indexer's inputs: nothing else learns from this loss, and the indexer learns from nothing else.

The ops return the loss and its gradients at once. Two autograd functions use them. :class:`Report`,
on the last hidden state, receives the scale of the loss first; :class:`Attach`, in each layer, then
hands the gradients of that layer, times the scale, to its indexer. So checkpointed layers may run
again in between, and whatever scales the loss scales these gradients.

Ranks that share the heads, in tensor parallel, have the same indexers and tokens. Each takes
some of the tokens, for which the others send it their heads, and all add up the results.

Shapes: T tokens laid end to end, H heads of this rank, N index heads, D ``index_head_dim``.
"""

import dataclasses
import functools
import inspect
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers.utils import ModelOutput

import custom_pypto
from custom_pypto.rows.expanded import Heads

from .absorbed import Part, absorbed_query, first_derivative
from .patched import text_model
from .tensor_parallel import at_rank, of_all_heads

Divergence = Literal["sparse", "dense"]
INDEXER_LOSS = get_args(Divergence)
# name of the forward's keyword and of the output
NAME = "indexer_loss"
# of breaks in a compiled graph
SCALE = "a backward hands its gradient to others, which a graph would not see"


class Option(NamedTuple):
    """What a patched model was told."""

    kind: Divergence | None
    coefficient: float


class Scale:
    """The gradient of the loss in a backward of its forward; None: nobody asks for it."""

    value: Tensor | None = None


class IndexInputs(NamedTuple):
    """What an indexer scores with."""

    query: Tensor  # [T, N, D]
    key: Tensor  # [T, 1, D]
    weights: Tensor  # [T, N] float32


class IndexerLoss:
    """The loss of one forward.

    The forward of the whole model creates it, the layers of the text model add to it.
    """

    def __init__(self):
        self.scale, self.values = Scale(), {}
        self.total: Tensor | None = None
        self.tokens: Tensor | None = None

    def take(self) -> Tensor | None:
        """The sum over tokens and layers, with a gradient; None if the layers did not train.

        It may not stay here: checkpointed layers keep this object, and the sum keeps them.
        """
        total, self.total = self.total, None
        return total

    @torch.compiler.disable(reason=SCALE)
    def report(self, last_hidden_state: Tensor, real: Tensor, layers: set[int]) -> None:
        """Adds up what these layers have added."""
        if missing := sorted(layers - self.values.keys()):
            raise ValueError(
                f"patched model: the indexers of layers {missing} must run for indexer_loss, got "
                "a replay of recorded selections; call models.use_custom_pypto(model) without "
                "indexer_loss to train in models.replay_indices"
            )
        value = sum(self.values[i] for i in sorted(layers))
        self.total = Report.apply(last_hidden_state, value, self.scale)
        self.tokens = real.sum()


class LayerLoss:
    """The loss of one call of a layer.

    Args:
        loss: of the forward.
        real: ``[T]`` bool, False for padding.
        parts: of the tokens.
        ranks: that share the heads, or None. They take the parts in turns.
    """

    def __init__(
        self,
        loss: IndexerLoss,
        layer: int,
        real: Tensor,
        parts: list[Part],
        ranks: dist.ProcessGroup | None,
    ):
        self.loss, self.layer, self.real, self.parts = loss, layer, real, parts
        self.ranks = ranks
        #: None: the layer has no indexer
        self.inputs: IndexInputs | None = None

    @torch.compiler.disable(reason=SCALE)
    def attach(
        self,
        output: Tensor,
        heads: Heads,
        latent: Tensor,
        rope: Tensor | None,
        indices: Tensor,
        statistics: list[Tensor],
    ) -> Tensor:
        """``output`` of the attention, with which the gradients reach the indexer.

        Args:
            heads: laid end to end, like the tensors after them.
            indices: that the attention read; without columns, all keys.
            statistics: maxima and sums ``[1, T, H]`` of its softmax.
        """
        if self.inputs is None:
            return output
        *gradients, value = self.divergence(heads, latent, rope, indices, *statistics)
        self.loss.values[self.layer] = value  # the same if the layer runs again
        return Attach.apply(output, *self.inputs, *gradients, self.loss.scale)

    @torch.no_grad()
    def divergence(
        self,
        heads: Heads,
        latent: Tensor,
        rope: Tensor | None,
        indices: Tensor,
        maxima: Tensor,
        sums: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of the three inputs, and the divergence, all summed over real tokens."""
        index = IndexInputs(*(x.detach() for x in self.inputs))
        d_query, d_weights = torch.zeros_like(index.query), torch.zeros_like(index.weights)
        # in float32: parts add to the same rows
        d_key = torch.zeros_like(index.key, dtype=torch.float32)
        value = d_key.new_zeros(())
        weight, sinks = heads.weight[:, : heads.q_nope.size(-1)], heads.sinks
        if self.ranks is not None:
            weight = of_all_heads(weight, self.ranks)
            sinks = None if sinks is None else of_all_heads(sinks, self.ranks)
        turn = 0
        for part in self.parts:
            queries, query_ends = real_rows(self.real, part.queries, part.query_ends)
            keys, key_ends = real_rows(self.real, part.keys, part.key_ends)
            if not len(queries):
                continue
            of_heads = heads.q_nope, heads.q_rope, maxima[0], sums[0]
            of_heads = [None if x is None else x[queries] for x in of_heads]
            if self.ranks is not None:
                of_heads = at_rank(turn % self.ranks.size(), of_heads, self.ranks)
                turn += 1
                if of_heads is None:
                    continue
            q_nope, q_rope, *of_softmax = of_heads
            if not indices.size(-1) and sinks is not None:
                # the dense op divides by the number of heads, but a sink takes a share of each
                shares = torch.exp(sinks - of_softmax[0]) / of_softmax[1]
                of_softmax[1] = of_softmax[1] * (1 - shares).mean(-1, keepdim=True)
            of_softmax = [x.unsqueeze(0) for x in of_softmax]
            of_attention = absorbed_query(q_nope, weight), latent[keys]
            of_index = index.query[queries], index.key[keys], index.weights[queries]
            ropes = {"query_rope": q_rope, "key_rope": None if rope is None else rope[keys]}
            lengths = {
                "actual_seq_qlen": query_ends,
                "actual_seq_klen": key_ends,
                "layout": "TND",
            }
            if indices.size(-1):
                of_part = custom_pypto.npu_sparse_lightning_indexer_grad_kl_loss_pto(
                    *of_attention,
                    *of_index,
                    indices[queries],
                    *of_softmax,
                    heads.scaling,
                    **ropes,
                    **lengths,
                )
            else:
                of_part = custom_pypto.npu_dense_lightning_indexer_grad_kl_loss_pto(
                    *of_attention,
                    *of_index,
                    *of_softmax,
                    *custom_pypto.npu_dense_lightning_indexer_softmax_lse_pto(*of_index, **lengths),
                    heads.scaling,
                    **ropes,
                    **lengths,
                )
            d_query[queries], of_keys, d_weights[queries], of_tokens = of_part
            d_key[keys] += of_keys
            value += of_tokens[0]
        if self.ranks is not None:
            for x in (d_query, d_key, d_weights, value):
                dist.all_reduce(x, group=self.ranks)
        return d_query, d_key.to(index.key.dtype), d_weights, value


def real_rows(real: Tensor, tokens: slice, ends: Tensor) -> tuple[Tensor, list[int]]:
    """The rows of the real ones of these tokens, and where each sequence ends among them.

    A causal mask stays as it is: padding on the left is a sequence of its own, and padding on the
    right ends its sequence.
    """
    inside = real[tokens]
    counts = functional.pad(inside.cumsum(0), (1, 0))
    return inside.nonzero().flatten() + tokens.start, counts[ends.long()].tolist()


class Attach(torch.autograd.Function):
    """``output`` as it is; in the backward the inputs of the indexer get ``scale`` times these
    gradients."""

    @staticmethod
    def forward(ctx, output, query, key, weights, d_query, d_key, d_weights, scale):
        ctx.save_for_backward(d_query, d_key, d_weights)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return output.view_as(output)

    @staticmethod
    @first_derivative
    def backward(ctx, d_output):
        scale = ctx.scale.value
        gradients = [None if scale is None else scale * x for x in ctx.saved_tensors]
        return d_output, *gradients, *[None] * 4


class Report(torch.autograd.Function):
    """``value``; its gradient becomes the scale of every layer's :class:`Attach` in this backward.

    No layer's backward runs before this one, as the last hidden state is an input.
    """

    @staticmethod
    def forward(ctx, last_hidden_state, value, scale):
        ctx.scale = scale
        return value.clone()

    @staticmethod
    @first_derivative
    def backward(ctx, d_value):
        ctx.scale.value = d_value
        # a later backward of a retained graph may not ask for the loss
        end = functools.partial(setattr, ctx.scale, "value", None)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return None, None, None


# ---- option and hooks of the whole model ---------------------------------------------------------


def check_indexer_loss(caller: str, model, attention, training: str, option: Option) -> None:
    """Rejects a loss that this model with this patched ``attention`` cannot have.

    Raises:
        ValueError: names the argument, what was expected and what came.
    """
    kind, coefficient = option
    # a number of Python, numpy or torch; "1" is none
    if not hasattr(coefficient, "__float__") or not 0 <= coefficient < float("inf"):
        raise ValueError(
            f"{caller}: indexer_loss_coefficient must be a number of at least 0, got "
            f"{coefficient!r}"
        )
    if kind is None:
        return
    if kind not in INDEXER_LOSS:
        raise ValueError(
            f"{caller}: indexer_loss must be {' or '.join(map(repr, INDEXER_LOSS))} or None, "
            f"got {kind!r}"
        )
    why = None
    if training == "upstream":
        why = "training='upstream', whose indexers have no gradient; pass training='auto'"
    elif attention.counting.groups:
        why = f"model_type {model.config.model_type}, whose indexer scores groups of tokens"
    if why:
        raise ValueError(f"{caller}: indexer_loss must be None for {why}, got {kind!r}")


def begin_indexer_loss(model, args: tuple, kwargs: dict):
    """Forward pre-hook: the text model gets a loss to add to, in training with gradients."""
    if text_model(model).training and torch.is_grad_enabled():
        return args, kwargs | {NAME: IndexerLoss()}
    return None


def add_indexer_loss(model, args: tuple, kwargs: dict, output):
    """Forward hook: puts the loss into the output, and adds it to that of the language model.

    It must also be called if the forward raises, then without an output, to take the loss.
    """
    loss = kwargs.get(NAME)
    if loss is None or (total := loss.take()) is None or output is None:
        return None
    coefficient = text_model(model)._custom_pypto.indexer_loss.coefficient
    value = total / divisor(loss, arguments(model, args, kwargs))
    return with_loss(output, value, coefficient, NAME)


def arguments(model, args: tuple, kwargs: dict) -> dict:
    """Those of a forward of the whole model, by name."""
    names = inspect.signature(type(model).forward).parameters
    return dict(zip([*names][1:], args, strict=False)) | kwargs


@torch.compiler.disable(reason="makes a class of outputs")
def with_loss(output: ModelOutput, value: Tensor, coefficient: float, name: str) -> ModelOutput:
    """``output`` with a loss of this name."""
    if not isinstance(output, ModelOutput):
        raise ValueError(
            f"patched model: return_dict must be True with {name} (a tuple has no place for it), "
            "got False; omit return_dict"
        )
    items = {**output, name: value}
    if items.get("loss") is not None:
        items["loss"] = items["loss"] + coefficient * value
    return with_field(type(output), name)(**items)


def divisor(loss: IndexerLoss, given: dict):
    """By what transformers divides the language model's loss; without labels, the real tokens."""
    if (items := given.get("num_items_in_batch")) is not None:
        return items
    if (shifted := given.get("shift_labels")) is None:
        if (labels := given.get("labels")) is None:
            return loss.tokens
        shifted = labels[..., 1:]
    return (shifted != -100).sum()


@functools.cache
def with_field(output_class: type, name: str) -> type:
    """This class of outputs with a field for a loss: transformers rebuilds outputs from their
    fields."""
    fields = [(name, Tensor | None, None)]
    original, names = getattr(output_class, "with_losses", (output_class, ()))

    def reduced(output: ModelOutput) -> tuple:
        # pickle finds classes by module and name, and this one has neither
        return output_with_losses, (original, (*names, name), {**output})

    namespace = {"__reduce__": reduced, "with_losses": (original, (*names, name))}
    return dataclasses.make_dataclass(
        output_class.__name__, fields, bases=(output_class,), namespace=namespace
    )


def output_with_losses(output_class: type, names: tuple[str, ...], items: dict) -> ModelOutput:
    for name in names:
        output_class = with_field(output_class, name)
    return output_class(**items)
