"""Gradients of the ops next to the forward of the same pairs of tokens and keys; those of the
indexer, where bfloat16 is widened, next to torch.mm in float32 and torch.index_select of the
selected rows. Compared with the reference before anything is timed."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import inputs
import torch
from inputs import INDEX_HEADS, D, K, L, R
from measure import Benchmark, Floor, interleaved, median_ms, ratio

import custom_pypto
from custom_pypto import reference
from custom_pypto.reference.index_training import arguments

TOKENS, KEYS = 64, 8192
# of the time of the forward, by heads; the operations are 2.53 times as many, a third for the rest;
# few heads share the reading of a key and the sums of its gradient
MOST_OF_FORWARD = {128: 3.3, 16: 3.5}
# of the time of an indexer's forward; of the scores that a loss compares, and attention's logits
MOST_OF_SCORES = 3.0
OF_TORCH = "of the speed of torch.mm and reads"
LEAST_OF_TORCH = 0.7


class Part(NamedTuple):
    """Of a baseline: so many times the time of a call."""

    run: Callable
    times: float = 1.0


class Case(NamedTuple):
    name: str
    run: Callable
    flop: int
    baseline: list[Part]
    compared_with: str
    limit: float

    @property
    def beside_torch(self) -> bool:
        return self.compared_with == OF_TORCH

    def measured(self, repeats: int) -> dict[str, list[float]]:
        """Seconds of the gradients and of the baseline in each round."""
        calls = {str(i): part.run for i, part in enumerate(self.baseline)}
        seconds = interleaved({"gradients": self.run} | calls, repeats)
        parts = [[self.baseline[int(i)].times * t for t in seconds[i]] for i in calls]
        baseline = [sum(part) for part in zip(*parts, strict=True)]
        return {"gradients": seconds["gradients"], "baseline": baseline}

    def share(self, seconds: dict[str, list[float]]) -> float:
        """Times of the forward, or of torch's speed."""
        found = ratio(seconds["gradients"], seconds["baseline"])
        return 1 / found if self.beside_torch else found


def attention(heads: int, dtype: torch.dtype) -> Case:
    op = "npu_sparse_flash_attention_grad_pto"
    with_gradient = reference.MODULES[op].with_gradient
    call = inputs.attention(TOKENS, heads, KEYS, dtype)
    d_out = torch.randn(call["query"].shape).to(dtype)
    inputs.compare(op, with_gradient(inputs.last_token(call), d_out[:, -1:]))
    forward = partial(custom_pypto.npu_sparse_flash_attention_pto, **call, return_softmax_lse=True)
    return Case(
        f"sparse attention, {heads} heads, {K} of {KEYS} keys, {str(dtype)[6:]}",
        partial(getattr(custom_pypto, op), **with_gradient(call, d_out)),
        2 * TOKENS * heads * K * (3 * (L + R) + 2 * L),
        [Part(forward)],
        "times the forward",
        MOST_OF_FORWARD[heads],
    )


def of_indexer(
    name: str, op: str, call: dict, flop: float, forward: list[Part], selected: int = 0
) -> Case:
    """Beside the forward of what the op computes, if bfloat16 is multiplied, else torch.mm, and
    torch.index_select for rows of so many selected dims."""
    dtype = call["query"].dtype
    name = f"{name}, {str(dtype)[6:]}"
    run = partial(getattr(custom_pypto, op), **call)
    if dtype == torch.bfloat16 and torch.ops.custom_pypto.has_bf16():
        unit = "times the forward"
        if len(forward) > 1:
            unit += " over these keys, with the attention's logits"
        return Case(name, run, int(flop), forward, unit, MOST_OF_SCORES)
    a, b = torch.randn(2048, 512), torch.randn(512, 2048)
    mm = Part(partial(torch.mm, a, b), flop / (2 * a.numel() * b.size(1)))
    reads = [Part(gather(selected))] if selected else []
    return Case(name, run, int(flop), [mm, *reads], OF_TORCH, LEAST_OF_TORCH)


def gather(dims: int) -> Callable:
    """Reads the rows that each token selects."""
    selections = [torch.randperm(KEYS)[:K] for _ in range(TOKENS)]
    return inputs.gathering([torch.randn(KEYS, dims)], selections)


def scores(keys: int, dtype: torch.dtype, selected: int = 1) -> Part:
    """The forward that scores so many keys for each token, and selects."""
    call = inputs.indexer(TOKENS, keys, dtype, sparse_mode=0, sparse_count=selected)
    return Part(partial(custom_pypto.npu_lightning_indexer_pto, **call, return_value=selected > 1))


def logits(keys: int, dtype: torch.dtype) -> Part:
    """That of attention to so many keys, of whose products these are the logits."""
    call = inputs.attention(TOKENS, 128, KEYS, dtype, sparse_mode=0, sparse_count=keys)
    forward = partial(custom_pypto.npu_sparse_flash_attention_pto, **call)
    return Part(forward, (L + R) / (2 * L + R))


