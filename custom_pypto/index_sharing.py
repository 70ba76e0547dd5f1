"""Which layers select positions by an indexer of their own, and which attend to the selection of an
earlier one (IndexCache, arXiv:2603.12201): a letter for each layer, ``F`` (full) or ``S`` (shared).

Names and meaning are vLLM's. For models and the plugin for vLLM, which share no code but this
package's.
"""

from collections.abc import Sequence
from typing import NamedTuple

OFFSET = 2  # index_skip_topk_offset where a config has none, as in vLLM and transformers


class Asked(NamedTuple):
    """What options, or keys of a config, say about layers that share.

    Only the layers that attend to a selection count: in DeepSeek-V4 those with rows of 4 tokens, as
    in vllm-ascend.
    """

    freq: int | None
    pattern: str | None
    offset: int = OFFSET
    prefix: str = ""  # of the names in errors

    @classmethod
    def by_config(cls, config) -> "Asked":
        if getattr(config, "use_index_cache", None) is False:
            return cls(None, None)
        pattern = getattr(config, "index_topk_pattern", None)
        freq = getattr(config, "index_topk_freq", None) if pattern is None else None
        return cls(freq, pattern, offset_of(config), "config.")

    def letters(
        self, caller: str, sparse: Sequence[int], layers: int, lacking: Sequence[int] = ()
    ) -> str | None:
        """A letter for each of the ``sparse`` layers; None: nothing was asked, or a ``freq`` of 1.

        Args:
            sparse: numbers of the layers that attend to a selection.
            layers: of the model.
            lacking: those of ``sparse`` that have no indexer.
        Raises:
            TypeError, ValueError: of ``caller``, with the name, what it must be, and what it is.
        """
        if self.pattern is not None:
            name, got = f"{caller}: {self.prefix}index_topk_pattern", repr(self.pattern)
            letters = self._of_pattern(name, sparse, layers)
        elif self.freq is not None:
            name, got = f"{caller}: {self.prefix}index_topk_freq", repr(self.freq)
            if (letters := self._of_freq(name, len(sparse))) is None:
                return None
        else:
            return None
        if letters.startswith("S"):
            raise ValueError(
                f"{name} must let the first layer select, which has no selection to share, got "
                f"{got} with index_skip_topk_offset {self.offset}: {letters}"
            )
        without = [i for i, x in zip(sparse, letters, strict=True) if x == "F" and i in lacking]
        if without:
            raise ValueError(
                f"{name} must let layers {without} share a selection, as they have no indexer, got "
                f"{got}: {letters}"
            )
        return letters

    def _of_pattern(self, name: str, sparse: Sequence[int], layers: int) -> str:
        pattern = self.pattern
        if not isinstance(pattern, str):
            raise TypeError(
                f"{name} must be a str of F and S, got {type(pattern).__name__} {pattern!r}"
            )
        if set(pattern) - set("FS") or len(pattern) not in (len(sparse), layers):
            count = "" if len(sparse) == layers else f"{len(sparse)} (layers that select keys) or "
            raise ValueError(
                f"{name} must have a letter F or S for each of {count}{layers} layers, got "
                f"{pattern!r} with {len(pattern)}"
            )
        if len(pattern) != len(sparse):  # letters of other layers mean nothing
            pattern = "".join(pattern[layer] for layer in sparse)
        return pattern

    def _of_freq(self, name: str, layers: int) -> str | None:
        freq = self.freq
        if not hasattr(freq, "__index__"):  # as ints of Python and numpy have
            raise TypeError(f"{name} must be an int, got {type(freq).__name__} {freq!r}")
        if freq < 1:
            raise ValueError(f"{name} must be at least 1, got {freq}")
        return None if freq == 1 else pattern_of(freq, self.offset, layers)


def offset_of(config) -> int:
    return getattr(config, "index_skip_topk_offset", OFFSET)


def pattern_of(freq: int, offset: int, layers: int) -> str:
    """``index_topk_freq`` as a pattern: layer ``offset - 1`` and from there every ``freq``-th
    selects, and all before it; with the usual offset of 2 the first two, and then every
    ``freq``-th."""
    return "".join("S" if max(i - offset + 1, 0) % freq else "F" for i in range(layers))


def sources_of(letters: str, sparse: Sequence[int]) -> dict[int, int]:
    """By layers that share a selection: the layer whose it is.

    Args:
        letters: of the layers with the numbers ``sparse``, the first one F.
    """
    found, last = {}, sparse[0] if sparse else 0
    for layer, letter in zip(sparse, letters, strict=True):
        if letter == "F":
            last = layer
        else:
            found[layer] = last
    return found
