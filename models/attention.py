"""DeepSeek sparse attention as the ops compute it: absorbed MLA over a paged cache.

Shapes: B batch, S new tokens, H heads (those of this rank in tensor parallel), L ``kv_lora_rank``,
R ``qk_rope_head_dim``, N index heads, D ``index_head_dim``.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import custom_pypto

from . import quantised_cache
from .cache import Step, write
from .pools import Pool
from .projection import check_absorbed, check_replaced, weight_of
from .tensor_parallel import CHECK_RANKS, check_indices

# Query tokens per slice. Queries, absorbed queries, outputs and indices take 0.4 MB per token at
# full size; a token of the cache takes 1.4 kB.
SLICE = 2048
# an index that the op skips; -1 would end the row
SKIPPED = -2


class PagedAttention:
    """Mixin for an upstream attention class, whose parameters it uses unchanged. The folder of an
    architecture declares the attributes below and overrides methods where it differs.

    The cached latent is both key and value of every head (arXiv:2405.04434, section 2.1): with
    ``kv_b_proj.weight`` as ``W_UK`` and ``W_UV``, ``q . (W_UK c) = (W_UK^T q) . c`` and
    ``sum_j p_j W_UV c_j = W_UV sum_j p_j c_j``. Upstream transformers expands the whole cache
    instead.
    """

    #: upstream class of the indexer
    indexer_class = None
    #: cache rows of each token, by name
    pools: dict[str, Pool]
    #: transformers' RoPE function for MLA's queries and keys
    mla_rope = None
    #: transformers' RoPE function for the indexer's queries and keys
    index_rope = None
    #: whether the indexer rotates its last dims instead of its first
    index_rope_last = False
    #: whether the architecture can have caches in int8
    int8 = False
    #: whether the layer passes its indices to the next layer
    returns_indices = False
    #: upstream classes of layers in the same model that are left as they are
    upstream_layers: tuple[type, ...] = ()
    #: a module with a weight on the layer's device
    first_norm = "kv_a_layernorm"

    @classmethod
    def check(cls, attention: nn.Module, layer: int) -> None:
        """Rejects an ``attention``, patched or not, with additions that the ops would bypass.

        Raises:
            TypeError: names the layer, the addition and the remedy.
        """
        parts = attention._modules  # runs in every forward, and nn.Module's lookup is slow
        check_absorbed(layer, parts["kv_b_proj"])
        if (indexer := parts.get("indexer")) is not None:
            check_replaced(layer, "indexer", indexer, cls.indexer_class)

    def forward(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs):
        if not isinstance(attention_mask, Step):
            return self.dense(hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        indices = None if self.selects else kwargs.get("prev_topk_indices")
        output, indices = self.attend(hidden_states, position_embeddings, attention_mask, indices)
        return (output, None, indices) if self.returns_indices else (output, None)

    def dense(self, *args, **kwargs):
        """The upstream path: attention to all positions, masked."""
        return super().forward(*args, **kwargs)

    def attend(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        step: Step,
        indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output ``[B, S, hidden]`` and the positions it attended to.

        Args:
            indices: those positions, of an earlier layer; None: this layer selects.
        """
        layer = step.cache.layers[self.layer_idx]
        cos, sin = position_embeddings

        latent, k_rope = self.compress_key(hidden_states)
        if layer.latent.dtype == torch.int8:
            k_rope = rotate(self.mla_rope, k_rope.unsqueeze(2), cos, sin)
            quantised_cache.write_latent(step, layer, latent, k_rope)
        else:
            write(layer.latent, step.slots, latent)
            if layer.rope is not None:
                write(layer.rope, step.slots, rotate(self.mla_rope, k_rope.unsqueeze(2), cos, sin))
        if self.indexer is not None:
            self.write_index_keys(hidden_states, position_embeddings, step)
        elif indices is None and not self.selects:
            raise ValueError(
                f"patched model: config.indexer_types must have a 'full' layer before layer "
                f"{self.layer_idx}, which is 'shared'"
            )
        q_latent = self.compress_query(hidden_states)

        tokens = hidden_states.size(1)
        if tokens <= SLICE:
            return self.read(hidden_states, q_latent, cos, sin, indices, step, step.lengths)
        parts, first = [], 0
        while first < tokens:  # range() would give torch.compile one graph per length
            end = first + SLICE if first + SLICE < tokens else tokens
            part = [
                None if x is None else x[:, first:end]
                for x in (hidden_states, q_latent, cos, sin, indices)
            ]
            # cached tokens when `end` was the last token; padding may make it negative
            lengths = (step.lengths - (tokens - end)).clamp(min=0)
            parts.append(self.read(*part, step, lengths))
            first = end
        outputs, selected = zip(*parts, strict=True)
        return torch.cat(outputs, 1), torch.cat(selected, 1)

    def read(
        self,
        hidden_states: Tensor,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        indices: Tensor | None,
        step: Step,
        lengths: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The results of :meth:`attend` for the last tokens that ``lengths`` counts."""
        layer = step.cache.layers[self.layer_idx]
        query, gate = self.project_query(hidden_states, q_latent)
        q_nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        if indices is None:
            normed = q_latent[..., : self.q_lora_rank]
            indices = self.select(hidden_states, normed, cos, sin, step, lengths)
        weight = weight_of(self.kv_b_proj).view(query.size(2), -1, self.kv_lora_rank)
        w_uk, w_uv = weight.split([self.qk_nope_head_dim, self.v_head_dim], 1)
        dtype = step.cache.made_for["dtype"]  # autocast gives the queries another dtype
        absorbed = torch.einsum("bshd,hdl->bshl", q_nope, w_uk).contiguous().to(dtype)
        if q_rope.size(-1):
            q_rope = rotate(self.mla_rope, q_rope, cos, sin).to(dtype)
        call = {
            "actual_seq_lengths_kv": lengths,
            "block_table": step.cache.block_table,
            "sparse_mode": 3,
        }
        if layer.latent.dtype == torch.int8:
            output = quantised_cache.attend(layer, absorbed, q_rope, indices, self.scaling, **call)
        else:
            sinks = getattr(self, "sinks", None)  # a parameter of some architectures
            output = custom_pypto.npu_sparse_flash_attention_pto(
                absorbed,
                layer.latent,
                None,
                indices,
                self.scaling,
                query_rope=None if layer.rope is None else q_rope,
                key_rope=layer.rope,
                sinks=None if sinks is None else sinks.float(),
                **call,
            )
        # for one token, multiplying by both halves is faster than copying the strided w_uv
        if output.size(1) == 1:
            output = torch.einsum("bshl,hvl->bshv", output, weight)[..., self.qk_nope_head_dim :]
        else:
            output = torch.einsum("bshl,hvl->bshv", output, w_uv)
        return self.project_output(output, gate), indices

    @property
    def selects(self) -> bool:
        """Whether this layer selects positions; if not, it attends to those of an earlier one."""
        return self.indexer is not None

    @property
    def selection_width(self) -> int:
        """Indices of each token in the result of :meth:`select`."""
        return self.indexer.index_topk

    def selectable(self, positions: Tensor) -> Tensor:
        """From how many indices, 0 to n - 1, the tokens at these positions select."""
        return positions + 1

    def padding(self, mask: Tensor) -> Tensor:
        """Tokens of left padding in the mask of an upstream forward, ``[B]``."""
        visible = mask if mask.dtype == torch.bool else mask == 0
        return visible[:, 0, -1].int().argmax(-1)

    def upstream_indices(self, columns: Tensor) -> Tensor:
        """What upstream's indexer returns to select these columns ``[B, T, .]`` of its mask.

        In place of negative numbers, which upstream cannot have, column 0: a token whose row is not
        full selects all that it sees, and does not see padding.
        """
        return columns.clamp(min=0)

    def compress_key(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The normed latent ``[B, S, L]``, and RoPE's key ``[B, S, R]``, not rotated yet."""
        widths = [self.kv_lora_rank, self.qk_rope_head_dim]
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split(widths, -1)
        return self.kv_a_layernorm(latent), k_rope

    def compress_query(self, hidden_states: Tensor) -> Tensor:
        """Input of :meth:`project_query`, ``[B, S, >= q_lora_rank]``; the first ``q_lora_rank``
        values are the normed latent, which is also the indexer's input."""
        return self.q_a_layernorm(self.q_a_proj(hidden_states))

    def project_query(
        self, hidden_states: Tensor, q_latent: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The query ``[B, S, H, nope + R]``, and the gate of :meth:`project_output` if any."""
        return self.q_b_proj(q_latent).unflatten(-1, (-1, self.qk_head_dim)), None

    def project_output(self, output: Tensor, gate: Tensor | None) -> Tensor:
        """``[B, S, hidden]`` from the output of the heads, ``[B, S, H, v_head_dim]``."""
        return self.o_proj(output.flatten(2))

    @torch.no_grad()  # as in transformers: a selection has no gradient
    def write_index_keys(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], step: Step
    ) -> None:
        indexer = self.indexer
        # some architectures keep the norm in float32
        key = indexer.k_norm(indexer.wk(hidden_states).to(indexer.k_norm.weight.dtype))
        key = self.rotate_index(key.unsqueeze(2), *position_embeddings)
        layer = step.cache.layers[self.layer_idx]
        if layer.index.dtype == torch.int8:
            quantised_cache.write_index(step, layer, key)
        else:
            write(layer.index, step.slots, key)

    @torch.no_grad()
    def select(
        self,
        hidden_states: Tensor,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: Step,
        lengths: Tensor,
    ) -> Tensor:
        """The ``[B, S, 1, index_topk]`` int32 positions that each token attends to."""
        indexer = self.indexer
        query = indexer.wq_b(q_latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        projection = indexer.weights_proj
        weights = projection(hidden_states.to(projection.weight.dtype)).float()
        layer = step.cache.layers[self.layer_idx]
        keys, space = layer.index, layer.spaces["index"]
        query = self.rotate_index(query, cos, sin)
        # both scales are positive, so they may move out of the ReLU into the weights
        weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        call = {
            "actual_seq_lengths_key": lengths,
            "block_table": step.cache.tables[space],
            "sparse_count": indexer.index_topk // space.ratio,
            "sparse_mode": 3,
        }
        if keys.dtype == torch.int8:
            indices = quantised_cache.select(step, layer, query, weights, **call)
        else:
            indices = custom_pypto.npu_lightning_indexer_pto(
                query.to(keys.dtype), keys, weights, cmp_ratio=space.ratio, **call
            )
        if CHECK_RANKS and dist.is_initialized():
            check_indices(self.layer_idx, indices)
        return indices

    def rotate_index(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B, S, N, D]`` with R of the D dims rotated."""
        indexer = self.indexer
        widths = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
        if self.index_rope_last:
            rest, rope = x.split(widths[::-1], -1)
            return torch.cat([rest, rotate(self.index_rope, rope, cos, sin)], -1)
        rope, rest = x.split(widths, -1)
        return torch.cat([rotate(self.index_rope, rope, cos, sin), rest], -1)


def rotate(rope, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[B, S, N, R]`` rotated by transformers' ``rope``, which requires a query and a key."""
    return rope(x, x[:, :, :1], cos, sin, unsqueeze_dim=2)[0]
