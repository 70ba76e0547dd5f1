"""The tokens of a prompt that each rank takes, and the values of all tokens from those of each.

The prompt is cut into ``2 n`` pieces for n ranks; rank r takes pieces r and ``2 n - 1 - r``, an
early and a late one, since late tokens have more keys to score.

Shapes: B batch, S tokens of the prompt, P those of a piece.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .absorbed import first_derivative


class Pieces(NamedTuple):
    """The tokens of a prompt that this rank takes."""

    rank: int
    ranks: int
    tokens: int  # S

    @property
    def size(self) -> int:
        """P; the last pieces may be shorter, or empty."""
        return -(-self.tokens // (2 * self.ranks))

    def bounds(self) -> list[tuple[int, int]]:
        """First and last column of this rank's pieces."""
        size, whole = self.size, self.tokens
        starts = (size * self.rank, size * (2 * self.ranks - 1 - self.rank))
        return [(min(start, whole), min(start + size, whole)) for start in starts]

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole prompt."""
        return torch.cat([x.narrow(dim, a, b - a) for a, b in self.bounds()], dim)

    def gathered(self, x: Tensor) -> Tensor:
        """Values ``[B, S, ..]`` of all tokens, from those of this rank's."""
        return Gathered.apply(x, self)


class Gathered(torch.autograd.Function):
    """In the backward each rank gets the sum of all ranks' gradients of its tokens."""

    @staticmethod
    def forward(ctx, x: Tensor, pieces: Pieces) -> Tensor:
        ctx.pieces = pieces
        halves = x.split([end - begin for begin, end in pieces.bounds()], 1)
        own = torch.stack([padded(half, pieces.size) for half in halves], 1)
        gathered = [torch.empty_like(own) for _ in range(pieces.ranks)]
        dist.all_gather(gathered, own)
        early, late = zip(*(of_rank.unbind(1) for of_rank in gathered), strict=True)
        in_order = torch.cat([*early, *reversed(late)], 1)
        return in_order[:, : pieces.tokens]

    @staticmethod
    @first_derivative
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        pieces, size = ctx.pieces, ctx.pieces.size
        # in float32, as parts add up their gradients
        whole = padded(gradient.float(), 2 * pieces.ranks * size)
        early, late = whole.unflatten(1, (-1, size)).chunk(2, 1)
        of_ranks = torch.stack([early, late.flip(1)], 2).unbind(1)
        own = torch.empty_like(of_ranks[0])
        dist.reduce_scatter(own, [x.contiguous() for x in of_ranks])
        parts = [own[:, i, : end - begin] for i, (begin, end) in enumerate(pieces.bounds())]
        return torch.cat(parts, 1).to(gradient.dtype), None


def padded(x: Tensor, tokens: int) -> Tensor:
    """``[B, tokens, ..]``, with zeros behind."""
    found = x.new_zeros(x.size(0), tokens, *x.shape[2:])
    found[:, : x.size(1)] = x
    return found
