"""Speed of models.load on a checkpoint in the published format, relative to reading its files.

    python benchmarks/bench_loading.py [--threads 1] [--repeats 5] [--write]
    python benchmarks/bench_loading.py --check    # against the floor

The checkpoint has 2 GB of random fp8 weights in the layout and the sizes of DeepSeek-V3.2, with
fewer layers, experts and vocabulary entries. The baseline reads every tensor with safetensors,
dequantizes fp8 with torch, one row of blocks at a time, and drops each tensor before the next.
models.load also validates the headers, creates the model and keeps every tensor. The files are in
the page cache. One thread is timed by the CPU time of the process, which includes transformers'
reader threads.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from measure import check, interleaved, machine, ratio, table, write_section
from safetensors import safe_open
from transformers import DeepseekV32Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from published import BLOCK, write_published  # noqa: E402
from tiny import YARN  # noqa: E402

from custom_pypto import models  # noqa: E402

FLOOR = 0.5
EXPERTS = 26  # in the second of two layers; the first is dense


def write_checkpoint(path: Path) -> int:
    """Returns the checkpoint's bytes, without the layer for multi-token prediction."""
    config = DeepseekV32Config(
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_routed_experts=EXPERTS,
        n_group=1,
        topk_group=1,
        vocab_size=1024,
        rope_parameters=YARN | {"factor": 40.0, "original_max_position_embeddings": 4096},
    )
    write_published(path, config)
    shards = sorted(path.glob("*.safetensors"))
    shards.pop().unlink()
    return sum(shard.stat().st_size for shard in shards)


def read(path: Path) -> int:
    """Every tensor, dequantized.

    Returns:
        how many weights there were.
    """
    weights = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if name.endswith("_scale_inv"):
                    continue
                weight = tensors.get_tensor(name)
                if weight.dtype == torch.float8_e4m3fn:
                    weight = dequantized(weight, tensors.get_tensor(f"{name}_scale_inv"))
                weights += weight.numel()
    return weights


def dequantized(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    for i, row in enumerate(scales):
        rows = slice(i * BLOCK, (i + 1) * BLOCK)
        result[rows] = weight[rows].float() * row.repeat_interleave(BLOCK)[: weight.size(1)]
    return result


def load(path: Path) -> None:
    models.load(path)
    gc.collect()  # a patched model refers to itself; two of them would not fit


def checked(path: Path) -> None:
    """Exits unless both sides read the same number of weights."""
    loaded = sum(tensor.numel() for tensor in models.load(path).state_dict().values())
    gc.collect()
    if loaded != (count := read(path)):
        raise SystemExit(f"{loaded} weights loaded, {count} read: not timed")


def times(path: Path, repeats: int) -> dict[str, list[float]]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.monotonic
    sides = {"load": lambda: load(path), "read": lambda: read(path)}
    return interleaved(sides, repeats, clock)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/RESULTS.md")
    parser.add_argument("--check", action="store_true", help="compare with the floor, one thread")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.check else args.threads)
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        size = write_checkpoint(path)
        checked(path)
        if args.check:
            name = f"models.load of {size / 1e9:.2f} GB, of the speed of reading it"

            def measured():
                seconds = times(path, args.repeats)
                return ratio(seconds["read"], seconds["load"])

            return check([(name, measured, FLOOR)])
        seconds = times(path, args.repeats)
    load, reading = (statistics.median(seconds[side]) for side in ("load", "read"))
    share = f"{ratio(seconds['read'], seconds['load']):.2f}"
    rows = [[f"{size / 1e9:.2f}", f"{load:.2f}", f"{reading:.2f}", share]]
    text = table(["GB in fp8", "models.load, s", "safetensors + torch, s", "of its speed"], rows)
    print(text)
    if args.write:
        command = f"python benchmarks/bench_loading.py --threads {args.threads}"
        write_section(f"Loading fp8, {args.threads} thread(s)", f"{command} --write", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
