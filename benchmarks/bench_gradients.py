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
from bench_ops import K, L, R, attention_inputs
from measure import check, interleaved, machine, of_kernels, ratio, table, write_section

import custom_pypto
from custom_pypto import reference

# tokens, heads, keys
CASES = [(64, 128, 8192), (64, 16, 8192)]
# of the time of the forward; the operations are 2.53 times as many
MOST = 3.0


def attention(S1: int, heads: int, keys: int, dtype: torch.dtype) -> dict[str, Callable]:
    """The forward with statistics and its gradients, checked for the first token."""
    module = reference.MODULES["npu_sparse_flash_attention_grad_pto"]
    call = attention_inputs(S1, heads, keys, dtype)
    d_out = torch.randn(call["query"].shape).to(dtype)
    of_tokens = ("query", "query_rope", "sparse_indices")
    first = call | dict(sparse_mode=0) | {name: call[name][:, :1] for name in of_tokens}
    one = module.with_gradient(first, d_out[:, :1])
    op = custom_pypto.npu_sparse_flash_attention_grad_pto
    error, bound = module.error(
        op(**one), reference.npu_sparse_flash_attention_grad_pto(**one), one, one
    )
    if error > bound:
        raise SystemExit(f"gradients {S1=} {heads=} {dtype}: error {error:.1e}; not timed")
    whole = module.with_gradient(call, d_out)
    forward = custom_pypto.npu_sparse_flash_attention_pto
    return {
        "forward": lambda: forward(**call, return_softmax_lse=True),
        "backward": lambda: op(**whole),
    }


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
