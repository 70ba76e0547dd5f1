"""Latency of the NPU programs by PyPTO's cost model; no NPU is used, and none has been.

    python benchmarks/bench_npu_model.py [--check] [--plot FILE] [--trace FOLDER] [--write]
    python benchmarks/bench_npu_model.py --tune {indexer,attention,fused} [--budget SECONDS]

``--check`` exits with 1 and names every floor that is missed; ``--tune`` searches tile settings and
writes what it finds into custom_pypto/kernels/tiling.py.

The figures are PyPTO's estimates for its simulated Atlas A2/A3 (24 cube and 48 vector cores). The
model prices the task graph, copies and matmuls; it prices gathers and top-k near zero, gives every
core its own memory bandwidth, and ignores lengths shorter than the tensors. So they compare
programs of the same kind, and are no device times. Beside them stand the two rooflines of the same
chip: the bytes that must move over 1.42 TB/s, the products and sums over 364 TFLOP/s in bf16.

Each call goes through custom_pypto.npu as it would on an NPU, with the tiles that ship.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from measure import table, write_section

from custom_pypto import npu, simulation
from custom_pypto.kernels import npu_sparse_attention_pto as kernels

HBM_BYTES_PER_US = 24 * 1850 * 32  # ddr_rate of PyPTO's A2A3.ini
CUBE_FLOP_PER_US = 24 * 1850 * 4096 * 2
BLOCK, K, D, L, R, N1, INDEX_HEADS = 128, 2048, 128, 512, 64, 128, 64
HIDDEN, Q_RANK, NOPE = 7168, 1536, 128
DTYPE = torch.bfloat16


@dataclass
class Case:
    """One call and what it must at least cost.

    ``floor`` is the estimate in µs that must not be exceeded.
    """

    op: str
    shape: str
    call: Callable
    bytes: int
    flop: int
    floor: float | None = None

    def estimate(self, trace: Path | None = None) -> simulation.Estimate:
        found = []

        def launch(kernel, tensors, written):
            found.append(simulation.estimate(kernel, *tensors, trace=trace))

        self.call(npu.implementations(launch))
        (estimate,) = found
        return estimate


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Lengths, block table, number of blocks."""
    blocks = [math.ceil(n / BLOCK) for n in lengths]
    ids, first = torch.zeros(len(lengths), max(blocks), dtype=torch.int32), 0
    for row, n in zip(ids, blocks, strict=True):
        row[:n] = torch.arange(first, first + n)
        first += n
    return int32(lengths), ids, first


def shape(B: int, S1: int, lengths: list[int]) -> str:
    keys = f"{lengths[0]}" if len(set(lengths)) == 1 else str(lengths)
    return f"{B},{S1},{keys}"


def indexer(B: int, S1: int, S2: int | list[int], floor: float | None = None) -> Case:
    lengths, block_table, blocks = paged([S2] * B if isinstance(S2, int) else S2)
    query = torch.zeros(B, S1, INDEX_HEADS, D, dtype=DTYPE)
    key = torch.zeros(blocks, BLOCK, 1, D, dtype=DTYPE)
    weights = torch.zeros(B, S1, INDEX_HEADS)

    def call(ops):
        ops["npu_lightning_indexer_pto"](
            query, key, weights, actual_seq_lengths_key=lengths, block_table=block_table
        )

    keys = int(lengths.sum())
    return Case(
        "lightning indexer",
        shape(B, S1, lengths.tolist()),
        call,
        bytes=2 * keys * D + 2 * query.numel() + 4 * B * S1 * K,
        flop=2 * S1 * keys * INDEX_HEADS * D,
        floor=floor,
    )


