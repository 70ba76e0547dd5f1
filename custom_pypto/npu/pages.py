"""Keys of the layouts BSND and TND as paged caches, for the programs that read only these.

All is computed on the device. The copy is as large as the keys. It is made once; the program reads
each key many times.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from .common import rows

PAGE = 128  # rows


def spans(lengths: Tensor, total: int, ratio: int = 1) -> tuple[Tensor, Tensor]:
    """The first row and the number of tokens of each packed sequence, from the prefix sums of
    tokens, ``ratio`` of which share a row.
    """
    ends = lengths.clamp(min=0).cummax(0).values.long()
    tokens = ends - pad(ends[:-1], (1, 0))
    rows = torch.div(tokens, ratio, rounding_mode="floor")
    starts = pad(rows.cumsum(0)[:-1], (1, 0)).clamp(max=total)
    tokens = torch.minimum(tokens, (total - starts) * ratio + ratio - 1)
    return starts.int(), tokens.int()


def counts(lengths: Tensor | None, key: Tensor, ratio: int = 1) -> Tensor:
    """Tokens of each sequence of ``[B, S2, 1, W]``, whose rows have ``ratio`` tokens each."""
    batch, most = key.shape[:2]
    if lengths is None:
        return torch.full((batch,), most * ratio, dtype=torch.int32, device=key.device)
    return lengths.clamp(max=most * ratio + ratio - 1)


def paged(
    layout: str, lengths: Tensor | None, keys: dict[str, Tensor | None]
) -> tuple[dict[str, Tensor | None], Tensor, Tensor]:
    """Caches ``[pages, PAGE, 1, W]`` of the keys, lengths by sequence, and the block table."""
    return (_by_sequence if layout == "BSND" else _packed)(lengths, keys)


def _by_sequence(lengths: Tensor | None, keys: dict[str, Tensor | None]) -> tuple:
    key = next(iter(keys.values()))
    batch, most = key.shape[:2]
    pages = -(-most // PAGE)  # of a sequence
    table = torch.arange(batch * pages, dtype=torch.int32, device=key.device)

    def cache(x: Tensor) -> Tensor:
        return pad(x, (0, 0, 0, 0, 0, pages * PAGE - most)).view(-1, PAGE, 1, x.size(-1))

    return _each(cache, keys), counts(lengths, key), table.view(batch, pages)


def _packed(lengths: Tensor, keys: dict[str, Tensor | None]) -> tuple:
    key = next(iter(keys.values()))
    total, batch = len(key), len(lengths)
    pages = total // PAGE + batch  # at most: each sequence has a page that is not full
    starts, lengths = spans(lengths, total)
    used = torch.div(lengths + (PAGE - 1), PAGE, rounding_mode="floor")
    first = pad(used.cumsum(0)[:-1], (1, 0))
    # rows behind the last sequence follow it
    row = torch.arange(total, device=key.device)
    sequence = (row.unsqueeze(1) >= starts + lengths).sum(1).clamp(max=batch - 1)
    places = first[sequence] * PAGE + row - starts[sequence]
    column = torch.arange(-(-total // PAGE), device=key.device)
    table = (first.unsqueeze(1) + column).clamp(max=pages - 1).int()

    def cache(x: Tensor) -> Tensor:
        found = x.new_zeros(pages * PAGE, x.size(-1)).index_copy_(0, places, rows(x))
        return found.view(pages, PAGE, 1, x.size(-1))

    return _each(cache, keys), lengths, table


def _each(cache: Callable[[Tensor], Tensor], keys: dict[str, Tensor | None]) -> dict:
    return {name: None if x is None else cache(x) for name, x in keys.items()}
