"""A training step of an attention layer of DeepSeek-V3.2, on the ops and on upstream's path: peak
memory and time of forward and backward by the length of the sequence.

One layer with a quarter of the hidden size and HEADS heads, all other sizes in full, float32, one
thread, random weights, ``index_topk`` 2048. Both sides get the same input; nothing is reported
unless the gradients of all their parameters match. Each figure is of a process of its own: memory
beyond weights and input, user CPU time.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from measure import Benchmark, Floor, in_own_process, peak_over
from model_sides import LAYER, random_model

from custom_pypto import models

SIDES = ("ops", "upstream")
HEADS = 16
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
COMPARED = 1024  # tokens of the check
TOLERANCE = 1e-5  # relative norm of a gradient: float32 sums in another order
# bytes that upstream takes per head and pair of tokens, from 4096 tokens on
UPSTREAM_BYTES = 14
# of upstream's, at 4096 tokens
MOST_MEMORY, MOST_TIME = 0.5, 1.2
# memory of twice the tokens
MOST_GROWTH = 2.2


def step(side: str, tokens: int) -> tuple[torch.nn.Module, dict]:
    """A model with gradients, and the figures of its step."""
    torch.set_num_threads(1)
    sizes = LAYER | dict(hidden_size=1792, num_attention_heads=HEADS, index_n_heads=HEADS // 2)
    model = random_model(sizes, torch.float32).train()
    models.use_custom_pypto(model, training=side)
    hidden = torch.randn(1, tokens, model.config.hidden_size, requires_grad=True)
    # a square would be constant behind the last norm
    weights = torch.randn_like(hidden)
    found = {}

    def run() -> None:
        start = time.process_time()
        out = model.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
        middle = time.process_time()
        (out * weights).sum().backward()
        found.update(forward=middle - start, backward=time.process_time() - middle)

    found["bytes"] = peak_over(run)
    return model, found


def figures_of(side: str, tokens: int) -> dict:
    return step(side, tokens)[1]


def measured(side: str, tokens: int) -> dict:
    """The figures of a process of its own."""
    return in_own_process(figures_of, side, tokens)


def compare() -> None:
    mine, theirs = (
        {name: p.grad for name, p in step(side, COMPARED)[0].named_parameters()} for side in SIDES
    )
    for name, gradient in theirs.items():
        if gradient is None:
            if mine[name] is not None:
                raise SystemExit(f"{name} has a gradient on the ops only; not timed")
            continue
        error = (mine[name] - gradient).norm() / gradient.norm()
        if not error <= TOLERANCE:
            raise SystemExit(f"gradient of {name}: error {error:.1e}; not timed")


def seconds(figures: dict) -> float:
    return figures["forward"] + figures["backward"]


def floors(tokens: int, plot: bool) -> Iterator[Floor]:
    compare()

    def of_upstream(value) -> float:
        ops, upstream = (value(measured(side, 4096)) for side in SIDES)
        return ops / upstream

    def growth() -> float:
        return measured("ops", 4096)["bytes"] / measured("ops", 2048)["bytes"]

    for name, measure, most in (
        (
            "memory at 4096 tokens, of upstream's",
            lambda: of_upstream(lambda x: x["bytes"]),
            MOST_MEMORY,
        ),
        ("memory of twice the tokens", growth, MOST_GROWTH),
        ("time at 4096 tokens, of upstream's", lambda: of_upstream(seconds), MOST_TIME),
    ):
        yield Floor(name, measure, most, at_least=False)


def draw(figures: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, times) = pyplot.subplots(1, 2, figsize=(10, 4))
    for side in SIDES:
        lengths = [n for s, n in figures if s == side]
        values = [figures[side, n] for n in lengths]
        memory.plot(lengths, [v["bytes"] / 2**30 for v in values], marker="o", label=side)
        times.plot(lengths, [seconds(v) for v in values], marker="o", label=side)
    for axes, title in ((memory, "peak memory, GiB"), (times, "forward + backward, s")):
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axes.set_xticks(TOKENS, [f"{n // 1024}K" for n in TOKENS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("plots") / "training.png", dpi=100)


def rows(tokens: int, plot: bool) -> Iterator[list[str]]:
    """Up to so many tokens."""
    compare()
    figures = {}
    for length in (n for n in TOKENS if n <= tokens):
        row = [f"{length // 1024}K"]
        for side in SIDES:
            needs = UPSTREAM_BYTES * HEADS * length**2
            if side == "upstream" and needs > 0.8 * psutil.virtual_memory().available:
                row += [f"needs {needs / 2**20:.0f}", "-", "-"]
                continue
            found = figures[side, length] = measured(side, length)
            row += [f"{found['bytes'] / 2**20:.0f}"]
            row += [f"{found['forward']:.1f}", f"{found['backward']:.1f}"]
        yield row
    if plot:
        draw(figures)


BENCHMARKS = {
    "training": Benchmark(
        [
            "tokens",
            *("MiB", "forward, s", "backward, s"),
            *("upstream's MiB", "upstream's forward, s", "upstream's backward, s"),
        ],
        rows,
        floors,
    )
}
