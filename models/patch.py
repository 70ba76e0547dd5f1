"""What :func:`models.use_custom_pypto` did to a model, as one record: applied and undone as a
whole."""

import shutil
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from . import calls, generation
from .absorbed import advise_on_bfloat16
from .architectures import attention_classes, check_widths
from .batch_invariant import check_invariant, make_invariant
from .cache.layout import CacheDtype, check_block_size, check_cache_dtypes
from .context_parallel import check_context_parallel
from .dequantization import Dequantized, dequantize, report, restore
from .index_sharing import Sharing
from .indexer_loss import (
    Divergence,
    Option,
    add_indexer_loss,
    begin_indexer_loss,
    check_indexer_loss,
)
from .mtp.decoding import generate
from .mtp.loss import add_mtp_loss, begin_mtp_loss, check_mtp_loss
from .mtp.parts import Streams
from .one_op import Head, derived, plain_class
from .patched import (
    attention_of,
    attentions_to_patch,
    decoder_layers,
    is_mtp,
    is_patched,
    mtp_attention,
    sizes,
    text_model,
    upstream_class,
)
from .projection import change_class, is_sharded
from .regions import Regions, get_compiled_call, valid_auto_compile_criteria
from .sharing import gather_sharded_state_dict_for_save
from .training import TRAINING, Training


def save_pretrained(model, save_directory, *args, **kwargs) -> None:
    """transformers', whose files of safetensors only their user may read; config.json beside them
    is as the umask says."""
    type(model).save_pretrained(model, save_directory, *args, **kwargs)
    config = Path(save_directory, "config.json")
    for file in Path(save_directory).glob("model*.safetensors") if config.is_file() else ():
        shutil.copymode(config, file)


# which a patched model has in place of its class's
METHODS = {
    "save_pretrained": save_pretrained,
    "_extract_generation_mode_kwargs": generation.extract_generation_mode_kwargs,
    "_prepare_cache_for_generation": generation.prepare_cache_for_generation,
    "_prepare_position_ids_for_generation": generation.prepare_position_ids_for_generation,
    "create_masks_for_generate": generation.create_masks_for_generate,
    "_valid_auto_compile_criteria": valid_auto_compile_criteria,
    "get_compiled_call": get_compiled_call,
    "gather_sharded_state_dict_for_save": gather_sharded_state_dict_for_save,
}


def name_of(hook) -> tuple[str, str]:
    return getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")


# by name: after a reload of this package its functions are others
HOOKS = {
    name_of(hook)
    for hook in (
        generation.prepare_forward,
        generation.finish_forward,
        begin_indexer_loss,
        add_indexer_loss,
        begin_mtp_loss,
        add_mtp_loss,
        Streams.keep,
    )
}
# torch's dicts of forward hooks and of what it knows about them
KINDS_OF_HOOKS = [name for name in vars(nn.Module()) if name.startswith("_forward_")]


