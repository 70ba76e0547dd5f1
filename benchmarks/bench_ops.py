"""Rate of the ops on this CPU, as a share of the rate of torch.mm in the same dtype.

    python benchmarks/bench_ops.py [--threads 1] [--repeats 15] [--write]
    python benchmarks/bench_ops.py --parts [--write]    # what short calls spend beside arithmetic
    python benchmarks/bench_ops.py --int8 [--write]     # int8 rows, beside the bfloat16 op
    python benchmarks/bench_ops.py --check    # against the floors of this CPU's kernels (floors.py)

Every case is first compared with custom_pypto.reference. FLOP counts: 2 * S1 * S2 * 64 * 128 for
the indexer (the time includes top-k, the count does not), 2 * S1 * N1 * 2048 * (576 + 512) for the
attention. The time of a top-k is the indexer's time for 2048 keys minus its time for 1.

Each op is called after torch.mm, as between the other layers of a model, and then again at once;
the difference is the cost of cold caches and torch's dispatch.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import floors
import torch
from measure import check, interleaved, machine, of_kernels, ratio, table, write_section

import custom_pypto
from custom_pypto import reference
from custom_pypto.cache_rows import int8_row_bytes
from custom_pypto.reference.npu_kv_quant_sparse_flash_attention_pto import dequantized

BLOCK, K, D, L, R = 128, 2048, 128, 512, 64


class Case(NamedTuple):
    name: str
    run: Callable
    flop: int


def paged(S2: int, dims: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(S2 // BLOCK, BLOCK, 1, dims).to(dtype)


def tables(S2: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Length and shuffled block table of one sequence."""
    return torch.tensor([S2], dtype=torch.int32), torch.randperm(S2 // BLOCK).int()[None]


def index_inputs(S1: int, S2: int, dtype: torch.dtype) -> dict:
    lengths, block_table = tables(S2)
    return dict(
        query=torch.randn(1, S1, 64, D).to(dtype),
        key=paged(S2, D, dtype),
        weights=torch.randn(1, S1, 64),
        actual_seq_lengths_key=lengths,
        block_table=block_table,
    )


def in_int8(inputs: dict) -> dict:
    """The call of the int8 indexer on the same rows."""
    query, query_scale = custom_pypto.npu_quant_rows_pto(inputs["query"])
    key, key_scale = custom_pypto.npu_quant_rows_pto(inputs["key"])
    scales = dict(query_dequant_scale=query_scale, key_dequant_scale=key_scale)
    return inputs | scales | dict(query=query, key=key, query_quant_mode=0, key_quant_mode=0)


def checked_indexer(op: str, inputs: dict) -> Case:
    S1, S2 = inputs["query"].size(1), int(inputs["actual_seq_lengths_key"])

    def run():
        return getattr(custom_pypto, op)(**inputs)

    # the last token sees the same keys alone as among the others
    tokens = [name for name in ("query", "weights", "query_dequant_scale") if name in inputs]
    want = getattr(reference, op)(**inputs | {name: inputs[name][:, -1:] for name in tokens})
    common = len(set(want.flatten().tolist()) & set(run()[:, -1].flatten().tolist()))
    if common < 0.999 * K:  # keys with nearly equal scores may be exchanged
        raise SystemExit(f"{op} {S1=} {S2=}: {common} of {K} positions agree; not timed")
    return Case(f"lightning indexer, S1={S1}, {S2 // 1024}K keys", run, 2 * S1 * S2 * 64 * D)


def indexer_case(S1: int, S2: int, dtype: torch.dtype) -> Case:
    return checked_indexer("npu_lightning_indexer_pto", index_inputs(S1, S2, dtype))


def int8_indexer_cases(S1: int, S2: int) -> tuple[Case, Case]:
    inputs = index_inputs(S1, S2, torch.bfloat16)
    quantized = checked_indexer("npu_quant_lightning_indexer_pto", in_int8(inputs))
    return checked_indexer("npu_lightning_indexer_pto", inputs), quantized


def attention_inputs(S1: int, N1: int, S2: int, dtype: torch.dtype) -> dict:
    query, rope = torch.randn(1, S1, N1, L).to(dtype), torch.randn(1, S1, N1, R).to(dtype)
    key, key_rope, (lengths, block_table) = paged(S2, L, dtype), paged(S2, R, dtype), tables(S2)
    indices = torch.stack([torch.randperm(S2 - S1)[:K] for _ in range(S1)]).int()[None, :, None]
    return dict(
        query=query,
        key=key,
        value=None,
        sparse_indices=indices,
        scale_value=192**-0.5,
        query_rope=rope,
        key_rope=key_rope,
        block_table=block_table,
        actual_seq_lengths_kv=lengths,
    )


def attention_of(inputs: dict, name: str, op=custom_pypto.npu_sparse_flash_attention_pto) -> Case:
    S1, N1 = inputs["query"].shape[1:3]
    flop = 2 * S1 * N1 * K * (2 * L + R)
    return Case(f"{name}, S1={S1}, {N1} heads", lambda: op(**inputs), flop)


def attention_case(S1: int, N1: int, S2: int, dtype: torch.dtype) -> Case:
    inputs = attention_inputs(S1, N1, S2, dtype)
    case = attention_of(inputs, "sparse attention")
    last = {n: inputs[n][:, -1:] for n in ("query", "query_rope", "sparse_indices")}
    want = reference.npu_sparse_flash_attention_pto(**inputs | last).float()
    error = ((case.run()[:, -1:].float() - want).abs().amax(-1) / want.abs().amax(-1)).max()
    if error > (1e-5 if dtype == torch.float32 else 2**-7):
        raise SystemExit(f"attention {S1=} {N1=} {dtype}: relative error {error:.1e}; not timed")
    return case


def int8_attention_cases(S1: int, N1: int, S2: int) -> tuple[Case, Case]:
    """On the dequantized rows, and on those of int8: the same to the bit."""
    inputs = attention_inputs(S1, N1, S2, torch.bfloat16)
    key, key_rope = (inputs[name] for name in ("key", "key_rope"))
    cache = torch.zeros(*key.shape[:-1], int8_row_bytes(L, R), dtype=torch.int8)
    slots = torch.arange(key.size(0) * key.size(1)).view(key.shape[:2])
    custom_pypto.npu_kv_quant_update_pto(key.squeeze(2), key_rope.squeeze(2), slots, cache)
    rows = dict(zip(("key", "key_rope"), dequantized(cache, L, torch.bfloat16), strict=True))
    bfloat16 = attention_of(inputs | rows, "sparse attention")
    query = torch.cat([inputs.pop("query"), inputs.pop("query_rope")], -1)
    inputs.pop("key_rope")
    inputs |= dict(query=query, key=cache, key_quant_mode=2, value_quant_mode=2)
    op = custom_pypto.npu_kv_quant_sparse_flash_attention_pto
    int8 = attention_of(inputs, "sparse attention", op)
    if not torch.equal(bfloat16.run(), int8.run()):
        raise SystemExit(f"attention of int8 {S1=} {N1=}: other bits; not timed")
    return bfloat16, int8


MAKE = {"indexer": indexer_case, "attention": attention_case}
# the op in bfloat16, and over the same rows in int8
MAKE_INT8 = {"indexer": int8_indexer_cases, "attention": int8_attention_cases}


def case_of(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    return MAKE[name](*shape, dtype)


def with_aim(*key) -> str:
    """The floor of a case on this machine, and its aim if it has one; "-" without a floor."""
    used = torch.ops.custom_pypto.cpu_isa()
    if used not in floors.OPS:
        return "-"
    aim = floors.AIMS[used].get(key)
    return f"{floors.OPS[used][key]:.2f}" + (f" (aim {aim:.2f})" if aim else "")


# floor of the float32 indexer on AVX2, as a share of torch.mm in float32
AVX2_FLOOR = ("indexer", 256, 8192), 0.6


def times(case: Case, dtype: torch.dtype, repeats: int) -> dict[str, list[float]]:
    """Seconds of torch.mm, of the op right after it, on cold caches, and of the op again."""
    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    return interleaved({"mm": lambda: a @ b, "op": case.run, "again": case.run}, repeats)


def share(case: Case, seconds: dict[str, list[float]], call: str = "op") -> float:
    """Share of the rate of torch.mm: its seconds per operation over ours."""
    return ratio(seconds["mm"], seconds[call]) * case.flop / (2 * 2048**3)


def top_k_microseconds(ascending: bool, repeats: int) -> float:
    """Top-k 2048 of 128K scores, random, or ascending: every key scores higher than all before."""
    S2 = 131072
    key = torch.zeros(S2 // BLOCK, BLOCK, 1, 16, dtype=torch.bfloat16)
    scores = torch.rand(S2)
    if ascending:  # two dims, because bfloat16 has no 128K steps
        scores = torch.arange(S2)
    high, low = (scores / scores.max() * 255).floor(), torch.rand(S2)
    if ascending:
        low = torch.arange(S2) % 512 // 2
    key.view(S2, 16)[:, 0], key.view(S2, 16)[:, 1] = high, low / 256
    query = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
    query[..., :2] = 1
    weights = torch.ones(1, 1, 1)
    more = {
        "actual_seq_lengths_key": torch.tensor([S2], dtype=torch.int32),
        "block_table": torch.arange(S2 // BLOCK, dtype=torch.int32)[None],
    }

    def run(count):
        return lambda: custom_pypto.npu_lightning_indexer_pto(
            query, key, weights, sparse_count=count, **more
        )

    seconds = interleaved({"all": run(K), "one": run(1)}, repeats)
    differences = [a - b for a, b in zip(seconds["all"], seconds["one"], strict=True)]
    return max(1.0, statistics.median(differences) * 1e6)  # noise may leave less than nothing


def int8_times(key: tuple, repeats: int) -> tuple[str, dict[str, list[float]]]:
    """The name of a case, and seconds of both ops, one after the other."""
    bfloat16, int8 = MAKE_INT8[key[0]](*key[1:])
    calls = {"bfloat16": bfloat16.run, "int8": int8.run}
    return int8.name, interleaved(calls, 5 if key[1] > 4 else repeats)


def int8_speedup(key: tuple, repeats: int) -> float:
    seconds = int8_times(key, repeats)[1]
    return ratio(seconds["bfloat16"], seconds["int8"])


def parts() -> list[Case]:
    """Parts of a short call: dispatch without arithmetic, a gather without attention, and attention
    to rows in the CPU caches."""
    x, one = torch.ones(16), torch.ones(1, dtype=torch.int32)
    query, key = torch.ones(1, 1, 1, 16).bfloat16(), torch.ones(1, 16, 1, 16).bfloat16()
    weights, zero = torch.ones(1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    block_table = zero.view(1, 1)

    def index():
        return custom_pypto.npu_lightning_indexer_pto(
            query, key, weights, actual_seq_lengths_key=one, block_table=block_table
        )

    def attend():
        return custom_pypto.npu_sparse_flash_attention_pto(
            query, key, None, zero, 1.0, actual_seq_lengths_kv=one, block_table=block_table
        )

    rows, ropes = (torch.randn(65536, width).bfloat16() for width in (L, R))
    indices = torch.randperm(65536)[:K]
    copies = rows[:K].clone(), ropes[:K].clone()

    def gather():
        torch.index_select(rows, 0, indices, out=copies[0])
        torch.index_select(ropes, 0, indices, out=copies[1])

    near = [
        attention_case(S1, N1, 4096, torch.bfloat16)
        for S1, N1 in ((1, 128), (4, 64), (4, 32), (4, 16))
    ]
    return [
        Case("x + x, 16 numbers", lambda: x + x, 0),
        Case("add_custom, 16 numbers", lambda: custom_pypto.add_custom(x, x), 0),
        Case("lightning indexer, one key of 16 dims", index, 0),
        Case("sparse attention, one key of 16 dims", attend, 0),
        Case("torch.index_select, 2048 rows of latent and RoPE, 64K keys", gather, 0),
        *(Case(f"{case.name}, 4K keys", case.run, case.flop) for case in near),
    ]


def int8_checks(repeats: int) -> list[tuple[str, Callable[[], float], float]]:
    return [
        (
            f"int8 over bfloat16, {key[0]} {key[1:]}",
            lambda key=key: int8_speedup(key, repeats),
            least,
        )
        for key, least in floors.INT8.get(torch.ops.custom_pypto.cpu_isa(), {}).items()
    ]


def check_floors(repeats: int) -> int:
    if torch.ops.custom_pypto.cpu_isa() == "avx2":
        key, least = AVX2_FLOOR
        case = case_of(*key, dtype=torch.float32)
        checks = [(f"{case.name}, avx2", lambda: share(case, times(case, torch.float32, 5)), least)]
        if "CUSTOM_PYPTO_CPU_ISA" not in os.environ:  # not the child process below
            checks += int8_checks(repeats)
        return check(checks)

    def measured(key):
        case = case_of(*key)
        few = 5 if key[1] > 4 else repeats
        name = f"{case.name}, floor {with_aim(*key)}"
        return name, lambda: share(case, times(case, torch.bfloat16, few))

    checks = [(*measured(key), least) for key, least in floors.here(floors.OPS).items()]
    # limit over measured microseconds: more is better, as for the other floors
    for ascending, most in ((False, 70), (True, 150)):
        name = f"top-k 2048 of 128K, {'ascending' if ascending else 'random'}, of {most} us"
        checks.append((name, lambda a=ascending, m=most: m / top_k_microseconds(a, repeats), 1.0))
    failed = check(checks + int8_checks(repeats))
    avx2 = [sys.executable, __file__, "--check"]
    environment = os.environ | {"CUSTOM_PYPTO_CPU_ISA": "avx2"}
    return failed | subprocess.run(avx2, env=environment).returncode


def print_parts(repeats: int, write: bool) -> int:
    rows = []
    for case in parts():
        seconds = times(case, torch.bfloat16, repeats)
        ms = [f"{statistics.median(seconds[call]) * 1e3:.3f}" for call in ("op", "again")]
        of_mm = [f"{share(case, seconds, c):.2f}" if case.flop else "-" for c in ("op", "again")]
        rows.append([case.name, *ms, *of_mm])
        print(*rows[-1], sep="  ", flush=True)
    if write:
        header = ["call", "ms after torch.mm", "ms again", "of torch.mm 2048^3", "called again"]
        command = "python benchmarks/bench_ops.py --parts --write"
        write_section(of_kernels("Parts of a short call, 1 thread"), command, table(header, rows))
    return 0


def print_int8(repeats: int, write: bool) -> int:
    rows = []
    here = floors.INT8.get(torch.ops.custom_pypto.cpu_isa(), {})
    for key in floors.INT8["avx512_bf16"]:
        name, seconds = int8_times(key, repeats)
        ms = [f"{statistics.median(seconds[op]) * 1e3:.2f}" for op in ("bfloat16", "int8")]
        speedup = ratio(seconds["bfloat16"], seconds["int8"])
        rows.append([name, *ms, f"{speedup:.2f}", str(here.get(key, "-"))])
        print(*rows[-1], sep="  ", flush=True)
    if write:
        header = ["op", "ms in bfloat16", "ms in int8", "speedup", "floor of --check"]
        command = "python benchmarks/bench_ops.py --int8 --write"
        write_section(of_kernels("int8 beside bfloat16, 1 thread"), command, table(header, rows))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/RESULTS.md")
    parser.add_argument("--parts", action="store_true", help="parts of short calls, one thread")
    parser.add_argument("--int8", action="store_true", help="int8 beside bfloat16, one thread")
    parser.add_argument("--check", action="store_true", help="compare with the floors, one thread")
    args = parser.parse_args()
    one = args.check or args.parts or args.int8
    torch.set_num_threads(1 if one else args.threads)
    torch.manual_seed(0)
    print(machine())
    if args.check:
        return check_floors(args.repeats)
    if args.parts:
        return print_parts(args.repeats, args.write)
    if args.int8:
        return print_int8(args.repeats, args.write)
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for key in floors.OPS["avx512_bf16"]:
            case = case_of(*key, dtype=dtype)
            seconds = times(case, dtype, args.repeats)
            median = statistics.median(seconds["op"])
            rate = f"{case.flop / median / 1e9:.0f}"
            of_mm = [f"{share(case, seconds, call):.2f}" for call in ("op", "again")]
            rows.append([case.name, str(dtype)[6:], f"{median * 1e3:.2f}", rate, *of_mm])
            if args.threads == 1:
                rows[-1].append(with_aim(*key) if dtype == torch.bfloat16 else "-")
            print(*rows[-1], sep="  ", flush=True)
    if args.write:
        header = ["op", "dtype", "ms", "GFLOP/s", "of torch.mm 2048^3", "called again"]
        header += ["floor of --check"] * (args.threads == 1)
        text = table(header, rows)
        command = f"python benchmarks/bench_ops.py --threads {args.threads}"
        write_section(of_kernels(f"Ops, {args.threads} thread(s)"), f"{command} --write", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
