"""The layer of experts of ``experts`` compared with kt-kernel, ktransformers' kernels for CPUs: AMX
where its wheel finds it. One thread, by the clock.

``pip install --no-deps kt-kernel`` installs the wheel, which pins another torch that its extension
does not link. Weights in int8 are rounded by it, one scale a row, and so are rows of x; those in
fp8 and bfloat16 are the same bits on both sides, with x in bfloat16.
"""

import importlib
import importlib.util
import time
from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch
from bench_experts import CHOSEN, EXPERTS, HIDDEN, MIDDLE, TOKENS, Layer, compared
from measure import Benchmark
from torch import Tensor

# its class of each kind; W8A8: of ours, of which the weights in int8 have theirs for two ways
CLASSES = {
    "bfloat16": "AMXBF16_MOE",
    "int8": "AMXInt8_MOE",
    "W8A8": "AMXInt8_MOE",
    "fp8": "AMXFP8_MOE",
}


class KtLayer(Layer):
    """Theirs read weights by their addresses: what they read is kept."""

    def __init__(self, kt: ModuleType, pool, kind: str, up: Tensor, down: Tensor):
        super().__init__(kind, up, down)
        self.pool, self.on_gpu = pool, torch.zeros(EXPERTS, dtype=torch.bool)
        config = kt.moe.MOEConfig(EXPERTS, CHOSEN, HIDDEN, MIDDLE, self.on_gpu.data_ptr())
        config.pool, config.max_len = pool.backend_, max(TOKENS)
        if self.kind == "int8":
            gate, other = up.bfloat16().chunk(2, 1)
            self.kept = [gate.contiguous(), other.contiguous(), down.bfloat16()]
            config.gate_proj, config.up_proj, config.down_proj = (x.data_ptr() for x in self.kept)
        else:
            (up, up_scale), (down, down_scale) = self.parts
            self.kept = [*up.chunk(2, 1), down]
            config.gate_projs, config.up_projs, config.down_projs = map(addresses, self.kept)
            scales = [None] * 3 if up_scale is None else [*up_scale.chunk(2, 1), down_scale]
            self.kept += scales
            config.gate_scales, config.up_scales, config.down_scales = map(addresses, scales)
        if self.kind == "fp8":
            config.quant_config.bits, config.quant_config.group_size = 8, 128
            config.quant_config.zero_point = False
        self.moe = getattr(kt.moe, CLASSES[kind])(config)
        order = torch.arange(EXPERTS)
        pool.submit(self.moe.load_weights_task(order.data_ptr()))
        pool.sync()

    def theirs(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        out, tokens = torch.empty_like(x), torch.tensor([x.size(0)], dtype=torch.int32)
        chosen = ids.long()
        given = (each.data_ptr() for each in (chosen, shares, x, out))
        self.pool.submit(self.moe.forward_task(tokens.data_ptr(), CHOSEN, *given, False))
        self.pool.sync()
        return out


def addresses(experts: Tensor | None) -> list[list[int]]:
    """Of each expert's matrix, for one NUMA node; 0: it has none."""
    return [[0 if experts is None else experts[i].data_ptr() for i in range(EXPERTS)]]


def rows(repeats: int) -> Iterator[list[str]]:
    if importlib.util.find_spec("kt_kernel") is None:
        raise SystemExit("kt: kt-kernel is not installed: pip install --no-deps kt-kernel")
    kt = importlib.import_module("kt_kernel").kt_kernel_ext
    if lacking := [name for name in CLASSES.values() if not hasattr(kt.moe, name)]:
        raise SystemExit(f"kt: kt-kernel has no {lacking[0]} on this CPU; not compared")
    config = kt.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [1]
    pool = kt.CPUInfer(config)
    # theirs run on a thread of their own
    layer_of = partial(KtLayer, kt, pool)
    yield from compared("kt", CLASSES, layer_of, repeats, time.monotonic)


BENCHMARKS = {
    "kt": Benchmark(
        ["weights", "tokens", "ms", "kt-kernel, ms", "ratio", "error", "kt-kernel's error"],
        rows,
        cases=2,
    )
}
