"""The layer for multi-token prediction (MTP), which drafts: a decoder layer of the model's class
behind the others, with the names of published checkpoints (arXiv:2412.19437, section 2.2).

For token ``x_j`` with the hidden state ``h_{j-1}`` of the token before it, after the model's last
norm, both embedded in one row::

    u_j = eh_proj([enorm(embedding(x_j)); hnorm(h_{j-1})])
    g_j = shared_head.norm(layer(u_1 .. u_j))
    p(x_{j+1}) = softmax(head(g_j))

Of further drafts ``g`` stands in place of ``h``. Embedding and head are the model's.
DeepSeek-V4 has streams ``X``, which a head joins, in place of ``h``, and a window in ``layer``::

    U_j = e_proj(enorm(embedding(x_j))) + h_proj(hnorm(X_{j-1}))       added to each stream
    G_j = layer(U_1 .. U_j)
    p(x_{j+1}) = softmax(head(norm(hc_head(G_j))))

Shapes: B batch, S new tokens, H hidden size.
"""

import torch
from torch import Tensor, nn

from ..architectures import ARCHITECTURES
from ..cache import PagedCache, Step, Tokens
from ..cache.store import slots
from ..patched import CACHE, MTP, decoder_layers, mtp_attention
from .parts import has_streams, parts_for, parts_of

#: key of config.json with the number of such layers
LAYERS = "num_nextn_predict_layers"
#: lists in a config with an entry for each layer, and that of the MTP layer; None: as the last one
OF_LAYER = {"layer_types": None, "mlp_layer_types": None, "indexer_types": "full"}
#: the same of DeepSeek-V4: a window alone, and a router that learns
OF_STREAMS = {"layer_types": "sliding_attention", "mlp_layer_types": "moe"}


def check_mtp(caller: str, config, model_class: type) -> None:
    """Rejects models of which no MTP layer is known, and configs without one.

    Raises:
        ValueError: names the model, or the key of the config.
    """
    if not ARCHITECTURES[model_class.__name__].mtp:
        supported = ", ".join(name for name, it in ARCHITECTURES.items() if it.mtp)
        raise ValueError(
            f"{caller}: mtp must be False for a {model_class.__name__}, got True: supported are "
            f"the MTP layers of {supported}"
        )
    if (layers := getattr(config, LAYERS, None)) != 1:
        raise ValueError(
            f"{caller}: mtp needs a config.json with {LAYERS} = 1, which says that the checkpoint "
            f"has such a layer, got {layers}; omit mtp"
        )


def config_of(text):
    """The config of a text model with the MTP layer as its last one."""
    config = text.config
    keys = config.to_dict()
    for name, own in (OF_STREAMS if has_streams(text) else OF_LAYER).items():
        if keys.get(name):
            keys[name] = [*keys[name], own or keys[name][-1]]
    keys["num_hidden_layers"] += 1
    made = type(config).from_dict(keys)
    made._attn_implementation = config._attn_implementation
    return made


def with_mtp(model_class: type) -> type:
    """A class that makes models of ``model_class`` which have the layer; transformers makes a model
    of a checkpoint by calling its class."""

    class WithMtp(model_class):
        def __init__(self, config, *args, **kwargs):
            super().__init__(config, *args, **kwargs)
            self.__class__ = model_class
            add_mtp(self)

    WithMtp.__name__ = WithMtp.__qualname__ = model_class.__name__
    return WithMtp


def add_mtp(model) -> nn.Module:
    """Gives ``model``, which must not be patched yet, an MTP layer with random weights; the layer.

    It is behind the decoder layers, which transformers runs up to ``num_hidden_layers``; of
    DeepSeek-V4, which runs all, beside them.
    """
    text = model.base_model
    config, last = config_of(text), text.layers[-1]
    layer = type(last)(config, last.self_attn.layer_idx + 1)
    parts_for(text).add(layer, text)
    layer.self_attn.is_mtp = True
    for module in layer.mlp.modules():
        if hasattr(module, "config"):  # of the model, which says how experts compute
            module.config = text.config
    for module in layer.modules():
        model._init_weights(module)
    like = text.get_input_embeddings().weight  # some norms are in float32
    layer.to(like.device, like.dtype)
    layer.train(model.training)
    if has_streams(text):
        setattr(text, MTP, nn.ModuleList([layer]))
    else:
        text.layers.append(layer)
    setattr(text.config, LAYERS, 1)
    return layer


def mtp_layer(text) -> nn.Module | None:
    """The MTP layer of a :func:`.patched.text_model`; None: it has none."""
    return None if mtp_attention(text) is None else decoder_layers(text)[-1]


