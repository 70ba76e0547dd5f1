"""A prompt over ranks compared with one process: the time, and the bytes between the ranks.

Every rank has one thread, and one core if the machine is quiet. Two layers with DeepSeek-V3.2's
widths of latents and index keys in bfloat16, 16 heads, hidden states of 1024. The first rank takes
the whole prompt alone, then all ranks share it, in turn; wall time, since a rank waits for the
others. Bytes are those that the loopback device sent, of this machine as a whole, next to 1408
bytes for each token, layer and other rank and the hidden states of the prompt at the end.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from measure import Benchmark, ratio
from model_sides import MODEL, make_model

from custom_pypto import models
from custom_pypto.models import CACHE

ROW = 2 * (512 + 64 + 128)  # latent, RoPE key and index key in bfloat16


@torch.inference_mode()
def work(rank: int, folder: Path, ranks: int, tokens: int, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    model = make_model("custom_pypto", MODEL, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(MODEL["vocab_size"], (1, tokens), generator=generator)

    def prompt(shared: bool) -> torch.Tensor:
        models.use_custom_pypto(model, context_parallel=shared)
        cache = models.PagedCache(model, 1, tokens)
        return model(ids, logits_to_keep=1, **{CACHE: cache}).logits

    expected, got = prompt(False), prompt(True)
    difference = float((got - expected).abs().max() / expected.abs().max())
    if not difference < 0.05:  # a rounding of bfloat16 can change a selected token
        raise SystemExit(f"logits differ by {difference}: not timed")
    alone, shared, sent = [], [], []
    for _ in range(repeats):
        dist.barrier()
        start = time.monotonic()
        if rank == 0:
            prompt(False)
            alone.append(time.monotonic() - start)
        dist.barrier()
        before, start = psutil.net_io_counters(pernic=True)["lo"].bytes_sent, time.monotonic()
        prompt(True)
        dist.barrier()
        shared.append(time.monotonic() - start)
        sent.append(psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps([alone, shared, sent, difference]))
    dist.destroy_process_group()


def rows(ranks: int, tokens: int, repeats: int) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            work, (Path(folder), ranks, tokens, repeats), nprocs=ranks, start_method="spawn"
        )
        alone, shared, sent, difference = json.loads((Path(folder) / "found.json").read_text())
    computed = tokens * (ranks - 1)
    cache, hidden = ROW * MODEL["num_hidden_layers"], 2 * MODEL["hidden_size"]
    yield [
        f"{tokens}",
        f"{statistics.median(alone):.1f}",
        f"{statistics.median(shared):.1f}",
        f"{ratio(alone, shared):.2f}",
        f"{statistics.median(sent) / 1e6:.0f}",
        f"{computed * cache / 1e6:.0f}",
        f"{computed * hidden / 1e6:.0f}",
        f"{difference:.4f}",
    ]


BENCHMARKS = {
    "ranks": Benchmark(
        [
            *("tokens", "one process, s", "ranks, s", "ratio", "MB between the ranks"),
            *("MB of cache rows, computed", "MB of hidden states, computed"),
            "difference of the logits, of the largest",
        ],
        rows,
        variant="ranks: {ranks}",
    )
}
