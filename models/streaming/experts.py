"""Experts that stay in the files of their model, as modules of it.

Shapes: T tokens, E experts, k experts of a token, H hidden size.
"""

import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from custom_pypto import layer_ops

from ..weights.modules import check_no_gradient, stored_experts
from .pool import Pool
from .slots import Expert, Slot

#: tokens of a forward up to which experts of later layers are guessed; more ask for most of them
FEW_TOKENS = 16
#: name of the implementation of experts in transformers
IN_FILES = "custom_pypto_in_files"


class Ahead(NamedTuple):
    """What a layer needs to guess the experts of the next one."""

    layer: "Layer"
    router: nn.Module
    ratio: Tensor  # ``[H]``, of the weights of the norms before both

    def guess(self, x: Tensor) -> None:
        """Has experts read that the next router may choose: the better half of what it would for
        the input of this layer's experts, ``[T, H]``, which attention alone changes."""
        # not as a module: its hooks are for its own calls
        choose = type(self.router).forward
        _, weights, ids = choose(self.router, (x.float() * self.ratio).to(x.dtype))
        best = weights.topk(-(-ids.size(-1) // 2), -1).indices
        self.layer.guess(ids.gather(-1, best))


class Layer:
    """Where a module has its experts.

    Args:
        number: of the layer.
        own: the experts of this rank, whose ids begin at 0 in a call.
        progress: ``bar``, of this thread's forward.
    """

    def __init__(self, pool: Pool, number: int, own: range, progress: threading.local):
        self.pool, self.number, self.own, self.progress = pool, number, own, progress
        self.count, self.ahead = len(own), None

    def experts(self, ids: Tensor) -> list[Expert]:
        numbers = ids.unique().tolist()
        return [Expert(self.number, one) for one in numbers if 0 <= one < self.count]

    def guess(self, ids: Tensor) -> None:
        """Has experts read before a call asks for them.

        Args:
            ids: as the router gives them, of the experts of all ranks.
        """
        experts = self.experts(ids - self.own.start)
        with self.pool.changed:
            self.pool.guess(experts)

    def __reduce_ex__(self, protocol):
        raise ValueError(
            "patched model: a model that was loaded with memory has its experts in its files, and "
            "cannot be copied or pickled; load it once more"
        )


class Call:
    """The experts that one layer needs for one call, in memory until the call ends."""

    def __init__(self, pool: Pool, experts: list[Expert], last: bool):
        self.pool, self.left, self.last = pool, experts, last
        self.needed: list[Slot] = []

    def __enter__(self) -> "Call":
        with self.pool.changed:
            known = self.pool.slots.taken
            self.left.sort(key=lambda expert: expert not in known)  # else they might make room
            self._ask()
        return self

    def __exit__(self, *_) -> None:
        with self.pool.changed:
            self._release(self.needed)

    def __iter__(self) -> Iterator[list[Slot]]:
        """Some of the experts at a time, as they come; those before make room."""
        while self.left or self.needed:
            with self.pool.changed:
                while not (ready := [slot for slot in self.needed if slot.is_done()]):
                    self.pool.wait()
                    self._ask()
                if error := next((slot.error for slot in ready if slot.error), None):
                    raise error
            yield ready
            with self.pool.changed:
                self._release(ready)
                self._ask()

    def _ask(self) -> None:
        while self.left and (slot := self.pool.pin(self.left[0], self)) is not None:
            self.needed.append(slot)
            del self.left[0]

    def _release(self, slots: list[Slot]) -> None:
        for slot in slots:
            self.pool.slots.unpin(slot, self, self.last)
        self.needed = [slot for slot in self.needed if slot not in slots]
        self.pool.changed.notify_all()


#: modules by a number, by which compiled graphs know them: in a tensor, as one graph is for many
modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def stream(module: nn.Module, layer: Layer) -> None:
    """Has ``module``, without weights, multiply experts of ``layer``."""
    number = max(modules, default=0) + 1
    module.streamed, module.handle = layer, torch.tensor(number)
    modules[number] = module


def experts_in_files(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' computation of experts ``self``, which may stay in their files.

    Args:
        hidden_states, top_k_index, top_k_weights: of :func:`stored_experts`.
    """
    given = hidden_states, top_k_index, top_k_weights
    if not hasattr(self, "handle"):
        return stored_experts(self, *given)
    if torch.compiler.is_exporting():
        raise ValueError(
            "patched model: a model that was loaded with memory cannot be exported, since its "
            "experts are in its files; load it without memory"
        )
    check_no_gradient(hidden_states, self.kind)
    if torch.compiler.is_compiling():
        return torch.ops.custom_pypto_models.streamed_experts(self.handle, *given)
    return compute(self, *given)


ALL_EXPERTS_FUNCTIONS.register(IN_FILES, experts_in_files)


def compute(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """:func:`layer_ops.experts` with the experts that are in memory while others are read.

    The sum of a token's experts has the order of ``ids`` in any case.

    Args:
        x: ``[T, H]``.
        ids: ``[T, k]``; E, of an expert on another rank, adds nothing.
        weights: ``[T, k]``.
    """
    layer, pool = self.streamed, self.streamed.pool
    pool.check_process()
    if bar := getattr(layer.progress, "bar", None):
        bar.update()
    experts, outputs = layer.experts(ids), None
    up, down = pool.memory.weights()
    valid = torch.where((ids >= 0) & (ids < layer.count), ids, layer.count)
    # what most of a layer's experts are swept by, such as a prompt, tells nothing of what is next
    with Call(pool, experts.copy(), last=2 * len(experts) <= layer.count) as call:
        if layer.ahead is not None and len(x) <= FEW_TOKENS:
            layer.ahead.guess(x)
        for slots in call:
            index = torch.full([layer.count + 1], -1)
            index[[slot.expert.number for slot in slots]] = torch.tensor([s.index for s in slots])
            chosen = index[valid]
            if len(slots) == len(experts):
                return layer_ops.experts(x, up, down, chosen, weights, self._apply_gate)
            pairs = (chosen >= 0).flatten().nonzero().squeeze(-1)
            part = layer_ops.expert_outputs(
                x[pairs // ids.size(-1)], up, down, chosen.view(-1, 1)[pairs], self._apply_gate
            )
            if outputs is None:
                outputs = part.new_zeros([*ids.shape, part.size(-1)])
            outputs.view(-1, part.size(-1))[pairs] = part.squeeze(1)
    if outputs is None:  # no token, or none of an expert here
        return torch.zeros_like(x)
    return layer_ops.weighted_sum(outputs, weights.float())


@torch.library.custom_op("custom_pypto_models::streamed_experts", mutates_args=())
def streamed_experts(handle: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return compute(modules[int(handle)], x, ids, weights)


@streamed_experts.register_fake
def _(handle: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return torch.empty_like(x)
