from collections.abc import Iterator

import torch
from torch import Tensor

from .checks import BLOCK

TILE = 128  # elements per scale


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """``(int8, float32 scales)`` of each row: ``round(x * (127 / a))``, ties to even, and
    ``a / 127``, with ``a = max(|x|, 1e-4)``."""
    x = x.float()
    a = x.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    # 127 / a of a number and a tensor is 127 times the reciprocal, rounded twice
    y = (x * (torch.full_like(a, 127) / a)).round()
    return y.nan_to_num(0).clamp(-127, 127).to(torch.int8), a / 127


def npu_kv_quant_update_pto(latent: Tensor, rope: Tensor, slots: Tensor, cache: Tensor) -> None:
    """``cache[slot] = [int8 latent | rope | scales]``, in order; a slot outside is not written."""
    values, scales = quantised(latent.unflatten(-1, (-1, TILE)))
    parts = values.flatten(-2), *(part.contiguous().view(torch.int8) for part in (rope, scales))
    rows = torch.cat([part.flatten(0, slots.dim() - 1).flatten(1) for part in parts], -1)
    block_size = cache.size(1)
    for slot, row in zip(slots.flatten().tolist(), rows, strict=True):
        if 0 <= slot < cache.size(0) * block_size:
            cache[slot // block_size, slot % block_size, 0] = row


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
