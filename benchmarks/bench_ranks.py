"""A prompt over ranks beside one process: the time, and the bytes between the ranks.

    python benchmarks/bench_ranks.py [--ranks 2] [--tokens 16384] [--repeats 3] [--write]

Every rank has one thread, and one core if the machine is quiet. Two layers with DeepSeek-V3.2's
widths of latents and index keys in bfloat16, 16 heads, hidden states of 1024. The first rank takes
the whole prompt alone, then all ranks share it, in turn; wall time, since a rank waits for the
others. Bytes are those that the loopback device sent, of this machine as a whole, beside 1408 bytes
for each token, layer and other rank and the hidden states of the prompt at the end.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from measure import machine, ratio, write_section
from model_sides import MODEL, make_model

from custom_pypto import models
from custom_pypto.models import CACHE

ROW = 2 * (512 + 64 + 128)  # latent, RoPE key and index key in bfloat16


@torch.inference_mode()
def work(rank: int, folder: Path, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks
    )
    model = make_model("custom_pypto", MODEL, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(MODEL["vocab_size"], (1, args.tokens), generator=generator)

    def prompt(shared: bool) -> torch.Tensor:
        models.use_custom_pypto(model, context_parallel=shared)
        cache = models.PagedCache(model, 1, args.tokens)
        return model(ids, logits_to_keep=1, **{CACHE: cache}).logits

    expected, got = prompt(False), prompt(True)
    difference = float((got - expected).abs().max() / expected.abs().max())
    if not difference < 0.05:  # a rounding of bfloat16 can change a selected token
        raise SystemExit(f"logits differ by {difference}: not timed")
    alone, shared, sent = [], [], []
    for _ in range(args.repeats):
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
        torch.save((alone, shared, sent, difference), folder / "seconds.pt")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/RESULTS.md")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            work, (Path(folder), args), nprocs=args.ranks, start_method="spawn"
        )
        alone, shared, sent, difference = torch.load(Path(folder) / "seconds.pt")
    layers, others = MODEL["num_hidden_layers"], args.ranks - 1
    rows = args.tokens * ROW * layers * others
    hidden = args.tokens * 2 * MODEL["hidden_size"] * others
    text = (
        f"{args.tokens} tokens, {layers} layers, a thread for each rank: one process "
        f"{statistics.median(alone):.1f} s, {args.ranks} ranks {statistics.median(shared):.1f} s: "
        f"{ratio(alone, shared):.2f} times as fast. Between the ranks "
        f"{statistics.median(sent) / 1e6:.0f} MB of {(rows + hidden) / 1e6:.0f} MB computed "
        f"({rows / 1e6:.0f} for cache rows, {hidden / 1e6:.0f} for hidden states). The logits of "
        f"the last token differ by {difference:.4f} of the largest."
    )
    print(text)
    if args.write:
        command = f"python benchmarks/bench_ranks.py --ranks {args.ranks} --tokens {args.tokens}"
        write_section(f"Prompts over {args.ranks} ranks", f"{command} --write", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