def training_call(dtype: torch.dtype, tokens: int = TOKENS, keys: int = KEYS) -> dict:
    return arguments(dtype, [tokens], [keys])


def indexer(dtype: torch.dtype) -> Case:
    op = "npu_lightning_indexer_grad_pto"

    def call(tokens: int, keys: int, count: int) -> dict:
        x = inputs.indexer(tokens, keys, dtype)
        visible = keys - tokens
        indices = torch.stack([torch.randperm(visible)[:count] for _ in range(tokens)])
        dy = torch.randn(1, tokens, 1, count).to(dtype)
        del x["sparse_count"]
        x |= dict(layout=x.pop("layout_query"), dy=dy)
        return x | dict(sparse_indices=indices.int().view_as(dy))

    inputs.compare(op, call(2, 100, 64))
    flop = 6 * TOKENS * K * INDEX_HEADS * D
    name, forward = f"indexer, {K} of {KEYS} keys", [scores(KEYS, dtype, K)]
    return of_indexer(name, op, call(TOKENS, KEYS, K), flop, forward, D)


def flop_of_a_pair(call: dict) -> int:
    return 2 * (call["query"].size(1) * (L + R) + 3 * INDEX_HEADS * D)


def sparse_divergence(dtype: torch.dtype) -> Case:
    op = "npu_sparse_lightning_indexer_grad_kl_loss_pto"
    inputs.compare(op, reference.MODULES[op].with_selection(training_call(dtype, 2, 100), 64))
    call = training_call(dtype)
    attend = inputs.attention(TOKENS, call["query"].size(1), KEYS, dtype)["sparse_indices"][0]
    names = ("query", "key", "query_rope", "key_rope", "scale_value")
    _, largest, total = custom_pypto.npu_sparse_flash_attention_pto(
        **{name: call[name] for name in names},
        value=None,
        sparse_indices=attend,
        actual_seq_lengths_query=torch.tensor([TOKENS], dtype=torch.int32),
        actual_seq_lengths_kv=torch.tensor([KEYS], dtype=torch.int32),
        layout_query="TND",
        layout_kv="TND",
        return_softmax_lse=True,
    )
    call |= dict(sparse_indices=attend, softmax_max=largest, softmax_sum=total)
    flop = TOKENS * K * flop_of_a_pair(call)
    name, forward = f"divergence over {K} of {KEYS} keys", [scores(K, dtype), logits(K, dtype)]
    return of_indexer(name, op, call, flop, forward, D + L + R)


def dense_divergence(dtype: torch.dtype) -> Case:
    op = "npu_dense_lightning_indexer_grad_kl_loss_pto"
    inputs.compare(op, reference.MODULES[op].with_statistics(training_call(dtype, 2, 100)))
    call = training_call(dtype)
    # any statistics: they only scale
    heads = torch.full((1, TOKENS, call["query"].size(1)), 8.0)
    call |= dict(softmax_max=heads, softmax_sum=heads)
    call |= dict(softmax_max_index=heads[..., 0], softmax_sum_index=heads[..., 0])
    flop = TOKENS * (KEYS - TOKENS / 2) * flop_of_a_pair(call)
    name, forward = f"divergence over {KEYS} keys", [scores(KEYS, dtype), logits(KEYS, dtype)]
    return of_indexer(name, op, call, flop, forward)


def cases(*dtypes: torch.dtype) -> Iterator[Case]:
    for dtype in dtypes:
        yield attention(128, dtype)
        yield attention(16, dtype)
        yield indexer(dtype)
        yield sparse_divergence(dtype)
        yield dense_divergence(dtype)


def floors(repeats: int) -> Iterator[Floor]:
    # that vectors multiply bfloat16 in the backward was measured on no AMD, whose forward is fast
    unmeasured = torch.ops.custom_pypto.cpu_isa() in ("avx512_bf16", "amx_emulated")
    for case in cases(torch.float32, torch.bfloat16):
        if unmeasured and not case.beside_torch and not case.name.endswith("float32"):
            continue
        yield Floor(
            f"gradients of {case.name}, {case.compared_with}",
            lambda case=case: case.share(case.measured(repeats)),
            case.limit,
            at_least=case.beside_torch,
        )


def rows(repeats: int) -> Iterator[list[str]]:
    for case in cases(torch.bfloat16, torch.float32):
        seconds = case.measured(repeats)
        ms = median_ms(seconds["gradients"], 0)
        rate = f"{case.flop / float(median_ms(seconds['gradients'], 6)) / 1e6:.0f}"
        yield [case.name, ms, rate, f"{case.share(seconds):.2f}", case.compared_with]


BENCHMARKS = {
    "gradients": Benchmark(
        [f"gradients of {TOKENS} tokens", "ms", "GFLOP/s", "ratio", "compared with"],
        rows,
        floors,
    )
}
