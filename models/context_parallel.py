"""Tokens over ranks: each takes its tokens of a prompt through all layers, every rank writes the
cache rows of all tokens, and so the caches end equal and whole.

In training the rows of a layer's call are gathered alike, and each rank gets the sum of all ranks'
gradients of its own. The hidden states at the end, too: every rank computes the same loss, so that
the gradients of its layers are those of its tokens, times the number of ranks. Their mean over the
ranks, which DistributedDataParallel and fully_shard take, is the gradient.

The prompt is cut into ``2 n`` pieces for n ranks; rank r takes pieces r and ``2 n - 1 - r``, an
early and a late one, since late tokens have more keys to score. In every layer the ranks send each
other the latent, the RoPE key and the index key of their tokens, before they are written.

Shapes: B batch, S tokens of the prompt, P those of a piece.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .absorbed import first_derivative
from .cache import Step, TokenSlice
from .cache.saved import checksum
from .latent_attention import LatentAttention
from .patched import patched_attentions
from .projection import is_sharded
from .sharing import (
    check_agreement,
    check_process_group,
    facts_of_config,
    facts_of_weights,
)
from .training import TrainingStep

# of a prompt over ranks; fewer are not worth the exchange
FEWEST_TOKENS = 32
SAME_MODEL = "with context_parallel all ranks have the same model, options and format of the cache"


class Pieces(NamedTuple):
    """The tokens of a prompt that this rank takes."""

    rank: int
    ranks: int
    real: Tensor  # [B, S] bool, False for padding

    @property
    def size(self) -> int:
        """P; the last pieces may be shorter, or empty."""
        return -(-self.real.size(1) // (2 * self.ranks))

    def bounds(self) -> list[tuple[int, int]]:
        """First and last column of this rank's pieces."""
        whole, size = self.real.size(1), self.size
        starts = (size * self.rank, size * (2 * self.ranks - 1 - self.rank))
        return [(min(start, whole), min(start + size, whole)) for start in starts]

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole prompt."""
        return torch.cat([x.narrow(dim, a, b - a) for a, b in self.bounds()], dim)


class PieceSlice(TokenSlice):
    on_every_rank = False


class OfPieces:
    """A step whose tokens are this rank's, of its ``pieces``. Its ``slots``, ``start`` and
    ``lengths`` are those of the whole prompt."""

    pieces: Pieces

    def count(self) -> int:
        return self.pieces.real.size(1)

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        return self.pieces.own(x, dim)

    def whole(self, x: Tensor) -> Tensor:
        return Gathered.apply(x, self.pieces)


class PieceStep(OfPieces, Step):
    def slices(self, size: int) -> list[TokenSlice]:
        real, found, column = self.pieces.real, [], 0
        ends = self.start[:, None] + nn.functional.pad(real.cumsum(1), (1, 0))
        ends = ends.to(self.start.dtype)
        for first, last in self.pieces.bounds():
            for begin in range(first, last, size):
                end = min(begin + size, last)
                columns = slice(column, column + end - begin)
                new = (self.valid, self.positions, self.position_ids)
                of_slice = (x[:, columns] for x in new)
                found.append(
                    PieceSlice(self.store, ends[:, begin], ends[:, end], *of_slice, columns)
                )
                column = columns.stop
        return found


class PieceTrainingStep(OfPieces, TrainingStep):
    pass


class Gathered(torch.autograd.Function):
    """Values ``[B, S, ..]`` of all tokens, from those of this rank's."""

    @staticmethod
    def forward(ctx, x: Tensor, pieces: Pieces) -> Tensor:
        ctx.pieces = pieces
        halves = x.split([end - begin for begin, end in pieces.bounds()], 1)
        own = torch.stack([padded(half, pieces.size) for half in halves], 1)
        gathered = [torch.empty_like(own) for _ in range(pieces.ranks)]
        dist.all_gather(gathered, own)
        early, late = zip(*(of_rank.unbind(1) for of_rank in gathered), strict=True)
        in_order = torch.cat([*early, *reversed(late)], 1)
        return in_order[:, : pieces.real.size(1)]

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


