"""Caches, masks and ``generate()`` of a patched model.

These functions become hooks and methods of the patched model only.
"""

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.peft import MIN_PEFT_VERSION

from custom_pypto.requirements import TRANSFORMERS, installed_version, numbers

from . import calls, context_parallel, indexer_loss, masks, training
from .batch_invariant import check_forward
from .cache import PagedCache, Step
from .index_sharing import SharedUpstream
from .memory import has_numbers, is_transformed
from .mtp import loss as mtp_loss
from .mtp.decoding import check_no_mtp
from .mtp.layer import follow
from .patched import (
    CACHE,
    CACHE_NAMES,
    checkpoints,
    differences,
    dimensions,
    dropout_of,
    patched_attentions,
    text_model,
)
from .projection import check_adapters_of_ranks
from .sharing import check_requests

# positional arguments of the upstream base models
FORWARD_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", CACHE)
FORWARD_ARGUMENTS += ("inputs_embeds", "use_cache")


def prepare_forward(model, args: tuple, kwargs: dict):
    """Forward pre-hook of the base model: :func:`prepare`, and the contexts of this thread."""
    prepared = prepare(model, args, kwargs)
    contexts = calls.around(model)
    if prepared is None and model._custom_pypto.sharing.pattern is not None:
        contexts = (*contexts, SharedUpstream(model))
    if not contexts:
        return prepared
    args, kwargs = prepared or (args, kwargs)
    step: Step | None = kwargs["attention_mask"]["indexed_attention"] if prepared else None
    named = {**dict(zip(FORWARD_ARGUMENTS, args, strict=False)), **kwargs}
    fed = named.get("inputs_embeds")
    batch, tokens = (named["input_ids"] if fed is None else fed).shape[:2]
    for context in contexts:
        context.begins(step, batch, tokens if step is None else step.whole.count())
    return args, kwargs | {calls.NAME: calls.Around(contexts, step)}


def prepare(model, args: tuple, kwargs: dict):
    """The arguments of a forward, and for the layers a :class:`Step` in place of the attention
    mask; None: this one takes the upstream path.

    In training mode without a cache, :mod:`.training` decides. In evaluation mode the upstream path
    runs inside transforms of ``torch.func``, and without ``use_cache`` for sequences packed into
    one row of the batch.
    """
    # names the positional arguments, in the order of the upstream forward
    kwargs = {**dict(zip(FORWARD_ARGUMENTS, args, strict=False)), **kwargs}
    loss, of_mtp = kwargs.pop(indexer_loss.NAME, None), kwargs.pop(mtp_loss.NAME, None)
    rename_cache("patched model", kwargs)
    attentions = patched_attentions(model)
    attention = next(iter(attentions.values()))
    request = masks.read(model, attention, kwargs)
    step: Step | None = None
    if request.cache is None:
        for i, each in attentions.items():  # upstream, too, their gradients are wrong
            check_adapters_of_ranks(i, each)
    if request.cache is None and model.training:
        if step := training.step_of(model, attentions, request, loss, of_mtp):
            kwargs["use_cache"] = False
    elif request.cache is not None or not (is_transformed() or masks.is_packed(request)):
        cache = cache_of(model, attentions, request)
        step = place(model, attentions, request, cache)
        kwargs[CACHE] = cache if request.cache is not None or request.keeps_cache else None
    if model._custom_pypto.batch_invariant:
        check_forward(step)
    if step is None:
        return None
    if model._custom_pypto.context_parallel and step.own.count() > 1:
        step, kwargs = context_parallel.share(model, step, kwargs)
    return (), kwargs | arguments(model, attention, request, step)


def cache_of(model, attentions: dict[int, nn.Module], request: masks.Request) -> PagedCache:
    """The cache of a forward, with room for its tokens: the caller's, or one of its own, which
    grows if the caller gets it and is dropped else."""
    next(iter(attentions.values())).check(attentions)
    if request.output_attentions:
        raise ValueError(
            "patched model: output_attentions must be False (the ops never form the attention "
            "matrix), got True; call models.use_transformers(model) for the upstream path"
        )
    if dropout := dropout_of(attentions):
        raise ValueError(
            "patched model: attention_dropout must be 0 in attentions in training mode, but for "
            "training forwards without a cache (the ops have no dropout), got "
            f"{dropout}; call model.eval(), or model.train() and omit {CACHE}"
        )
    if (cache := request.cache) is None:
        spare = model._custom_pypto.cache["block_size"] if request.keeps_cache else 0
        return own_cache(model, request.batch, request.tokens + spare)
    check_cache(cache, model, attentions)
    if cache.grows and not isinstance(request.mask, dict):  # generate() has made room already
        grow(cache, request.tokens)
    return cache


