"""Patched models beside upstream transformers: time and memory of decode and prefill by context.

    python benchmarks/bench_model.py [--part model] [--dtype float32] [--repeats 7] [--write]
    python benchmarks/bench_model.py --part layer [--write] [--plot]
    python benchmarks/bench_model.py --part step [--write]
    python benchmarks/bench_model.py --part fixed [--write]
    python benchmarks/bench_model.py --check    # the layer against its floors

The model: two dense layers of DeepSeek-V3.2 (hidden 1024, 16 heads, latent 512, RoPE 64, 64 x 128
indexer, index_topk 2048). The layer: one attention layer of the published size (hidden 7168, 128
heads), bfloat16, on one thread. Both sides get the same random weights and the same cached tokens;
no time is reported unless their results match. The step: what the patch does in Python for each
decoded token, beside 61 small layers. Fixed: what a small layer costs in a decode step, on one
thread's CPU time. The layer's times are user CPU time: upstream's step takes
gigabytes of fresh pages, whose price is the machine's. Peak memory is the memory of one side beyond
weights and cache, measured in its own process.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import floors
import psutil
import torch
from measure import (
    check,
    interleaved,
    machine,
    of_kernels,
    peak_over,
    ratio,
    table,
    user_seconds,
    write_section,
)
from model_sides import CALLS, LAYER, MODEL, SIDES, filled_cache, make_model
from model_step import measure_fixed, measure_step
from torch import Tensor

import custom_pypto

STEPS = {
    "step": ("A decoded token, beside the layers", measure_step),
    "fixed": ("Fixed cost of a decoder layer", measure_fixed),
}
CONTEXTS = (1024, 4096, 16384)
# upstream materialises float32 index scores [64, S, S]: 64 GiB at 16K
UPSTREAM_PREFILL_LIMIT = 4096
UPSTREAM_DECODE_LIMIT = 16384
LAYER_DECODE_CONTEXTS = tuple(1024 * 2**i for i in range(8))
LAYER_PREFILL_CONTEXTS = (1024, 2048, 4096, 16384)
# Relative to the largest element of a row. Each side rounds four times (ours: absorbed query,
# latent output, head output, sum of the heads; upstream: expanded key or value, weight, head
# output, sum), by at most 2^-8 each, 2^-5 in total. One of the 2048 positions may be another with
# an equal score within rounding: sqrt(2 / 2048) = 2^-5 once more.
LAYER_TOLERANCE = 2**-4
PLOTS = Path(__file__).with_name("plots")


def upstream_layer_prefill_limit() -> int:
    """In tokens: upstream needs about 1.7 KB per pair of tokens, 7 GB at 2K and 28 GB at 4K."""
    return 4096 if psutil.virtual_memory().available > 32e9 else 2048


def sides_of(phase: str, context: int) -> tuple[str, ...]:
    """The sides to run: upstream only where it fits in memory and takes seconds at most."""
    if phase == "layer prefill":
        limit = upstream_layer_prefill_limit()
    else:
        limit = UPSTREAM_PREFILL_LIMIT if phase == "prefill" else UPSTREAM_DECODE_LIMIT
    return SIDES if context <= limit else SIDES[:1]


def assert_agree(phase: str, outputs: dict[str, Tensor]) -> None:
    """Exits unless the sides agree within rounding; float32 logits, or bfloat16 rows."""
    ours, upstream = (outputs[side].float() for side in SIDES)
    error, limit = (ours - upstream).abs().amax(-1), 1e-3
    if phase.startswith("layer"):
        error, limit = error / upstream.abs().amax(-1), LAYER_TOLERANCE
    if not (error <= limit).all():
        raise SystemExit(f"{phase}: the sides differ by {error.max():.1e}; not reported")


def times(both: dict, phase: str, context: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each side to run, after their results were compared."""
    outputs = {}

    def kept(side: str) -> Callable[[], None]:
        call = CALLS[phase](side, both[side], context)
        return lambda: outputs.update({side: call()})

    clock = user_seconds if phase.startswith("layer") else None
    seconds = interleaved({side: kept(side) for side in sides_of(phase, context)}, repeats, clock)
    # bfloat16 logits cannot be compared: where scores nearly tie, both selections are valid
    if len(outputs) == 2 and (phase.startswith("layer") or both["transformers"].dtype.itemsize > 2):
        assert_agree(phase, outputs)
    return seconds


