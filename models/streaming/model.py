"""A model whose experts are read while it runs: how many fit in memory, its modules, its log."""

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from custom_pypto.weight_formats import rounded_formats

from ..memory import is_readable
from ..patched import text_model
from ..weights.modules import EXPERT_WEIGHTS, is_experts
from .experts import FEW_TOKENS, IN_FILES, Ahead, Layer, stream
from .places import Form, pieces
from .pool import Counts, Pool
from .slots import Expert

logger = logging.getLogger("custom_pypto")

DELAY = 2.0  # seconds after which a forward shows its progress


@dataclass(frozen=True)
class Group:
    """The experts of a module."""

    form: Form
    count: int
    own: range  # of this rank

    def nbytes(self) -> int:
        return self.form.nbytes() * len(self.own)


def groups_of(
    model: nn.Module, kinds: dict[str, str], own: Callable[[int], slice]
) -> dict[str, Group]:
    """By name, the modules of experts in one of these formats, whose weights are still plain.

    Args:
        own: the share of this rank of a number of experts.
    """
    found = {}
    for name, kind in kinds.items():
        if is_experts(module := model.get_submodule(name)):
            shapes = [list(module._parameters[weight].shape) for weight in EXPERT_WEIGHTS]
            form = Form.of(kind, [shape[1:] for shape in shapes])
            count = shapes[0][0]
            found[name] = Group(form, count, range(count)[own(count)])
    return found


def totals(groups: dict[str, Group]) -> tuple[int, dict[Form, int]]:
    """Bytes of all experts, and how many there are of each form."""
    counts: dict[Form, int] = {}
    for group in groups.values():
        counts[group.form] = counts.get(group.form, 0) + len(group.own)
    return sum(group.nbytes() for group in groups.values()), counts


