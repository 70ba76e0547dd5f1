"""The folder that a conversion writes: each file is whole or not there, and has a checksum."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

import filelock
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from tqdm import tqdm

from custom_pypto import files

RECORD, SUMS, INDEX = "conversion.json", "SHA256SUMS", "model.safetensors.index.json"
CONFIG = "config.json"
LOCK = ".conversion.lock"  # of the run that writes the folder
METADATA = {"format": "pt"}
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


class Conversion:
    """What becomes of a checkpoint, weight by weight, planned from its config and headers alone.

    Args:
        source: what :func:`custom_pypto.hub.find` found.
        options: what an interrupted run must have in common with the one that goes on.
    """

    def __init__(self, source, options: dict):
        self.source, self.options = source, options

    def files(self) -> set[Path]:
        """Those of the source with a tensor that is read."""
        raise NotImplementedError

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of what becomes of each weight, in the order of the shards."""
        raise NotImplementedError

    def outputs(self, weight: str) -> list[str]:
        """Names of the tensors that become of a weight."""
        return [weight]

    def tensors(self, weight: str) -> list[Tensor]:
        """The tensors that become of a weight, by :meth:`outputs`."""
        raise NotImplementedError

    def check_values(self) -> None:
        """Rejects values that cannot be converted, before anything is written."""
        raise NotImplementedError

    def texts(self) -> dict[str, str]:
        """config.json, and other files of the target that are not the source's."""
        raise NotImplementedError

    def record(self) -> dict:
        """What must be equal for an interrupted run to go on; needs the files."""
        stats = {file.name: file.stat() for file in sorted(self.files())}
        source = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        return self.options | {"source": source}

    @functools.cached_property
    def split(self):
        """Which weights are in which shard."""
        return split_state_dict_into_shards_factory(
            self.sizes,
            get_storage_size=int,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=self.options["max_shard_size"],
        )

    def index(self) -> dict:
        """The index of the shards."""
        shards = self.split.filename_to_tensors.items()
        weight_map = {
            name: file for file, names in shards for each in names for name in self.outputs(each)
        }
        return {"metadata": self.split.metadata, "weight_map": weight_map}


def convert(target: Path, conversion: Conversion) -> tuple[int, int, int]:
    """Returns the number of shards kept and written, and their bytes."""
    source, sizes = conversion.source, conversion.sizes
    source.fetch([*others(source), *(file.name for file in conversion.files())])
    sums = begin(target, conversion.record())
    check_space(target, conversion, sums)
    conversion.check_values()
    kept, total = 0, sum(sizes.values())
    shards = conversion.split.filename_to_tensors
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as progress:
        for file, weights in shards.items():
            progress.set_description(file)
            if (target / file).is_file() and sums.get(file) == sha256(target / file):
                kept += 1
            else:
                sums[file] = write_shard(target / file, conversion, weights)
                write_sums(target, sums)
            progress.update(sum(sizes[weight] for weight in weights))

    if len(shards) > 1:
        sums[INDEX] = write_json(target / INDEX, conversion.index())
    texts = conversion.texts()
    config = texts.pop(CONFIG)
    for name, text in texts.items():
        sums[name] = write_text(target / name, text)
    copy_others(source, target, sums)
    # last: without it the folder is not a valid checkpoint
    sums[CONFIG] = write_text(target / CONFIG, config)
    write_sums(target, sums)
    return kept, len(shards) - kept, total


def write_shard(file: Path, conversion: Conversion, weights: list[str]) -> str:
    """Returns its checksum. What it holds is in memory until it is written."""
    tensors = {}
    for weight in weights:
        made = zip(conversion.outputs(weight), conversion.tensors(weight), strict=True)
        tensors |= dict(made)
    write = functools.partial(files.write_tensors, tensors=tensors, metadata=METADATA)
    return write_whole(file, write)


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_whole(file: Path, write) -> str:
    """Writes ``file`` with ``write(path)``; it gets its name when complete and on the disk.

    Returns:
        the checksum of the file, read back.
    """
    with files.replacing(file) as partial:
        write(partial)
        flush(partial)
        digest = sha256(partial)
    flush(file.parent)
    return digest


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file: Path, text: str) -> str:
    return write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))


def write_json(file: Path, value) -> str:
    return write_text(file, json.dumps(value, indent=2) + "\n")


def write_sums(target: Path, sums: dict[str, str]) -> None:
    write_text(target / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))


@contextlib.contextmanager
def alone(target: Path):
    """Keeps other runs from writing the folder, until this one ends."""
    target.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(target / LOCK, timeout=0), contextlib.ExitStack() as stack:
            stack.callback((target / LOCK).unlink, missing_ok=True)
            yield
    except filelock.Timeout:
        raise ValueError(
            f"TARGET must be written by one run at a time, another one writes {target}; wait for it"
        ) from None


def begin(target: Path, record: dict) -> dict[str, str]:
    """Starts in an empty folder, or resumes the same conversion.

    Returns:
        the checksums of the shards written before, by name.
    """
    files.remove_remains(target)
    found = sorted(file.name for file in target.iterdir() if file.name != LOCK)
    if RECORD in found and json.loads((target / RECORD).read_text()) == record:
        if not (target / SUMS).is_file():
            return {}
        lines = (target / SUMS).read_text(encoding="utf-8").splitlines()
        return {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    if found:
        raise ValueError(
            f"{target} must be empty or hold the output of the same command for the same files, "
            f"got {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}"
        )
    write_json(target / RECORD, record)
    return {}


def check_space(target: Path, conversion: Conversion, sums: dict[str, str]) -> None:
    """Checks the free space before hours of work; a file with a checksum counts as written."""
    sizes, shards = conversion.sizes, conversion.split.filename_to_tensors.items()
    needed = sum(sizes[weight] for file, names in shards if file not in sums for weight in names)
    if needed > (free := shutil.disk_usage(target).free):
        left, wanted = (tqdm.format_sizeof(size, "B") for size in (free, needed))
        raise ValueError(f"{target} needs {wanted} of free disk space, has {left}")


def others(source) -> list[str]:
    """Names of the tokenizer, the licence and other files that need no conversion."""
    own = (RECORD, SUMS, INDEX, CONFIG)
    return [
        name
        for name in source.files()
        if name not in own and not name.startswith(".") and Path(name).suffix not in WEIGHTS
    ]


def copy_others(source, target: Path, sums: dict[str, str]) -> None:
    """Copies what needs no conversion and ``target`` does not have yet."""
    for name in others(source):
        if name not in sums:
            sums[name] = write_whole(
                target / name, lambda path, name=name: shutil.copyfile(source.folder / name, path)
            )
