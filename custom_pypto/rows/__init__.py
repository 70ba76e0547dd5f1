"""Formats of cache rows: their parts, the ops that write them, and the ops that read them.

A cache has a format of latents and a format of index keys. To add one, write a class in
:mod:`.latents` or :mod:`.index` and name it below. Where rows are, callers say by keywords of the
ops: ``lengths``, the keys of each sequence, ``block_table``, and those of packed queries.
"""

import torch

from .index import IndexRows as IndexRows
from .index import Int8IndexRows
from .latents import Int8LatentRows
from .latents import LatentRows as LatentRows

# by the dtype of most of their values; others are of the base class, in the dtype of the model
LATENT_FORMATS: dict[torch.dtype, type[LatentRows]] = {torch.int8: Int8LatentRows}
INDEX_FORMATS: dict[torch.dtype, type[IndexRows]] = {torch.int8: Int8IndexRows}


def latent_format(dtype: torch.dtype | None) -> type[LatentRows]:
    return LATENT_FORMATS.get(dtype, LatentRows)


def index_format(dtype: torch.dtype | None) -> type[IndexRows]:
    return INDEX_FORMATS.get(dtype, IndexRows)
