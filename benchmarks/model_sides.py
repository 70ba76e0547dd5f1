"""A patched model compared with the same of upstream: calls of both, times and peak memory.

Both get the same random weights and the same cached tokens; no time is reported unless their
results match. Peak memory is that of one side beyond weights and cache, in a process of its own.
"""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from measure import in_own_process, interleaved, median_ms, peak_over, ratio
from torch import Tensor
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, DynamicCache

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.architectures import attention_classes
from custom_pypto.rows.parts import write

SIDES = ("custom_pypto", "transformers")
MODEL = dict(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=2,
    num_attention_heads=16,
    q_lora_rank=768,
)
# only the attention layer is used
LAYER = dict(vocab_size=16, intermediate_size=16, num_hidden_layers=1)


def random_model(sizes: dict, dtype: torch.dtype) -> DeepseekV32ForCausalLM:
    """Of upstream; all other sizes are those of DeepSeek-V3.2 as published, transformers' own
    defaults. Layers are dense unless ``sizes`` say more."""
    torch.manual_seed(0)
    config = DeepseekV32Config(
        **dict(first_k_dense_replace=sizes["num_hidden_layers"]) | sizes, dtype=dtype
    )
    config.num_key_value_heads = config.num_attention_heads
    return DeepseekV32ForCausalLM._from_config(config, dtype=dtype).eval()


def make_model(side: str, sizes: dict, dtype: torch.dtype):
    model = random_model(sizes, dtype)
    return models.use_custom_pypto(model) if side == "custom_pypto" else model


def filled_cache(side: str, model, tokens: int):
    """A cache that holds the same ``tokens`` random tokens on both sides, with room for one."""
    config, pools = model.config, attention_classes("filled_cache", model)[1].pools
    generator = torch.Generator().manual_seed(1)
    paged = models.PagedCache(model, 1, tokens + 1) if side == "custom_pypto" else None
    cache = paged or DynamicCache(config=config)
    step = paged.place(1, tokens, None) if paged else None
    for i in range(config.num_hidden_layers):
        rows = {}
        for name, pool in pools.items():
            if (row := pool.row(config, i, model.dtype)) is not None:
                values = torch.randn(1, tokens, row.width, generator=generator)
                rows[name] = values.to(row.dtype)
        if paged:
            for name, pool in paged.layers[i].pools.items():
                write(pool, step.slots, rows[name])
        else:
            cache.update(rows["latent"][:, None], rows["rope"][:, None], i)
            cache.update_indexer(rows["index"], i)
    if paged:
        paged.finish(step, None)
    return cache


def decode_call(side: str, model, context: int):
    """One decode step up to ``context`` cached tokens; the cache is as before afterwards. Each step
    has another token, for other experts."""
    cache, generator = filled_cache(side, model, context - 1), torch.Generator().manual_seed(4)

    @torch.no_grad()
    def step():
        ids = torch.randint(1, model.config.vocab_size, (1, 1), generator=generator)
        logits = model(ids, **{CACHE: cache}, use_cache=True).logits
        cache.crop(-1)
        return logits

    return step


def prompt_ids(vocabulary: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, vocabulary, (1, tokens), generator=generator)


def prefill_call(side: str, model, context: int):
    ids = prompt_ids(model.config.vocab_size, context)

    @torch.no_grad()
    def prefill():
        cache = models.PagedCache(model, 1, context) if side == "custom_pypto" else None
        return model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits

    return prefill


@torch.no_grad()
def attend(side: str, model, hidden: Tensor, cache, cached: int) -> Tensor:
    """The first attention layer of ``model`` on the tokens after the ``cached`` ones."""
    attention, tokens = model.base_model.layers[0].self_attn, hidden.size(1)
    positions = torch.arange(cached, cached + tokens)
    rotation = model.base_model.rotary_emb(hidden, position_ids=positions[None])
    if side == "custom_pypto":
        step = cache.place(1, tokens, None)
        cache.finish(step, hidden)
        return attention(hidden, rotation, step)[0]
    causal = torch.arange(cached + tokens) <= positions[:, None]
    return attention(hidden, rotation, causal[None, None], **{CACHE: cache})[0]


