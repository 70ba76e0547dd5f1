"""DeepSeek-V4: a window of tokens and compressed rows (technical report, section 2.3).

Layers of three types: the window alone; with every row of 128 tokens; with the rows of 4 tokens
that a lightning indexer selects.
"""

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4CSACompressor,
    DeepseekV4DecoderLayer,
    DeepseekV4Experts,
    DeepseekV4GroupedLinear,
    DeepseekV4HCACompressor,
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
    DeepseekV4Indexer,
    DeepseekV4IndexerScorer,
    DeepseekV4MLP,
    DeepseekV4RMSNorm,
    DeepseekV4TopKRouter,
    DeepseekV4UnweightedRMSNorm,
    apply_rotary_pos_emb,
)

from custom_pypto import layer_ops
from custom_pypto.rows.parts import write

from ..attention import Mtp
from ..cache import Tokens
from ..cache.layout import Pool, RowLayout
from ..cache.store import PagedLayer
from ..compressed_attention import CompressedAttention, compressor_rows
from ..compression import state_layout
from ..one_op import (
    BoundedMLP,
    Experts,
    Float32Norm,
    GroupedLinear,
    HyperConnection,
    HyperHead,
    RootRouter,
    StreamsLayer,
    UnweightedNorm,
    takes,
)
from ..projection import check_replaced
from ..routing import RoutedLayer

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
# tokens of a slice: few, so that the ring of each sequence stays short
SLICE = 256


def window_and_rows(config, layer: int) -> RowLayout:
    """The window of every layer, in front of the compressed rows."""
    rate = config.compress_rates.get(config.layer_types[layer], 0)
    return RowLayout(config.sliding_window - 1 + SLICE, rate, spare=SLICE)


def index_rows(config, layer: int) -> RowLayout:
    return RowLayout(0, config.compress_rates[SPARSE])


def state(config, layer: int) -> RowLayout:
    kind = config.layer_types[layer]
    return state_layout(config.compress_rates[kind], overlaps=kind == SPARSE)


OF_SPARSE, OF_HEAVY = {"layer_types": SPARSE}, {"layer_types": HEAVY}
SIZES = ("sliding_window", "compress_rates")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[B, S, N, D]`` with pairs of the last R dims rotated.

    Args:
        cos: ``[B, S, R / 2]``, as sin.
    """
    if takes(x, cos, sin):
        return layer_ops.rotate_pairs(x, cos, sin)
    return apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)


class OwnLayer(RoutedLayer, StreamsLayer):
    @staticmethod
    def scores(router: nn.Module, logits: Tensor) -> Tensor:
        return router.score_fn(logits)


class OwnMLP(BoundedMLP):
    bound = property(lambda self: self.limit)


class PagedDeepseekV4Attention(CompressedAttention, DeepseekV4Attention):
    one_op = {
        DeepseekV4MLP: OwnMLP,
        DeepseekV4Experts: Experts,
        DeepseekV4GroupedLinear: GroupedLinear,
        DeepseekV4HyperConnection: HyperConnection,
        DeepseekV4HyperHead: HyperHead,
        DeepseekV4DecoderLayer: OwnLayer,
        DeepseekV4RMSNorm: Float32Norm,
        DeepseekV4TopKRouter: RootRouter,
        DeepseekV4UnweightedRMSNorm: UnweightedNorm,
    }
    pools = {
        "kv": Pool("head_dim", layout=window_and_rows, sizes=SIZES),
        "index": Pool("index_head_dim", where=OF_SPARSE, layout=index_rows),
        "overlap_state": Pool("head_dim", where=OF_SPARSE, vectors=4, layout=state),
        "index_state": Pool("index_head_dim", where=OF_SPARSE, vectors=4, layout=state),
        "state": Pool("head_dim", where=OF_HEAVY, vectors=2, layout=state),
    }
    rope = staticmethod(rotate)
    mtp = Mtp(
        types={"layer_types": "sliding_attention", "mlp_layer_types": "moe"},
        names={r"mtp\.0\.hc_head_": "mtp.0.hc_head.hc_"},
        streams=True,
    )

    slice_tokens = property(lambda self: SLICE)

    @classmethod
    def check_parts(cls, attention: DeepseekV4Attention, layer: int) -> None:
        compressor = attention.compressor
        if attention.layer_type == HEAVY:
            check_replaced(layer, "compressor", compressor, DeepseekV4HCACompressor)
        elif attention.layer_type == SPARSE:
            check_replaced(layer, "compressor", compressor, DeepseekV4CSACompressor)
            check_replaced(layer, "indexer", compressor.indexer, DeepseekV4Indexer)
            scorer = compressor.indexer.scorer
            check_replaced(layer, "indexer's scorer", scorer, DeepseekV4IndexerScorer)

    @property
    def indexer(self) -> DeepseekV4Indexer | None:
        return self.compressor.indexer if self.layer_type == SPARSE else None

    def rotations(self, text, x: Tensor, position_ids: Tensor):
        kind = self.rope_layer_type
        return {kind: text.rotary_emb(x, position_ids=position_ids, layer_type=kind)}

    def angles(self, position_embeddings: dict[str, tuple[Tensor, Tensor]]):
        return position_embeddings[self.rope_layer_type]

    def complete_rows(
        self, x: Tensor, layer: PagedLayer, tokens: Tokens
    ) -> list[tuple[Tensor, Tensor]]:
        if self.layer_type == HEAVY:
            return [compressor_rows(self.compressor, self.rope, layer, "kv", "state", tokens, x)]
        if self.layer_type != SPARSE:
            return []
        if self.selects:
            with torch.no_grad():  # as in transformers: a selection has no gradient
                index = compressor_rows(
                    self.indexer, self.rope, layer, "index", "index_state", tokens, x
                )
                write(layer.pools["index"], *index)
        return [
            compressor_rows(self.compressor, self.rope, layer, "kv", "overlap_state", tokens, x)
        ]

    def padding(self, mask: Tensor) -> Tensor:
        """Always 0.

        Raises:
            ValueError: left padding, which upstream counts in its groups.
        """
        visible = mask if mask.dtype == torch.bool else mask == 0
        padded = (~visible[:, 0, 0, 0]).nonzero().flatten().tolist()
        if padded:
            raise ValueError(
                "replay_indices: attention_mask must have no padding on the upstream path of "
                "DeepSeek-V4, which counts padding as tokens of its windows, got some in sequences "
                f"{padded}; replay sequence b alone, without its n tokens of padding: "
                "record[b : b + 1, n:]"
            )
        return torch.zeros(len(mask), dtype=torch.int64, device=mask.device)
