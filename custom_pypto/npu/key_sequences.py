"""The sequences of keys of a call in any layout, for the programs of :mod:`selected_rows
<custom_pypto.kernels.selected_rows>`, which read rows of a cache in place.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .common import MOST_COUNTED, Limits
from .pages import counts, spans


@dataclass(frozen=True)
class KeySequences:
    key: Tensor
    layout: str
    lengths: Tensor | list[int] | None  # in tokens, as the layout has them
    block_table: Tensor | None = None
    cmp_ratio: int = 1  # tokens per row

    @property
    def paged(self) -> bool:
        return self.layout == "PA_BSND"

    @property
    def rows(self) -> int:
        """Of the cache."""
        return self.key.size(0) if self.key.dim() == 3 else self.key.size(0) * self.key.size(1)

    @property
    def most(self) -> int:
        """Rows that one sequence can have."""
        if self.block_table is not None and self.paged:
            return self.block_table.size(1) * self.key.size(1)
        return self.key.size(-3)

    @property
    def empty(self) -> bool:
        return self.key.numel() == 0 or self.most == 0

    def check(self, limits: Limits) -> None:
        if self.block_table is not None and self.paged:
            # a row of the table is checked beside the indices, in the memory of one vector core
            width, remedy = self.block_table.size(1), "use larger blocks or a smaller table"
            limits.require(width <= 8192, "block_table.size(1)", "at most 8192", width, remedy)
        limits.require(
            self.most + self.rows <= MOST_COUNTED,
            "key",
            "of fewer than 16 million rows, the keys of a sequence in addition",
            f"{self.rows} rows and {self.most} keys",
            "use a smaller cache or table",
        )

    def facts(self) -> dict[str, int]:
        """The facts of :class:`KeyFacts <custom_pypto.kernels.selected_rows.KeyFacts>`."""
        if self.block_table is None or not self.paged:
            return dict(block_size=0, table_width=1, cmp_ratio=self.cmp_ratio)
        width = self.block_table.size(1)
        return dict(block_size=self.key.size(1), table_width=width, cmp_ratio=self.cmp_ratio)

    def tensors(self) -> dict[str, Tensor | None]:
        """Lengths and first rows of the sequences, and the block tables of gathers."""
        device, lengths = self.key.device, as_tensor(self.lengths, self.key)
        starts = torch.zeros(1, dtype=torch.int32, device=device)  # not read with pages
        if self.layout == "TND":
            assert lengths is not None  # by the contract
            starts, lengths = spans(lengths, len(self.key), self.cmp_ratio)
        elif self.layout == "BSND":
            batch, most = self.key.shape[:2]
            starts = torch.arange(0, batch * most, most, dtype=torch.int32, device=device)
            lengths = counts(lengths, self.key, self.cmp_ratio)
        assert lengths is not None
        return dict(
            key_lengths=lengths.contiguous(),
            key_starts=starts,
            block_table=None if self.block_table is None else self.block_table.contiguous(),
            one_block=torch.zeros(1, 1, dtype=torch.int32, device=device),
        )


def as_tensor(lengths: Tensor | list[int] | None, like: Tensor) -> Tensor | None:
    """Lengths on the device of ``like``; integers of the host are clamped to int32.

    Each is written by a kernel: a capture allows no copy from the host, and a copy would wait.
    """
    if lengths is None or isinstance(lengths, Tensor):
        return lengths
    limits, found = torch.iinfo(torch.int32), like.new_empty(len(lengths), dtype=torch.int32)
    for i, n in enumerate(lengths):
        found[i].fill_(min(max(n, limits.min), limits.max))
    return found


def zero_sums(like: Tensor, count: int, widths: dict[str, int]) -> dict[str, Tensor | None]:
    """The destinations of :mod:`custom_pypto.kernels.row_sums`, by the prefix of their names, for
    ``count`` indices per token into the rows of ``like``; None for a width of 0.
    """
    from ..kernels.row_sums import PARTS, sums_rows  # with PyPTO, which may be missing

    rows = sums_rows(like.numel() // like.size(-1), count)
    return {
        f"{prefix}_{part}": like.new_zeros(rows, width, dtype=torch.float32) if width else None
        for prefix, width in widths.items()
        for part in range(PARTS)
    }
