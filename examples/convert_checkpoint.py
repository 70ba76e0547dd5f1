"""Converts a published checkpoint in fp8 or fp4 to bfloat16 or to other quantized weights, or
cuts a part of one.

    python examples/convert_checkpoint.py SOURCE TARGET
    python examples/convert_checkpoint.py SOURCE TARGET --layers 4 --experts 32
    python examples/convert_checkpoint.py SOURCE TARGET --weights int8
    python examples/convert_checkpoint.py deepseek-ai/DeepSeek-V3.2 TARGET --layers 4
    cd TARGET && sha256sum -c SHA256SUMS

The same command resumes an interrupted run: a shard is kept if its checksum still matches, and gets
its final name only when complete. One shard is in memory at a time. Tensors that are not quantized
are copied unchanged, including layers for multi-token prediction unless --layers is given. With
--experts the model generates no sensible text, but runs like the whole model. With --weights the
whole result is in memory, nothing is kept of an interrupted run, and models.load maps the files.
"""

import custom_pypto  # noqa: F401  # before torch, so that its idle threads sleep

# isort: split
import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import filelock
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from options import Help
from tqdm import tqdm

from custom_pypto import files, hub, models
from custom_pypto.models.architectures import supported_model
from custom_pypto.models.loading.checkpoint import (
    check_dtypes,
    check_scales,
    check_shards,
    first_layers,
    stored_tensors,
)
from custom_pypto.models.loading.reader import Reader
from custom_pypto.models.weights import published
from custom_pypto.weight_formats import rounded_formats

RECORD, SUMS, INDEX = "conversion.json", "SHA256SUMS", "model.safetensors.index.json"
PARTIAL = ".conversion.partial"  # a model that is being saved
LOCK = ".conversion.lock"  # of the run that writes the folder
METADATA = {"format": "pt"}
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


# layers of the text model, and layers that draft: mtp, mtp_layers, mtp_dspark
LAYER = re.compile(r"(?:model\.|language_model\.)*(?:layers\.(\d+)|mtp\w*)\.")


def layer_of(name):
    """The layer of a tensor; -1 is none of the text model, infinity one that drafts."""
    found = LAYER.match(name)
    if found is None:
        return -1
    return math.inf if found[1] is None else int(found[1])


