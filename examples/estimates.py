"""Estimated tokens per second, from bytes and rates: what model_memory.py and generate.py --bench
share. Nothing is measured here."""

from typing import NamedTuple

#: of a layer with experts on one thread (benchmarks/RESULTS.md): the share of the read bandwidth at
#: which it reads its weights, and the seconds that it takes besides
SHARE, FIXED = 0.75, 0.6e-3
#: share of the experts in memory, and of those that a token asks for: published for GLM-5.2 by
#: mlx-lm (discussion 1438, to 0.18) and colibri (docs/benchmarks.md, from 0.26 on). No other model
#: has as many points. Texts differ: DeepSeek-V4-Flash was reported with 0.52 at 0.09, 0.65 at 0.12
#: and 0.81 at 0.35 by colibri's users, with 0.08 to 0.18 at 0.06 on long reports by FreeToken's.
HITS = ((0, 0), (0.05, 0.24), (0.10, 0.46), (0.18, 0.60), (0.26, 0.72), (0.76, 0.98), (1, 1))


def seconds_of_token(read: float, layers: int, bandwidth: float) -> float:
    """An estimate for one sequence with a short context, from bytes and bytes per second."""
    return read / (SHARE * bandwidth) + layers * FIXED


def hit_share(share: float) -> float:
    """How many of the experts that a token asks for are in memory, where ``share`` of all are."""
    for (below, low), (above, high) in zip(HITS, HITS[1:], strict=False):
        if share <= above:
            return low + (high - low) * (share - below) / (above - below)
    return 1.0


class Range(NamedTuple):
    """Tokens per second."""

    low: float  # reading and computing take turns
    high: float  # they overlap

    @classmethod
    def of(cls, computing: float, reading: float) -> "Range":
        """From the seconds that a token takes for each."""
        return cls(1 / (computing + reading), 1 / max(computing, reading))

    def __str__(self) -> str:
        low, high = f"{self.low:.2g}", f"{self.high:.2g}"
        return low if low == high else f"{low} to {high}"


class Streamed(NamedTuple):
    """A model some of whose experts are in memory, the others in files."""

    kept: float  # bytes of experts in memory
    hits: float  # share of a token's experts that are in memory, assumed
    from_files: float  # bytes that a token reads there
    speed: Range
    prompt: float  # seconds in which each expert that is not in memory is read once

    @classmethod
    def of(cls, size, layers: int, memory: float, disk: float, bandwidth: float):
        """None: about as little as the experts of one token in one layer does not fit.

        Args:
            size: memory_tables.Size.
            memory: bytes for all weights.
            disk, bandwidth: bytes per second of files, and of memory.
        """
        kept = min(size.experts, memory - (size.weights - size.experts))
        if kept < size.routed / layers:
            return None
        hits = hit_share(kept / size.experts)
        from_files = (1 - hits) * size.routed
        speed = Range.of(seconds_of_token(size.read, layers, bandwidth), from_files / disk)
        return cls(kept, hits, from_files, speed, (size.experts - kept) / disk)