def hidden_states(model, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, tokens, model.config.hidden_size, generator=generator).to(model.dtype)


def layer_decode_call(side: str, model, context: int):
    """As decode_call, of the attention layer alone."""
    cache, hidden = filled_cache(side, model, context - 1), hidden_states(model, 1)

    def step():
        output = attend(side, model, hidden, cache, context - 1)
        cache.crop(-1)
        return output

    return step


def layer_prefill_call(side: str, model, context: int, attend: Callable = attend):
    hidden = hidden_states(model, context)

    def prefill():
        ours = side == "custom_pypto"
        cache = models.PagedCache(model, 1, context) if ours else DynamicCache(config=model.config)
        return attend(side, model, hidden, cache, 0)

    return prefill


HEADER = [
    *("phase", "context", "ms", "ms upstream", "times upstream"),
    *("peak MiB", "peak MiB upstream", "memory of upstream / ours", "repeats"),
]


class Subject(NamedTuple):
    """What is compared. Functions are of modules, since new processes get them."""

    make: Callable[[str], Any]  # the model of a side
    calls: dict[str, Callable]  # by phase: of a side, its model and a context
    limits: dict[str, int]  # by phase: most tokens of upstream, where it fits and takes seconds
    tolerance: float | None  # None: results are not compared
    relative: bool = True  # to the largest element of a row
    clock: Callable[[], float] | None = None


class Result(NamedTuple):
    phase: str
    context: int
    seconds: dict[str, list[float]]  # by side
    peaks: dict[str, int]
    repeats: int

    def row(self) -> list[str]:
        ms = {side: median_ms(x, 1) for side, x in self.seconds.items()}
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


def both_of(subject: Subject) -> dict:
    return {side: subject.make(side) for side in SIDES}


def times(
    subject: Subject, both: dict, phase: str, context: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each side to run, after their results were compared."""
    outputs: dict[str, Tensor] = {}

    def kept(side: str) -> Callable[[], None]:
        call = subject.calls[phase](side, both[side], context)
        return lambda: outputs.update({side: call().float()})

    sides = SIDES if context <= subject.limits[phase] else SIDES[:1]
    seconds = interleaved({side: kept(side) for side in sides}, repeats, subject.clock)
    if len(sides) == 2 and subject.tolerance is not None:
        ours, upstream = (outputs[side] for side in SIDES)
        error = (ours - upstream).abs().amax(-1)
        if subject.relative:
            error = error / upstream.abs().amax(-1)
        if not (error <= subject.tolerance).all():
            raise SystemExit(f"{phase}: the sides differ by {error.max():.1e}; not reported")
    return seconds


def speedup(subject: Subject, both: dict, phase: str, context: int, repeats: int) -> float:
    seconds = times(subject, both, phase, context, repeats)
    return ratio(seconds["transformers"], seconds["custom_pypto"])


def peak_here(make: Callable, call: Callable, side: str, context: int, threads: int) -> int:
    torch.set_num_threads(threads)
    model = make(side)
    measured = call(side, model, context)
    call(side, model, 256)()  # threads and libraries start before the measurement
    return peak_over(measured)


def peak_bytes(subject: Subject, side: str, phase: str, context: int) -> int:
    """Peak resident memory of one call, beyond the memory resident before it."""
    call, threads = subject.calls[phase], torch.get_num_threads()
    return in_own_process(peak_here, subject.make, call, side, context, threads)


def measured(subject: Subject, both: dict, phase: str, context: int, repeats: int) -> Result:
    seconds = times(subject, both, phase, context, repeats)
    peaks = {side: peak_bytes(subject, side, phase, context) for side in seconds}
    return Result(phase, context, seconds, peaks, repeats)


def median_of(result: Result, side: str) -> float:
    return statistics.median(result.seconds[side]) * 1e3
