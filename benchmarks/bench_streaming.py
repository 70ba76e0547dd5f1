"""Tokens of a model whose experts stay in its files, compared with the disk and with memory.

The checkpoint is in the published format, with DeepSeek-V3.2's widths in fp8: five layers with 40
experts of 44 MB each, random, 9 GB. It has no dense layers, which are 3 of DeepSeek-V3.2's 61:
nobody knows yet which experts to read while these run. A quarter of the experts fits in the budget.
No token takes less time than the disk for what is read for it, nor than the model in memory. The
disk's rate is that of the model's own threads, which read experts of these files in the same run
while nothing is computed. The page cache has no part: files are read past it where the file system
allows, else what was read is dropped from it. Tensors begin at multiples of 4096 bytes: some
virtual disks read only such bytes in place, and others by a copy, which takes 0.1 s of CPU for a
GB; NVMe disks read all in place.
"""

import contextlib
import itertools
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import transformers
from bench_loading import write_checkpoint
from measure import Benchmark, Floor, in_own_process, interleaved, ratio
from published import header_of
from streaming_harness import budget, pool_of
from transformers import PreTrainedModel

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.streaming.files import BLOCK
from custom_pypto.models.streaming.pool import Pool
from custom_pypto.models.streaming.slots import State

EXPERTS, LAYERS = 40, 5
SHARE = 4  # one expert in so many fits in the budget
FREE = 14 * 10**9  # bytes of disk that the files and what writes them take
TOKENS, PROMPT = 24, 16
PROBED = 48  # experts that are read for the disk's rate
WEIGHTS = {"experts": "stored", "rest": "stored"}
CHOSEN = 8  # experts of a token in a layer
MOST = {
    "a token, of the longer of disk and memory": 1.3,  # the aim is 1.15
    "a layer's experts in slots, of those in memory": 1.05,
    "CPU seconds for a GB that is read": 0.06,
}


def save_aligned(tensors: dict[str, torch.Tensor], file: Path, metadata: dict) -> None:
    """A safetensors file whose large tensors begin at multiples of 4096 bytes."""
    ordered = dict(sorted(tensors.items(), key=lambda item: item[1].nbytes % BLOCK))
    with file.open("wb") as opened:
        opened.write(header_of(ordered, metadata, BLOCK))
        for tensor in ordered.values():
            opened.write(tensor.contiguous().view(torch.uint8).numpy())
        opened.flush()
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Run(NamedTuple):
    """Of each token after a prompt: which, its seconds, and GB that were read meanwhile."""

    tokens: list[int]
    seconds: list[float]
    read: list[float]

    def per_token(self) -> float:
        return statistics.median(self.seconds)


@torch.no_grad()
def run(model, pool: Pool | None = None) -> Run:
    """
    Args:
        pool: of a model whose experts stay in its files.
    """
    cache, ids = models.PagedCache(model, 1, PROMPT + TOKENS), torch.arange(PROMPT)[None]
    found = Run([], [], [])
    logits = model(ids, **{CACHE: cache}).logits
    for _ in range(TOKENS):
        found.tokens.append(int(logits[0, -1].argmax()))
        before, begin = pool.counts().nbytes if pool else 0, time.perf_counter()
        logits = model(torch.tensor([found.tokens[-1:]]), **{CACHE: cache}).logits
        found.seconds.append(time.perf_counter() - begin)
        found.read.append(((pool.counts().nbytes if pool else 0) - before) / 1e9)
    return found


