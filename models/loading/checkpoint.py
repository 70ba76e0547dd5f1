"""Validates that a checkpoint is complete and fits the model, from the headers of its files."""

import functools
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from custom_pypto.files import NAMES
from custom_pypto.hub import Directory, other_format

from ..weights import published
from ..weights.modules import converted_state
from ..weights.published import FLOATS, FP4, FP8, INTEGERS

logger = logging.getLogger("custom_pypto")

EXPERT = r"(\.experts\.)(\d+)\."
OF_MTP = r"mtp\.\d+\."
# lists of a config.json with one entry per layer
PER_LAYER = ["layer_types", "mlp_layer_types", "indexer_types", "index_topk_pattern"]
PER_LAYER += ["compress_ratios", "no_rope_layers", "kv_source_layers"]
LFS_POINTER = b"version https://git-lfs."


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    dtype: str  # of safetensors: BF16, F8_E4M3 ...
    shape: list[int]  # of its values: a byte of fp4 holds two


class Place(NamedTuple):
    """The place of a tensor on disk in the model: a parameter or stored buffer, or a part of it."""

    parameter: str
    index: int
    count: int  # parts of the parameter: 1, or one or two of each expert, or blocks of its rows
    shape: list[int]
    operation: ConversionOps | None = None  # of transformers, on the tensor as read


class Checkpoint(NamedTuple):
    """The tensors of a model on disk."""

    tensors: dict[str, Stored]  # by name on disk, scales included
    parts: dict[str, list[str]]  # names on disk of each parameter and stored buffer, in order
    operations: dict[str, ConversionOps]  # of the parameters that have one
    saved: dict[str, Tensor]  # values and scales that the files have in a stored format, on meta

    def dtypes(self) -> dict[str, set[str]]:
        """Of the parts of each parameter and stored buffer."""
        found = self.parts.items()
        return {name: {self.tensors[part].dtype for part in parts} for name, parts in found}

    def of_rank(self, rank: int, ranks: int) -> dict[str, Stored]:
        """The tensors without the experts that are another rank's, if all are apart on disk."""
        others = set()
        for parts in self.parts.values():
            if re.search(EXPERT, parts[0]):
                own = len(parts) // ranks
                others |= {*parts[: rank * own], *parts[(rank + 1) * own :]}
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if published.weight_name(name) not in others
        }


def check_shards(
    source: Directory, model, blocks: dict[str, tuple[int, int]], kinds: dict[str, str]
) -> Checkpoint:
    """Rejects a checkpoint unless it holds every tensor of ``model``, complete and in its shape; of
    stored weights in their dtype.

    Files without a tensor of ``model`` may be missing, such as those of unused layers and of layers
    for multi-token prediction.

    Args:
        blocks: rows and columns that share a scale, for each quantized dtype.
        kinds: the format of each module that was saved with stored weights.
    """
    saved = converted_state(model, kinds)
    state = stored_state(model) | saved
    part_of = parts_on_disk(model, state)
    tensors = stored_tensors(
        source,
        lambda name: bool(part_of(name) or part_of(published.weight_name(name))),
        blocks,
    )
    others = {
        name: tensor
        for name, tensor in tensors.items()
        if (part := part_of(name)) is None or part.parameter not in saved
    }
    check_dtypes(others, blocks)
    found: dict[str, dict[int, str]] = {}
    operations = {}
    for name, (file, dtype, shape) in tensors.items():
        if (part := part_of(name)) is None:
            continue  # a scale
        if name not in others and dtype != (expected := NAMES[state[part.parameter].dtype]):
            raise ValueError(
                f"load: {file}: {name} must be {expected} (quantization_config of config.json), "
                f"got {dtype}"
            )
        if shape != part.shape:
            raise ValueError(
                f"load: {file}: {name} must be of shape {part.shape} (config.json), got {shape}"
            )
        if name in others and (dtype in INTEGERS) == state[part.parameter].is_floating_point():
            kind = "floating-point values" if dtype in INTEGERS else "integers"
            raise ValueError(
                f"load: {file}: {name} must be of {kind}, as in the model, got {dtype}"
            )
        first = found.setdefault(part.parameter, {}).setdefault(part.index, name)
        if first != name:
            raise ValueError(
                f"load: {part.parameter} must be in the checkpoint once, got {first} in "
                f"{tensors[first].file} and {name} in {file}; keep the one that is up to date"
            )
        if part.operation is not None:
            operations[part.parameter] = part.operation
    if missing := missing_tensors(state, found, part_of):
        raise ValueError(
            f"load: {index_file(source.folder)} lacks {examples(missing)}; use the checkpoint's "
            "own config.json, or download it again"
        )
    check_scales(others, blocks)
    parts = {name: [found[name][i] for i in sorted(found[name])] for name in state}
    return Checkpoint(tensors, parts, operations, saved)