def attention(B: int, S1: int, S2: int, heads: int = N1, floor: float | None = None) -> Case:
    lengths, block_table, blocks = paged([S2] * B)
    query = torch.zeros(B, S1, heads, L, dtype=DTYPE)
    rope = torch.zeros(B, S1, heads, R, dtype=DTYPE)
    key = torch.zeros(blocks, BLOCK, 1, L, dtype=DTYPE)
    key_rope = torch.zeros(blocks, BLOCK, 1, R, dtype=DTYPE)
    indices = torch.arange(K, dtype=torch.int32).expand(B, S1, 1, K).contiguous()

    def call(ops):
        ops["npu_sparse_flash_attention_pto"](
            query,
            key,
            None,
            indices,
            192**-0.5,
            query_rope=rope,
            key_rope=key_rope,
            block_table=block_table,
            actual_seq_lengths_kv=lengths,
        )

    tokens = B * S1
    name = "sparse attention" + ("" if heads == N1 else f", {heads} heads")
    return Case(
        name,
        shape(B, S1, [S2]),
        call,
        bytes=2 * tokens * (K * (L + R) + heads * (2 * L + R)),
        flop=2 * tokens * heads * K * (2 * L + R),
        floor=floor,
    )


def fused_arguments(B: int, S1: int, S2: int) -> dict:
    lengths, block_table, blocks = paged([S2] * B)

    def zeros(*shape, dtype=DTYPE):
        return torch.zeros(shape, dtype=dtype)

    last = (lengths[:, None] - S1 + torch.arange(S1)).int()
    return dict(
        x=zeros(B, S1, HIDDEN),
        w_dq=zeros(HIDDEN, Q_RANK),
        w_uq_qr=zeros(Q_RANK, N1 * (NOPE + R)),
        w_uk=zeros(N1, NOPE, L),
        w_dkv_kr=zeros(HIDDEN, L + R),
        gamma_cq=zeros(Q_RANK),
        gamma_ckv=zeros(L),
        sin=zeros(B, S1, R),
        cos=zeros(B, S1, R),
        cache_index=block_table.gather(1, last.long() // BLOCK) * BLOCK + last % BLOCK,
        kv_cache=zeros(blocks, BLOCK, 1, L),
        kr_cache=zeros(blocks, BLOCK, 1, R),
        block_table=block_table,
        act_seqs=lengths,
        w_idx_qb=zeros(Q_RANK, INDEX_HEADS * D),
        w_idx_k=zeros(HIDDEN, D),
        w_idx_proj=zeros(HIDDEN, INDEX_HEADS),
        in_gamma_k=zeros(D),
        in_beta_k=zeros(D),
        index_k_cache=zeros(blocks, BLOCK, 1, D),
    )


WEIGHTS = ("w_dq", "w_uq_qr", "w_uk", "w_dkv_kr", "w_idx_qb", "w_idx_k", "w_idx_proj")


def fused(B: int, S1: int, S2: int, floor: float | None = None) -> Case:
    arguments = fused_arguments(B, S1, S2)
    weights = sum(arguments[name].numel() for name in WEIGHTS)
    select, attend = indexer(B, S1, S2), attention(B, S1, S2)
    return Case(
        "fused attention",
        shape(B, S1, [S2]),
        lambda ops: ops["npu_sparse_attention_pto"](**arguments),
        bytes=2 * weights + select.bytes + attend.bytes,
        flop=2 * B * S1 * weights + select.flop + attend.flop,
        floor=floor,
    )


def prolog(B: int, S1: int, S2: int) -> Case:
    """The first part of the fused op alone."""
    arguments = fused_arguments(B, S1, S2)
    weights = sum(arguments[name].numel() for name in WEIGHTS)

    def call(ops):
        alone = partial(kernels.kernel, prolog_only=True)
        with mock.patch.object(kernels, "kernel", alone):
            ops["npu_sparse_attention_pto"](**arguments)

    return Case(
        "prolog alone",
        shape(B, S1, [S2]),
        call,
        bytes=2 * weights,
        flop=2 * B * S1 * weights,
    )


def cases() -> list[Case]:
    return [
        attention(1, 1, 4096, floor=24),
        attention(4, 1, 8192),
        attention(4, 2, 8192, floor=46),
        attention(16, 1, 16384, floor=60),
        attention(1, 1, 131072),
        attention(4, 2, 8192, heads=64),
        attention(4, 2, 8192, heads=16),
        attention(1, 256, 8192),
        indexer(1, 1, 8192, floor=25),
        indexer(4, 1, 8192),
        indexer(4, 2, 8192),
        indexer(16, 1, 16384),
        indexer(1, 1, 65536, floor=85),
        indexer(1, 1, 131072, floor=135),
        indexer(4, 2, [65536, 971, 32869, 16383], floor=240),
        indexer(1, 256, 8192),
        prolog(4, 1, 8192),
        # below the sum of its parts alone, which is known when they are
        fused(4, 1, 8192),
    ]


def missed_floors(results: list[tuple[Case, simulation.Estimate]]) -> list[str]:
    """Adds the fused op's floor and names every floor that is not met."""
    at = {(case.op, case.shape): estimate.latency_us for case, estimate in results}
    missed = []
    for case, estimate in results:
        if case.op == "fused attention":
            parts = ("prolog alone", "lightning indexer", "sparse attention")
            case.floor = sum(at[part, case.shape] for part in parts)
        if case.floor is not None and estimate.latency_us > case.floor:
            missed.append(
                f"{case.op} at {case.shape}: {estimate.latency_us:.1f} µs, floor {case.floor:.1f}"
            )
    return missed


def report(results: list[tuple[Case, simulation.Estimate]]) -> str:
    rows = []
    for case, estimate in results:
        rows.append(
            [
                case.op,
                case.shape,
                f"{estimate.latency_us:.1f}",
                "-" if case.floor is None else f"{case.floor:.1f}",
                f"{estimate.utilisation:.0%}",
                str(estimate.tasks),
                str(estimate.edges),
                f"{case.bytes / HBM_BYTES_PER_US:.1f}",
                f"{case.flop / CUBE_FLOP_PER_US:.1f}",
            ]
        )
    header = [
        *("op", "B, S1, keys", "estimate µs", "floor µs", "cores busy", "tasks", "edges"),
        *("bytes µs", "FLOP µs"),
    ]
    return table(header, rows)


NOTE = """PyPTO 0.2.0 cost-model estimates for its simulated Atlas A2/A3, bf16, 128 heads where none
are named, K 2048, blocks of 128 keys. They are not device times: the model prices gathers and top-k
near zero, gives every core its own memory bandwidth and ignores lengths shorter than the tensors.
An estimate below its roofline shows just that. bytes µs: what must move at least, over 1.42 TB/s;
FLOP µs: what must be computed, over 364 TFLOP/s. The floor of the fused op is the sum of its parts'
estimates. No NPU has run these programs.
"""


def plot(results: list[tuple[Case, simulation.Estimate]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [f"{case.op} {case.shape}" for case, _ in results]
    bars = {
        "estimate of PyPTO's cost model": [e.latency_us for _, e in results],
        "bytes over 1.42 TB/s": [c.bytes / HBM_BYTES_PER_US for c, _ in results],
        "FLOP over 364 TFLOP/s": [c.flop / CUBE_FLOP_PER_US for c, _ in results],
    }
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(names) + 1.5))
    for i, (label, values) in enumerate(bars.items()):
        axes.barh([y + 0.27 * i for y in range(len(names))], values, height=0.25, label=label)
    axes.set_yticks([y + 0.27 for y in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("µs, simulated Atlas A2/A3, not a device")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a floor is missed")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a bar chart")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write timelines for Perfetto")
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    parser.add_argument(
        "--tune", choices=["indexer", "attention", "fused"], help="search tile settings instead"
    )
    parser.add_argument("--budget", type=float, default=600, help="seconds to tune for")
    options = parser.parse_args()
    if options.tune:
        from tune_npu_model import tune

        tune(options.tune, options.budget)
        return 0

    if options.trace:
        options.trace.mkdir(parents=True, exist_ok=True)
    results = []
    for case in cases():
        trace = None
        if options.trace:
            name = f"{case.op} {case.shape}".replace(", ", ",").replace(" ", "_")
            trace = options.trace / f"{name}.json"
        results.append((case, case.estimate(trace)))
        if sys.stderr.isatty():
            print(f"{case.op} {case.shape}", file=sys.stderr)
    missed = missed_floors(results)
    text = f"{report(results)}\n\n{NOTE}"
    print(text)
    if options.write:
        command = "python benchmarks/bench_npu_model.py --write"
        write_section("NPU programs, PyPTO cost-model estimates", command, text)
    if options.plot:
        plot(results, options.plot)
    for line in missed:
        print(f"floor missed: {line}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