def read_alone(pool: Pool) -> tuple[float, float]:
    """GB per second, and seconds of CPU for a GB, while nothing is computed."""
    experts, size = itertools.cycle(pool.places), PROBED * pool.form.nbytes() / 1e9
    with pool.changed:
        for slot in list(pool.slots.taken.values()):
            if slot.state == State.READY:
                pool.slots.lose(slot)
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(PROBED // 8):
        pool.fill(itertools.islice(experts, 8))
    return size / (time.perf_counter() - begin), (time.process_time() - used) / size


def within_half(path: str, memory: int, limit: int) -> tuple[list[int], float]:
    """Tokens of a process that the kernel grants no more data, and the GB that it has then."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    tokens = run(models.load(path, weights=WEIGHTS, memory=memory)).tokens
    return tokens, psutil.Process().memory_info().data / 1e9


class Sides(NamedTuple):
    whole: PreTrainedModel
    part: PreTrainedModel  # a share of its experts in memory


@contextlib.contextmanager
def sides() -> Iterator[Sides]:
    """The model in memory and the one in files, once their tokens were compared, also in a process
    that may use half as much memory as the files take of the disk."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        if (free := shutil.disk_usage(folder).free) < FREE:
            raise SystemExit(f"needs {FREE / 1e9:.0f} GB of disk here, found {free / 1e9:.1f}")
        size = write_checkpoint(path := Path(folder), LAYERS, EXPERTS, save_aligned, dense=0)
        whole = models.load(path, weights=WEIGHTS)
        tokens, memory = run(whole).tokens, budget(whole, LAYERS * EXPERTS // SHARE)
        under_limit, used = in_own_process(within_half, str(path), memory, size // 2)
        print(f"{size / 1e9:.2f} GB of files, a limit of {size / 2e9:.2f}, used {used:.2f}")
        part = models.load(path, weights=WEIGHTS, memory=memory)
        if tokens != under_limit or tokens != run(part).tokens:
            raise SystemExit("the tokens of both models differ: not timed")
        yield Sides(whole, part)


def round_of(of: Sides) -> dict[str, float]:
    """Figures of one round: both sides and the disk, one after the other."""
    pool, whole = pool_of(of.part), run(of.whole).per_token()
    before = pool.counts()
    part = run(of.part, pool)
    counts, read = pool.counts() - before, statistics.fmean(part.read)
    rate, cpu = read_alone(pool)
    return {
        "in memory, ms": 1000 * whole,
        "ms": 1000 * statistics.fmean(part.seconds),
        "GB read": read,
        "hits": counts.hits / counts.asked,
        "disk, GB/s": rate,
        "CPU s a GB": cpu,
        "token": statistics.fmean(part.seconds) / max(read / rate, whole),
    }


def resident(of: Sides) -> float:
    """A layer's experts in slots, all of them, over the same layer in memory, at decode."""
    layer = next(name for name, x in of.whole.named_modules() if name.endswith(".experts"))
    whole, part = of.whole.get_submodule(layer), of.part.get_submodule(layer)
    x, weights = torch.randn(1, whole.hidden_dim).bfloat16(), torch.full((1, CHOSEN), 1 / CHOSEN)
    ids = torch.arange(CHOSEN)[None]
    ahead, part.streamed.ahead = part.streamed.ahead, None
    try:
        with torch.no_grad():
            calls = {"part": lambda: part(x, ids, weights), "whole": lambda: whole(x, ids, weights)}
            seconds = interleaved(calls, repeats=50)
    finally:
        part.streamed.ahead = ahead
    return ratio(seconds["part"], seconds["whole"])


def floors(threads: int, repeats: int) -> Iterator[Floor]:
    torch.set_num_threads(1)
    with sides() as of:
        figures = [
            lambda: round_of(of)["token"],
            lambda: resident(of),
            lambda: read_alone(pool_of(of.part))[1],
        ]
        for name, figure in zip(MOST, figures, strict=True):
            yield Floor(name, figure, MOST[name], at_least=False)


def rows(threads: int, repeats: int) -> Iterator[list[str]]:
    torch.set_num_threads(threads)
    with sides() as of:
        found = [round_of(of) for _ in range(repeats)]
        in_slots = statistics.median(resident(of) for _ in range(repeats))
        medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
        yield [
            f"{pool_of(of.part).readers} readers",
            *(f"{figure:.3g}" for figure in [*medians.values(), in_slots]),
        ]


FIGURES = ["in memory, ms", "ms", "GB read", "hits", "disk, GB/s", "CPU s a GB"]
FIGURES += ["of the longer of disk and memory", "experts in slots, of those in memory"]
BENCHMARKS = {
    "streaming": Benchmark(
        ["a quarter of the experts in memory", *FIGURES], rows, floors, variant="threads: {threads}"
    )
}
