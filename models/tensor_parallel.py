"""What ranks exchange that share the heads of an attention.

Caches and indexers are replicated on every rank, as in DeepSeek's implementation: all heads use
the same indices, and the 576 values per token that all heads read are too few to be worth an
exchange.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from custom_pypto.requirements import switched_on

from .absorbed import first_derivative

# compare the indices of all ranks after every indexer, to find a rank with different results
CHECK_RANKS = switched_on("CUSTOM_PYPTO_CHECK_RANKS")


class ReadByHeads(torch.autograd.Function):
    """A tensor, equal on all ranks, that each reads for its own heads: the gradient is the sum of
    the ranks'."""

    @staticmethod
    def forward(ctx, x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @first_derivative
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.ranks)
        return gradient, None


def of_all_heads(x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """``x [heads of this rank, ..]`` with the heads of all ranks."""
    of_rank = places(x, ranks)
    dist.all_gather(of_rank, x.contiguous(), group=ranks)
    return torch.cat(of_rank)


def at_rank(
    rank: int, of_heads: list[Tensor | None], ranks: dist.ProcessGroup
) -> list[Tensor | None] | None:
    """Tensors ``[T, heads of this rank, ..]`` with the heads of all ranks, on this ``rank`` of the
    group; None on the others."""
    here, gathered = ranks.rank() == rank, []
    for x in of_heads:
        of_rank = places(x, ranks) if here and x is not None else None
        if x is not None:
            dist.gather(x.contiguous(), of_rank, group=ranks, group_dst=rank)
        gathered.append(None if of_rank is None else torch.cat(of_rank, 1))
    return gathered if here else None


def places(x: Tensor, ranks: dist.ProcessGroup) -> list[Tensor]:
    """For the tensors of all ranks that are like ``x``."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(ranks.size())]


def check_indices(layer: int, indices: Tensor) -> None:
    """Raises on all ranks unless all selected the same positions in the same order."""
    of_rank = [torch.empty_like(indices) for _ in range(dist.get_world_size())]
    dist.all_gather(of_rank, indices)
    different = [rank for rank, other in enumerate(of_rank) if not torch.equal(other, of_rank[0])]
    if different:
        batch, token = (of_rank[different[0]] != of_rank[0]).nonzero()[0, :2].tolist()
        raise RuntimeError(
            f"npu_lightning_indexer_pto: the indices of layer {layer} must be equal on all "
            f"ranks, got differences between rank 0 and rank {', '.join(map(str, different))}, "
            f"first for token {token} of sequence {batch}; load the same checkpoint on all ranks, "
            "and do not mix machines or libraries that round differently"
        )
