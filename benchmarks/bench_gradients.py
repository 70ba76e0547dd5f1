"""Times the gradients of the ops, on one thread, next to the forward of the same call.

python benchmarks/bench_gradients.py           # a table
python benchmarks/bench_gradients.py --write   # into RESULTS.md
python benchmarks/bench_gradients.py --check   # exit code 1 if a floor is missed
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from bench_ops import K, L, R
from measure import check, interleaved, machine, of_kernels, ratio, table, write_section

import custom_pypto
from custom_pypto import reference

# tokens, heads, keys
CASES = [(64, 128, 8192), (64, 16, 8192)]
# of the time of the forward; the operations are 2.53 times as many
MOST = 3.0


def attention(T: int, heads: int, keys: int, dtype: torch.dtype) -> dict[str, Callable]:
    """The forward and its gradients, checked for the first token."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    query, key = random(T, heads, L), random(keys, 1, L)
    ropes = dict(query_rope=random(T, heads, R), key_rope=random(keys, 1, R))
    indices = torch.stack([torch.randperm(keys)[:K] for _ in range(T)]).int()[:, None]
    lengths = [torch.tensor([n], dtype=torch.int32) for n in (T, keys)]
    d_out, scale = random(T, heads, L), 192**-0.5

    def forward(n: int = T):
        return custom_pypto.npu_sparse_flash_attention_pto(
            query[:n],
            key,
            None,
            indices[:n],
            scale,
            actual_seq_lengths_query=lengths[0].clamp(max=n),
            actual_seq_lengths_kv=lengths[1],
            layout_query="TND",
            layout_kv="TND",
            sparse_mode=0,
            return_softmax_lse=True,
            **ropes | dict(query_rope=ropes["query_rope"][:n]),
        )

    def gradient_of(n: int, of_forward: tuple) -> dict:
        out, largest, total = of_forward
        return dict(
            query=query[:n],
            key=key,
            value=None,
            sparse_indices=indices[:n],
            d_out=d_out[:n],
            out=out,
            softmax_max=largest,
            softmax_sum=total,
            scale_value=scale,
            query_rope=ropes["query_rope"][:n],
            key_rope=ropes["key_rope"],
            actual_seq_qlen=lengths[0].clamp(max=n),
            actual_seq_kvlen=lengths[1],
            layout="TND",
            sparse_mode=0,
        )

    op, name = custom_pypto.npu_sparse_flash_attention_grad_pto, "sparse_flash_attention_grad_pto"
    one = gradient_of(1, forward(1))
    expected = getattr(reference, f"npu_{name}")(**one)
    error, bound = reference.MODULES[f"npu_{name}"].error(op(**one), expected, one, one)
    if error > bound:
        raise SystemExit(f"{name} {heads=} {dtype}: error {error:.1e}; not timed")
    whole = gradient_of(T, forward())
    return {"forward": forward, "backward": lambda: op(**whole)}


def measured(case: tuple, dtype: torch.dtype, repeats: int) -> dict[str, list[float]]:
    return interleaved(attention(*case, dtype), repeats)


def check_floors(repeats: int) -> int:
    dtypes = [torch.float32]
    if not torch.ops.custom_pypto.cpu_isa().startswith(("avx512_bf16", "amx")):
        dtypes.append(torch.bfloat16)  # else only the forward multiplies it without widening
    checks = []
    for dtype in dtypes:

        def share(dtype=dtype) -> float:
            seconds = measured(CASES[0], dtype, repeats)
            return MOST * ratio(seconds["forward"], seconds["backward"])

        name = f"sparse attention, {CASES[0][0]} tokens, {CASES[0][1]} heads, {dtype}"
        checks.append((f"backward of {name}, of {MOST} forwards", share, 1.0))
    return check(checks)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/RESULTS.md")
    parser.add_argument("--check", action="store_true", help="compare with the floors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine())
    if args.check:
        return check_floors(args.repeats)
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for case in CASES:
            seconds = measured(case, dtype, args.repeats)
            T, heads, keys = case
            name = f"sparse attention, {T} tokens, {heads} heads, {keys // 1024}K keys"
            ms = [f"{statistics.median(seconds[x]) * 1e3:.0f}" for x in ("forward", "backward")]
            times = ratio(seconds["backward"], seconds["forward"])
            flop = 2 * T * heads * K * (3 * (L + R) + 2 * L)
            rate = f"{flop / statistics.median(seconds['backward']) / 1e9:.0f}"
            rows.append([name, str(dtype)[6:], *ms, f"{times:.2f}", rate])
            print(*rows[-1], sep="  ", flush=True)
    if args.write:
        header = ["op", "dtype", "ms forward", "ms backward", "ratio", "GFLOP/s of the backward"]
        command = "python benchmarks/bench_gradients.py --write"
        write_section(of_kernels("Gradients, 1 thread"), command, table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