@dataclass
class Patch:
    """The attribute ``_custom_pypto`` of a patched text model."""

    training: str  # the path of training forwards
    indexer_loss: Option
    cache: dict  # options of the caches that forwards and generate() create
    sizes: dict  # of patched.sizes
    dequantized: list[Dequantized]
    sharing: Sharing
    mtp_loss: float = 0.0  # what that of an MTP layer is multiplied by
    context_parallel: bool = False  # whether ranks share prompts
    batch_invariant: bool = False
    told: set[str] = field(default_factory=set)  # why it trained on the upstream path, if logged
    regions: Regions | None = None  # of the latest compile_config of generate()
    streams: Streams | None = None  # which an MTP layer takes

    def facts(self) -> list[tuple[str, object]]:
        """The options that ranks must share, by name."""
        return [*self.cache.items(), ("index_topk_pattern", self.sharing.pattern)]

    def apply(self, model, attentions: dict[int, nn.Module], paged: type) -> None:
        """In place of an earlier patch, if there is one. Nothing here can fail."""
        text = text_model(model)
        if (earlier := patch_of(model)) is not None:
            earlier.remove_hooks(model)
            if earlier.batch_invariant or self.batch_invariant:
                restore_classes(model)
            self.dequantized = earlier.dequantized + self.dequantized
        text._custom_pypto = self  # first: what an interruption leaves can be patched, or undone
        sources = self.sharing.sources
        for layer, attention in attentions.items():  # of an MTP layer, too
            change_class(attention, paged)
            attention.shares_selection = layer in sources
            attention.lends_selection = layer in sources.values()
            attention.batch_invariant = self.batch_invariant
        if self.batch_invariant:
            make_invariant(model, paged)
        else:
            use_ops(model, paged)
        for name, method in METHODS.items():
            setattr(model, name, partial(method, model))
        if mtp_attention(text) is not None:
            below = vars(model).get("generate")  # which reads experts in files
            model.generate = wraps(model.generate)(partial(generate, model, below))
            if paged.mtp.streams:
                self.streams = Streams()
                text.hc_head.register_forward_pre_hook(self.streams.keep)
        text.register_forward_hook(generation.finish_forward, with_kwargs=True)
        if self.indexer_loss.kind:
            model.register_forward_pre_hook(begin_indexer_loss, with_kwargs=True)
            model.register_forward_hook(add_indexer_loss, with_kwargs=True, always_call=True)
        if self.mtp_loss:
            model.register_forward_pre_hook(begin_mtp_loss, with_kwargs=True)
            model.register_forward_hook(add_mtp_loss, with_kwargs=True, always_call=True)
        # the last, as it hands the layers a step
        text.register_forward_pre_hook(generation.prepare_forward, with_kwargs=True)

    def __getstate__(self) -> dict:
        # compiled functions are of this process; the next compiled generate() makes others
        return vars(self) | {"regions": None}

    def undo(self, model) -> None:
        text = text_model(model)
        self.remove_hooks(model)
        layers = enumerate(decoder_layers(text))
        found = {i: attention_of(layer, is_patched) for i, layer in layers}
        attentions = {i: attention for i, attention in found.items() if attention is not None}
        for attention in attentions.values():
            for name in ("shares_selection", "lends_selection", "batch_invariant"):
                vars(attention).pop(name, None)
            change_class(attention, upstream_class(attention))
        restore_classes(model)
        restore(attentions, self.dequantized)
        del text._custom_pypto

    def remove_hooks(self, model) -> None:
        """Takes hooks, regions and methods from ``model``."""
        text = text_model(model)
        Regions.leave(text)
        streams = [text.hc_head] if self.streams is not None else []
        for module in (text, model, *streams):
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if name_of(hook) in HOOKS]:
                    for kind in KINDS_OF_HOOKS:
                        vars(module)[kind].pop(key, None)
        for name in METHODS:
            vars(model).pop(name, None)
        if mtp_attention(text) is not None and (patched := vars(model).pop("generate", None)):
            if (below := patched.args[1]) is not None:
                model.generate = below


def use_ops(model, paged: type) -> None:
    """Gives modules of upstream their mixins of :mod:`.one_op`."""
    for module in list(text_model(model).modules()):
        # transformers shards some by a forward of their own; stored experts have an op
        own = is_sharded(module) or getattr(module, "kind", None)
        if (mixin := paged.one_op.get(type(module))) and not own:
            change_class(module, derived(mixin, type(module)))
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and not is_sharded(head):
        change_class(head, Head)


def restore_classes(model) -> None:
    """Those of upstream, of all modules but attentions."""
    for module in list(model.modules()):
        if hasattr(cls := type(module), "is_mixed_in"):
            change_class(module, plain_class(cls))


def patch_of(model) -> Patch | None:
    """The patch of ``model``; None: it is not patched."""
    return vars(text_model(model)).get("_custom_pypto")


