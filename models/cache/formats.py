"""Formats of cache rows: their pools, the ops that write them, and the ops that read them.

All layers of a cache share a format of latents and a format of index keys. To add a format, write
a class here and name it in :data:`LATENT_FORMATS` or :data:`INDEX_FORMATS`.

Shapes: B batch, S new tokens, H heads, L ``kv_lora_rank``, R ``qk_rope_head_dim``, N index heads,
D ``index_head_dim``, K selected positions.
"""

import torch
from torch import Tensor

import custom_pypto
from custom_pypto.cache_rows import SCALE_GROUP, dequantized, hadamard_matrix, int8_row_bytes

from ..absorbed import Heads, absorbed_query, of_heads
from ..expanded import FEWEST_TOKENS, expanded_attention, is_cheaper
from ..memory import is_readable
from .layout import Row
from .step import Step, TokenSlice
from .store import PagedLayer, first_rows, write

Rows = dict[str, Row | None]
COMPUTED = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of the ops


class LatentRows:
    """Latents and RoPE keys, in a pool each, in the dtype of the model."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def rows(self, declared: Rows) -> Rows:
        """The rows of a layer's pools in this format."""
        return declared

    def write(self, step: Step, layer: PagedLayer, latent: Tensor, rope: Tensor | None) -> None:
        """Writes latents ``[B, S, L]`` and rotated RoPE keys ``[B, S, 1, R]`` of new tokens."""
        write(layer.latent, step.slots, latent)
        if rope is not None:
            write(layer.rope, step.slots, rope)

    def attend(
        self, layer: PagedLayer, heads: Heads, indices: Tensor, tokens: TokenSlice
    ) -> Tensor:
        """The outputs ``[B, S, H, v]`` of the heads over the rows at ``indices``."""
        if (output := self.attend_expanded(layer, heads, indices, tokens)) is not None:
            return output
        call = {
            "actual_seq_lengths_kv": tokens.lengths,
            "block_table": tokens.store.tables[layer.layouts["latent"]],
            "sparse_mode": 3,
        }
        if heads.sinks is not None:  # of some architectures
            call["sinks"] = heads.sinks
        # autocast gives the queries another dtype
        query = absorbed_query(heads.q_nope, heads.weight).to(self.dtype)
        rope = None if heads.q_rope is None else heads.q_rope.to(self.dtype)
        output = self.read(layer, query, rope, indices, heads.scaling, **call)
        return of_heads(output, heads.weight[:, heads.q_nope.size(-1) :])

    def attend_expanded(
        self, layer: PagedLayer, heads: Heads, indices: Tensor, tokens: TokenSlice
    ) -> Tensor | None:
        """:func:`.expanded_attention`, or None where it is not cheaper or cannot be."""
        size = indices.size(1)
        if size < FEWEST_TOKENS or not is_readable(tokens.lengths):
            return None
        keys = int(tokens.lengths.max())
        if torch.is_grad_enabled() or not is_cheaper(heads, indices, keys):
            return None
        table = tokens.store.tables[layer.layouts["latent"]]
        latent, rope = self.first_rows(layer, table, keys, heads.weight.size(2))
        device = indices.device
        unwritten = (torch.arange(keys, device=device) >= tokens.lengths[:, None]).unsqueeze(-1)
        for rows in (latent, rope):
            if rows is not None and not rows.masked_fill_(unwritten, 0).isfinite().all():
                return None  # a NaN would reach tokens that do not select its row
        ends = tokens.lengths[:, None] + torch.arange(1 - size, 1, device=device)
        return expanded_attention(heads, indices, ends, latent, rope)

    def first_rows(
        self, layer: PagedLayer, table: Tensor, count: int, width: int
    ) -> tuple[Tensor, Tensor | None]:
        """Copies of the latents ``[B, count, width]`` and RoPE keys ``[B, count, R]``."""
        rope = None if layer.rope is None else first_rows(layer.rope, table, count)
        return first_rows(layer.latent, table, count), rope

    def read(
        self,
        layer: PagedLayer,
        query: Tensor,
        query_rope: Tensor | None,
        indices: Tensor,
        scaling: float,
        **call,
    ) -> Tensor:
        """Attention of queries ``[B, S, H, L]`` and ``[B, S, H, R]`` over rows at ``indices``."""
        return custom_pypto.npu_sparse_flash_attention_pto(
            query,
            layer.latent,
            None,
            indices,
            scaling,
            query_rope=query_rope,
            key_rope=layer.rope,
            **call,
        )


