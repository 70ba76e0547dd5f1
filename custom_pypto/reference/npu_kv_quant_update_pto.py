from collections.abc import Iterator

import torch
from torch import Tensor

from .checks import BLOCK
from .npu_quant_rows_pto import quantize
from .npu_sparse_attention_pto import write_cache

SCALE_GROUP = 128  # values of a latent that share a scale


def npu_kv_quant_update_pto(latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor) -> None:
    """Rows ``nope | rope | scales``: int8, with a float32 scale per group."""
    if not slots.numel():
        return
    values, scales = quantize(latent.unflatten(-1, (-1, SCALE_GROUP)))
    scales = scales.where(~scales.isnan(), torch.nan)  # one of the many
    parts = values.flatten(-2), *(part.contiguous().view(torch.int8) for part in (rope, scales))
    write_cache(cache, torch.cat(parts, -1), slots)


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    for dtype in dtypes:
        if dtype.itemsize != 2:
            continue
        for tokens in (1, 300):
            g = torch.Generator().manual_seed(4)
            exponents = torch.randint(-16, 4, (tokens, 1), generator=g)
            x = torch.ldexp(torch.randn(tokens, 576, generator=g), exponents).to(dtype)
            x[0] = 0
            slots = torch.randperm(3 * BLOCK, generator=g)[:tokens]
            slots[::7] = -1
            yield (
                dtype,
                f"{tokens} tokens",
                dict(
                    latent=x[:, :512].contiguous(),
                    rope=x[:, 512:].contiguous(),
                    slots=slots,
                    cache=torch.zeros(3, BLOCK, 1, 656, dtype=torch.int8),
                ),
            )


def error(got: None, expected: None, mine: dict, theirs: dict) -> tuple[float, float]:
    """The number of different bytes."""
    return float((mine["cache"] != theirs["cache"]).sum()), 0.0
