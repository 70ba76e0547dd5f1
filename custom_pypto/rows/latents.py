"""Formats of latents and RoPE keys.

Shapes: B sequences, T new tokens, H heads, L ``kv_lora_rank``, R ``qk_rope_head_dim``, K selected
positions; queries are ``[B, S, H, .]``, or packed ``[T, H, .]``.
"""

import torch
from torch import Tensor

import custom_pypto

from .parts import Part, Pools, first_rows, flat, write

SCALE_GROUP = 128  # values that share a scale


class LatentRows:
    """Latents and RoPE keys in the dtype of the model."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    @staticmethod
    def lacking(config, dtype: torch.dtype) -> str | None:
        """Why a model of this config and dtype cannot have the format; None if it can."""
        return None

    def parts(self, latent: int, rope: int) -> dict[str, Part]:
        """Of a row, from L and R."""
        return {"latent": Part(latent, self.dtype), "rope": Part(rope, self.dtype)}

    def write(self, pools: Pools, slots: Tensor, latent: Tensor, rope: Tensor | None) -> None:
        """Writes latents ``[.., L]`` and rotated RoPE keys ``[.., R]`` of T tokens."""
        write(pools["latent"], slots, latent)
        if rope is not None:
            write(pools["rope"], slots, rope)

    def first(
        self, pools: Pools, block_table: Tensor, count: int, latent: int
    ) -> tuple[Tensor, Tensor | None]:
        """Copies of the first latents ``[B, count, L]`` and RoPE keys ``[B, count, R]``."""
        rope = first_rows(pools["rope"], block_table, count) if "rope" in pools else None
        return first_rows(pools["latent"], block_table, count), rope

    def attend(
        self,
        pools: Pools,
        query: Tensor,
        query_rope: Tensor | None,
        indices: Tensor,
        scale: float,
        *,
        lengths: Tensor,
        **others,
    ) -> Tensor:
        """Attention of queries ``[.., H, L]`` and ``[.., H, R]`` over the rows at ``indices [.., 1,
        K]``; ``others`` are keywords of the op."""
        return custom_pypto.npu_sparse_flash_attention_pto(
            query.to(self.dtype),
            pools["latent"],
            None,
            indices,
            scale,
            query_rope=None if query_rope is None else query_rope.to(self.dtype),
            key_rope=pools.get("rope"),
            actual_seq_lengths_kv=lengths,
            **others,
        )


class Int8LatentRows(LatentRows):
    """A row of bytes: the quantized latent, the RoPE key, a float32 scale per scale group."""

    @staticmethod
    def lacking(config, dtype):
        if dtype not in (torch.bfloat16, torch.float16):
            return f"a model in {dtype} (rows have RoPE keys of 2 bytes; load it in bfloat16)"
        for name, unit in (("kv_lora_rank", SCALE_GROUP), ("qk_rope_head_dim", 16)):
            if (size := getattr(config, name)) % unit:
                return f"{name} {size}, no multiple of {unit}"
        return None

    def parts(self, latent, rope):
        return {"latent": Part(int8_row_bytes(latent, rope), torch.int8)}

    def write(self, pools, slots, latent, rope):
        pool = pools["latent"]
        custom_pypto.npu_kv_quant_update_pto(
            *(x.flatten(0, -2).to(self.dtype) for x in (latent, rope)), flat(slots, pool), pool
        )

    def first(self, pools, block_table, count, latent):
        return dequantized_latents(
            first_rows(pools["latent"], block_table, count), latent, self.dtype
        )

    def attend(self, pools, query, query_rope, indices, scale, *, lengths, **others):
        return custom_pypto.npu_kv_quant_sparse_flash_attention_pto(
            torch.cat([query, query_rope], -1).to(self.dtype),
            pools["latent"],
            None,
            indices,
            scale,
            key_quant_mode=2,
            value_quant_mode=2,
            rope_head_dim=query_rope.size(-1),
            actual_seq_lengths_kv=lengths,
            **others,
        )


def int8_row_bytes(latent: int, rope: int) -> int:
    return latent + 2 * rope + 4 * latent // SCALE_GROUP


def dequantized_latents(rows: Tensor, latent: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(latent, rope)`` of int8 rows, in ``dtype``: each int8 times its scale, in float32, then
    rounded."""
    scales = 4 * latent // SCALE_GROUP
    values, rope, scale = rows.split([latent, rows.size(-1) - latent - scales, scales], -1)
    # views of another dtype need rows of their own, which start at a multiple of its size
    scale, rope = (part.clone(memory_format=torch.contiguous_format) for part in (scale, rope))
    values = values.unflatten(-1, (-1, SCALE_GROUP)).float() * scale.view(torch.float32)[..., None]
    return values.flatten(-2).to(dtype), rope.view(dtype)
