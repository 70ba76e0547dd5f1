"""What a model costs besides computing: Python's part of a forward of 61 small
layers; and CPU time and dispatcher calls of a small decoder layer in a decode step."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import floors
import torch
from measure import Benchmark, Floor, interleaved, ratio
from model_sides import SIDES, filled_cache, make_model, random_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig

from custom_pypto import models
from custom_pypto.models import CACHE

# the layers of DeepSeek-V3.2 with little to compute
STEP = dict(
    vocab_size=16,
    hidden_size=64,
    intermediate_size=16,
    num_hidden_layers=61,
    num_attention_heads=2,
    q_lora_rank=32,
)


def step_rows(repeats: int) -> Iterator[list[str]]:
    """The time of a step, and of the patch's hooks in it."""
    model = make_model(SIDES[0], STEP, torch.float32)
    cache = filled_cache(SIDES[0], model, 1024)
    cache.reserve(1024 + repeats)
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
    for _ in range(repeats):
        start, spent[0] = time.perf_counter(), 0.0
        with torch.inference_mode():
            model(token, cache=cache)
        of_step.append(time.perf_counter() - start)
        of_hooks.append(spent[0])
    for name, seconds in (("step", of_step), ("checks, cache lengths, slots", of_hooks)):
        yield [name, *microseconds(seconds)]


def microseconds(seconds: list[float], parts: int = 1) -> list[str]:
    """Median and least."""
    return [f"{f(seconds) / parts * 1e6:.0f}" for f in (statistics.median, min)]


FIXED = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    qk_nope_head_dim=32,
    v_head_dim=32,
    index_n_heads=16,
    index_head_dim=32,
    index_topk=64,
    n_routed_experts=16,
    num_experts_per_tok=8,
    n_group=4,
    topk_group=2,
    num_hidden_layers=16,
)
FIXED_LAYERS, FIXED_TOKENS = FIXED["num_hidden_layers"], 128
COMPILED = ", compiled layers"


class Calls(TorchDispatchMode):
    """Counts the calls that reach the dispatcher."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += 1
        return op(*args, **(kwargs or {}))


def fixed_calls() -> dict[tuple[str, str], Callable]:
    """A decode step of small layers, by their kind and by the model."""
    calls = {}
    for experts in (False, True):
        dense = dict(first_k_dense_replace=0 if experts else FIXED_LAYERS)
        upstream = random_model(FIXED | dense, torch.bfloat16)
        name = "experts" if experts else "dense MLP"
        calls[name, "transformers"] = fixed_call(SIDES[1], upstream, upstream)
        with tempfile.TemporaryDirectory() as folder:
            upstream.save_pretrained(folder)
            for weights in (None, "int8"):
                model = models.load(folder, weights=weights)
                side = f"weights={weights!r}"
                calls[name, side] = fixed_call(SIDES[0], model, model)
                compiled = model.get_compiled_call(CompileConfig())
                calls[name, side + COMPILED] = fixed_call(SIDES[0], model, compiled)
    return calls


def fixed_rows(repeats: int) -> Iterator[list[str]]:
    """The CPU time of a small layer in a decode step, and its dispatcher calls."""
    calls = fixed_calls()
    seconds = interleaved(calls, repeats)
    for (name, side), call in calls.items():
        each = microseconds(seconds[name, side], FIXED_LAYERS)
        yield [name, side, *each, "-" if side.endswith(COMPILED) else dispatched(call)]


def dispatched(call: Callable) -> str:
    with Calls() as counted:
        call()
    return f"{counted.count / FIXED_LAYERS:.0f}"


def fixed_call(side: str, model, forward: Callable) -> Callable:
    """A decode step by ``forward`` of the model; the cache is as before afterwards."""
    cache, ids = filled_cache(side, model, FIXED_TOKENS), torch.tensor([[7]])

    @torch.inference_mode()
    def step():
        forward(ids, **{CACHE: cache}, use_cache=True)
        cache.crop(-1)

    return step


def fixed_floors(repeats: int) -> Iterator[Floor]:
    calls = fixed_calls()
    for (layer, side), most in floors.FIXED.items():

        def share(peer=calls[layer, "transformers"], ours=calls[layer, side]) -> float:
            seconds = interleaved({"peer": peer, "ours": ours}, repeats)
            return ratio(seconds["ours"], seconds["peer"])

        yield Floor(f"layer, {layer}, {side}, of transformers' time", share, most, at_least=False)


TIMES = ["median µs", "least µs"]
BENCHMARKS = {
    "step": Benchmark([f"{STEP['num_hidden_layers']} layers", *TIMES], step_rows),
    "fixed": Benchmark(
        ["layer", "model", *TIMES, "dispatcher calls"], fixed_rows, fixed_floors, cases=2
    ),
}
