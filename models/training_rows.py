"""Formats of rows that live as long as a call of their layer, in training: plain tensors, in the
order of the tokens, through which gradients flow.

Shapes: B batch, S tokens, T = B * S, H heads, N index heads, D ``index_head_dim``.
"""

import torch
import torch.distributed as dist
from torch import Tensor

import custom_pypto

from .absorbed import AbsorbedAttention, Heads
from .cache.formats import IndexRows, LatentRows, Rows
from .cache.step import Step, TokenSlice
from .cache.store import PagedLayer
from .indexer_loss import IndexInputs
from .tensor_parallel import ReadByHeads

REENTRANT = (
    "gradient checkpointing must have use_reentrant=False where layers attend to the latents of an "
    "earlier one, got True, which would drop the gradient of these latents"
)


class LatentsOfCall(LatentRows):
    """Latents and RoPE keys ``[T, 1, .]``.

    Args:
        ranks: that share the heads, or None.
        shared: later layers attend to them.
    """

    def __init__(self, dtype: torch.dtype, ranks: dist.ProcessGroup | None, shared: bool):
        super().__init__(dtype)
        self.ranks, self.shared = ranks, shared
        self.has_graph = False

    def rows(self, declared: Rows) -> Rows:
        return declared | {"latent": None, "rope": None}

    def write(self, step: Step, layer: PagedLayer, latent: Tensor, rope: Tensor | None) -> None:
        if self.ranks is not None:  # transformers' plan adds up the gradients of RoPE keys
            latent = ReadByHeads.apply(latent, self.ranks)
        layer.latent = laid_end_to_end(latent.unsqueeze(2), self.dtype)
        layer.rope = laid_end_to_end(rope, self.dtype)
        self.has_graph = torch.is_grad_enabled()

    def attend(
        self, layer: PagedLayer, heads: Heads, indices: Tensor, tokens: TokenSlice
    ) -> Tensor:
        if torch.is_grad_enabled() and not self.has_graph:
            raise ValueError(f"patched model: {REENTRANT}")
        shape, indices = indices.shape[:2], indices.flatten(0, 1)
        heads = heads._replace(
            q_nope=laid_end_to_end(heads.q_nope, self.dtype),
            q_rope=laid_end_to_end(heads.q_rope, self.dtype),
            weight=heads.weight.to(self.dtype),
        )
        output, *statistics = AbsorbedAttention.apply(
            heads.q_nope,
            heads.q_rope,
            heads.weight,
            layer.latent,
            layer.rope,
            heads.sinks,
            indices,
            heads.scaling,
            tokens.store.parts,
        )
        if self.shared:
            tokens.store.hold(layer, output)
        if (loss := tokens.store.loss) is not None:
            output = loss.attach(output, heads, layer.latent, layer.rope, indices, statistics)
        return output.unflatten(0, shape)


class IndexKeysOfCall(IndexRows):
    """Index keys ``[T, 1, D]``.

    Args:
        learns: the indexer has a loss.
        dense: tokens attend to all keys: the selection has no columns.
    """

    def __init__(self, dtype: torch.dtype, learns: bool, dense: bool):
        self.dtype, self.learns, self.dense = dtype, learns, dense

    def rows(self, declared: Rows) -> Rows:
        return declared | {"index": None}

    def write(self, step: Step, layer: PagedLayer, key: Tensor) -> None:
        layer.index = laid_end_to_end(key, self.dtype)

    def select(
        self, layer: PagedLayer, query: Tensor, weights: Tensor, tokens: TokenSlice, count: int
    ) -> Tensor:
        shape = query.shape[:2]
        inputs = IndexInputs(laid_end_to_end(query, self.dtype), layer.index, weights.flatten(0, 1))
        if (loss := tokens.store.loss) is not None:
            loss.inputs = inputs
        if self.dense:
            return torch.empty(*shape, 1, 0, dtype=torch.int32, device=query.device)
        query, key, weights = (x.detach() for x in inputs)
        selected = [
            custom_pypto.npu_lightning_indexer_pto(
                query[part.queries],
                key[part.keys],
                weights[part.queries],
                actual_seq_lengths_query=part.query_ends,
                actual_seq_lengths_key=part.key_ends,
                layout_query="TND",
                layout_key="TND",
                sparse_count=count,
            )
            for part in tokens.store.parts
        ]
        return torch.cat(selected).unflatten(0, shape)


def laid_end_to_end(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``[T, ..]`` of ``[B, S, ..]``."""
    return None if x is None else x.flatten(0, 1).to(dtype)
