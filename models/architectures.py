"""The supported architectures, as strings; patching a model imports only its folder."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from custom_pypto.descriptions import sparse_count_problem
from custom_pypto.requirements import TRANSFORMERS

from .cache.layout import Pool

_VERSION = transformers.__version__


class Architecture(NamedTuple):
    name: str  # in tables of the documents, which tests/facts.py makes
    folder: str  # next to this file
    attention: str  # the attention class of patched models, in this folder
    #: the first supported transformers with the model class
    since: str = TRANSFORMERS[0]
    #: whether the plugin for vLLM serves it: its tests have a model of each
    served: bool = False
    #: whether it can draft with a layer for multi-token prediction: :mod:`.mtp`
    mtp: bool = False


# by the model class of transformers
ARCHITECTURES = {
    "DeepseekV32ForCausalLM": Architecture(
        "DeepSeek-V3.2", "deepseek_v32", "PagedDeepseekV32Attention", served=True, mtp=True
    ),
    "GlmMoeDsaForCausalLM": Architecture(
        "GLM-5", "glm_moe_dsa", "PagedGlmMoeDsaAttention", served=True, mtp=True
    ),
    "AXK2ForCausalLM": Architecture("A.X-K2", "axk2", "PagedAXK2Attention", mtp=True),
    "DeepseekV4ForCausalLM": Architecture(
        "DeepSeek-V4", "deepseek_v4", "PagedDeepseekV4Attention", served=True, mtp=True
    ),
    "HYV4ForCausalLM": Architecture("Hy4", "hy_v4", "PagedHYV4Attention", served=True, mtp=True),
    "HYV4VLForConditionalGeneration": Architecture(
        "Hy4 with images and videos", "hy_v4_vl", "PagedHYV4VLAttention", "5.24"
    ),
    "Dots3NoteForCausalLM": Architecture(
        "Dots 3 Note, text", "dots3_note", "PagedDots3NoteAttention", "5.23", mtp=True
    ),
    "Glm5NextForConditionalGeneration": Architecture(
        "GLM-5.3-Flash", "glm5_next", "PagedGlm5NextAttention", mtp=True
    ),
    "MistralLarge4ForConditionalGeneration": Architecture(
        "Mistral Large 4", "mistral_large4", "PagedMistralLarge4Attention", "5.23"
    ),
}

# what is known of models with an index_topk that cannot be patched, by the class in their config
KNOWN = {
    "DeepseekV3ForCausalLM": " (DeepseekV32ForCausalLM, of model_type deepseek_v32, has one)",
    "LongcatFlashForCausalLM": " (LongCat-2.0 always selects the first 16 and the last 1024 "
    "positions besides, as no op here does)",
    "DeepseekV41ForCausalLM": " (DeepSeek-V4.1 selects from blocks of candidates and reads engram "
    "tables, as no op here does)",
}


def check_widths(config, pools: dict[str, Pool]) -> None:
    """Rejects widths that the ops do not take.

    Raises:
        ValueError: names the attribute of ``config``, what was expected and what came.
    """
    if problem := sparse_count_problem(config.index_topk):
        raise ValueError(f"use_custom_pypto: config.index_topk {problem}")
    names = dict.fromkeys(pool.width for pool in pools.values() if isinstance(pool.width, str))
    for layer in range(config.num_hidden_layers):
        for name in names:
            width = getattr(config.per_layer_config[layer], name)
            if width and width % 16:
                raise ValueError(
                    f"use_custom_pypto: config.{name} must be a multiple of 16, got {width} in "
                    f"layer {layer}; without the patch transformers runs this model"
                )


def attention_class(name: str) -> Any:
    """The patched attention class of a model class in :data:`ARCHITECTURES`."""
    architecture = ARCHITECTURES[name]
    module = import_module(f".{architecture.folder}", __package__)
    return getattr(module, architecture.attention)


def available() -> list[str]:
    """The supported model classes that the installed transformers has."""
    names = dir(transformers)  # of all that it has: a sixth of a second
    return [name for name in ARCHITECTURES if name in names]


def attention_classes(caller: str, model: PreTrainedModel) -> tuple[Any, Any]:
    """The upstream attention class of ``model``, and the patched one.

    Raises:
        TypeError: unsupported model class.
    """
    # FSDP2 gives a model a class of its own, whose last base is the model's
    cls = type(model).__bases__[-1] if isinstance(model, FSDPModule) else type(model)
    name = cls.__name__
    if name not in ARCHITECTURES or getattr(transformers, name, None) is not cls:
        inside = "; pass its get_base_model()" if hasattr(model, "get_base_model") else ""  # peft's
        raise TypeError(
            f"{caller}: model must be a {' or '.join(available())} of transformers, "
            f"got {type(model).__module__}.{type(model).__qualname__}{inside}"
        )
    paged = attention_class(name)
    return paged.__bases__[-1], paged


def supported_model(
    caller: str, checkpoint: Path
) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """The configuration of a checkpoint and its supported model class; of a multimodal model whose
    class is unsupported, those of its text model.

    Raises:
        TypeError: unsupported model class, or one that only a newer transformers has.
        ValueError: ``config.json`` is no configuration.
    """
    file = checkpoint / "config.json"
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        named = written.get("architectures") or [f"model of type {written['model_type']}"]
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{caller}: {file} is not the configuration of a model, JSON in UTF-8 without a "
            f"byte-order mark: {error!r}; download it again"
        ) from error
    remark = KNOWN.get(named[0], "")
    for name in named:
        if name in ARCHITECTURES and not hasattr(transformers, name):
            since = ARCHITECTURES[name].since
            raise TypeError(
                f"{caller}: {name} needs transformers {since}, found {_VERSION}; "
                f"pip install 'transformers=={since}.*'"
            )
    try:
        # by default transformers prompts at the terminal, and "y" runs the checkpoint's code
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    except ValueError as error:
        selects = "index_topk" in written.get("text_config", written)
        known = written.get("model_type") in transformers.CONFIG_MAPPING
        known |= any(name in ARCHITECTURES for name in named)
        # of unknown classes transformers says only how to run the checkpoint's code
        if known or ("auto_map" in written and not selects):
            raise ValueError(f"{caller}: {file}: {error}") from error
        why = f"unknown to transformers {_VERSION}{remark if selects else ''}"
        raise _unsupported(caller, file, named, why) from error
    text = config.get_text_config()
    for part, mapping in (
        (config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        (text, MODEL_FOR_CAUSAL_LM_MAPPING),
    ):
        found = mapping.get(type(part), None)
        if found is not None and found.__name__ in ARCHITECTURES:
            return part, found
    if hasattr(text, "index_topk"):
        why = f"with index_topk, but without a lightning indexer in transformers {_VERSION}{remark}"
        raise _unsupported(caller, file, named, why)
    raise _unsupported(caller, file, named, "without index_topk, so without sparse attention")


def _unsupported(caller: str, file: Path, named: list[str], why: str) -> TypeError:
    return TypeError(
        f"{caller}: {file} is of a {' or '.join(named)}, {why}; supported are "
        f"{', '.join(available())}"
    )
