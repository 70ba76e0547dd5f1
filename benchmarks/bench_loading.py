"""Speed of models.load on a checkpoint in the published format, in each format of weights.

    python benchmarks/bench_loading.py [--threads 2] [--repeats 3] [--write]
    python benchmarks/bench_loading.py --check    # against the floors

The checkpoint has 2 GB of random fp8 weights in the layout and the sizes of DeepSeek-V3.2, with
fewer layers, experts and vocabulary entries. The baseline reads every tensor with safetensors and
keeps it as stored. models.load also validates the headers, creates the model, and
dequantizes or rounds the weights. The files are in the page cache. One thread is timed by the CPU
time of the process, which includes transformers' reader threads.
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

from published import write_published  # noqa: E402
from tiny import YARN  # noqa: E402

from custom_pypto import models  # noqa: E402

# of the speed of safetensors, on one thread
FLOORS = {"stored": 0.20, None: 0.10, "int8": 0.08, "int4": 0.07}
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


def read(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor as stored."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt", backend="pread") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    return tensors


def load(path: Path, weights: str | None) -> None:
    models.load(path, weights=weights)
    gc.collect()  # a patched model refers to itself; two of them would not fit


def checked(path: Path) -> None:
    """Exits unless both sides read the same number of weights."""
    loaded = sum(tensor.numel() for tensor in models.load(path).state_dict().values())
    gc.collect()
    stored = read(path).items()
    count = sum(tensor.numel() for name, tensor in stored if not name.endswith("_scale_inv"))
    if loaded != count:
        raise SystemExit(f"{loaded} weights loaded, {count} read: not timed")


def times(path: Path, weights: list[str | None], repeats: int) -> dict[str, list[float]]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.monotonic
    sides = {str(kind): lambda kind=kind: load(path, kind) for kind in weights}
    return interleaved({"read": lambda: read(path), **sides}, repeats, clock)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/RESULTS.md")
    parser.add_argument("--check", action="store_true", help="compare with the floors, one thread")
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

            def measured(weights):
                seconds = times(path, [weights], args.repeats)
                return ratio(seconds["read"], seconds[str(weights)])

            def line(weights, floor):
                name = f"models.load of {size / 1e9:.2f} GB, weights={weights!r}"
                return f"{name}, of safetensors' speed", lambda: measured(weights), floor

            return check([line(*case) for case in FLOORS.items()])
        seconds = times(path, list(FLOORS), args.repeats)
    rows = []
    for side, found in seconds.items():
        median = statistics.median(found)
        share = f"{ratio(seconds['read'], found):.2f}"
        name = "safetensors" if side == "read" else f"weights={side}"
        rows.append([name, f"{median:.2f}", f"{size / 1e9 / median:.2f}", share])
    text = table([f"{size / 1e9:.2f} GB in fp8", "s", "GB/s", "of its speed"], rows)
    print(text)
    if args.write:
        command = f"python benchmarks/bench_loading.py --threads {args.threads}"
        write_section(f"Loading fp8, {args.threads} thread(s)", f"{command} --write", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