def place(
    model, attentions: dict[int, nn.Module], request: masks.Request, cache: PagedCache
) -> Step:
    """The new tokens of a forward on ``cache``."""
    if cache.store.recurrent and checkpoints(model):
        raise ValueError(
            "patched model: gradient checkpointing must be off in training mode with a cache that "
            "has states of linear attention (transformers gives checkpointed layers no cache), got "
            "it on; call model.eval() or model.gradient_checkpointing_disable() before"
        )
    cache.check_batch(request.batch)
    real = masks.new_tokens(request.mask, cache.sequences, request.tokens)
    if next(iter(attentions.values())).counting.columns:
        masks.check_pauses(real, cache.sequences)
    return cache.place(request.batch, request.tokens, real, request.positions)


def rename_cache(caller: str, kwargs: dict) -> None:
    """Gives a cache under either name the one of the installed transformers, which would drop the
    other in silence, or prefer it to its own.

    Raises:
        ValueError: two caches.
    """
    given = [kwargs.pop(name, None) for name in CACHE_NAMES]
    given = [cache for cache in given if cache is not None]
    if len(given) > 1:
        raise ValueError(
            f"{caller}: {' and '.join(CACHE_NAMES)} are two names of one argument, got both; pass "
            f"{CACHE}"
        )
    if given:
        kwargs[CACHE] = given[0]


def arguments(model, attention: nn.Module, request: masks.Request, step: Step) -> dict:
    """What the layers get: the step in place of the masks, and positions, those of the caller or
    those of the step."""
    in_place_of_masks = dict.fromkeys(["indexed_attention", *model.config.layer_types], step)
    real = step.rows.real if isinstance(step.rows, training.TrainingRows) else step.own.valid
    if "linear_attention" in in_place_of_masks:
        in_place_of_masks["linear_attention"] = real
    given, positions = request.rotating, step.own.position_ids
    if attention.counting.axes and given is not None:
        positions = step.part(given, -1)
    if attention.counting.positions:
        if problem := masks.problem_of_positions(given, step.own.positions, real):
            raise ValueError(f"patched model: {problem}; omit them, or {masks.UPSTREAM}")
        positions = step.own.positions.clamp(min=0) if given is None else given
    return {"attention_mask": in_place_of_masks, "position_ids": positions}


@torch.compiler.disable(reason=f"pass {CACHE}=models.PagedCache(...) to a compiled forward")
def own_cache(model, batch_size: int, max_cache_len: int) -> PagedCache:
    """Creates the cache of a forward that got none."""
    cache = PagedCache(model, batch_size, max_cache_len, **model._custom_pypto.cache)
    cache.grows = True
    return cache


@torch.compiler.disable(reason="a cache created by a forward grows; create one of a fixed size")
def grow(cache: PagedCache, tokens: int) -> None:
    """Makes room for ``tokens`` more per sequence; a fake cache has no length."""
    if has_numbers(cache.seen):
        cache.reserve(int(cache.seen) + tokens)


def finish_forward(model, args: tuple, kwargs: dict, output):
    """Forward hook of the base model: the tokens of a completed forward count from now on, and the
    loss of its indexers is complete."""
    mask, of_mtp = kwargs.get("attention_mask"), model._custom_pypto.streams
    streams = None if of_mtp is None else of_mtp.take()
    if isinstance(mask, dict) and isinstance(step := mask.get("indexed_attention"), Step):
        states = output[0] if streams is None else streams
        if (loss := getattr(step.rows, "mtp_loss", None)) is not None:
            loss.run(model, kwargs, step, states)
        follow(model, kwargs, step, states)
        step.rows.finish(step, states)
        if step.pieces is not None:
            return context_parallel.whole_output(step, output)
    return output


def extract_generation_mode_kwargs(model, custom_generate, kwargs: dict, *args) -> dict:
    """What ``generate()`` calls first, with its arguments for the model."""
    rename_cache("generate", kwargs)
    check_no_mtp(kwargs.get("use_mtp"))  # of a model with one, its own generate() takes the option
    return type(model)._extract_generation_mode_kwargs(model, custom_generate, kwargs, *args)