class Int8LatentRows(LatentRows):
    """A row of bytes: the quantized latent, the RoPE key, a float32 scale per scale group."""

    @staticmethod
    def lacking(config, dtype: torch.dtype) -> str | None:
        """Why a model cannot have this format; None if it can."""
        if dtype not in (torch.bfloat16, torch.float16):
            return f"a model in {dtype} (rows have RoPE keys of 2 bytes; load it in bfloat16)"
        if config.kv_lora_rank % SCALE_GROUP:
            return f"kv_lora_rank {config.kv_lora_rank}, no multiple of {SCALE_GROUP}"
        return None

    def rows(self, declared: Rows) -> Rows:
        latent, rope = declared["latent"], declared["rope"]
        width = int8_row_bytes(latent.width, rope.width)
        return declared | {"latent": Row(width, torch.int8, latent.layout), "rope": None}

    def write(self, step: Step, layer: PagedLayer, latent: Tensor, rope: Tensor | None) -> None:
        custom_pypto.npu_kv_quant_update_pto(
            latent.flatten(0, 1).to(self.dtype),
            rope.flatten(0, 2).to(self.dtype),
            flat_slots(step),
            layer.latent,
        )

    def first_rows(
        self, layer: PagedLayer, table: Tensor, count: int, width: int
    ) -> tuple[Tensor, Tensor | None]:
        return dequantized(first_rows(layer.latent, table, count), width, self.dtype)

    def read(
        self,
        layer: PagedLayer,
        query: Tensor,
        query_rope: Tensor | None,
        indices: Tensor,
        scaling: float,
        **call,
    ) -> Tensor:
        return custom_pypto.npu_kv_quant_sparse_flash_attention_pto(
            torch.cat([query, query_rope], -1),
            layer.latent,
            None,
            indices,
            scaling,
            key_quant_mode=2,
            value_quant_mode=2,
            rope_head_dim=query_rope.size(-1),
            **call,
        )


class IndexRows:
    """Index keys in the dtype of the model."""

    #: whether the keys, and the queries and weights of :meth:`select`, have gradients
    learns = False

    def __init__(self, config, dtype: torch.dtype, device: torch.device):
        pass

    def rows(self, declared: Rows) -> Rows:
        """The rows of a layer's pools in this format."""
        return declared

    def write(self, step: Step, layer: PagedLayer, key: Tensor) -> None:
        """Writes the keys ``[B, S, 1, D]`` of new tokens."""
        write(layer.index, step.slots, key)

    def select(
        self, layer: PagedLayer, query: Tensor, weights: Tensor, tokens: TokenSlice, count: int
    ) -> Tensor:
        """The ``count`` rows with the best scores, ``[B, S, 1, count]`` int32.

        Args:
            query: ``[B, S, N, D]``.
            weights: ``[B, S, N]`` float32.
        """
        return custom_pypto.npu_lightning_indexer_pto(
            query.to(layer.index.dtype),
            layer.index,
            weights,
            cmp_ratio=layer.layouts["index"].ratio,
            **index_call(layer, tokens, count),
        )


