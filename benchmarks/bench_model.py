"""Patched models compared with upstream transformers: decode and prefill by context.

The model: two dense layers of DeepSeek-V3.2 (hidden 1024, 16 heads, latent 512, RoPE 64, 64 x 128
indexer, index_topk 2048). The layer: one attention layer of the published size (hidden 7168, 128
heads), bfloat16, on one thread; its times are user CPU time: upstream's step takes gigabytes of
fresh pages, whose price is the machine's.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import floors
import psutil
import torch
from measure import Benchmark, Floor, interleaved, median_ms, user_seconds
from model_sides import (
    HEADER,
    LAYER,
    MODEL,
    SIDES,
    Result,
    Subject,
    both_of,
    decode_call,
    filled_cache,
    layer_decode_call,
    layer_prefill_call,
    make_model,
    measured,
    median_of,
    peak_bytes,
    prefill_call,
    speedup,
)

import custom_pypto

CONTEXTS = (1024, 4096, 16384)
LAYER_DECODE_CONTEXTS = tuple(1024 * 2**i for i in range(8))
LAYER_PREFILL_CONTEXTS = (1024, 2048, 4096, 16384)
UPSTREAM_DECODE_LIMIT = 16384
# in tokens: upstream needs about 1.7 KB per pair of tokens, 7 GB at 2K and 28 GB at 4K
LAYER_PREFILL_LIMIT = 4096 if psutil.virtual_memory().available > 32e9 else 2048
# Relative to the largest element of a row. Each side rounds four times (ours: absorbed query,
# latent output, head output, sum of the heads; upstream: expanded key or value, weight, head
# output, sum), by at most 2^-8 each, 2^-5 in total. One of the 2048 positions may be another with
# an equal score within rounding: sqrt(2 / 2048) = 2^-5 once more.
LAYER_TOLERANCE = 2**-4
PLOT = Path(__file__).with_name("plots") / "model_time.png"


def whole_model(side: str, dtype: torch.dtype):
    return make_model(side, MODEL, dtype)


def layer_model(side: str):
    return make_model(side, LAYER, torch.bfloat16)


LAYERS = Subject(
    layer_model,
    {"layer decode": layer_decode_call, "layer prefill": layer_prefill_call},
    {"layer decode": UPSTREAM_DECODE_LIMIT, "layer prefill": LAYER_PREFILL_LIMIT},
    LAYER_TOLERANCE,
    clock=user_seconds,
)


def model_rows(threads: int, repeats: int, dtype: str) -> Iterator[list[str]]:
    # bfloat16 logits cannot be compared: where scores nearly tie, both selections are valid
    subject = Subject(
        partial(whole_model, dtype=getattr(torch, dtype)),
        {"decode": decode_call, "prefill": prefill_call},
        # upstream materialises float32 index scores [64, S, S]: 64 GiB at 16K
        {"decode": UPSTREAM_DECODE_LIMIT, "prefill": 4096},
        1e-3 if dtype == "float32" else None,
        relative=False,
    )
    both = both_of(subject)
    for phase in subject.calls:
        for context in CONTEXTS:
            times = repeats if phase == "decode" else 1 if context > 1024 else 3
            yield measured(subject, both, phase, context, times).row()


def layer_rows(repeats: int, plot: bool) -> Iterator[list[str]]:
    both, results = both_of(LAYERS), []
    # upstream takes seconds per token
    cases = [
        ("layer decode", context, 3 if context <= UPSTREAM_DECODE_LIMIT else repeats)
        for context in LAYER_DECODE_CONTEXTS
    ]
    for case in [*cases, *(("layer prefill", context, 1) for context in LAYER_PREFILL_CONTEXTS)]:
        results.append(measured(LAYERS, both, *case))
        yield results[-1].row()
    if plot:
        draw(results, both["custom_pypto"])


def layer_floors(repeats: int, plot: bool) -> Iterator[Floor]:
    both = both_of(LAYERS)
    for context, least in floors.here(floors.LAYER_DECODE).items():
        time = partial(speedup, LAYERS, both, "layer decode", context, 2)
        yield Floor(f"layer decode, {context // 1024}K, times upstream", time, least)
    # upstream falls behind further on longer prompts
    phase, context = "layer prefill", LAYER_PREFILL_LIMIT

    def memory() -> float:
        ours, upstream = (peak_bytes(LAYERS, side, phase, context) for side in SIDES)
        return upstream / ours

    name = f"{phase}, {context // 1024}K"
    time = partial(speedup, LAYERS, both, phase, context, 1)
    yield Floor(f"{name}, times upstream", time, 1.3)
    yield Floor(f"{name}, peak memory of upstream over ours", memory, 5.0)
    peak = partial(peak_bytes, LAYERS, SIDES[0], phase, 16384)
    yield Floor(f"{phase}, 16K, peak bytes", peak, 4 * 2**30, at_least=False)


def indexer_call(model, context: int):
    """The lightning indexer of a decode step by itself."""
    cache = filled_cache("custom_pypto", model, context)
    indexer = model.base_model.layers[0].self_attn.indexer
    query = torch.randn(1, 1, indexer.n_heads, indexer.head_dim).to(model.dtype)
    return partial(
        custom_pypto.npu_lightning_indexer_pto,
        query,
        cache.layers[0].pools["index"],
        torch.randn(1, 1, indexer.n_heads),
        actual_seq_lengths_key=cache.lengths,
        block_table=cache.block_table,
        sparse_count=indexer.index_topk,
    )


def draw(results: list[Result], model) -> None:
    """Time per decoded token against the context, into ``PLOT``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(SIDES, ("tab:blue", "tab:orange"), strict=True))
    figure, axes = plt.subplots(figsize=(8, 5))
    for side, colour in colours.items():
        shown = [r for r in results if r.phase == "layer decode" and side in r.seconds]
        ms = [median_of(r, side) for r in shown]
        axes.plot([r.context for r in shown], ms, "o-", color=colour, label=side)
    decoded = [r for r in results if r.phase == "layer decode"]
    contexts = [r.context for r in decoded]
    alone = interleaved({context: indexer_call(model, context) for context in contexts}, 7)
    indexer = [float(median_ms(seconds, 6)) for seconds in alone.values()]
    rest = [median_of(r, SIDES[0]) - own for r, own in zip(decoded, indexer, strict=True)]
    axes.plot(contexts, indexer, "s--", color="tab:green", label="of it: lightning indexer")
    axes.plot(contexts, rest, ":", color="tab:blue", label="of it: everything else")
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="ms")
    title = "Time per decoded token\none attention layer of DeepSeek-V3.2, bfloat16, one thread"
    axes.set_title(title)
    axes.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)


BENCHMARKS = {
    "model": Benchmark(HEADER, model_rows, cases=2, variant="{dtype}"),
    "layer": Benchmark(HEADER, layer_rows, layer_floors, cases=2),
}