def missing_tensors(
    state: dict[str, Tensor],
    found: dict[str, dict[int, str]],
    part_of: Callable[[str], Place | None],
) -> set[str]:
    """Names of the tensors of ``state`` that were not ``found``: of experts the names on disk, of
    others the names in the model."""
    missing = state.keys() - found.keys()
    for parameter, names in found.items():
        count = part_of(next(iter(names.values()))).count
        lacking = set(range(count)) - names.keys()
        if not all(re.search(EXPERT, name) for name in names.values()):
            missing |= {parameter} if lacking else set()
            continue
        for index in lacking:
            per_expert = count // len(state[parameter])
            alike = [name for i, name in names.items() if (i - index) % per_expert == 0]
            expert = rf"\g<1>{index // per_expert}."
            missing.add(re.sub(EXPERT, expert, alike[0]) if alike else parameter)
    return missing


def check_dtypes(tensors: dict[str, Stored], blocks: dict[str, tuple[int, int]]) -> None:
    for name, (file, dtype, _) in tensors.items():
        if dtype == FP8 and FP8 not in blocks:
            raise ValueError(
                f"load: {file}: {name} is {dtype}, but config.json lacks the quantization_config "
                "with its block size; use the checkpoint's own config.json"
            )
        if dtype not in FLOATS | INTEGERS | blocks:
            raise ValueError(
                f"load: {file}: {name} must be of dtype {', '.join(FLOATS)} or "
                f"{' or '.join(blocks or [FP8])}, got {dtype}"
            )


def check_scales(tensors: dict[str, Stored], blocks: dict[str, tuple[int, int]]) -> None:
    """Rejects quantized tensors that are no matrices, lack scales, or have scales of another grid
    or dtype."""
    for name, (file, dtype, shape) in tensors.items():
        if dtype not in blocks:
            continue
        if len(shape) != 2:
            raise ValueError(
                f"load: {file}: {name} must be a matrix to be {dtype}, got shape {shape}; use a "
                "checkpoint with this tensor in bfloat16"
            )
        if (scale := published.scale_name(name, tensors)) is None:
            names = " or ".join(published.scale_names(name))
            raise ValueError(
                f"load: {file}: {name} is {dtype} and lacks its {names}; download the checkpoint "
                "again"
            )
        grid, found = published.grid(shape, blocks[dtype]), tensors[scale]
        if found.shape != grid or found.dtype not in FLOATS:
            height, width = blocks[dtype]
            raise ValueError(
                f"load: {found.file}: {scale} must be of shape {grid} (one scale per "
                f"{height}x{width} block of {shape}) and dtype {', '.join(FLOATS)}, got "
                f"{found.shape} and {found.dtype}"
            )


def index_file(path: Path) -> Path:
    """The only file of a checkpoint, else the index of its shards. Where both exist, since one was
    saved over the other, transformers takes the file, too."""
    index, whole = path / "model.safetensors.index.json", path / "model.safetensors"
    if not whole.is_file():
        return index if index.is_file() else whole
    if index.is_file():
        logger.warning("load: takes %s, as transformers does, and not %s; delete one", whole, index)
    return whole


def stored_tensors(
    source: Directory, wanted: Callable[[str], bool], blocks: dict[str, tuple[int, int]]
) -> dict[str, Stored]:
    """Locations of the ``wanted`` tensors, from the headers of their files.

    The index alone says which file a tensor is read from: another one may hold an older copy. What
    it does not name is taken from the only file that has it, scales from the file of their weight.
    """
    index = index_file(source.folder)
    file_of: dict[str, str] = {}
    promised: dict[str, set[str]] = {}
    if index.name.endswith(".json"):
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"load: {index} is not a safetensors index: {error!r}; download it again"
            ) from error
        file_of = {name: weight_map[name] for name in filter(wanted, weight_map)}
        for name, file in file_of.items():
            promised.setdefault(file, set()).add(name)
    else:
        promised[index.name] = set()

    tensors: dict[str, Stored] = {}
    unnamed: dict[str, list[Stored]] = {}
    for file, names in sorted(promised.items()):
        found = read_header(source, file, blocks)
        if missing := names - found.keys():
            raise ValueError(
                f"load: {source.folder / file} lacks {examples(missing)}, listed in {index.name}; "
                f"is the file from another checkpoint?"
            )
        for name in filter(wanted, found):
            if name in names:
                tensors[name] = found[name]
            elif name not in file_of:
                unnamed.setdefault(name, []).append(found[name])

    # weights first, whose scales follow them
    for name in sorted(unnamed, key=lambda name: published.weight_name(name) != name):
        weight, copies = tensors.get(published.weight_name(name)), unnamed[name]
        if weight is not None:
            copies = [copy for copy in copies if copy.file == weight.file]
        if len(copies) > 1:
            raise ValueError(
                f"load: {name} must be in one file, or listed in {index}, got it in "
                f"{' and '.join(str(copy.file) for copy in copies)}; delete the file that is not "
                "of this checkpoint, or list the tensor"
            )
        if copies:
            tensors[name] = copies[0]
    return tensors