class Drafting:
    """The MTP layer of a text model on a cache: its rows, and what is still to be fed to it.

    Rows follow the cache's tokens, but for the first token of a sequence, which has no hidden state
    before it: that of the token at position ``p`` is row ``p - 1``. A row that the layer wrote of
    its own drafts is written again, with the model's hidden states, before it counts.
    """

    def __init__(self, model, text, cache: PagedCache):
        self.model, self.text, self.cache = model, text, cache
        self.layer, self.embedding = mtp_layer(text), text.get_input_embeddings()
        #: ``[B, n, H]`` the hidden states before the last n tokens, which the layer was not fed
        self.before = cache.sequences.hidden[:, None].clone()
        #: ``[B, S, H]`` those of the last forward, in the order of its tokens
        self.hidden: Tensor | None = None

    def keep(self, tokens: int) -> None:
        """Takes back what the last forward wrote, but of its first ``tokens`` tokens."""
        hidden, sequences = self.hidden, self.cache.sequences
        self.cache.crop(tokens - hidden.size(1))
        self.before = torch.cat([self.before, hidden[:, :tokens]], 1)
        sequences.hidden.copy_(hidden[:, tokens - 1])

    def draft(self, ids: Tensor, positions: Tensor, count: int) -> Tensor:
        """The ``count`` likeliest tokens ``[B, count]`` after ``ids``, one after the other.

        Args:
            ids: ``[B, T]``; the cache has all but the last.
            positions: ``[B, T]`` for RoPE.
        """
        new, drafts = self.before.size(1), ids[:, :0]
        state = self.feed(ids[:, -new:], self.before, positions[:, -new:], 1)[:, -1:]
        self.before = self.before[:, :0]
        head, hidden_of = self.model.get_output_embeddings(), parts_of(self.layer).hidden
        while True:
            token = head(hidden_of(self.layer, state)).argmax(-1)
            drafts = torch.cat([drafts, token], 1)
            if (done := drafts.size(1)) == count:
                return drafts
            state = self.feed(token, state, positions[:, -1:] + done, 1 + done)

    def finish(self, ids: Tensor, positions: Tensor) -> None:
        """Feeds the tokens that the cache has, for a later call on it."""
        if (new := self.before.size(1)) > 1:
            own = slice(-new, -1)
            self.feed(ids[:, own], self.before[:, :-1], positions[:, own], 0)

    def feed(self, ids: Tensor, before: Tensor, positions: Tensor, behind: int) -> Tensor:
        """``g`` ``[B, S, H]`` of tokens, the last of which is so many behind the cache's last."""
        ends, new = self.cache.lengths + behind, torch.arange(ids.size(1), device=ids.device)
        start = ends - ids.size(1)
        tokens = Tokens(
            start,
            ends,
            torch.ones_like(ids, dtype=torch.bool),
            start[:, None] + new,
            positions,
            slice(0, ids.size(1)),
        )
        return run(self.text, self.layer, self.cache, self.embedding(ids), before, tokens)


def follow(text, kwargs: dict, step: Step, hidden: Tensor) -> None:
    """Feeds the MTP layer the tokens of a forward on a cache with its rows, before they count.

    Args:
        kwargs: of the forward.
        hidden: its states, ``[B, S, ..]``.
    """
    cache = step.rows
    if not isinstance(cache, PagedCache) or cache.sequences.hidden is None:
        return
    if cache.drafting is not None:  # who drafts knows which tokens stay
        cache.drafting.hidden = hidden
        return
    embeddings = kwargs.get("inputs_embeds")
    if embeddings is None:
        embeddings = text.get_input_embeddings()(kwargs["input_ids"])
    before = torch.cat([cache.sequences.hidden[:, None], hidden[:, :-1]], 1)
    tokens = step.own._replace(position_ids=kwargs["position_ids"])
    run(text, mtp_layer(text), cache, embeddings, before, tokens)


def run(
    text, layer: nn.Module, cache: PagedCache, embeddings: Tensor, before: Tensor, tokens: Tokens
) -> Tensor:
    """``g`` ``[B, S, H]`` of tokens, whose rows this writes.

    Args:
        embeddings: of the tokens, ``[B, S, H]``; before: the hidden states of those before them.
    """
    embedded = joined(layer, embeddings, before)
    return called(text, layer, embedded, step_of(cache, tokens), tokens.position_ids, cache)


def called(
    text,
    layer: nn.Module,
    embedded: Tensor,
    step: Step,
    positions: Tensor,
    cache: PagedCache | None = None,
) -> Tensor:
    """The states ``[B, S, ..]`` of what is :func:`joined`, at the rows of ``step``."""
    output = layer(
        embedded,
        attention_mask=step,
        position_embeddings=parts_of(layer).angles(text, layer, embedded, positions),
        position_ids=positions,
        use_cache=cache is not None,
        **{CACHE: cache},
    )
    return output_of(layer, output)


def joined(layer: nn.Module, embeddings: Tensor, before: Tensor) -> Tensor:
    """``u`` ``[B, S, H]``, which the decoder layer takes."""
    return parts_of(layer).joined(layer, embeddings, before)


def output_of(layer: nn.Module, output) -> Tensor:
    """The states ``g`` ``[B, S, ..]`` from what the decoder layer returns."""
    return parts_of(layer).state(layer, output)


def step_of(cache: PagedCache, tokens: Tokens) -> Step:
    """The rows of the MTP layer for tokens of the model: one before each."""
    positions = tokens.positions - 1
    valid = tokens.valid & (positions >= 0)
    positions = positions.clamp(min=0)
    own = tokens._replace(
        start=(tokens.start - 1).clamp(min=0),
        lengths=(tokens.lengths - 1).clamp(min=0),
        valid=valid,
        positions=positions,
    )
    new_slots, layout, tables = None, cache.store.every_token, cache.store.tables
    if layout in tables:
        new_slots = slots(tables[layout], layout, positions, valid)
    return Step(cache, cache.sequences, own, own, new_slots)
