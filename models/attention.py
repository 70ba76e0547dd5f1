"""The base of all attention classes of patched models.

Shapes: B batch, S new tokens.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import calls
from .cache import Step
from .cache.layout import INDEXER_POOLS, Pool, Row
from .cache.store import PagedLayer

# an index that the op skips; -1 would end the row
SKIPPED = -2


class Counting(NamedTuple):
    """What the forward of an architecture counts, where transformers counts otherwise than by
    positions of tokens in their sequence."""

    #: A cache row stands for a group of tokens. transformers groups by columns of the batch, and
    #: left padding shifts its groups; here groups begin at the first real token.
    groups: bool = False
    #: Rotations and what a token sees follow the count of a sequence's real tokens: transformers
    #: reads ``position_ids`` for one and columns for the other.
    positions: bool = False
    #: RoPE rotates by positions of time, height and width ``[3, B, S]``, which transformers makes
    #: of images and videos.
    axes: bool = False
    #: Layers of transformers' own count padding between tokens, in their window or state: a
    #: sequence cannot pause.
    columns: bool = False


class Mtp(NamedTuple):
    """The layer for multi-token prediction of an architecture: :mod:`.mtp`."""

    #: its entries in lists of the config by layer; None: that of the last layer
    types: dict[str, str | None] = {
        "layer_types": None,
        "mlp_layer_types": None,
        "indexer_types": "full",
    }
    #: whether its residuals are plain where the other layers have streams
    plain: bool = False
    #: whether it has an embedding of its own
    embeds: bool = False
    #: parts of names on disk, as patterns, and what they are in the model; ``{}``: its number
    names: dict[str, str] = {}
    #: whether a config without the number of such layers, or with another, has one
    always: bool = False
    #: whether it takes the streams of a token in place of a hidden state, and is beside the other
    #: layers
    streams: bool = False


class PatchedAttention:
    """Mixin for an upstream attention class with unchanged parameters: it attends on the ops, slice
    by slice, if a :class:`Step` is in place of the mask, else it takes the upstream path.

    The folder of an architecture declares the attributes below, and overrides methods where it
    differs.
    """

    #: cache rows of each token, by name
    pools: dict[str, Pool]
    #: whether the architecture can have caches in int8
    int8 = False
    #: whether upstream's layer returns indices, for the next layer
    returns_indices = False
    # no numbers of layers, of which compiled graphs would be made
    #: whether the layer attends to the selection of an earlier one
    shares_selection = False
    #: whether later layers attend to the selection of this one
    lends_selection = False
    #: what a forward counts, as transformers does
    counting = Counting()
    #: whether later layers attend to the latents of this one
    shares_latents = False
    #: upstream classes of layers that stay unpatched
    upstream_layers: tuple[type, ...] = ()
    #: name of a submodule with a weight on the layer's device
    first_norm: str
    #: new tokens that :meth:`read` takes at once
    slice_tokens: int
    #: whether the layer drafts, behind the layers of a forward: :mod:`.mtp`
    is_mtp = False
    #: what such a layer of this architecture has
    mtp = Mtp()
    #: whether a forward of the model is :mod:`.batch_invariant`
    batch_invariant = False
    #: mixins of :mod:`.one_op` and :mod:`.routing` for modules of upstream, by their class
    one_op: dict[type[nn.Module], type] = {}

    @classmethod
    def check(cls, attentions: dict[int, nn.Module]) -> None:
        """Rejects an attention, patched or not, with additions that the ops would bypass, or under
        the number of another layer, whose cache rows it would write.

        Args:
            attentions: by the number of their layer.
        Raises:
            TypeError: names the layer, the addition and the remedy.
            ValueError: names both numbers.
        """
        for layer, attention in attentions.items():
            if attention.layer_idx != layer:
                raise ValueError(
                    f"use_custom_pypto: the attention of layer {layer} must have layer_idx={layer},"
                    f" got {attention.layer_idx}; number layers anew after adding or removing some "
                    "(each self_attn.layer_idx, config.num_hidden_layers and the config's lists by "
                    "layer), or call models.use_transformers(model)"
                )
            cls.check_parts(attention, layer)

    @classmethod
    def check_parts(cls, attention: nn.Module, layer: int) -> None:
        """Rejects modules of an ``attention`` with additions that the ops would bypass."""
        raise NotImplementedError

    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        around, step = kwargs.pop(calls.NAME, None), attention_mask
        contexts = () if around is None else around.contexts
        if not isinstance(step, Step):
            attention = self
            for context in contexts:
                attention = context.upstream(attention, hidden_states, step)
            return attention.dense(hidden_states, position_embeddings, step, **kwargs)
        if not self.selects:
            contexts = ()
        indices = None
        for context in contexts:
            if (given := context.given(self, step)) is not None:
                indices = given
        output, indices = self.attend(hidden_states, position_embeddings, step, indices)
        for context in contexts:
            context.taken(self, step, indices)
        # layers share by PagedLayer.selection, all architectures alike
        return (output, None, None) if self.returns_indices else (output, None)

    def dense(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        """The upstream path: attention to all positions, masked."""
        return super().forward(
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            **kwargs,
        )

    def attend(
        self, hidden_states: Tensor, position_embeddings, step: Step, indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output ``[B, S, hidden]``, and the indices that it attended to, or None.

        Args:
            position_embeddings: of the upstream model.
            indices: of a record; None: this layer selects, or shares.
        """
        layer = step.layer_of(self)
        if self.shares_selection:
            indices = layer.selection.indices
            if indices is None:
                raise ValueError(
                    "patched model: a layer that selects must run before layer "
                    f"{self.layer_idx}, which shares its selection; after changing layers call "
                    "models.use_custom_pypto(model) again"
                )
        cos, sin = self.angles(position_embeddings)
        self.write(hidden_states, cos, sin, step, layer)
        inputs, results = (hidden_states, cos, sin, indices), []
        slices = step.slices(self.slice_tokens) if layer.in_slices else [step.own]
        for tokens in slices:
            of_slice = inputs
            if len(slices) > 1:
                of_slice = [None if x is None else x[:, tokens.columns] for x in inputs]
            results.append(self.read(*of_slice, tokens, layer))
        outputs, selected = zip(*results, strict=True)
        output, indices = outputs[0], selected[0]
        if len(results) > 1:
            output = torch.cat(outputs, 1)
            indices = None if indices is None else torch.cat(selected, 1)
        if self.lends_selection:
            layer.selection.indices = indices
        return output, indices

    def rotations(self, text: nn.Module, x: Tensor, position_ids: Tensor):
        """What a forward of ``text`` hands this layer as position embeddings."""
        return text.rotary_emb(x, position_ids=position_ids)

    def angles(self, position_embeddings) -> tuple[Tensor | None, Tensor | None]:
        """Cosines and sines ``[B, S, R]`` of this layer."""
        return position_embeddings

    def write(
        self, hidden_states: Tensor, cos: Tensor, sin: Tensor, step: Step, layer: PagedLayer
    ) -> None:
        """Writes the cache rows of all new tokens, unless :meth:`read` does."""

    @property
    def source(self) -> int | None:
        """The layer whose latents this one attends to; None: its own."""
        return None

    @property
    def ranks(self) -> dist.ProcessGroup | None:
        """Those that share the heads, in tensor parallel; None: this one has all."""
        return None

    @property
    def selects(self) -> bool:
        """Whether this layer selects positions by an indexer of its own."""
        return self.indexer is not None and not self.shares_selection

    def rows(self, config, dtype: torch.dtype) -> dict[str, Row | None]:
        """The cache rows of this layer, by pool; None: it has none."""
        lacking = INDEXER_POOLS if self.shares_selection else ()
        return {
            name: None if name in lacking else pool.row(config, self.layer_idx, dtype)
            for name, pool in self.pools.items()
        }

    @property
    def selection_width(self) -> int:
        """Indices of each token in the second result of :meth:`attend`."""
        return self.indexer.index_topk

    def selectable(self, positions: Tensor) -> Tensor:
        """The number n of indices, 0 to n - 1, from which the tokens at these positions select."""
        return positions + 1

    def multiplications(self, tokens: int) -> tuple[int, int]:
        """Per head of a forward over a sequence: upstream's, of all pairs of tokens, and the op's,
        of the selected ones."""
        raise NotImplementedError

    def padding(self, mask: Tensor) -> Tensor:
        """Tokens of left padding in the mask of an upstream forward, ``[B]``."""
        visible = mask if mask.dtype == torch.bool else mask == 0
        return visible[:, 0, -1].int().argmax(-1)

    def upstream_indices(self, columns: Tensor) -> Tensor:
        """The result of upstream's indexer that selects these columns ``[B, T, .]`` of its mask.

        Negative numbers, invalid upstream, become column 0: a token with such numbers selects all
        that it sees, and column 0 is either among that or masked as padding.
        """
        return columns.clamp(min=0)


def causal_pairs(tokens: int, most: int) -> int:
    """Pairs of a token and one that it sees, at most ``most`` per token."""
    first = min(tokens, most)
    return first * (first + 1) // 2 + (tokens - first) * most
