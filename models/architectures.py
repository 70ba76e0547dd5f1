"""The supported architectures, as strings; patching a model imports only its folder."""

import json
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import transformers
from torch.distributed.fsdp import FSDPModule

from custom_pypto.requirements import TRANSFORMERS

from .cache.layout import Pool


class Architecture(NamedTuple):
    folder: str  # next to this file
    attention: str  # the attention class of patched models, in this folder
    #: the first supported transformers with the model class
    since: str = TRANSFORMERS[0]


# by the model class of transformers
ARCHITECTURES = {
    "DeepseekV32ForCausalLM": Architecture("deepseek_v32", "PagedDeepseekV32Attention"),
    "GlmMoeDsaForCausalLM": Architecture("glm_moe_dsa", "PagedGlmMoeDsaAttention"),
    "AXK2ForCausalLM": Architecture("axk2", "PagedAXK2Attention"),
    "DeepseekV4ForCausalLM": Architecture("deepseek_v4", "PagedDeepseekV4Attention"),
    "HYV4ForCausalLM": Architecture("hy_v4", "PagedHYV4Attention"),
    "Dots3NoteForCausalLM": Architecture("dots3_note", "PagedDots3NoteAttention", "5.23"),
    "Glm5NextForConditionalGeneration": Architecture("glm5_next", "PagedGlm5NextAttention"),
    "MistralLarge4ForConditionalGeneration": Architecture(
        "mistral_large4", "PagedMistralLarge4Attention", "5.23"
    ),
}


def check_widths(config, pools: dict[str, Pool]) -> None:
    """Rejects widths that the ops do not take.

    Raises:
        ValueError: names the attribute of ``config``, what was expected and what came.
    """
    topk = config.index_topk
    if not (1 <= topk <= 2048 or topk in range(3072, 8193, 1024)):
        raise ValueError(
            "use_custom_pypto: config.index_topk must be 1 to 2048, or 3072 to 8192 in steps of "
            f"1024, got {topk}"
        )
    names = dict.fromkeys(pool.width for pool in pools.values() if isinstance(pool.width, str))
    for layer in range(config.num_hidden_layers):
        for name in names:
            width = getattr(config.per_layer_config[layer], name)
            if width and width % 16:
                raise ValueError(
                    f"use_custom_pypto: config.{name} must be a multiple of 16, got {width} in "
                    f"layer {layer}; without the patch transformers runs this model"
                )


def available() -> list[str]:
    """The supported model classes that the installed transformers has."""
    return [name for name in ARCHITECTURES if name in dir(transformers)]


def attention_classes(caller: str, model) -> tuple[type, type]:
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
    architecture = ARCHITECTURES[name]
    module = import_module(f".{architecture.folder}", __package__)
    paged = getattr(module, architecture.attention)
    return paged.__bases__[-1], paged


def check_available(caller: str, checkpoint: Path) -> None:
    """Rejects a checkpoint of a model class that only a newer transformers has.

    Raises:
        TypeError: names the class, and the version that has it.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    for name in config.get("architectures") or []:
        if name in ARCHITECTURES and not hasattr(transformers, name):
            since = ARCHITECTURES[name].since
            raise TypeError(
                f"{caller}: {name} needs transformers {since}, found {transformers.__version__}; "
                f"pip install 'transformers=={since}.*'"
            )
