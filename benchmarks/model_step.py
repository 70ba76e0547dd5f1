"""The part ``step`` of ``bench_model.py``: Python's part of a forward, beside the layers."""

import statistics
import time
from collections.abc import Callable

import torch
from measure import table
from model_sides import SIDES, filled_cache, make_model

# the layers of DeepSeek-V3.2 with little to compute
STEP = dict(
    vocab_size=16,
    hidden_size=64,
    intermediate_size=16,
    num_hidden_layers=61,
    num_attention_heads=2,
    q_lora_rank=32,
)


def measure_step(steps: int = 100) -> str:
    """A table of the time of a step, and of the patch's hooks in it."""
    model = make_model(SIDES[0], STEP, torch.float32)
    cache = filled_cache(SIDES[0], model, 1024)
    cache.reserve(1024 + steps)
    token, spent = torch.zeros(1, 1, dtype=torch.int64), [0.0]

    def timed(hook: Callable) -> Callable:
        def call(*arguments):
            start = time.perf_counter()
            result = hook(*arguments)
            spent[0] += time.perf_counter() - start
            return result

        return call

    for hooks in (model.model._forward_pre_hooks, model.model._forward_hooks):
        hooks.update({key: timed(hook) for key, hook in hooks.items()})
    of_step, of_hooks = [], []
    for _ in range(steps):
        start, spent[0] = time.perf_counter(), 0.0
        with torch.inference_mode():
            model(token, cache=cache)
        of_step.append(time.perf_counter() - start)
        of_hooks.append(spent[0])
    rows = [
        [name, f"{statistics.median(x) * 1e6:.0f}", f"{min(x) * 1e6:.0f}"]
        for name, x in (("step", of_step), ("checks, cache lengths, slots", of_hooks))
    ]
    return table(["61 layers", "median µs", "least µs"], rows)
