"""Patches transformers' models with DeepSeek sparse attention to use the ops of
:mod:`custom_pypto`::

    from custom_pypto import models

    model = models.load("path/to/checkpoint")           # or, for an existing model:
    model = models.use_custom_pypto(model)
    model.generate(input_ids, max_new_tokens=100)

The patch changes the class of the model's attention modules, norms, routers and experts: same
parameters, same state dict, no copies. transformers and other models are unchanged.
"""

import sys

if __name__ == "models":  # in the repository's root: the same modules under both names
    import custom_pypto.models  # noqa: F401

    for name in [name for name in sys.modules if name.startswith("custom_pypto.models")]:
        sys.modules[name.removeprefix("custom_pypto.")] = sys.modules[name]

from custom_pypto.requirements import transformers_problem

if _problem := transformers_problem():
    raise ImportError(f"custom_pypto.models: {_problem}")

from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import GenerationConfig, PreTrainedModel  # noqa: E402

from custom_pypto import hub  # noqa: E402

from . import quantized_weights  # noqa: E402
from .absorbed import advise_on_bfloat16  # noqa: E402
from .architectures import attention_classes, check_widths, supported_model  # noqa: E402
from .cache import PagedCache  # noqa: E402
from .cache.layout import check_block_size, check_cache_dtypes  # noqa: E402
from .checkpoint import check_shards, first_layers  # noqa: E402
from .context_parallel import check_context_parallel  # noqa: E402
from .dequantization import dequantize, report, restore  # noqa: E402
from .indexer_loss import Option, check_indexer_loss  # noqa: E402
from .loading import (  # noqa: E402
    Reader,
    check_device,
    check_dtype,
    check_memory,
    check_scale_values,
    dtypes_of,
    parameters,
    reading,
    resolve_dtype,
)
from .patch import Patch, patch_of  # noqa: E402
from .patched import CACHE, attentions_to_patch, sizes, text_model  # noqa: E402
from .replay import record_indices, replay_indices  # noqa: E402
from .sharing import (  # noqa: E402
    LOAD_ALIKE,
    check_agreement,
    check_sharing,
    facts_of_config,
    facts_of_files,
    facts_of_weights,
    own_device,
    plan_of,
    share_experts_alone,
)
from .training import TRAINING  # noqa: E402
from .weights.choice import Weights, check_stored, check_weights, kinds_of  # noqa: E402
from .weights.modules import convert  # noqa: E402
from .weights.quantizer import StoredWeights, stored_kinds  # noqa: E402

__all__ = [
    "CACHE",
    "PagedCache",
    "load",
    "record_indices",
    "replay_indices",
    "use_custom_pypto",
    "use_transformers",
]


