"""Layers without an indexer of their own: those of the config, and those that an option lets share
the selection of an earlier layer (:mod:`custom_pypto.index_sharing`)."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from custom_pypto.index_sharing import OFFSET, letters_of, pattern_of, sources_of

from .cache.layout import Pool, check_int
from .calls import Context


class Sharing(NamedTuple):
    """Which layers share, of a patched model."""

    #: by layers that share a selection: the layer whose it is
    sources: dict[int, int]
    #: a letter per layer that selects or shares, if they share more than by the config
    pattern: str | None

    @classmethod
    def of(
        cls,
        caller: str,
        config,
        pools: dict[str, Pool],
        layers: list[int],
        freq: int | None,
        pattern: str | None,
    ) -> "Sharing":
        """By the options ``index_topk_freq`` and ``index_topk_pattern``, else by the config.

        Args:
            pools: of the architecture.
            layers: that are patched.
        Raises:
            TypeError, ValueError: names the option, what it must be and what came.
        """
        own = [i for i in layers if pools["index"].row(config, i, torch.bfloat16) is not None]
        by_config = getattr(config, "indexer_types", None) is not None
        sparse = layers if by_config else own
        letters = "".join("F" if i in own else "S" for i in sparse)
        if letters.startswith("S"):
            raise ValueError(
                f"{caller}: config.indexer_types must have a 'full' layer before layer {sparse[0]},"
                " which is 'shared'"
            )
        name, wanted = asked(caller, config, sparse, freq, pattern, by_config)
        if wanted is not None:
            lacking = [
                i for i, a, b in zip(sparse, letters, wanted, strict=True) if (a, b) == ("S", "F")
            ]
            if lacking:
                raise ValueError(
                    f"{caller}: {name} must let layers {lacking} share a selection, as they have no"
                    f" indexer (config.indexer_types), got {wanted}; the indexers are {letters}"
                )
        more = wanted if wanted != letters else None
        return cls(sources_of(wanted or letters, sparse), more)


def asked(
    caller: str, config, sparse: list[int], freq: int | None, pattern: str | None, by_config: bool
) -> tuple[str, str | None]:
    """The option that counts, and its letters for the ``sparse`` layers; None: as the model has
    indexers."""
    if freq is not None and pattern is not None:
        raise ValueError(
            f"{caller}: index_topk_freq must be None with index_topk_pattern, got {freq!r} and "
            f"{pattern!r}; pass one of them"
        )
    prefix = ""
    # transformers has made indexer_types of these keys where a config has those
    if freq is None and pattern is None and not by_config:
        if getattr(config, "use_index_cache", None) is not False:
            pattern = getattr(config, "index_topk_pattern", None)
            freq = getattr(config, "index_topk_freq", None) if pattern is None else None
        prefix = "config."
    name = f"{prefix}index_topk_{'freq' if pattern is None else 'pattern'}"
    if pattern is not None:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{caller}: {name} must be a str of F and S, got {type(pattern).__name__} "
                f"{pattern!r}"
            )
        try:
            return name, letters_of(pattern, sparse, config.num_hidden_layers)
        except ValueError as error:
            raise ValueError(f"{caller}: {name} {error}") from None
    if freq is None:
        return name, None
    check_int(f"{caller}: {name}", freq)
    if freq < 1:
        raise ValueError(f"{caller}: {name} must be at least 1, got {freq}")
    if freq == 1:  # no more sharing than by the config
        return name, None
    offset = getattr(config, "index_skip_topk_offset", OFFSET)
    wanted = pattern_of(freq, offset, len(sparse))
    if wanted.startswith("S"):
        raise ValueError(
            f"{caller}: config.index_skip_topk_offset must be at least 1 with {name}={freq}, as the"
            f" first layer has no selection to share, got {offset}"
        )
    return name, wanted


class SharedUpstream(Context):
    """Around the layers of a forward on the upstream path, whose layers have an indexer each: those
    that share a selection get it in place of their indexer's.

    By layer, as activation checkpointing calls layers again in the backward.
    """

    def __init__(self, text: nn.Module):
        super().__init__(text)
        self.selected: dict[int, Tensor] = {}

    def upstream(self, attention: nn.Module, hidden_states: Tensor, mask: Tensor) -> nn.Module:
        if attention.indexer is None:
            return attention
        if attention.index_source is not None:
            return with_indexer(attention, Selected(self.selected[attention.index_source]))
        if not attention.is_index_source:
            return attention
        keeps = Keeping(attention.indexer, self.selected, attention.layer_idx)
        return with_indexer(attention, keeps)


class Keeping(nn.Module):
    """``indexer``, whose selection stays in ``selected``."""

    def __init__(self, indexer: nn.Module, selected: dict[int, Tensor], layer: int):
        super().__init__()
        self.indexer, self.selected, self.layer = indexer, selected, layer

    def forward(self, *args, **kwargs) -> Tensor:
        self.selected[self.layer] = columns = self.indexer(*args, **kwargs)
        return columns


class Selected(nn.Module):
    """An indexer that selects these ``columns``."""

    def __init__(self, columns: Tensor):
        super().__init__()
        self.columns = columns

    def forward(self, *args, **kwargs) -> Tensor:
        return self.columns


def with_indexer(attention: nn.Module, other: nn.Module) -> nn.Module:
    """A module with the parts of ``attention``, but ``other`` in place of its indexer."""
    [name] = [name for name, x in attention.named_modules() if x is attention.indexer]
    return with_other(attention, name, other)


def with_other(module: nn.Module, name: str, other: nn.Module) -> nn.Module:
    """A module with the parts of ``module``, but ``other`` under this dotted name."""
    first, _, rest = name.partition(".")
    twin, part = copy.copy(module), other
    if rest:
        part = with_other(module.get_submodule(first), rest, other)
        if "forward" in vars(part):
            raise TypeError(
                f"patched model: the {first} must have its own forward on the upstream path, where "
                "layers attend to recorded or shared selections, got a replaced one (offloaded by "
                "accelerate?), which would select; load the model without device_map, or use "
                "evaluation mode"
            )
    twin._modules = module._modules | {first: part}
    return twin
