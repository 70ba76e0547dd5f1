"""DeepSeek sparse attention as the ops compute it: absorbed MLA over a paged cache.

Shapes: B batch, S new tokens, H heads (those of this rank in tensor parallel), L ``kv_lora_rank``,
R ``qk_rope_head_dim``, N index heads, D ``index_head_dim``, K ``index_topk``.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from custom_pypto.rows.expanded import Heads
from custom_pypto.rows.index import score_weights

from .attention import PatchedAttention, causal_pairs
from .cache import Step, Tokens
from .cache.store import PagedLayer
from .one_op import Rotation, linear
from .projection import (
    check_absorbed,
    check_adapters_of_ranks,
    check_replaced,
    ranks_of,
    weight_of,
)
from .tensor_parallel import CHECK_RANKS, ReadByHeads, check_indices


class LatentAttention(PatchedAttention):
    """The cached latent is both key and value of every head: :mod:`.absorbed`."""

    #: upstream class of the indexer
    indexer_class: type
    #: of queries and keys of the attention
    rope: Rotation
    #: of the indexer's queries and keys
    index_rope: Rotation
    #: whether the indexer rotates its last dims instead of its first
    index_rope_last = False
    first_norm = "kv_a_layernorm"
    # Queries, absorbed queries, outputs and indices take 0.4 MB per token at full size; a token of
    # the cache takes 1.4 kB.
    slice_tokens = 2048

    @classmethod
    def check_parts(cls, attention: nn.Module, layer: int) -> None:
        parts = attention._modules  # runs in every forward, and nn.Module's lookup is slow
        check_absorbed(layer, parts["kv_b_proj"])
        if ranks_of(parts["kv_b_proj"]) is not None:
            check_adapters_of_ranks(layer, attention)
        if (indexer := parts.get("indexer")) is not None:
            check_replaced(layer, "indexer", indexer, cls.indexer_class)

    def write(
        self, hidden_states: Tensor, cos: Tensor, sin: Tensor, step: Step, layer: PagedLayer
    ) -> None:
        self.write_latents(hidden_states, cos, sin, step, layer)
        if self.selects:
            self.write_index_keys(hidden_states, cos, sin, step, layer)

    def write_latents(
        self, hidden_states: Tensor, cos: Tensor, sin: Tensor, step: Step, layer: PagedLayer
    ) -> None:
        latent, k_rope = self.compress_key(hidden_states)
        if self.ranks is not None and torch.is_grad_enabled():
            latent = ReadByHeads.apply(latent, self.ranks)  # their plan adds up those of RoPE keys
        latent, rope = step.gathered(latent), None
        if self.qk_rope_head_dim:
            rope = step.gathered(self.rope.rotate(k_rope.unsqueeze(2), cos, sin))
        layer.write_latents(step.slots, latent, rope)

    def read(
        self,
        hidden_states: Tensor,
        cos: Tensor,
        sin: Tensor,
        indices: Tensor | None,
        tokens: Tokens,
        layer: PagedLayer,
    ) -> tuple[Tensor, Tensor]:
        """The results of :meth:`attend` for the tokens of a slice."""
        q_latent = self.compress_query(hidden_states)
        query, gate = self.project_query(hidden_states, q_latent, tokens)
        q_nope, q_rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        if indices is None:
            indices = self.select(hidden_states, q_latent, cos, sin, tokens, layer)
        if self.qk_rope_head_dim:
            q_rope = self.rope.rotate(q_rope, cos, sin)
        heads = Heads(
            q_nope,
            q_rope if self.qk_rope_head_dim else None,
            weight_of(self.kv_b_proj).view(query.size(2), -1, self.kv_lora_rank),
            self.scaling,
            self.sinks.float() if hasattr(self, "sinks") else None,  # of some architectures
            not self.batch_invariant,
        )
        output = layer.attend(heads, indices, tokens.lengths)
        return self.project_output(output, gate), indices

    def multiplications(self, tokens: int) -> tuple[int, int]:
        dense = tokens**2 * (self.qk_head_dim + self.v_head_dim)
        width = 2 * self.kv_lora_rank + self.qk_rope_head_dim
        return dense, causal_pairs(tokens, self.attended) * width

    @property
    def ranks(self) -> dist.ProcessGroup | None:
        return ranks_of(self.kv_b_proj)

    @property
    def attended(self) -> int:
        """The most positions that a token attends to."""
        return self.config.index_topk

    def compress_key(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The normed latent ``[B, S, L]``, and RoPE's key ``[B, S, R]``, not rotated yet."""
        widths = [self.kv_lora_rank, self.qk_rope_head_dim]
        latent, k_rope = linear(self.kv_a_proj_with_mqa, hidden_states).split(widths, -1)
        return self.kv_a_layernorm(latent), k_rope

    def compress_query(self, hidden_states: Tensor) -> Tensor:
        """Input of :meth:`project_query`, and of :meth:`index_query`, ``[B, S, .]``."""
        return self.q_a_layernorm(linear(self.q_a_proj, hidden_states))

    def project_query(
        self, hidden_states: Tensor, q_latent: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor | None]:
        """The query ``[B, S, H, nope + R]``, and the gate of :meth:`project_output` if any."""
        return linear(self.q_b_proj, q_latent).unflatten(-1, (-1, self.qk_head_dim)), None

    def project_output(self, output: Tensor, gate: Tensor | None) -> Tensor:
        """``[B, S, hidden]`` from the output of the heads, ``[B, S, H, v_head_dim]``."""
        return linear(self.o_proj, output.flatten(2))

    def write_index_keys(
        self, hidden_states: Tensor, cos: Tensor, sin: Tensor, step: Step, layer: PagedLayer
    ) -> None:
        indexer = self.indexer
        with indexer_gradients(layer):
            # some architectures keep the norm in float32
            key = linear(indexer.wk, constant(hidden_states)).to(indexer.k_norm.weight.dtype)
            key = self.rotate_index(indexer.k_norm(key).unsqueeze(2), cos, sin)
        layer.write_keys(step.slots, step.gathered(key))

    def select(
        self,
        hidden_states: Tensor,
        q_latent: Tensor,
        cos: Tensor,
        sin: Tensor,
        tokens: Tokens,
        layer: PagedLayer,
    ) -> Tensor:
        """The ``[B, S, 1, K]`` int32 positions that each token attends to."""
        if (every := layer.every_row(self.selected_rows, tokens)) is not None:
            return every
        with indexer_gradients(layer):
            query, weights = self.score_inputs(
                constant(hidden_states), constant(q_latent), cos, sin, tokens
            )
        indices = layer.select(query, weights, self.selected_rows, tokens)
        if CHECK_RANKS and dist.is_initialized() and tokens.on_every_rank:
            check_indices(self.layer_idx, indices)
        return indices

    @property
    def selected_rows(self) -> int:
        """Rows of index keys that a token selects."""
        return self.indexer.index_topk

    def score_inputs(
        self, hidden_states: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor, tokens: Tokens
    ) -> tuple[Tensor, Tensor]:
        """The indexer's query ``[B, S, N, D]``, and the weights ``[B, S, N]`` float32 of its
        heads."""
        indexer = self.indexer
        query = self.rotate_index(self.index_query(q_latent, tokens), cos, sin)
        projection = indexer.weights_proj
        weights = linear(projection, hidden_states.to(projection.weight.dtype))
        return query, score_weights(weights, indexer.head_dim)

    def index_query(self, q_latent: Tensor, tokens: Tokens) -> Tensor:
        """The indexer's query ``[B, S, N, D]``, not rotated yet."""
        indexer = self.indexer
        normed = q_latent[..., : self.q_lora_rank]
        return linear(indexer.wq_b, normed).unflatten(-1, (indexer.n_heads, indexer.head_dim))

    def rotate_index(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[B, S, N, D]`` with R of the D dims rotated."""
        indexer = self.indexer
        # some architectures have parameters in their frequencies, which indexers do not train
        cos, sin = constant(cos), constant(sin)
        first = indexer.head_dim - indexer.qk_rope_head_dim if self.index_rope_last else 0
        return self.index_rope.rotate(x, cos, sin, first)


def constant(x: Tensor) -> Tensor:
    """``x`` without its gradient."""
    return x.detach() if x.requires_grad else x  # detach takes longer than the question


def indexer_gradients(layer: PagedLayer) -> torch.set_grad_enabled:
    """No gradients inside, as in transformers, unless indexers learn."""
    return torch.set_grad_enabled(layer.learns and torch.is_grad_enabled())
