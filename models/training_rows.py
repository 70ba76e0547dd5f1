"""Formats of rows that live as long as a call of their layer, in training: plain tensors, in the
order of the tokens, through which gradients flow.

Shapes: B batch, S tokens, T = B * S, H heads, N index heads, D ``index_head_dim``.
"""

import torch
from torch import Tensor

import custom_pypto

from .absorbed import AbsorbedAttention, Heads
from .cache.formats import IndexRows, LatentRows, Rows
from .cache.step import Step, TokenSlice
from .cache.store import PagedLayer


class LatentsOfCall(LatentRows):
    """Latents and RoPE keys ``[T, 1, .]``."""

    def rows(self, declared: Rows) -> Rows:
        return declared | {"latent": None, "rope": None}

    def write(self, step: Step, layer: PagedLayer, latent: Tensor, rope: Tensor | None) -> None:
        layer.latent = laid_end_to_end(latent.unsqueeze(2), self.dtype)
        layer.rope = laid_end_to_end(rope, self.dtype)
        layer.has_gradient = torch.is_grad_enabled()

    def attend(
        self, layer: PagedLayer, heads: Heads, indices: Tensor, tokens: TokenSlice
    ) -> Tensor:
        if torch.is_grad_enabled() and not layer.has_gradient:
            raise ValueError(
                "patched model: gradient checkpointing must have use_reentrant=False where layers "
                "attend to the latents of an earlier one, got True, which would drop the gradient "
                "of these latents"
            )
        output, *_ = AbsorbedAttention.apply(
            laid_end_to_end(heads.q_nope, self.dtype),
            laid_end_to_end(heads.q_rope, self.dtype),
            heads.weight.to(self.dtype),
            layer.latent,
            layer.rope,
            heads.sinks,
            indices.flatten(0, 1),
            heads.scaling,
            tokens.store.parts,
        )
        return output.unflatten(0, indices.shape[:2])


class IndexKeysOfCall(IndexRows):
    """Index keys ``[T, 1, D]``."""

    def __init__(self, config, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype

    def rows(self, declared: Rows) -> Rows:
        return declared | {"index": None}

    def write(self, step: Step, layer: PagedLayer, key: Tensor) -> None:
        layer.index = laid_end_to_end(key, self.dtype)

    def select(
        self, layer: PagedLayer, query: Tensor, weights: Tensor, tokens: TokenSlice, count: int
    ) -> Tensor:
        shape, query = query.shape[:2], laid_end_to_end(query, self.dtype)
        weights = weights.flatten(0, 1)
        selected = [
            custom_pypto.npu_lightning_indexer_pto(
                query[part.queries],
                layer.index[part.keys],
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
