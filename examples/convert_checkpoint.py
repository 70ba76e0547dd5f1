"""Converts a published checkpoint to quantized weights or to bfloat16, or cuts a part of one.

    python examples/convert_checkpoint.py SOURCE TARGET --weights int4
    python examples/convert_checkpoint.py SOURCE TARGET --weights int4 --format compressed-tensors
    python examples/convert_checkpoint.py SOURCE TARGET
    python examples/convert_checkpoint.py SOURCE TARGET --layers 4 --experts 32
    python examples/convert_checkpoint.py deepseek-ai/DeepSeek-V3.2 TARGET --layers 4
    cd TARGET && sha256sum -c SHA256SUMS

With --weights, models.load maps the files of TARGET, which are those that models.load(SOURCE,
weights=...) and save_pretrained write; with --format compressed-tensors they are for vLLM instead.
Without --weights, fp8 and fp4 become bfloat16.

The same command resumes an interrupted run: a shard is kept if its checksum still matches, and gets
its final name only when complete. One shard is in memory at a time: at most --max-shard-size, or
the largest tensor. Tensors that are not quantized are copied unchanged. Layers for multi-token
prediction stay unless --layers is given; with --weights alone, those that models.load can load.
With --experts the model generates no sensible text, but runs like the whole model.
"""

import custom_pypto  # noqa: F401  # before torch, so that its idle threads sleep

# isort: split
import argparse
import sys
from pathlib import Path

from conversion.folder import SUMS, alone, convert
from conversion.packed import Packed
from conversion.plain import Plain
from conversion.stored import Stored
from options import Help
from tqdm import tqdm

from custom_pypto import hub
from custom_pypto.weight_formats import rounded_formats


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
    add("--format", choices=("compressed-tensors",), help="of the files of int8 and int4, for vLLM")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="largest shard, such as 500MB")
    return parser.parse_args()


def planned(args, source):
    """The conversion that was asked for."""
    if args.format is not None and args.weights not in rounded_formats():
        raise ValueError(
            f"--format {args.format} needs --weights {' or '.join(rounded_formats())}, got "
            f"{args.weights}"
        )
    if args.weights is None:
        return Plain(source, args.layers, args.experts, args.max_shard_size)
    if args.experts is not None:
        raise ValueError("--experts must be omitted with --weights; cut the experts first")
    kind = Stored if args.format is None else Packed
    return kind(source, args.weights, args.layers, args.max_shard_size)


def main():
    args = parse_args()
    try:
        conversion = planned(args, hub.find("SOURCE", args.source, args.revision))
        with alone(args.target):
            kept, written, size = convert(args.target, conversion)
    except (MemoryError, OSError, TypeError, ValueError) as error:
        sys.exit(f"convert_checkpoint.py: {error}")
    except KeyboardInterrupt:
        sys.exit("convert_checkpoint.py: interrupted; run the same command to resume")
    size = tqdm.format_sizeof(size, "B")
    print(f"{args.target}: {size} | {written} shards written, {kept} kept | {SUMS}")


if __name__ == "__main__":
    main()
