"""Validates that a checkpoint is complete and fits the model, from the headers of its files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_renamings

from . import fp8


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    dtype: str  # of safetensors: BF16, F8_E4M3 ...
    shape: list[int]
    name: str  # in that file


def check_shards(path: Path, model, block: tuple[int, int] | None = None) -> dict[str, Stored]:
    """Rejects a checkpoint unless it holds every tensor of ``model``, complete and in its shape.

    Files without a tensor of ``model`` may be missing, such as those of unused layers and of layers
    for multi-token prediction.

    Args:
        block: rows and columns that share a scale if the checkpoint is in fp8, else None.
    Returns:
        the locations of the tensors of ``model`` and of their scales, under the names that
        ``save_pretrained`` would give them.
    """
    expected = tensors_on_disk(model)
    wanted = expected.keys() | {fp8.scale_name(name) for name in expected}
    forward, back = renamings_of(model)
    tensors = stored_tensors(
        path,
        wanted.__contains__,
        lambda name: apply_renamings(apply_renamings(name, forward), back),
    )
    for name, (file, _, shape, _) in tensors.items():
        if shape != expected.get(name, shape):
            raise ValueError(
                f"load: {file}: {name} must be of shape {expected[name]} (config.json), got {shape}"
            )
    if missing := expected.keys() - tensors.keys():
        raise ValueError(
            f"load: {index_file(path)} lacks {examples(missing)}; use the checkpoint's own "
            "config.json, or download it again"
        )
    check_scales(tensors, block)
    return tensors


def check_scales(tensors: dict[str, Stored], block: tuple[int, int] | None) -> None:
    """Rejects fp8 weights with missing scales, or with scales of another grid than ``block``."""
    for name, (file, dtype, shape, _) in tensors.items():
        if dtype != fp8.STORED:
            if dtype not in fp8.DTYPES:
                raise ValueError(
                    f"load: {file}: {name} must be of dtype {', '.join(fp8.DTYPES)} or "
                    f"{fp8.STORED}, got {dtype}"
                )
            continue
        if block is None:
            raise ValueError(
                f"load: {file}: {name} is {dtype}, but config.json lacks the quantization_config "
                "with its block size; use the checkpoint's own config.json"
            )
        scale = fp8.scale_name(name)
        if scale not in tensors:
            raise ValueError(
                f"load: {file}: {name} is {dtype} and lacks its {scale}; download the checkpoint "
                "again"
            )
        grid = fp8.grid(shape, block)
        if tensors[scale].shape != grid:
            raise ValueError(
                f"load: {tensors[scale].file}: {scale} must be of shape {grid} (one scale per "
                f"{block[0]}x{block[1]} block of {shape}), got {tensors[scale].shape}"
            )


def index_file(path: Path) -> Path:
    """The index of a sharded checkpoint, else its only file."""
    index = path / "model.safetensors.index.json"
    return index if index.is_file() else path / "model.safetensors"


def stored_tensors(
    path: Path, wanted: Callable[[str], bool], renamed: Callable[[str], str] = str
) -> dict[str, Stored]:
    """Locations of the ``wanted`` tensors, from the headers of their files, by ``renamed`` name."""
    index = index_file(path)
    promised: dict[str, set[str]] = {}
    if index.name.endswith(".json"):
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"load: {index} is not a safetensors index: {error!r}; download it again"
            ) from error
        for name in weight_map:
            if wanted(renamed(name)):
                promised.setdefault(weight_map[name], set()).add(name)
    else:
        promised[index.name] = set()

    tensors = {}
    for file, names in sorted(promised.items()):
        found = read_header(path / file)
        if missing := names - found.keys():
            raise ValueError(
                f"load: {path / file} lacks {examples(missing)}, listed in {index.name}; "
                f"is the file from another checkpoint?"
            )
        here = {renamed(name): stored for name, stored in found.items()}
        tensors |= {name: here[name] for name in filter(wanted, here)}
    return tensors


def read_header(file: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors file, which must not be truncated."""
    if not file.is_file():
        raise FileNotFoundError(f"load: {file} is missing; download it again")
    try:
        with safe_open(file, framework="pt", backend="pread") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {
                name: Stored(file, one.get_dtype(), one.get_shape(), name)
                for name, one in slices.items()
            }
    except SafetensorError as error:  # an error page, a broken download, a git-lfs pointer
        raise ValueError(
            f"load: {file} ({file.stat().st_size} bytes) is not a complete safetensors file: "
            f"{error}; download it again"
        ) from error


def renamings_of(model) -> tuple[list[WeightRenaming], list[WeightRenaming]]:
    """transformers' renamings from checkpoint to model, and back.

    Several names of a checkpoint may give one name of the model; the way back gives one of them.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    forward = [x for x in conversions if isinstance(x, WeightRenaming)]
    return forward, [x.reverse_transform() for x in forward[::-1]]


def on_disk(model) -> dict[str, tuple[list[int], list[str]]]:
    """Shape and checkpoint tensors of each stored parameter and buffer of ``model``: for some
    architectures a checkpoint has experts one by one or other names, which transformers maps.

    The tensors are equally large, in their order within the parameter.
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    _, renamings = renamings_of(model)
    stacks = [x.target_patterns for x in conversions if isinstance(x, WeightConverter)]
    stacked = tuple(name for names in stacks for name in names)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()

    def parts(name: str, shape: torch.Size) -> list[str]:
        if not name.endswith(stacked):
            return [apply_renamings(name, renamings)]
        experts, _, projection = name.partition(".experts.")
        parts = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
        return [f"{experts}.experts.{i}.{part}.weight" for i in range(shape[0]) for part in parts]

    return {
        name: (list(tensor.shape), parts(name, tensor.shape))
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def tensors_on_disk(model) -> dict[str, list[int]]:
    """Name and shape of every tensor of ``model`` as stored in a checkpoint."""
    shapes = {}
    for shape, parts in on_disk(model).values():
        if ".experts.0." in parts[0]:
            experts, rows, columns = shape
            shape = [rows * experts // len(parts), columns]
        shapes |= dict.fromkeys(parts, shape)
    return shapes


def first_layers(config: dict, layers: int) -> dict:
    """The ``config.json`` of a checkpoint, reduced to the first ``layers`` layers."""
    have = config["num_hidden_layers"]
    if not 1 <= layers <= have:
        raise ValueError(f"load: num_hidden_layers must be 1 to {have} (config.json), got {layers}")
    cut = {
        name: config[name][:layers]
        for name in ("layer_types", "mlp_layer_types", "indexer_types", "index_topk_pattern")
        if config.get(name) is not None
    }
    if config.get("per_layer_config") is not None:
        own = config["per_layer_config"].items()
        cut["per_layer_config"] = {i: values for i, values in own if int(i) < layers}
    return config | cut | {"num_hidden_layers": layers}


def examples(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more tensors"