def peak_bytes(side: str, phase: str, context: int, dtype: torch.dtype) -> int:
    """Peak resident memory of one call, beyond the memory resident before it, in a new process."""
    command = [sys.executable, __file__, "--dtype", str(dtype)[6:], "--peak", side, phase]
    done = subprocess.run([*command, str(context)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def print_peak(side: str, phase: str, context: int, dtype: torch.dtype) -> None:
    model = make_model(side, LAYER if phase.startswith("layer") else MODEL, dtype)
    call = CALLS[phase](side, model, context)
    CALLS[phase](side, model, 64)()  # threads and libraries start before the measurement
    print(peak_over(call))


class Result(NamedTuple):
    phase: str
    context: int
    seconds: dict[str, list[float]]  # by side
    peaks: dict[str, int]
    repeats: int

    def row(self) -> list[str]:
        ms = {s: f"{statistics.median(x) * 1e3:.1f}" for s, x in self.seconds.items()}
        # below 1 MiB the allocator's pages dominate, not the call
        mib = {s: f"{x / 2**20:.0f}" if x >= 2**20 else "<1" for s, x in self.peaks.items()}
        time = memory = "-"
        if len(ms) == 2:
            time = f"{ratio(self.seconds['transformers'], self.seconds['custom_pypto']):.1f}"
            ours = self.peaks["custom_pypto"]
            at_least = ">" if ours < 2**20 else ""
            memory = f"{at_least}{self.peaks['transformers'] / max(ours, 2**20):.1f}"
        return [
            *(self.phase, f"{self.context // 1024}K"),
            *(ms.get(side, "not run") for side in SIDES),
            time,
            *(mib.get(side, "not run") for side in SIDES),
            *(memory, str(self.repeats)),
        ]


def measured(both: dict, phase: str, context: int, repeats: int) -> Result:
    seconds = times(both, phase, context, repeats)
    dtype = both["custom_pypto"].dtype
    peaks = {side: peak_bytes(side, phase, context, dtype) for side in seconds}
    result = Result(phase, context, seconds, peaks, repeats)
    print(*result.row(), sep="  ", flush=True)
    return result


def measure_model(dtype: torch.dtype, repeats: int) -> list[Result]:
    both = {side: make_model(side, MODEL, dtype) for side in SIDES}
    return [
        measured(both, phase, context, repeats if phase == "decode" else 1 if context > 1024 else 3)
        for phase in ("decode", "prefill")
        for context in CONTEXTS
    ]


def make_layers() -> dict:
    return {side: make_model(side, LAYER, torch.bfloat16) for side in SIDES}


def measure_layer(both: dict, repeats: int) -> list[Result]:
    results = [
        # upstream takes seconds per token
        measured(both, "layer decode", context, 3 if context <= UPSTREAM_DECODE_LIMIT else repeats)
        for context in LAYER_DECODE_CONTEXTS
    ]
    return results + [
        measured(both, "layer prefill", context, 1) for context in LAYER_PREFILL_CONTEXTS
    ]


def check_layer() -> int:
    both = make_layers()

    def time(phase: str, context: int, repeats: int) -> float:
        seconds = times(both, phase, context, repeats)
        return ratio(seconds["transformers"], seconds["custom_pypto"])

    def memory(context: int) -> float:
        sides = [peak_bytes(side, "layer prefill", context, torch.bfloat16) for side in SIDES]
        return sides[1] / sides[0]

    def within_4_gib() -> float:
        return 4 * 2**30 / peak_bytes("custom_pypto", "layer prefill", 16384, torch.bfloat16)

    checks = [
        (
            f"layer decode, {c // 1024}K, times upstream",
            partial(time, "layer decode", c, 2),
            least,
        )
        for c, least in floors.here(floors.LAYER_DECODE).items()
    ]
    prefill = upstream_layer_prefill_limit()  # upstream falls behind further on longer prompts
    name = f"layer prefill, {prefill // 1024}K"
    return check(
        [
            *checks,
            (f"{name}, times upstream", partial(time, "layer prefill", prefill, 1), 1.3),
            (f"{name}, peak memory of upstream over ours", partial(memory, prefill), 5.0),
            ("layer prefill, 16K, 4 GiB over peak memory", within_4_gib, 1.0),
        ]
    )


def indexer_call(model, context: int):
    """The lightning indexer of a decode step by itself."""
    cache = filled_cache("custom_pypto", model, context)
    indexer = model.base_model.layers[0].self_attn.indexer
    query = torch.randn(1, 1, indexer.n_heads, indexer.head_dim).to(model.dtype)
    weights = torch.randn(1, 1, indexer.n_heads)
    return lambda: custom_pypto.npu_lightning_indexer_pto(
        query,
        cache.layers[0].index,
        weights,
        actual_seq_lengths_key=cache.lengths,
        block_table=cache.block_table,
        sparse_count=indexer.index_topk,
    )


def plot(results: list[Result], model) -> None:
    """Time per decoded token and peak memory against the context, into ``PLOTS``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def points(phase: str, side: str, value: Callable[[Result], float]):
        chosen = [r for r in results if r.phase == phase and side in r.seconds]
        return [r.context for r in chosen], [value(r) for r in chosen]

    def save(file: str, title: str, unit: str) -> None:
        axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=unit, title=title)
        contexts = sorted({r.context for r in results})
        axes.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        PLOTS.mkdir(exist_ok=True)
        figure.savefig(PLOTS / file, dpi=110)

    colours = dict(zip(SIDES, ("tab:blue", "tab:orange"), strict=True))
    layer = "one attention layer of DeepSeek-V3.2, bfloat16, one thread"
    figure, axes = plt.subplots(figsize=(8, 5))
    for side, colour in colours.items():
        x, ms = points(
            "layer decode", side, lambda r, s=side: statistics.median(r.seconds[s]) * 1e3
        )
        axes.plot(x, ms, "o-", color=colour, label=side)
    contexts, ours = points(
        "layer decode", SIDES[0], lambda r: statistics.median(r.seconds[SIDES[0]]) * 1e3
    )
    alone = {context: indexer_call(model, context) for context in contexts}
    indexer = [statistics.median(x) * 1e3 for x in interleaved(alone, 7).values()]
    rest = [a - b for a, b in zip(ours, indexer, strict=True)]
    axes.plot(contexts, indexer, "s--", color="tab:green", label="of it: lightning indexer")
    axes.plot(contexts, rest, ":", color="tab:blue", label="of it: everything else")
    print("indexer alone, ms:", *(f"{ms:.2f}" for ms in indexer))
    print("everything else, ms:", *(f"{ms:.2f}" for ms in rest))
    save("model_time.png", f"Time per decoded token\n{layer}", "ms")

    figure, axes = plt.subplots(figsize=(8, 5))
    for phase, line in (("layer decode", "o--"), ("layer prefill", "o-")):
        for side, colour in colours.items():
            # below 1 MiB the allocator's pages dominate, not the call
            x, mib = points(phase, side, lambda r, s=side: max(r.peaks[s] / 2**20, 1))
            axes.plot(x, mib, line, color=colour, label=f"{side}, {phase.split()[1]}")
    save("model_memory.png", f"Peak memory over weights and cache\n{layer}", "MiB (1: at most 1)")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--part", choices=["model", "layer", *STEPS], help="run only one table")
    parser.add_argument("--write", action="store_true", help="write to benchmarks/RESULTS.md")
    parser.add_argument("--plot", action="store_true", help="plot the layer into benchmarks/plots")
    parser.add_argument("--check", action="store_true", help="compare the layer with its floors")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)  # the process that measures
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return args


def main() -> int:
    args = arguments()
    threads, dtype = len(os.sched_getaffinity(0)), getattr(torch, args.dtype)
    if args.peak:
        side, phase, context = args.peak
        torch.set_num_threads(1 if phase.startswith("layer") else threads)
        print_peak(side, phase, int(context), dtype)
        return 0

    def report(title: str, command: str, note: str, results: list[Result]) -> None:
        header = ["phase", "context", "ms", "ms upstream", "ratio", "peak MiB", "peak MiB upstream"]
        text = table([*header, "ratio", "repeats"], [result.row() for result in results])
        if args.write:
            command = f"python benchmarks/bench_model.py {command} --write"
            write_section(of_kernels(title), command, text + note)

    note = (
        "\n\nms: of one decoded token, or of the whole prompt; medians of interleaved repeats. "
        "Peak: on top of weights and cache. Not run: upstream prefill that does not fit; at 16K "
        "its float32 index scores alone are 64 x 16384 x 16384 x 4 bytes = 64 GiB"
    )
    torch.set_num_threads(1)
    if args.part in STEPS:
        title, measure = STEPS[args.part]
        text = measure()
        print(machine(), text, sep="\n")
        if args.write:
            command = f"python benchmarks/bench_model.py --part {args.part} --write"
            write_section(title, command, text)
        return 0
    torch.set_num_threads(threads)
    if not args.check and args.part != "layer":
        print(machine())
        results = measure_model(dtype, args.repeats)
        report(f"Model, {args.dtype}", f"--part model --dtype {args.dtype}", note + ".", results)
    torch.set_num_threads(1)
    if args.check:
        print(machine())
        return check_layer()
    if args.part != "model":
        print(machine())
        both = make_layers()
        results = measure_layer(both, args.repeats)
        note += (
            ", and upstream decode above 16K, whose time goes on growing with the context. User "
            "CPU time: see the next section."
        )
        report(
            "Attention layer of the full size, bfloat16, 1 thread", "--part layer", note, results
        )
        if args.plot:
            plot(results, both["custom_pypto"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
