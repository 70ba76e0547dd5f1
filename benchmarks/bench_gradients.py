"""Times the gradients of the ops on one thread: those of attention next to the forward of the same
call, those of the indexer next to torch.mm in float32.

python benchmarks/bench_gradients.py           # a table
python benchmarks/bench_gradients.py --write   # into RESULTS.md
python benchmarks/bench_gradients.py --check   # exit code 1 if a floor is missed
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from bench_ops import K, L, R, attention_inputs
from measure import check, interleaved, machine, of_kernels, ratio, table, write_section

import custom_pypto
from custom_pypto import reference
from custom_pypto.reference.index_training import arguments

TOKENS, KEYS = 64, 8192
INDEX_HEADS, D = 64, 128
# of the time of the forward; the operations are 2.53 times as many
MOST_OF_FORWARD = 3.0
LEAST_OF_MM = 0.7


class Case(NamedTuple):
    name: str
    run: Callable
    flop: int
    baseline: Callable
    baseline_flop: int
    compared_with: str

    def measured(self, repeats: int) -> dict[str, list[float]]:
        return interleaved({"gradients": self.run, "baseline": self.baseline}, repeats)

    def floor(self, seconds: dict[str, list[float]]) -> float:
        """What the floor allows, relative to what was measured: at least 1."""
        share = ratio(seconds["baseline"], seconds["gradients"])
        if self.compared_with == "forward":
            return MOST_OF_FORWARD * share
        return share * self.flop / self.baseline_flop / LEAST_OF_MM


def checked(op: str, call: dict) -> None:
    """Compares a small call with the reference before anything is timed."""
    module = reference.MODULES[op]
    got, expected = getattr(custom_pypto, op)(**call), getattr(reference, op)(**call)
    error, bound = module.error(got, expected, call, call)
    if error > bound:
        raise SystemExit(f"{op}: error {error:.1e}; not timed")


def attention(heads: int, dtype: torch.dtype) -> Case:
    op = "npu_sparse_flash_attention_grad_pto"
    with_gradient = reference.MODULES[op].with_gradient
    call = attention_inputs(TOKENS, heads, KEYS, dtype)
    d_out = torch.randn(call["query"].shape).to(dtype)
    of_tokens = ("query", "query_rope", "sparse_indices")
    first = call | dict(sparse_mode=0) | {name: call[name][:, :1] for name in of_tokens}
    checked(op, with_gradient(first, d_out[:, :1]))
    whole, forward = with_gradient(call, d_out), custom_pypto.npu_sparse_flash_attention_pto
    pairs = 2 * TOKENS * heads * K
    return Case(
        f"sparse attention, {heads} heads, {K} of {KEYS} keys, {str(dtype)[6:]}",
        lambda: custom_pypto.npu_sparse_flash_attention_grad_pto(**whole),
        pairs * (3 * (L + R) + 2 * L),
        lambda: forward(**call, return_softmax_lse=True),
        pairs * (2 * L + R),
        "forward",
    )


def beside_mm(name: str, op: str, call: dict, flop: int) -> Case:
    a, b = torch.randn(2048, 512), torch.randn(512, 2048)
    dtype = str(next(iter(call.values())).dtype)[6:]
    run = getattr(custom_pypto, op)
    mm = 2 * a.numel() * b.size(1)
    return Case(
        f"{name}, {dtype}", lambda: run(**call), flop, lambda: torch.mm(a, b), mm, "torch.mm"
    )


def training_call(dtype: torch.dtype, tokens: int = TOKENS, keys: int = KEYS) -> dict:
    return arguments(dtype, [tokens], [keys])


def indexer(dtype: torch.dtype) -> Case:
    op = "npu_lightning_indexer_grad_pto"

    def call(tokens: int, keys: int, count: int) -> dict:
        x = training_call(dtype, tokens, keys)
        indices = [torch.randperm(keys - tokens)[:count] for _ in range(tokens)]
        return dict(
            query=x["query_index"],
            key=x["key_index"],
            dy=torch.randn(tokens, 1, count).to(dtype),
            sparse_indices=torch.stack(indices).int().unsqueeze(1),
            weights=x["weights"],
            actual_seq_lengths_query=torch.tensor([tokens], dtype=torch.int32),
            actual_seq_lengths_key=torch.tensor([keys], dtype=torch.int32),
            layout="TND",
        )

    checked(op, call(2, 100, 64))
    flop = 6 * TOKENS * K * INDEX_HEADS * D
    return beside_mm(f"indexer, {K} of {KEYS} keys", op, call(TOKENS, KEYS, K), flop)


def sparse_divergence(dtype: torch.dtype) -> Case:
    op = "npu_sparse_lightning_indexer_grad_kl_loss_pto"
    with_selection = reference.MODULES[op].with_selection
    checked(op, with_selection(training_call(dtype, 2, 100), 64))
    call = training_call(dtype)
    attend = attention_inputs(TOKENS, call["query"].size(1), KEYS, dtype)["sparse_indices"][0]
    length = dict.fromkeys(("actual_seq_lengths_query", "actual_seq_lengths_kv"))
    length["actual_seq_lengths_query"] = torch.tensor([TOKENS], dtype=torch.int32)
    length["actual_seq_lengths_kv"] = torch.tensor([KEYS], dtype=torch.int32)
    names = ("query", "key", "query_rope", "key_rope", "scale_value")
    _, largest, total = custom_pypto.npu_sparse_flash_attention_pto(
        **{name: call[name] for name in names},
        value=None,
        sparse_indices=attend,
        **length,
        layout_query="TND",
        layout_kv="TND",
        return_softmax_lse=True,
    )
    call |= dict(sparse_indices=attend, softmax_max=largest, softmax_sum=total)
    pairs = 2 * TOKENS * K
    flop = pairs * (call["query"].size(1) * (L + R) + 3 * INDEX_HEADS * D)
    return beside_mm(f"divergence over {K} of {KEYS} keys", op, call, flop)


def dense_divergence(dtype: torch.dtype) -> Case:
    op = "npu_dense_lightning_indexer_grad_kl_loss_pto"
    checked(op, reference.MODULES[op].with_statistics(training_call(dtype, 2, 100)))
    call = training_call(dtype)
    # any statistics: they only scale
    heads = torch.full((1, TOKENS, call["query"].size(1)), 8.0)
    call |= dict(softmax_max=heads, softmax_sum=heads)
    call |= dict(softmax_max_index=heads[..., 0], softmax_sum_index=heads[..., 0])
    pairs = 2 * TOKENS * (KEYS - TOKENS / 2)
    flop = int(pairs * (call["query"].size(1) * (L + R) + 3 * INDEX_HEADS * D))
    return beside_mm(f"divergence over {KEYS} keys", op, call, flop)


def cases(dtype: torch.dtype) -> list[Callable[[], Case]]:
    return [
        lambda: attention(128, dtype),
        lambda: attention(16, dtype),
        lambda: indexer(dtype),
        lambda: sparse_divergence(dtype),
        lambda: dense_divergence(dtype),
    ]


def check_floors(repeats: int) -> int:
    checks = []
    # with kernels that multiply bfloat16, only the forward multiplies it without widening
    fast = torch.ops.custom_pypto.cpu_isa().startswith(("avx512_bf16", "amx"))
    for dtype in (torch.float32, torch.bfloat16):
        for make in cases(dtype):
            case = make()
            if case.compared_with == "forward" and (fast and dtype != torch.float32):
                continue
            allowed = (
                f"{MOST_OF_FORWARD} forwards"
                if case.compared_with == "forward"
                else (f"{LEAST_OF_MM} of the rate of torch.mm")
            )
            checks.append(
                (
                    f"gradients of {case.name}: {allowed}",
                    lambda case=case: case.floor(case.measured(repeats)),
                    1.0,
                )
            )
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
        for make in cases(dtype):
            case = make()
            seconds = case.measured(args.repeats)
            ms = statistics.median(seconds["gradients"]) * 1e3
            rate = f"{case.flop / ms / 1e6:.0f}"
            beside = ratio(seconds["gradients"], seconds["baseline"])
            if case.compared_with == "forward":
                share = f"{beside:.2f} times the forward"
            else:
                share = f"{case.flop / case.baseline_flop / beside:.2f} of torch.mm's rate"
            rows.append([case.name, f"{ms:.0f}", rate, share])
            print(*rows[-1], sep="  ", flush=True)
    if args.write:
        header = [f"gradients of {TOKENS} tokens", "ms", "GFLOP/s", "beside"]
        command = "python benchmarks/bench_gradients.py --write"
        write_section(of_kernels("Gradients, 1 thread"), command, table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
