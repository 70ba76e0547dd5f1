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

from .. import calls
from ..architectures import ARCHITECTURES, attention_class
from ..attention import Mtp
from ..cache import PagedCache, Step, Tokens
from ..cache.store import slots
from ..patched import CACHE, MTP, decoder_layers, mtp_attention, text_model
from .leads import MOST
from .parts import Parts, StreamParts, logits_of, parts_of
from .plain import PlainLayer

#: key of config.json with the number of such layers
LAYERS = "num_nextn_predict_layers"
#: key that says that drafts share the selection of the first one
SHARE = "index_share_for_mtp_iteration"
#: why the layers that drafts come from in other checkpoints are not MTP layers
OTHERS = {
    "MistralLarge4ForConditionalGeneration": "whose checkpoint has DSpark layers instead",
    "HYV4VLForConditionalGeneration": "whose layer would need the positions of images",
}


def check_mtp(caller: str, config, model_class: type) -> None:
    """Rejects models of which no MTP layer is known, and configs without one.

    Raises:
        ValueError: names the model, or the key of the config.
    """
    if not ARCHITECTURES[model_class.__name__].mtp:
        supported = ", ".join(name for name, it in ARCHITECTURES.items() if it.mtp)
        why = f" ({OTHERS[name]})" if (name := model_class.__name__) in OTHERS else ""
        raise ValueError(
            f"{caller}: mtp must be False for a {name}{why}, got True: supported are the MTP "
            f"layers of {supported}"
        )
    if not has_mtp(config, model_class):
        layers = getattr(config.get_text_config(), LAYERS, None)
        raise ValueError(
            f"{caller}: mtp needs a config.json with {LAYERS} = 1, which says that the checkpoint "
            f"has such a layer, got {layers}; omit mtp"
        )


def has_mtp(config, model_class: type) -> bool:
    """Whether a checkpoint with this config says that it has a layer that :func:`check_mtp`
    accepts."""
    name = model_class.__name__
    if not ARCHITECTURES[name].mtp:
        return False
    return getattr(config.get_text_config(), LAYERS, None) == 1 or attention_class(name).mtp.always


def config_of(config, mtp: Mtp):
    """The config of a model with the MTP layer as its last one."""
    keys = config.to_dict()
    for name, own in mtp.types.items():
        if keys.get(name):
            keys[name] = [*keys[name], own or keys[name][-1]]
    if own := keys.get("per_layer_config"):  # as the first layer of its type
        first = keys["layer_types"].index(keys["layer_types"][-1])
        like = {int(i): values for i, values in own.items()}.get(first, {})
        keys["per_layer_config"] = own | {keys["num_hidden_layers"]: like}
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
    text, mtp = text_model(model), attention_class(type(model).__name__).mtp
    config, last = config_of(text.config, mtp), text.layers[-1]
    layer = type(last)(config, len(text.layers))
    if mtp.plain:
        layer = PlainLayer(layer)
    if mtp.embeds:
        embedding = text.get_input_embeddings()
        layer.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, embedding.padding_idx
        )
    (StreamParts if mtp.streams else Parts).add(layer, text)
    layer.self_attn.is_mtp = True
    for module in layer.mlp.modules():
        if hasattr(module, "config"):  # of the model, which says how experts compute
            module.config = text.config
    for module in layer.modules():
        text._init_weights(module)
    like = text.get_input_embeddings().weight  # some norms are in float32
    layer.to(like.device, like.dtype)
    layer.train(model.training)
    if mtp.streams:
        setattr(text, MTP, nn.ModuleList([layer]))
        for part in (text, model):
            for plan in (part.tp_plan, part.ep_plan):  # how ranks share a layer
                rules = [rule for rule in plan if "layers.*" in rule]
                plan.update({x.replace("layers.*", f"{MTP}.*", 1): plan[x] for x in rules})
    else:
        text.layers.append(layer)
    setattr(text.config, LAYERS, 1)
    return layer


def mtp_layer(text) -> nn.Module | None:
    """The MTP layer of a :func:`.patched.text_model`; None: it has none."""
    return None if mtp_attention(text) is None else decoder_layers(text)[-1]


