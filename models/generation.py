"""What a swapped model does differently around its layers: caches, masks and ``generate()``.

These functions become a forward pre-hook and two methods of the one model that is swapped.
"""

import torch
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from .cache import PagedCache, Step, dimensions
from .projection import check_layer

# of the stock base models, in their order
FORWARD_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "past_key_values")
FORWARD_ARGUMENTS += ("inputs_embeds", "use_cache")


def prepare_forward(block_size: int, model, args: tuple, kwargs: dict):
    """Before every forward of the base model: makes room in the cache for the new tokens and hands
    the layers a :class:`Step` in place of the attention mask.

    Without ``past_key_values``: in training mode the stock path runs, since the ops have no
    backward, and so it does for sequences packed into one row; otherwise this forward gets a cache
    of its own, which it returns if ``use_cache`` is on (one that grows) and forgets if not.
    """
    # **{}: the names of positional arguments, whose order is that of the stock forward
    kwargs = {**dict(zip(FORWARD_ARGUMENTS, args, strict=False)), **kwargs}
    cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
    if cache is None:
        keep = model.config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]
        if model.training or (not keep and is_packed(mask, kwargs.get("position_ids"))):
            return None
    elif model.training and model.config.attention_dropout:
        raise ValueError(
            "attention_dropout: the ops drop nothing; call model.eval(), or leave past_key_values "
            "out for the stock path"
        )
    if kwargs.get("output_attentions", getattr(model.config, "output_attentions", False)):
        raise ValueError(
            "output_attentions: the ops never form the attention matrix; "
            "call models.use_transformers(model) to get it from the stock path"
        )
    ids, embeddings = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    batch, tokens = (ids if embeddings is None else embeddings).shape[:2]
    for i, layer in enumerate(model.layers):
        attention = layer.self_attn
        check_layer(i, attention, attention.indexer_class)
    if cache is None:
        cache = own_cache(model, batch, tokens + block_size if keep else tokens, block_size)
        kwargs["past_key_values"] = cache if keep else None
    else:
        check_cache(cache, model)
        if cache.grows and not isinstance(mask, dict):  # generate() has made room before
            grow(cache, tokens)
    if kwargs.get("position_ids") is None:  # stock would count after the cache has grown
        positions = cache.get_seq_length() + torch.arange(tokens, device=cache.seen.device)
        kwargs["position_ids"] = positions[None]
    step = cache.place(batch, tokens, new_tokens(mask, tokens))
    kwargs["attention_mask"] = {"indexed_attention": step}
    return (), kwargs


def is_packed(attention_mask: Tensor | None, position_ids: Tensor | None) -> bool:
    """Whether transformers takes a row for several sequences, as it does from positions that start
    again. A graph cannot tell; the mask that the stock path makes there is right for both."""
    if attention_mask is not None or position_ids is None:
        return False
    return find_packed_sequence_indices(position_ids) is not None


@torch.compiler.disable(reason="pass past_key_values=models.PagedCache(...) to a compiled forward")
def own_cache(model, batch_size: int, max_cache_len: int, block_size: int) -> PagedCache:
    """The cache of a forward that was given none."""
    cache = PagedCache(model, batch_size, max_cache_len, block_size=block_size)
    cache.grows = True
    return cache


@torch.compiler.disable(reason="a cache that a forward made grows; make one of a fixed size")
def grow(cache: PagedCache, tokens: int) -> None:
    """Room for as many more tokens per sequence."""
    cache.reserve(int(cache.seen) + tokens)


def finish_forward(model, args: tuple, kwargs: dict, output) -> None:
    """After every forward of the base model that is through: its tokens count from now on."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict) and isinstance(step := mask.get("indexed_attention"), Step):
        step.commit()


def prepare_cache_for_generation(
    model, block_size, generation_config, model_kwargs, generation_mode, batch_size, max_length
):
    """``generate()`` makes its cache here, or checks the one it is given."""
    kind = generation_config.cache_implementation
    if kind not in (None, "dynamic"):
        raise ValueError(
            "cache_implementation: a model swapped by use_custom_pypto has its own cache, "
            f"got {kind!r}; leave it out, or pass past_key_values=models.PagedCache(...)"
        )
    rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
    cache = model_kwargs.get("past_key_values")
    if cache is None and generation_config.use_cache is not False:
        cache = PagedCache(model, rows, max_length, block_size=block_size)
        model_kwargs["past_key_values"] = cache
        return
    if cache is not None:
        check_cache(cache, model)
        if cache.grows:
            cache.reserve(max_length)
        if cache.max_cache_len < max_length or cache.batch_size != rows:
            raise ValueError(
                f"generate: needs a PagedCache with batch_size={rows} and max_cache_len of at "
                f"least {max_length}, got {cache}"
            )
        mask, seen = model_kwargs.get("attention_mask"), int(cache.get_seq_length())
        # stock feeds the wrong ids then, and continues another text
        if mask is not None and seen and mask.size(1) <= seen:
            known = mask.size(1)
            raise ValueError(
                f"generate: needs more ids than the {seen} tokens per sequence that the cache has, "
                f"those included, got {known}; crop({known - 1 - seen}) makes it forget what the "
                "ids do not have, reset() everything"
            )
    type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_length
    )


def create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values, **kwargs):
    """``generate()`` calls this outside of the compiled forward, where the mask may still grow
    with the sequence and lengths can be read."""
    tokens = inputs_embeds.shape[1]
    past_key_values.check_room(tokens)
    return {"indexed_attention": new_tokens(attention_mask, tokens)}


def check_cache(cache, model) -> None:
    if not isinstance(cache, PagedCache):
        raise TypeError(
            "past_key_values: a model swapped by use_custom_pypto needs a models.PagedCache, "
            f"got {type(cache).__name__}"
        )
    if torch.compiler.is_compiling():  # generate() has been here before
        return
    if (made := cache.made_for) != (wanted := dimensions(model)):
        names = [name for name in made | wanted if made.get(name) != wanted.get(name)]
        raise ValueError(
            f"PagedCache: made for a model with {listed(made, names)}, got one with "
            f"{listed(wanted, names)}; make one for this model"
        )


def listed(values: dict, names: list[str]) -> str:
    return ", ".join(f"{name}={values.get(name)}" for name in names)


def new_tokens(attention_mask: Tensor | dict | None, tokens: int) -> Tensor | None:
    """Which of the ``tokens`` new tokens are real, ``[B, tokens]`` bool; None: all of them."""
    if isinstance(attention_mask, dict):
        return attention_mask["indexed_attention"]
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.size(1) < tokens:
        raise ValueError(
            f"attention_mask must be [B, tokens so far] with at least the {tokens} new tokens, "
            f"got {list(attention_mask.shape)}; masks of other shapes need the stock path"
        )
    mask = attention_mask.bool()
    # one look per prefill; a single new token (decode) is spared it, and a graph cannot take it
    if tokens > 1 and not torch.compiler.is_compiling() and (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError(
            "attention_mask: pads must be left of all real tokens, got a 0 right of a 1; "
            "set tokenizer.padding_side = 'left'"
        )
    return mask[:, -tokens:]