class Conversion:
    """The conversion plan, from ``config.json`` and the headers of the source only.

    Args:
        source: what :func:`custom_pypto.hub.find` found.
    """

    def __init__(self, source, layers, experts, max_shard_size):
        self.source, self.layers, self.experts = source, layers, experts
        parsed, model_class = supported_model("SOURCE", source.folder)
        original = json.loads((source.folder / "config.json").read_text())
        if "text_config" in original:
            raise ValueError(
                f"SOURCE must be a model of text for a conversion to bfloat16, got a "
                f"{model_class.__name__}; --weights takes it"
            )
        self.blocks = published.blocks_of(original)
        self.config = self.new_config(original)
        if layers is not None:
            parsed = type(parsed).from_dict(first_layers(parsed.to_dict(), layers, "--layers"))
        if experts is not None:
            check_experts(experts, parsed)
        with torch.device("meta"):
            model = models.use_custom_pypto(model_class._from_config(parsed))
        check_shards(source, model, self.blocks, {})

        self.tensors = stored_tensors(source, self.wants, self.blocks)
        check_dtypes(self.tensors, self.blocks)
        check_scales(self.tensors, self.blocks)
        quantized = filter(self.is_quantized, self.tensors)
        scales = {published.scale_name(name, self.tensors) for name in quantized}
        self.split = split_state_dict_into_shards_factory(
            {name: self.size(name) for name in sorted(self.tensors.keys() - scales, key=natural)},
            get_storage_size=int,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        self.files = sorted({stored.file for stored in self.tensors.values()})
        self.options = {"layers": layers, "experts": experts, "max_shard_size": max_shard_size}

    def record(self):
        """What must be equal for an interrupted run to go on; needs the files."""
        stats = {file.name: file.stat() for file in self.files}
        source = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        return self.options | {"source": source}

    def new_config(self, original):
        config = {name: it for name, it in original.items() if name not in published.CONFIG}
        if self.blocks:
            config["torch_dtype" if "torch_dtype" in config else "dtype"] = "bfloat16"
        if self.layers is not None:
            config = first_layers(config, self.layers, "--layers")
            if "num_nextn_predict_layers" in config:
                config["num_nextn_predict_layers"] = 0
        if self.experts is not None:
            config["n_routed_experts"] = self.experts
        return config

    def wants(self, name):
        if self.layers is not None and layer_of(name) >= self.layers:
            return False
        expert = re.search(r"\.experts\.(\d+)\.", name)
        return self.experts is None or not expert or int(expert[1]) < self.experts

    def is_quantized(self, name):
        return self.tensors[name].dtype in self.blocks

    def cuts(self, name):
        """Whether ``name`` has a row for each expert: the router's weight and bias, and experts
        that the checkpoint stacks."""
        stacked = r"\.(mlp|ffn)\.(gate\.(?!tid2eid)|experts\.[a-z])"
        return self.experts is not None and re.search(stacked, name) is not None

    def size(self, name):
        _, dtype, (rows, *columns) = self.tensors[name]
        rows = self.experts if self.cuts(name) else rows
        others = published.FLOATS | published.INTEGERS
        dtype = torch.bfloat16 if self.is_quantized(name) else others[dtype]
        return rows * torch.Size(columns).numel() * dtype.itemsize

    def shard(self, reader, names):
        tensors = {}
        for name in names:
            tensor = reader.read(name)
            if self.cuts(name):
                tensor = tensor[: self.experts].clone()
            elif self.experts is not None and name.endswith("tid2eid"):
                tensor %= self.experts  # the experts of each token id
            tensors[name] = tensor
        return tensors


def natural(name):
    """A key that sorts ``layers.2`` before ``layers.10``."""
    return [part.zfill(8) if part.isdigit() else part for part in name.split(".")]


def check_experts(experts, config):
    """The router takes the best ``topk_group`` groups of experts, each by the sum of its best two,
    and then the best ``num_experts_per_tok`` in them; without groups the best of all."""
    groups = getattr(config, "n_group", None)

    def works(count):
        if groups is None:
            return count >= config.num_experts_per_tok
        group, rest = divmod(count, groups)
        enough = group * config.topk_group >= config.num_experts_per_tok
        return rest == 0 and group >= 2 and enough

    allowed = [str(count) for count in range(1, config.n_routed_experts + 1) if works(count)]
    if str(experts) not in allowed:
        listed = ", ".join([*allowed[:3], "...", allowed[-1]] if len(allowed) > 4 else allowed)
        grouping = "" if groups is None else f"n_group {groups}, topk_group {config.topk_group}, "
        raise ValueError(
            f"--experts must be one of {listed} ({grouping}num_experts_per_tok "
            f"{config.num_experts_per_tok}), got {experts}"
        )


def sha256(file):
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_whole(file, write):
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


def flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file, text):
    return write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))


def write_json(file, value):
    return write_text(file, json.dumps(value, indent=2) + "\n")


def write_sums(target, sums):
    write_text(target / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))


@contextlib.contextmanager
def alone(target):
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


def begin(target, record):
    """Starts in an empty folder, or resumes the same conversion.

    Returns:
        the checksums of the shards written before, by name.
    """
    files.remove_remains(target)
    found = sorted(file.name for file in target.iterdir() if file.name not in (PARTIAL, LOCK))
    if RECORD in found and json.loads((target / RECORD).read_text()) == record:
        shutil.rmtree(target / PARTIAL, ignore_errors=True)
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


def check_space(target, conversion, sums):
    """Checks the free space before hours of work; a file with a checksum counts as written."""
    names = conversion.split.filename_to_tensors
    needed = sum(
        conversion.size(name)
        for file, tensors in names.items()
        if file not in sums
        for name in tensors
    )
    if needed > (free := shutil.disk_usage(target).free):
        left, wanted = (tqdm.format_sizeof(size, "B") for size in (free, needed))
        raise ValueError(f"{target} needs {wanted} of free disk space, has {left}")


