"""Speed of models.load on a checkpoint in the published format, in each format of weights.

The checkpoint has 2 GB of random fp8 weights in the layout and the sizes of DeepSeek-V3.2, with
fewer layers, experts and vocabulary entries. The baseline reads every tensor with safetensors and
keeps it as stored. models.load also validates the headers, creates the model, and
dequantizes or rounds the weights. The files are in the page cache. One thread is timed by the CPU
time of the process, which includes transformers' reader threads. Each side runs twice, and the
second run is timed: in a virtual machine the host may have to find memory first that was free for
some seconds, which took 2 s per GB on the one measured, longer than loading.
"""

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from measure import Benchmark, Floor, interleaved, ratio
from published import write_published
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import YARN
from transformers import DeepseekV32Config

from custom_pypto import models

# of the speed of safetensors, on one thread: nine tenths of the least seen, on a busy machine
FLOORS = {"stored": 0.95, None: 0.33, "int8": 0.55, "int4": 0.50}
EXPERTS = 26  # in the second of two layers; the first is dense


def write_checkpoint(
    path: Path, layers: int, experts: int, save: Callable = save_file, dense: int = 1
) -> int:
    """Returns the checkpoint's bytes, without the layer for multi-token prediction.

    Args:
        layers: with experts, behind the dense ones.
        save: the function for a file.
    """
    config = DeepseekV32Config(
        num_hidden_layers=dense + layers,
        first_k_dense_replace=dense,
        n_routed_experts=experts,
        n_group=1,
        topk_group=1,
        vocab_size=1024,
        rope_parameters=YARN | {"factor": 40.0, "original_max_position_embeddings": 4096},
    )
    write_published(path, config, save)
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
    twice = {}
    for name, side in {"read": lambda: read(path), **sides}.items():
        twice |= {f"{name}, not timed": side, name: side}
    seconds = interleaved(twice, repeats, clock)
    return {name: seconds[name] for name in ("read", *sides)}


@contextlib.contextmanager
def checkpoint() -> Iterator[tuple[Path, float]]:
    """Its folder and GB."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), 1, EXPERTS)
        checked(Path(folder))
        yield Path(folder), size / 1e9


def floors(threads: int, repeats: int) -> Iterator[Floor]:
    torch.set_num_threads(1)
    with checkpoint() as (path, size):
        for weights, least in FLOORS.items():

            def share(weights=weights) -> float:
                seconds = times(path, [weights], repeats)
                return ratio(seconds["read"], seconds[str(weights)])

            name = f"models.load of {size:.2f} GB, weights={weights!r}, of safetensors' speed"
            yield Floor(name, share, least)


def rows(threads: int, repeats: int) -> Iterator[list[str]]:
    with checkpoint() as (path, size):
        seconds = times(path, list(FLOORS), repeats)
    for side, found in seconds.items():
        median = statistics.median(found)
        share = f"{ratio(seconds['read'], found):.2f}"
        name = "safetensors" if side == "read" else f"weights={side}"
        yield [name, f"{median:.2f}", f"{size / median:.2f}", share]


BENCHMARKS = {
    "loading": Benchmark(
        ["2 GB in fp8", "s", "GB/s", "of its speed"], rows, floors, variant="threads: {threads}"
    )
}
