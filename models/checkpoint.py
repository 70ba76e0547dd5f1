"""Is this checkpoint whole, and the model's? Answered from the headers of its files."""

import json
from pathlib import Path


def check_shards(path: Path, model) -> None:
    """Refuses a checkpoint that does not hold every tensor of ``model``, whole and in its shape."""
    expected = tensors_on_disk(model)
    promised: dict[str, set[str]] = {}
    index = path / "model.safetensors.index.json"
    source = index if index.is_file() else path / "model.safetensors"
    if source == index:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"load: {index} is not a safetensors index: {error!r}") from error
        for name, file in weight_map.items():
            promised.setdefault(file, set()).add(name)
    else:
        promised[source.name] = set()

    found = set()
    for file, names in sorted(promised.items()):
        shapes = read_header(path / file)
        if missing := names - shapes.keys():
            raise ValueError(
                f"load: {path / file} must hold {examples(missing)} according to {index.name}, "
                f"but does not; is it a file of another checkpoint?"
            )
        for name, shape in shapes.items():
            if shape != expected.get(name, shape):
                raise ValueError(
                    f"load: {path / file}: {name} must be {expected[name]} according to "
                    f"config.json, got {shape}"
                )
        found |= shapes.keys()
    if missing := expected.keys() - found:
        raise ValueError(f"load: {source} must list {examples(missing)}, but does not")


def read_header(file: Path) -> dict[str, list[int]]:
    """The shape of every tensor in a safetensors file, which must have its full size."""
    if not file.is_file():
        raise FileNotFoundError(f"load: {file} is missing; download it again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        # text instead of a length: an error page, or the pointer that git-lfs left in its place
        if not 2 <= length <= 100_000_000:
            raise ValueError(
                f"load: {file} ({size} bytes) is not a safetensors file; download it again"
            )
        if size < 8 + length:
            raise ValueError(
                f"load: {file} must have at least {8 + length} bytes according to its header, "
                f"got {size}; download it again"
            )
        header = stream.read(length)
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        shapes = {name: tensor["shape"] for name, tensor in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"load: {file} has no readable safetensors header: {error!r}") from error
    if size != 8 + length + end:
        raise ValueError(
            f"load: {file} must have {8 + length + end} bytes according to its header, got {size}; "
            "download it again"
        )
    return shapes


def tensors_on_disk(model) -> dict[str, list[int]]:
    """Name and shape of every tensor of ``model`` as checkpoints have it: experts one by one."""
    shapes = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        experts, fused, projection = name.partition(".experts.")
        if not fused:
            shapes[name] = list(tensor.shape)
            continue
        count, rows, columns = tensor.shape
        parts = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
        for part in parts:
            for i in range(count):
                shapes[f"{experts}.experts.{i}.{part}.weight"] = [rows // len(parts), columns]
    return shapes


def examples(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more tensors"