class Int8IndexRows(IndexRows):
    """Quantized index keys, and their float16 scales in a pool of their own.

    A Hadamard matrix rotates keys and queries, as in DeepSeek-V3.2's own inference code: outliers
    spread over all dims, products stay equal. All keys of a cache must be rotated, or none; their
    bytes do not tell.
    """

    def __init__(self, config, dtype: torch.dtype, device: torch.device):
        self.rotation = hadamard_matrix(config.index_head_dim).to(device, dtype)

    @staticmethod
    def lacking(config, dtype: torch.dtype) -> str | None:
        """Why a model cannot have this format; None if it can."""
        size = config.index_head_dim
        return None if size.bit_count() == 1 else f"index_head_dim {size}, no power of two"

    def rows(self, declared: Rows) -> Rows:
        index = declared.get("index")
        if index is None:
            return declared
        scale = Row(1, torch.float16, index.layout)
        return declared | {"index": index._replace(dtype=torch.int8), "index_scale": scale}

    def write(self, step: Step, layer: PagedLayer, key: Tensor) -> None:
        custom_pypto.npu_quant_index_update_pto(
            key.flatten(0, 2).to(self.rotation.dtype),
            flat_slots(step),
            layer.index,
            layer.index_scale.squeeze(-1),
            hadamard=self.rotation,
        )

    def select(
        self, layer: PagedLayer, query: Tensor, weights: Tensor, tokens: TokenSlice, count: int
    ) -> Tensor:
        rows, scales = custom_pypto.npu_quant_rows_pto(
            query.to(self.rotation.dtype), hadamard=self.rotation
        )
        key_scales = layer.index_scale.squeeze(-1)
        return custom_pypto.npu_quant_lightning_indexer_pto(
            rows, layer.index, weights, scales, key_scales, 0, 0, **index_call(layer, tokens, count)
        )


# by the user's ``index_dtype`` or ``kv_dtype``; None or the dtype of the model: the base class
LATENT_FORMATS: dict[torch.dtype | None, type[LatentRows]] = {torch.int8: Int8LatentRows}
INDEX_FORMATS: dict[torch.dtype | None, type[IndexRows]] = {torch.int8: Int8IndexRows}


def check_cache_dtypes(
    caller: str, text, attention, index_dtype: torch.dtype | None, kv_dtype: torch.dtype | None
) -> None:
    """Rejects dtypes that the cache of a text model with this patched ``attention`` cannot have.

    Raises:
        ValueError: names the argument, the supported and the given dtype.
    """
    if text.dtype not in COMPUTED:
        raise ValueError(
            f"{caller}: model must be {' or '.join(map(str, COMPUTED))}, got "
            f"{text.dtype}, which the ops do not compute in; call model.float() first"
        )
    for name, dtype, formats in (
        ("index_dtype", index_dtype, INDEX_FORMATS),
        ("kv_dtype", kv_dtype, LATENT_FORMATS),
    ):
        if dtype in (None, text.dtype):
            continue
        if dtype not in formats:
            raise ValueError(
                f"{caller}: {name} must be {' or '.join(map(str, formats))} or None (dtype of the "
                f"model), got {dtype}; Atlas A2 and A3 compute in no other"
            )
        if attention.int8:
            why = formats[dtype].lacking(text.config, text.dtype)
        else:
            why = f"model_type {text.config.model_type}, which has no caches in int8"
        if why is not None:
            raise ValueError(f"{caller}: {name} must be None for {why}, got {dtype}")


def index_call(layer: PagedLayer, tokens: TokenSlice, count: int) -> dict[str, Tensor | int]:
    """Arguments of both indexers."""
    return {
        "actual_seq_lengths_key": tokens.lengths,
        "block_table": tokens.store.tables[layer.layouts["index"]],
        "sparse_count": count,
        "sparse_mode": 3,
    }


def flat_slots(step: Step) -> Tensor:
    """Slots in the flattened pools; on an NPU ``step.slots`` has blocks and rows instead."""
    slots = step.slots
    return slots if slots.ndim == 1 else slots[:, 0] * step.store.block_size + slots[:, 1]