def read_header(
    source: Directory, name: str, blocks: dict[str, tuple[int, int]]
) -> dict[str, Stored]:
    """Every tensor of a safetensors file, which must not be truncated."""
    file = source.folder / name
    if not file.is_file():
        if (header := source.header(name)) is None:
            instead = other_format(source.folder) or "; download it again"
            raise FileNotFoundError(f"load: {file} is missing{instead}")
        return {tensor: stored(file, *facts, blocks) for tensor, facts in header.items()}
    try:
        with safe_open(file, framework="pt", backend="pread") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {
                name: stored(file, one.get_dtype(), one.get_shape(), blocks)
                for name, one in slices.items()
            }
    except SafetensorError as error:  # an error page, a broken download
        with file.open("rb") as opened:
            if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(
                    f"load: {file} is a Git LFS pointer, not the file; run git lfs pull in "
                    f"{file.parent}"
                ) from error
        raise ValueError(
            f"load: {file} ({file.stat().st_size} bytes) is not a complete safetensors file: "
            f"{error}; download it again"
        ) from error


def stored(file: Path, dtype: str, shape: list[int], blocks: dict[str, tuple[int, int]]) -> Stored:
    if dtype == FP4 and FP4 in blocks and shape:
        shape = [*shape[:-1], 2 * shape[-1]]
    return Stored(file, dtype, shape)


def stored_state(model) -> dict[str, Tensor]:
    """The parameters and buffers of ``model`` that a checkpoint has."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def parts_on_disk(model, state: dict[str, Tensor]) -> Callable[[str], Place | None]:
    """A function from the name of a tensor on disk to its part of ``model``, whose parameters and
    stored buffers are ``state``; None: not in the model.

    transformers maps names: a checkpoint has experts one by one, and other names for some
    architectures. Names as in the model are taken as well.
    """
    rules = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    rule_of = {source: rule for rule in converters for source in rule.source_patterns}

    @functools.cache
    def part_of(name: str) -> Place | None:
        layer = re.match(OF_MTP, name)
        # first by the rules: a rule may also match a name of the model
        for some in ((renamings, converters), ([], [])):
            parameter, source = rename_source_key(name, *some, model.base_model_prefix, state)
            if parameter in state:
                break
            if layer:  # an MTP layer has a head for its streams under the name of the model's
                own, source = rename_source_key(name[layer.end() :], *some)
                parameter = rename_source_key(
                    layer[0] + own, [], [], model.base_model_prefix, state
                )[0]
                if parameter in state:
                    break
        else:
            return None
        shape = list(state[parameter].shape)
        if source is None:
            return Place(parameter, 0, 1, shape)
        rule = rule_of[source]
        per_expert, index = len(rule.source_patterns), rule.source_patterns.index(source)
        if (numbered := re.search(EXPERT, name)) is None:
            [operation] = rule.operations
            other = None if isinstance(operation, Concatenate) else operation
            return Place(parameter, index, per_expert, [shape[0] // per_expert, *shape[1:]], other)
        experts, rows, columns = shape
        expert = int(numbered[2])
        if expert >= experts:
            return None
        index += expert * per_expert
        return Place(parameter, index, experts * per_expert, [rows // per_expert, columns])

    return part_of


def first_layers(config: dict, layers: int, what: str = "load: num_hidden_layers") -> dict:
    """The ``config.json`` of a checkpoint, reduced to the first ``layers`` layers.

    Args:
        what: the argument that ``layers`` is, for the error.
    """
    if "text_config" in config:  # of a multimodal model
        return config | {"text_config": first_layers(config["text_config"], layers, what)}
    have = config["num_hidden_layers"]
    if not 1 <= layers <= have:
        raise ValueError(f"{what} must be 1 to {have} (config.json), got {layers}")
    cut = {name: config[name][:layers] for name in PER_LAYER if config.get(name) is not None}
    if (pattern := config.get("index_topk_pattern")) is not None and len(pattern) != have:
        # a letter per layer that selects: of DeepSeek-V4 those with rows of 4 tokens
        kinds = cut.get("layer_types") or cut.get("compress_ratios", [])
        selecting = "compressed_sparse_attention", "indexed_attention", 4
        cut["index_topk_pattern"] = pattern[: sum(kind in selecting for kind in kinds)]
    if config.get("per_layer_config") is not None:
        own = config["per_layer_config"].items()
        cut["per_layer_config"] = {i: values for i, values in own if int(i) < layers}
    return config | cut | {"num_hidden_layers": layers}


def examples(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more tensors"