def use_custom_pypto(
    model: PreTrainedModel,
    *,
    block_size: int = 128,
    index_dtype: CacheDtype | None = None,
    kv_dtype: CacheDtype | None = None,
    training: Training = "auto",
    indexer_loss: Divergence | None = None,
    indexer_loss_coefficient: float = 1.0,
    mtp_loss_coefficient: float | None = None,
    context_parallel: bool = False,
    index_topk_freq: int | None = None,
    index_topk_pattern: str | None = None,
    batch_invariant: bool = False,
) -> PreTrainedModel:
    """Patches ``model`` to run on the ops: sparse attention over a paged cache.

    The patch replaces the lightning indexer and the attention of every layer, and the cache that
    ``generate()`` creates. Patching again only sets the options. Padding must be on the left; in
    training it may be on either side. Additions such as hooks or adapters, made before or after,
    take effect or raise: docs/models.md has the tables. A ``kv_b_proj`` whose weight alone is
    quantized by torchao, optimum-quanto or bitsandbytes is dequantized: docs/checkpoints.md.

    Args:
        model: of a class in :data:`models.architectures.ARCHITECTURES`, patched in place.
        block_size: tokens per cache block, a multiple of 16 up to 1024.
        index_dtype: ``torch.int8`` or ``"int8"`` for index keys and queries of a byte per value;
            None: the dtype of the model. See :class:`PagedCache`.
        kv_dtype: the same for cached latents, of models in bfloat16 or float16.
        training: the path of forwards in training mode without a cache. ``"ops"``: the ops, with
            gradients for all parameters but the indexers', which have none upstream either; memory
            grows linearly with the sequence, and no cache is returned. ``"upstream"``: upstream's
            dense attention. ``"auto"``: upstream where it takes fewer operations and little memory
            (:func:`models.training.upstream_is_cheaper`) or where the ops cannot run, else the ops.
        indexer_loss: a loss for the indexers, and for nothing else, in training forwards with
            gradients, which then always run on the ops: their divergence from the attention, summed
            over layers. ``"sparse"``: over the selected positions. ``"dense"``, to warm indexers
            up: over all positions, to which the model attends in training mode. The output has it
            as ``indexer_loss``, divided like the loss of the language model, without labels by
            the number of real tokens. None: none.
        indexer_loss_coefficient: what it is multiplied by in the output's ``loss``.
        mtp_loss_coefficient: what the loss of the layer for multi-token prediction counts in the
            output's ``loss``, in training forwards with labels, gradients and without a cache:
            these then always run on the ops. The output has it as ``mtp_loss``. None: 0.1, as at
            the end of DeepSeek-V3's training, for a model with the layer. 0: no such loss.
            docs/training.md has the definition.
        context_parallel: the ranks of torch's process group, which the caller initialises, take a
            part of the tokens of each prompt, and of each training forward on the ops. Every rank
            has the whole model, makes the same calls, and ends with the whole cache; gradients are
            right in their mean over the ranks. See docs/many_machines.md.
        index_topk_freq: layers share selections (IndexCache, arXiv:2603.12201), as in vLLM: of the
            layers that attend to selected positions the first two select, and from the second on
            every so many-th; the others attend to the selection of the last before them, score
            nothing and store no index keys. An ``index_skip_topk_offset`` of the config counts in
            place of the 2. 1: no more layers share than have no indexer. docs/shared_selections.md
            has what that costs.
        index_topk_pattern: the same by letters, ``F`` (full: the layer selects) and ``S`` (shared):
            one for each layer that attends to selected positions, or for each layer of the model,
            of which those of other layers mean nothing. None of both: by the keys of these names in
            the config, unless its ``use_index_cache`` is false, or by its ``indexer_types``.
        batch_invariant: the bits of a sequence's outputs depend neither on what runs beside it nor
            on chunks of its prompt, a cached prefix, padding or training: products, exponentials
            and means have one order of sums, which takes more time. Training runs on the ops. Not
            for models that ranks share or whose experts are in files, on NPUs, inside of autocast.
            See docs/reliability.md.
    Returns:
        ``model`` itself.
    Raises:
        TypeError: unsupported model class, wrapped attention, or a ``kv_b_proj`` or indexer with
            additions that the ops would bypass. Every forward repeats the check.
        ValueError: a model or an option that ``batch_invariant`` excludes; unsupported
            ``block_size``, ``index_topk``, width in the config, dtype of a cache, ``training`` or
            ``indexer_loss``; a frequency or pattern that gives the first layer no selection, or a
            layer without an indexer its own. With ``training="ops"`` or ``indexer_loss``, from a
            forward: dropout, attentions or a cache are requested, or the sequences are packed or
            padded in a way that the ops do not support.

    Example::

        model = transformers.AutoModelForCausalLM.from_pretrained("path/to/checkpoint")
        models.use_custom_pypto(model, block_size=64)
        model.generate(torch.tensor([[0, 1, 2]]), max_new_tokens=10)
    """
    upstream, paged = attention_classes("use_custom_pypto", model)
    check_block_size("use_custom_pypto", block_size)
    if training not in TRAINING:
        raise ValueError(
            f"use_custom_pypto: training must be {' or '.join(map(repr, TRAINING))}, "
            f"got {training!r}"
        )
    option = Option(indexer_loss, indexer_loss_coefficient)
    check_indexer_loss("use_custom_pypto", model, paged, training, option)
    if batch_invariant:
        check_invariant(model, paged, training, context_parallel)
    if context_parallel:
        check_context_parallel("use_custom_pypto", model, paged, indexer_loss)
    text = text_model(model)
    mtp_loss = check_mtp_loss(
        "use_custom_pypto", text, training, context_parallel, mtp_loss_coefficient
    )
    check_widths(text.config, paged.pools)
    dtypes = check_cache_dtypes("use_custom_pypto", text, paged, index_dtype, kv_dtype)
    attentions = attentions_to_patch(text, upstream, paged)
    dequantized = dequantize(attentions, text.dtype)
    own = {i: attention for i, attention in attentions.items() if not is_mtp(attention)}
    try:
        paged.check(attentions)
        sharing = Sharing.of(
            "use_custom_pypto",
            text.config,
            paged.pools,
            list(own),
            index_topk_freq,
            index_topk_pattern,
        )
        if (earlier := patch_of(model)) is not None and earlier.sharing != sharing:
            check_outside("use_custom_pypto", text, "to change which layers select")
        cache_sizes = sizes(text.config, paged.pools, own)
        if len(own) < len(attentions):
            cache_sizes["mtp"] = True
        if sharing.pattern is not None:
            cache_sizes["index_topk_pattern"] = sharing.pattern
    except Exception:
        restore(attentions, dequantized)
        raise
    report(dequantized)
    # the upstream path has no loss for indexers
    path = "ops" if indexer_loss or batch_invariant else training
    cache = {"block_size": block_size, **dtypes}
    patch = Patch(
        path,
        option,
        cache,
        cache_sizes,
        dequantized,
        sharing,
        mtp_loss,
        context_parallel,
        batch_invariant,
    )
    patch.apply(model, attentions, paged)
    plain = not any(getattr(module, "kind", None) for module in text.modules())
    if plain and text.dtype == torch.bfloat16 and text.device.type == "cpu":
        advise_on_bfloat16()
    return model


def use_transformers(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes :func:`use_custom_pypto` and restores the original model exactly.

    Returns:
        ``model`` itself, unchanged if it is not patched.
    Raises:
        TypeError: unsupported model class.
        ValueError: inside of :func:`record_indices` or :func:`replay_indices`, which would end.
    """
    attention_classes("use_transformers", model)
    if (patch := patch_of(model)) is not None:
        check_outside("use_transformers", text_model(model))
        patch.undo(model)
    return model


def check_outside(caller: str, text, why: str = "") -> None:
    if calls.around(text):
        raise ValueError(
            f"{caller}: must be called outside of record_indices and replay_indices of this model"
            f"{why and f' {why}'}, got a call inside; leave the context first"
        )
