"""Which layers select positions by an indexer of their own, and which attend to the selection of an
earlier one (IndexCache, arXiv:2603.12201): a letter for each layer, ``F`` (full) or ``S`` (shared).

Names and meaning are those of vLLM and SGLang. For models and the plugin for vLLM, which share no
code but this package's.
"""

from collections.abc import Sequence

OFFSET = 2  # index_skip_topk_offset where a config has none, as in vLLM and transformers


def pattern_of(freq: int, offset: int, layers: int) -> str:
    """``index_topk_freq`` as a pattern: from layer ``offset - 1`` on every ``freq``-th selects, and
    all before it; with the usual offset of 2 the first two, and then every ``freq``-th."""
    return "".join("S" if max(i - offset + 1, 0) % freq else "F" for i in range(layers))


def letters_of(pattern: str, sparse: Sequence[int], layers: int) -> str:
    """The letters of the ``sparse`` layers, those that attend to a selection.

    Args:
        pattern: a letter for each of them; or for each of the ``layers`` of the model, of which
            those of other layers mean nothing.
        sparse: their numbers.
    Raises:
        ValueError: what the pattern must be, and what it is.
    """
    if set(pattern) - set("FS") or len(pattern) not in (len(sparse), layers):
        count = "" if len(sparse) == layers else f"{len(sparse)} (layers that select keys) or "
        raise ValueError(
            f"must have a letter F or S for each of {count}{layers} layers, got {pattern!r} with "
            f"{len(pattern)}"
        )
    if len(pattern) != len(sparse):
        pattern = "".join(pattern[layer] for layer in sparse)
    if pattern.startswith("S"):
        raise ValueError(
            f"must begin with F (the first layer has no selection to share), got {pattern!r}"
        )
    return pattern


def sources_of(letters: str, sparse: Sequence[int]) -> dict[int, int]:
    """By layers that share a selection: the layer whose it is."""
    found: dict[int, int] = {}
    last = None
    for layer, letter in zip(sparse, letters, strict=True):
        if letter == "F":
            last = layer
        elif last is not None:
            found[layer] = last
    return found