def prepare_cache_for_generation(
    model, generation_config, model_kwargs, generation_mode, batch_size, max_length
):
    """Creates the cache of ``generate()``, or validates the one passed to it."""
    kind = generation_config.cache_implementation
    if kind not in (None, "dynamic"):
        raise ValueError(
            "generate: cache_implementation must be None or 'dynamic' for a patched model, "
            f"got {kind!r}; omit it, or pass {CACHE}=models.PagedCache(...)"
        )
    check_requests(model, generation_config, text_model(model)._custom_pypto.context_parallel)
    rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
    if virtual := virtual_tokens(model):
        check_peft()
    # transformers does not cut the drafts of prompt lookup
    max_length += virtual + (generation_config.prompt_lookup_num_tokens or 0)
    cache = model_kwargs.get(CACHE)
    if cache is None and generation_config.use_cache is not False:
        options = text_model(model)._custom_pypto.cache
        cache = PagedCache(model, rows, max_length, **options)
        model_kwargs[CACHE] = cache
        return
    if cache is not None:
        text = text_model(model)
        check_cache(cache, text, patched_attentions(text))
        if cache.grows:
            cache.reserve(max_length)
        if cache.max_cache_len < max_length or cache.batch_size != rows:
            raise ValueError(
                f"generate: {CACHE} must be a PagedCache with batch_size={rows} and "
                f"max_cache_len of at least {max_length}, got {cache}"
            )
        mask, seen = model_kwargs.get("attention_mask"), int(cache.get_seq_length())
        # upstream would feed the wrong ids and continue another text
        if mask is not None and seen and mask.size(1) <= seen:
            known = mask.size(1)
            raise ValueError(
                f"generate: input_ids must have more than the {seen} tokens per sequence that the "
                f"cache holds, got {known}; pass the whole conversation, or drop tokens from the "
                f"cache: crop({known - 1 - seen}) or reset()"
            )
    type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_length
    )


def prepare_position_ids_for_generation(model, inputs: Tensor, model_kwargs: dict) -> Tensor:
    """The positions of ``generate()``, if the caller gave none. Upstream counts on from the last;
    where windows follow the count of real tokens, a row of padding alone ends before the first."""
    positions = type(model)._prepare_position_ids_for_generation(model, inputs, model_kwargs)
    mask, text = model_kwargs.get("attention_mask"), text_model(model)
    attention = next(iter(patched_attentions(text).values()))
    if attention.counting.positions and isinstance(mask, Tensor) and mask.shape == positions.shape:
        positions = positions.masked_fill(~mask.bool().any(1, keepdim=True), -1)
    return positions


def virtual_tokens(model) -> int:
    """Those that peft's prompt tuning puts in front of the tokens of ``generate()``."""
    # peft puts a method of its own in place of the model's while it generates
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    tuned = getattr(owner, "active_peft_config", None)
    return getattr(tuned, "num_virtual_tokens", None) or 0


def check_peft() -> None:
    """Rejects a peft that knows the cache by another name only: it takes each step for the first,
    and puts the virtual tokens in front of every new one."""
    found = installed_version("peft")
    if numbers(found) < numbers(MIN_PEFT_VERSION):
        raise ValueError(
            f"generate: prompt tuning needs the peft that transformers {transformers.__version__} "
            f"asks for, {MIN_PEFT_VERSION} or newer, got {found}; pip install "
            f"'peft>={MIN_PEFT_VERSION}', or an older 'transformers=={TRANSFORMERS[0]}.*'"
        )


def create_masks_for_generate(model, config, inputs_embeds, attention_mask, **kwargs):
    """``generate()`` calls this outside of the compiled forward, where the mask may still grow
    with the sequence and lengths can be read."""
    if virtual_tokens(model):  # whose ones peft will put in front of the mask
        return attention_mask
    tokens, cache = inputs_embeds.shape[1], kwargs[CACHE]
    cache.check_room(tokens)
    return masks.for_generate(attention_mask, cache.sequences, tokens, cache.max_cache_len)


def check_cache(cache, text, attentions: dict[int, nn.Module]) -> None:
    if not isinstance(cache, PagedCache):
        raise TypeError(
            f"patched model: {CACHE} must be a models.PagedCache, got "
            f"{type(cache).__name__}; omit it, and use no prefix tuning, or call "
            "models.use_transformers(model) for the upstream path"
        )
    if torch.compiler.is_compiling():  # generate() has validated it already
        return
    if cache.made_for != (wanted := dimensions(text, attentions)):
        made, wanted = differences(cache.made_for, wanted)
        raise ValueError(
            f"PagedCache: created for a model with {made}, got one with {wanted}; create one for "
            "this model"
        )