def convert(source, target, conversion):
    """Returns the number of shards kept and written, and their bytes."""
    source.fetch([*others(source), *(file.name for file in conversion.files)])
    sums = begin(target, conversion.record())
    check_space(target, conversion, sums)
    reader = Reader(conversion.tensors, conversion.blocks)
    kept, total = 0, conversion.split.metadata["total_size"]
    shards = conversion.split.filename_to_tensors
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as progress:
        for file, names in shards.items():
            progress.set_description(file)
            if (target / file).is_file() and sums.get(file) == sha256(target / file):
                kept += 1
            else:
                tensors = conversion.shard(reader, names)
                write = functools.partial(files.write_tensors, tensors=tensors, metadata=METADATA)
                sums[file] = write_whole(target / file, write)
                write_sums(target, sums)
            progress.update(sum(map(conversion.size, names)))

    if len(shards) > 1:
        weight_map = conversion.split.tensor_to_filename
        index = {"metadata": conversion.split.metadata, "weight_map": weight_map}
        sums[INDEX] = write_json(target / INDEX, index)
    copy_others(source, target, sums)
    # last: without it the folder is not a valid checkpoint
    sums["config.json"] = write_json(target / "config.json", conversion.config)
    write_sums(target, sums)
    return kept, len(shards) - kept, total


def others(source):
    """Names of the tokenizer, the licence and other files that need no conversion."""
    own = (RECORD, SUMS, INDEX, "config.json")
    return [
        name
        for name in source.files()
        if name not in own and not name.startswith(".") and Path(name).suffix not in WEIGHTS
    ]


def copy_others(source, target, sums):
    """Copies what needs no conversion and ``target`` does not have yet."""
    for name in others(source):
        if name not in sums:
            sums[name] = write_whole(
                target / name, lambda path, name=name: shutil.copyfile(source.folder / name, path)
            )


def convert_weights(args, source):
    """Returns the number of shards and their bytes."""
    record = {name: getattr(args, name) for name in ("weights", "layers", "max_shard_size")}
    target = args.target
    begin(target, record | {"source": str(source.folder.resolve())})
    given = dict(weights=args.weights, num_hidden_layers=args.layers, revision=args.revision)
    model = models.load(args.source, **given)
    source.fetch(others(source))
    model.save_pretrained(target / PARTIAL, max_shard_size=args.max_shard_size)
    sums, shards, total = {}, 0, 0
    written = sorted((target / PARTIAL).iterdir(), key=lambda file: file.name == "config.json")
    for file in written:  # config.json last: without it the folder is not a valid checkpoint
        if file.name == "config.json":
            copy_others(source, target, sums)
        if file.suffix == ".safetensors":
            shards, total = shards + 1, total + file.stat().st_size
        shutil.copymode(target / RECORD, file)  # safetensors makes files for this user alone
        flush(file)
        sums[file.name] = sha256(file)
        file.replace(target / file.name)
    flush(target)
    write_sums(target, sums)
    shutil.rmtree(target / PARTIAL)
    return shards, total


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="a checkpoint directory with config.json and safetensors, or the name of a repository "
        "on the Hugging Face Hub",
    )
    add(
        "target",
        metavar="TARGET",
        type=Path,
        help="an empty or new directory, or that of an interrupted run",
    )
    add("--revision", help="branch, tag or commit of the repository")
    add("--layers", type=int, metavar="N", help="the first N layers only")
    add("--experts", type=int, metavar="N", help="the first N routed experts of each layer only")
    add("--weights", choices=("stored", *rounded_formats()), help="of linear layers and experts")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="largest shard, such as 500MB")
    return parser.parse_args()


def main():
    args = parse_args()
    try:
        kept, source = 0, hub.find("SOURCE", args.source, args.revision)
        if args.weights is None:
            conversion = Conversion(source, args.layers, args.experts, args.max_shard_size)
            with alone(args.target):
                kept, written, size = convert(source, args.target, conversion)
        elif args.experts is None:
            with alone(args.target):
                written, size = convert_weights(args, source)
        else:
            raise ValueError("--experts must be omitted with --weights; cut the experts first")
    except (MemoryError, OSError, TypeError, ValueError) as error:
        sys.exit(f"convert_checkpoint.py: {error}")
    except KeyboardInterrupt:
        sys.exit("convert_checkpoint.py: interrupted; run the same command to resume")
    size = tqdm.format_sizeof(size, "B")
    print(f"{args.target}: {size} | {written} shards written, {kept} kept | {SUMS}")


if __name__ == "__main__":
    main()