def slots_of(groups: dict[str, Group], free: int) -> dict[Form, int]:
    """How many experts of each form fit in ``free`` bytes, the share of each form being its share
    of all experts."""
    whole, counts = totals(groups)
    return {form: min(count, count * max(free, 0) // whole) for form, count in counts.items()}


def check_budget(
    groups: dict[str, Group],
    memory: int,
    weights: dict[str, str | None],
    per_token: int,
    resident: int,
) -> None:
    """Rejects a ``memory`` in which the model cannot run, or formats that its files have not.

    Args:
        weights: that were asked for.
        per_token: experts of a layer.
        resident: bytes of all other weights.
    Raises:
        MemoryError, ValueError: what was expected and what came, and the remedy.
    """
    size = functools.partial(tqdm.format_sizeof, suffix="B")
    if not groups:
        raise MemoryError(
            f"load: memory must be at least {size(resident)}, got {size(memory)}: nothing of this "
            "model can stay in its files, as routed experts in bfloat16, fp8 and fp4 can, and "
            "those of models that were saved with weights"
        )
    if (kind := weights["experts"]) in rounded_formats():
        raise ValueError(
            f"load: weights must be None or 'stored' for experts that stay in their files, got "
            f"{kind!r}; write files in it first: python examples/convert_checkpoint.py PATH FOLDER "
            f"--weights {kind}"
        )
    whole, counts = totals(groups)
    least = resident + max(-(-per_token * whole // count) for count in counts.values())
    if memory < least:
        smaller = "" if weights["rest"] else ", or weights={'experts': 'stored', 'rest': 'stored'}"
        raise MemoryError(
            f"load: memory must be at least {size(least)}, for {per_token} experts and the "
            f"{size(resident)} of the model's other weights, got {size(memory)}; pass more{smaller}"
        )


class Streaming:
    """The experts of a model that stay in its files. Its threads end with it."""

    def __init__(self, pools: list[Pool]):
        self.pools, self.progress = pools, threading.local()
        self.layers: list[Layer] = []
        self.hashed: list[tuple[Layer, nn.Module]] = []  # with the routers
        weakref.finalize(self, stop, pools).atexit = False

    def counts(self) -> Counts:
        return sum((pool.counts() for pool in self.pools), Counts())

    __reduce_ex__ = Layer.__reduce_ex__


def stop(pools: list[Pool]) -> None:
    for pool in pools:
        if pool.process == os.getpid():  # a fork may have copied a lock that a thread held
            pool.read_with(0)


def start(
    model: PreTrainedModel,
    reader,
    parts_of: dict[str, list[str]],
    groups: dict[str, Group],
    counts: dict[Form, int],
) -> None:
    """Has ``model``, which was loaded without these experts, read them while it runs.

    Args:
        reader: of the checkpoint.
        parts_of: names on disk of each parameter.
        counts: of slots.
    """
    text, numbers = text_model(model), {}
    for name in groups:
        layer = model.get_submodule(name.rpartition(".mlp.")[0])
        numbers[name] = layer.self_attn.layer_idx
    pools = {}
    for form, count in counts.items():
        places = {
            Expert(numbers[name], number): some
            for name, group in groups.items()
            if group.form == form
            for number, some in enumerate(
                pieces(reader, parts_of, name, form, group.count, group.own)
            )
        }
        pools[form] = Pool(form, places, count)
    streaming = Streaming(list(pools.values()))
    for pool in streaming.pools:
        pool.choose_readers()
        logger.info("load: %s", pool)
    model.set_experts_implementation(IN_FILES)
    for name in sorted(groups, key=numbers.get):
        module, (block, _, _) = model.get_submodule(name), name.rpartition(".")
        group = groups[name]
        layer = Layer(pools[group.form], numbers[name], group.own, streaming.progress)
        stream(module, layer)
        if numbers[name] >= text.config.num_hidden_layers:  # it drafts, from other inputs
            continue
        router = model.get_submodule(block).gate
        if hasattr(router, "tid2eid"):  # experts follow from the token alone
            streaming.hashed.append((layer, router))
        elif streaming.layers:
            last = streaming.layers[-1]
            norms = [text.layers[x.number].post_attention_layernorm for x in (last, layer)]
            last.ahead = Ahead(layer, router, ratio_of(*norms))
        streaming.layers.append(layer)
    text.register_forward_pre_hook(functools.partial(begin, streaming), with_kwargs=True)
    text.register_forward_hook(functools.partial(end, streaming))
    for module in (model, text):
        module._apply = functools.partial(apply, module)
    model.generate = functools.wraps(model.generate)(functools.partial(generate, model, streaming))


def ratio_of(last: nn.Module, norm: nn.Module) -> Tensor:
    """What the output of the norm ``last`` is multiplied by, to be that of ``norm`` for the same
    input, but for its length."""
    weights = [getattr(one, "weight", None) for one in (last, norm)]
    if None in weights:  # of A.X-K2 they depend on the input
        return torch.ones(1)
    return (weights[1].float() / weights[0].float()).nan_to_num(posinf=0, neginf=0)


def begin(streaming: Streaming, text: nn.Module, args: tuple, kwargs: dict) -> None:
    """Forward pre-hook of the text model: has the experts that follow from the tokens read, and
    shows the progress of a long forward."""
    if torch.compiler.is_compiling():
        return
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is not None and is_readable(ids) and ids.numel() <= FEW_TOKENS:
        for layer, router in streaming.hashed:
            layer.pool.check_process()
            layer.guess(router.tid2eid[ids])
    streaming.progress.bar = tqdm(
        total=len(streaming.layers), desc="experts", unit="layer", delay=DELAY, disable=None
    )


def end(streaming: Streaming, *_) -> None:
    if not torch.compiler.is_compiling() and (bar := getattr(streaming.progress, "bar", None)):
        bar.close()


def apply(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """``nn.Module._apply``, which moves and shares: before it has, for a part of the model."""
    moved = function(torch.empty(1))
    if moved.device.type != "cpu" or moved.is_shared():
        how = "that is shared by processes" if moved.is_shared() else str(moved.device)
        raise ValueError(
            "patched model: a model that was loaded with memory must stay in this process's memory "
            f"of the CPU, got a move to one {how}; load it without memory"
        )
    return type(module)._apply(module, function, recurse)


def generate(model: PreTrainedModel, streaming: Streaming, *args, **kwargs):
    """transformers', with a line in the log of what was read for it, and for other threads
    meanwhile."""
    before = streaming.counts()
    try:
        return type(model).generate(model, *args, **kwargs)
    finally:
        logger.info("generate: %s", streaming.counts() - before)