def use_custom_pypto(
    model: PreTrainedModel,
    *,
    block_size: int = 128,
    index_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    training: str = "auto",
    indexer_loss: str | None = None,
    indexer_loss_coefficient: float = 1.0,
    context_parallel: bool = False,
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
        index_dtype: ``torch.int8`` for index keys and queries of a byte per value; None: the dtype
            of the model. See :class:`PagedCache`.
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
        context_parallel: the ranks of torch's process group, which the caller initialises, take a
            part of the tokens of each prompt, and of each training forward on the ops. Every rank
            has the whole model, makes the same calls, and ends with the whole cache; gradients are
            right in their mean over the ranks. See docs/many_machines.md.
    Returns:
        ``model`` itself.
    Raises:
        TypeError: unsupported model class, wrapped attention, or a ``kv_b_proj`` or indexer with
            additions that the ops would bypass. Every forward repeats the check.
        ValueError: unsupported ``block_size``, ``index_topk``, width in the config, dtype of a
            cache, ``training`` or ``indexer_loss``. With ``training="ops"`` or ``indexer_loss``,
            from a forward: dropout, attentions or a cache are requested, or the sequences are
            packed or padded in a way that the ops do not support.
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
    if context_parallel:
        check_context_parallel("use_custom_pypto", model, paged, indexer_loss)
    text = text_model(model)
    check_widths(text.config, paged.pools)
    dtypes = {"index_dtype": index_dtype, "kv_dtype": kv_dtype}
    check_cache_dtypes("use_custom_pypto", text, paged, **dtypes)
    attentions = attentions_to_patch(text, upstream, paged)
    dequantized = dequantize(attentions, text.dtype)
    try:
        paged.check(attentions)
        cache_sizes = sizes(text.config, paged.pools, attentions)
    except Exception:
        restore(attentions, dequantized)
        raise
    report(dequantized)
    # the upstream path has no loss for indexers
    path, cache = "ops" if indexer_loss else training, {"block_size": block_size, **dtypes}
    patch = Patch(path, option, cache, cache_sizes, dequantized, context_parallel)
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
    """
    attention_classes("use_transformers", model)
    if (patch := patch_of(model)) is not None:
        patch.undo(model)
    return model


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    num_hidden_layers: int | None = None,
    device: torch.device | str | None = None,
    tensor_parallel: bool = False,
    expert_parallel: bool = False,
    weights: Weights = None,
    revision: str | None = None,
) -> PreTrainedModel:
    """Loads a checkpoint, patched by :func:`models.use_custom_pypto`.

    Of a repository on the Hub, config and index are downloaded first, then the headers of the files
    that the layers need, and these files last, if the disk and the memory are large enough.

    The header of every file is validated first. Upstream ``from_pretrained`` does not name a
    truncated or mismatched file, and fills missing tensors with random numbers after a warning.
    Weights in the published fp8 (e4m3, a scale per 128x128 block) and fp4 (e2m1, a scale per 32
    values of a row) are dequantized, unless ``weights`` says otherwise. Files without a requested
    tensor are not opened and may be missing.

    Args:
        path: a directory with ``config.json`` and safetensors, sharded or not; or the name of a
            repository on the Hugging Face Hub, as ``"deepseek-ai/DeepSeek-V3.2"``.
        dtype: a ``torch.dtype`` or its name, or ``"auto"``: the dtype in ``config.json``, else of
            the embedding. Upstream keeps some parameters of some architectures in float32.
        num_hidden_layers: number of layers, from the first on; None: all.
        device: target device; None: CPU.
        tensor_parallel: share attention heads, the widths of MLPs and experts, and the vocabulary
            among all ranks of torch's process group, which the caller initialises; each rank uses
            its own accelerator, or the CPU if there is none.
        expert_parallel: share experts, whole ones, and the vocabulary among all ranks; each reads
            its own experts alone. With ``tensor_parallel`` the heads and other widths, too.
        weights: the format of linear layers and experts, which compute with it on the CPU
            (:func:`custom_pypto.weight_only_linear`): ``"stored"``, bfloat16, fp8 and fp4 as on
            disk; ``"int8"``, rounded with a scale for each row; ``"int4"``, rounded with scale and
            zero for each 128 values; or a dict of these for ``"experts"`` and ``"rest"``. Such a
            model has no gradients. Embedding, head, norms, routers, ``kv_b_proj`` and the indexers'
            ``weights_proj`` are in ``dtype`` in any case. None: ``dtype``, or the formats of a
            model that was saved with them, whose files are then mapped and must stay as they are.
        revision: branch, tag or commit of a repository; None: its main branch.
    Raises:
        FileNotFoundError: no such directory, repository, revision, config, index or shard.
        OSError: the Hub does not answer, or refuses; or the disk is too small.
        ConnectionError: a rank that this one waits for has ended or hangs.
        RuntimeError: ``tensor_parallel`` or ``expert_parallel`` without a process group.
        ValueError: a damaged or mismatched file; the message names the file, the expected and the
            actual value. Or invalid ``num_hidden_layers``, unsupported quantization, unsupported
            number of ranks, ``dtype`` or ``device``, ``device`` with ranks that share a model, or
            ranks that load different things.
        TypeError: unsupported model class in the config.
        MemoryError: the model does not fit; nothing was read or, of a repository, downloaded.
    """
    wanted, formats = check_dtype(dtype), check_weights(weights)
    place = check_device(device)
    source = hub.find("load: path", path, revision)
    config, model_class = supported_model("load", source.folder)
    ranks, shared = 1, tensor_parallel or expert_parallel
    if shared:
        text = config.get_text_config()
        ranks = check_sharing(text, device, tensor_parallel, expert_parallel)
    kinds = stored_kinds(config)
    check_stored(formats, kinds, device, tensor_parallel, expert_parallel)
    blocks = quantized_weights.blocks_of(config.to_dict())
    if num_hidden_layers is not None:
        config = type(config).from_dict(first_layers(config.to_dict(), num_hidden_layers))
    for name in quantized_weights.CONFIG & vars(config).keys():
        delattr(config, name)  # describes the files; the model is not quantized
    if shared and not tensor_parallel:
        share_experts_alone(config.get_text_config())
    with torch.device("meta"):
        skeleton = use_custom_pypto(model_class._from_config(config))
    names = {name for name, _ in skeleton.named_modules()}
    kinds = {name: kind for name, kind in kinds.items() if name in names}  # of the first layers
    convert(skeleton, kinds)
    checkpoint = check_shards(source, skeleton, blocks)
    resolved = resolve_dtype(wanted, config, checkpoint)
    own = checkpoint.of_rank(dist.get_rank(), ranks) if expert_parallel else checkpoint.tensors
    reader = Reader(own, blocks, mapped=bool(kinds))
    chosen = kinds_of(skeleton, formats, checkpoint.dtypes(), dtypes_of(skeleton, resolved))
    state = parameters(skeleton, checkpoint, reader, resolved, chosen)
    convert(skeleton, chosen)
    if kinds := kinds | chosen:
        config.quantization_config = StoredWeights.of(kinds).to_dict()
    plan = plan_of(skeleton, ranks, expert_parallel) if shared else None
    generation_config = None
    if (source.folder / "generation_config.json").is_file():
        generation_config = GenerationConfig.from_pretrained(source.folder)
    if plan:
        facts = facts_of_files(config, checkpoint.tensors) | {"dtype": resolved, "weights": formats}
        if generation_config is not None:
            facts |= facts_of_config(generation_config, "generation_config.json")
        ways = {"tensor_parallel": tensor_parallel, "expert_parallel": expert_parallel}
        check_agreement("load", facts | ways, LOAD_ALIKE)
    check_memory(skeleton, resolved, own_device() if plan else place, formats, plan)
    source.fetch({tensor.file.name for tensor in own.values()})
    check_scale_values(skeleton, checkpoint, reader, plan)
    with reading(reader):
        model = model_class.from_pretrained(
            None,
            config=config,
            generation_config=generation_config,
            state_dict=state,
            dtype=resolved,
            distributed_config=plan,
        )
    model.config.name_or_path = model.name_or_path = str(path)
    if kinds:  # saved as they are in the model: transformers cannot split stored experts
        model._weight_conversions = []
        model.hf_quantizer.shared = ranks > 1
    else:  # else transformers would save the experts stacked, as it got them here
        del model._weight_conversions
    if plan:
        check_agreement("load", facts_of_weights(model), LOAD_ALIKE)
    return use_custom_pypto(model.to(place) if plan is None else model)