@torch.compiler.disable(reason="a prompt over ranks is no graph; compile steps of a token")
def share(model, step: Step, kwargs: dict) -> tuple[Step, dict]:
    """The part of this rank in a step, and in the arguments of a forward; all of both if the prompt
    is short.

    Raises:
        ConnectionError: a rank has ended or hangs.
        ValueError: the ranks have other tokens, or caches of other lengths; or all hidden states
            are requested.
    """
    if step.count() < max(FEWEST_TOKENS, 2 * dist.get_world_size()):
        return step, kwargs
    for name in ("output_hidden_states", "output_router_logits"):
        if kwargs.get(name, getattr(model.config, name, False)):
            raise ValueError(
                f"patched model: {name} must be False for tokens over ranks, which have a part of "
                "them each, got True; call models.use_custom_pypto(model) without context_parallel"
            )
    pieces = Pieces(dist.get_rank(), dist.get_world_size(), step.valid)
    facts = {
        "tokens [B, S]": [*step.valid.shape],
        "cached tokens": int(step.sequences.seen),
        "mask": checksum(step.valid),
        "position_ids": checksum(step.position_ids),
    }
    for name in ("input_ids", "inputs_embeds"):
        facts[name] = None if kwargs.get(name) is None else checksum(kwargs[name])
    check_agreement("patched model", facts, "with context_parallel all ranks make the same calls")
    check_agreement("patched model", facts_of_model(model, step), SAME_MODEL)
    own = {
        name: pieces.own(x, dim)
        for name, dim in (("input_ids", 1), ("inputs_embeds", 1), ("position_ids", -1))
        if (x := kwargs.get(name)) is not None
    }
    new = {name: pieces.own(getattr(step, name)) for name in ("valid", "positions", "position_ids")}
    step = step._replace(pieces=pieces, **new)
    if not isinstance(step, TrainingStep):
        return PieceStep(*step), kwargs | own
    batch, tokens = pieces.real.shape
    step.store.take(
        [range(b * tokens + x, b * tokens + y) for b in range(batch) for x, y in pieces.bounds()]
    )
    return PieceTrainingStep(*step), kwargs | own


def facts_of_model(model, step: Step) -> dict[str, object]:
    """What decides which tokens a model computes; in every call, as weights may have changed."""
    patch, attentions = model._custom_pypto, patched_attentions(model)
    selecting = {i: each for i, each in attentions.items() if each.indexer is not None}
    facts = facts_of_config(model.config, "the config")
    facts |= {f"{name} of the patch": str(value) for name, value in patch.cache.items()}
    facts |= {f"index_topk of layer {i}": each.selection_width for i, each in selecting.items()}
    facts["dtype of the model"] = str(model.dtype)
    if not isinstance(step, TrainingStep):
        pools = step.store.layers[min(attentions)].pools
        facts |= {f"dtype of {x} in the cache": str(pool.dtype) for x, pool in pools.items()}
    return facts | facts_of_weights(model)


def whole_output(step: Step, output):
    """The output of the base model for all tokens, from that for this rank's."""
    if isinstance(output, tuple):
        return step.whole(output[0]), *output[1:]
    output.last_hidden_state = step.whole(output.last_hidden_state)
    return output


def check_context_parallel(caller: str, model, paged: type, indexer_loss: str | None) -> None:
    """Rejects a model that cannot share tokens.

    Raises:
        RuntimeError: there is no process group.
        ValueError: names the model and the reason.
    """
    why = None
    if not issubclass(paged, LatentAttention) or paged.upstream_layers:
        why = f"model_type {model.config.model_type}, whose tokens need states of earlier ones"
    elif any(map(is_sharded, model.modules())):
        why = "a model whose weights are shared by ranks, which compute the same tokens together"
    elif indexer_loss is not None:
        why = f"indexer_loss={indexer_loss!r}, which ranks with other tokens do not add up"
    if why is not None:
        raise ValueError(f"{caller}: context_parallel must be False for {why}")
    check_process_group(caller, "context_parallel")