def embedding_of(text) -> nn.Module:
    """The embedding of the tokens that the MTP layer gets: its own, or the model's."""
    return getattr(mtp_layer(text), "embed_tokens", None) or text.get_input_embeddings()


class FirstSelection(calls.Context):
    """Later drafts attend to the positions that the layer selected for the first: none of them is
    that of a draft."""

    def __init__(self, text):
        super().__init__(text, {})
        self.indices: Tensor | None = None

    def given(self, attention: nn.Module, step: Step) -> Tensor | None:
        return self.indices

    def taken(self, attention: nn.Module, step: Step, indices: Tensor) -> None:
        self.indices = indices[:, -1:]


class Drafting:
    """The MTP layer of a text model on a cache: its rows, and what is still to be fed to it.

    Rows follow the cache's tokens, but for the first token of a sequence, which has no hidden state
    before it: that of the token at position ``p`` is row ``p - 1``. A row that the layer wrote of
    its own drafts is written again, with the model's hidden states, before it counts.
    """

    def __init__(self, model, text, cache: PagedCache):
        self.model, self.text, self.cache = model, text, cache
        self.layer, self.embedding = mtp_layer(text), embedding_of(text)
        #: ``[n, ..]`` of each sequence, the states of its last n tokens in the cache
        self.states = list(cache.sequences.hidden[:, None].clone())
        #: of these the last ones, whose next tokens the layer was not fed
        self.unfed = [1] * cache.batch_size
        #: ``[B, S, ..]`` those of the last forward, in the order of its tokens
        self.hidden: Tensor | None = None

    def __enter__(self) -> "Drafting":
        self.cache.drafting = self
        self.cache.store.keep_states(True)
        self.padding = self.cache.seen - self.cache.lengths
        return self

    def __exit__(self, *_) -> None:
        self.cache.drafting = None
        self.cache.store.keep_states(False)
        # an interruption may leave sequences ahead of others
        columns = self.cache.lengths + self.padding
        ahead = (columns - columns.min()).tolist()
        if any(ahead):
            self.cache.sequences.take_back(ahead, int(columns.min()))

    def keep(self, removed: list[int]) -> None:
        """Takes the hidden states of the last forward, and back the last ``removed`` tokens of each
        sequence."""
        cache, hidden = self.cache, self.hidden
        for i, states in enumerate(self.states):
            unfed = self.unfed[i] + hidden.size(1)
            states = torch.cat([states, hidden[i]])[: len(states) + hidden.size(1) - removed[i]]
            self.unfed[i] = max(1, unfed - removed[i])
            # what is ahead may be taken back to the state before it
            self.states[i] = states[-self.unfed[i] - MOST - 1 :]
        if len(set(removed)) == 1:
            cache.crop(-removed[0])
        else:
            columns = cache.lengths + self.padding - cache.lengths.new_tensor(removed)
            cache.sequences.take_back(removed, int(columns.max()))
        cache.sequences.hidden.copy_(torch.stack([states[-1] for states in self.states]))

    def draft(self, ends: list[Tensor], positions: Tensor, count: int) -> Tensor:
        """The ``count`` likeliest tokens ``[B, count]`` after each of ``ends``, one after the
        other.

        Args:
            ends: a text for each sequence, of whose columns the cache has all but the last.
            positions: ``[B, T]`` of all columns for RoPE.
        """
        window = self.window(ends, positions, 0)
        shared = (FirstSelection(self.text),) if getattr(self.text.config, SHARE, False) else ()
        state = self.feed(*window, 1, shared)[:, -1:]
        self.unfed = [0] * len(ends)
        hidden_of = parts_of(self.layer).hidden
        drafts, last = positions.new_empty(len(ends), 0), window[2][:, -1:]
        while True:
            token = logits_of(self.model, hidden_of(self.layer, state)).argmax(-1)
            drafts = torch.cat([drafts, token], 1)
            if (done := drafts.size(1)) == count:
                return drafts
            valid = torch.ones_like(token, dtype=torch.bool)
            state = self.feed(token, state, last + done, valid, 1 + done, shared)

    def finish(self, ids: Tensor, positions: Tensor) -> None:
        """Feeds the tokens that the cache has, for a later call on it."""
        if max(self.unfed) > 1:
            self.feed(*self.window(list(ids), positions, 1), 0)

    def window(
        self, ends: list[Tensor], positions: Tensor, less: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The last tokens that the layer was not fed, the hidden states before them, their
        positions and whether they are any, right-aligned, but for the last ``less``."""
        size = max(self.unfed) - less
        tokens, before, places, valid = [], [], [], []
        for i, end in enumerate(ends):
            own = max(self.unfed[i] - less, 0)
            columns = torch.arange(len(end) - less - size, len(end) - less, device=end.device)
            columns = columns.clamp(min=0)
            states = self.states[i][len(self.states[i]) - less - own :][:own]
            tokens.append(end[columns])
            before.append(torch.cat([states.new_zeros(size - own, *states.shape[1:]), states]))
            places.append(positions.expand(len(ends), -1)[i][columns])
            valid.append(torch.arange(size, device=end.device) >= size - own)
        return tuple(torch.stack(x) for x in (tokens, before, places, valid))

    def feed(
        self,
        ids: Tensor,
        before: Tensor,
        positions: Tensor,
        valid: Tensor,
        behind: int,
        contexts: tuple[calls.Context, ...] = (),
    ) -> Tensor:
        """``g`` ``[B, S, H]`` of tokens, right-aligned where they are ``valid``, the last of which
        is so many behind the cache's last."""
        ends, new = self.cache.lengths + behind, torch.arange(ids.size(1), device=ids.device)
        first = ends - ids.size(1)
        tokens = Tokens(
            ends - valid.sum(1).to(ends.dtype),
            ends,
            valid,
            first[:, None] + new,
            positions,
            slice(0, ids.size(1)),
        )
        embeddings = self.embedding(ids)
        return run(self.text, self.layer, self.cache, embeddings, before, tokens, contexts)


def follow(text, kwargs: dict, step: Step, hidden: Tensor) -> None:
    """Feeds the MTP layer the tokens of a forward on a cache with its rows, before they count.

    Args:
        kwargs: of the forward.
        hidden: its states, ``[B, S, ..]``.
    """
    cache = step.rows
    # a cache that ends with its forward has no drafts
    if kwargs.get(CACHE) is None or cache.sequences.hidden is None:
        return
    if cache.drafting is not None:  # who drafts knows which tokens stay
        cache.drafting.hidden = hidden
        return
    embeddings = kwargs.get("inputs_embeds")
    if embeddings is None:
        embeddings = embedding_of(text)(kwargs["input_ids"])
    before = torch.cat([cache.sequences.hidden[:, None], hidden[:, :-1]], 1)
    tokens = step.own._replace(position_ids=kwargs["position_ids"])
    run(text, mtp_layer(text), cache, embeddings, before, tokens)


def run(
    text,
    layer: nn.Module,
    cache: PagedCache,
    embeddings: Tensor,
    before: Tensor,
    tokens: Tokens,
    contexts: tuple[calls.Context, ...] = (),
) -> Tensor:
    """``g`` ``[B, S, H]`` of tokens, whose rows this writes.

    Args:
        embeddings: of the tokens, ``[B, S, H]``; before: the hidden states of those before them.
        contexts: around this call of the layer.
    """
    embedded = joined(layer, embeddings, before)
    step, positions = step_of(cache, tokens), tokens.position_ids
    return called(text, layer, embedded, step, positions, cache, contexts)


def called(
    text,
    layer: nn.Module,
    embedded: Tensor,
    step: Step,
    positions: Tensor,
    cache: PagedCache | None = None,
    contexts: tuple[calls.Context, ...] = (),
) -> Tensor:
    """The states ``[B, S, ..]`` of what is :func:`joined`, at the rows of ``step``."""
    output = layer(
        embedded,
        attention_mask=step,
        position_embeddings=mtp_attention(text).rotations(text, embedded, positions),
        position_ids=positions,
        use_cache=cache is not None,
        **{CACHE: cache, calls.NAME: calls.Around(contexts, step)},
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
