"""Layers without an indexer of their own: those of the config, and those that an option lets share
the selection of an earlier layer (:mod:`custom_pypto.index_sharing`)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from custom_pypto.index_sharing import Asked, offset_of, sources_of

from .cache.layout import Pool
from .calls import Context, with_other


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
        # which transformers has made of the config's keys, where it has them; not of Hy4's
        by_types = getattr(config, "indexer_types", None) is not None
        sparse = layers if by_types else own
        lacking = [i for i in sparse if i not in own]
        if lacking and lacking[0] == sparse[0]:
            raise ValueError(
                f"{caller}: config.indexer_types must have a 'full' layer before layer {sparse[0]},"
                " which is 'shared'"
            )
        if freq is not None and pattern is not None:
            raise ValueError(
                f"{caller}: index_topk_freq must be None with index_topk_pattern, got {freq!r} and "
                f"{pattern!r}; pass one of them"
            )
        asked = Asked(freq, pattern, offset_of(config))
        if freq is None and pattern is None and not by_types:
            asked = Asked.by_config(config)
        by_indexers = "".join("S" if i in lacking else "F" for i in sparse)
        letters = asked.letters(caller, sparse, config.num_hidden_layers, lacking) or by_indexers
        more = letters if letters != by_indexers else None
        return cls(sources_of(letters, sparse), more)


class SharedUpstream(Context):
    """Around the layers of a forward on the upstream path, whose layers have an indexer each: those
    that share a selection get it in place of their indexer's.

    By layer, as activation checkpointing calls layers again in the backward.
    """

    def __init__(self, text: nn.Module):
        super().__init__(text, {})
        self.sources = text._custom_pypto.sharing.sources
        self.selected: dict[int, Tensor] = {}

    def upstream(self, attention: nn.Module, hidden_states: Tensor, mask: Tensor) -> nn.Module:
        if attention.indexer is None:
            return attention
        number = attention.layer_idx
        if attention.shares_selection:
            return with_indexer(attention, Selected(self.selected[self.sources[number]]))
        if not attention.lends_selection:
            return attention
        keeps = Keeping(attention.indexer, self.selected, number)
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
