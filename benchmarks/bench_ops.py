"""Rate of the ops on this CPU, as a share of the rate of torch.mm in the same dtype.

    python benchmarks/bench_ops.py [--threads 1] [--repeats 15] [--write]

Every case is first compared with custom_pypto.reference. Arithmetic counted: the indexer's
2 * S1 * S2 * 64 * 128 (top-k comes on top), the attention's 2 * S1 * N1 * 2048 * (576 + 512).
"""

import argparse
import statistics

import torch
from measure import interleaved, machine, ratio, table, write_section

import custom_pypto
from custom_pypto import reference

BLOCK, K, D, L, R = 128, 2048, 128, 512, 64


def paged(S2: int, dims: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(S2 // BLOCK, BLOCK, 1, dims).to(dtype)


def tables(S2: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Length and shuffled block table of one sequence."""
    return torch.tensor([S2], dtype=torch.int32), torch.randperm(S2 // BLOCK).int()[None]


def indexer_case(S1: int, S2: int, dtype: torch.dtype):
    query, key = torch.randn(1, S1, 64, D).to(dtype), paged(S2, D, dtype)
    weights, (lengths, block_table) = torch.randn(1, S1, 64), tables(S2)
    more = {"actual_seq_lengths_key": lengths, "block_table": block_table}

    def run():
        return custom_pypto.npu_lightning_indexer_pto(query, key, weights, **more)

    # the last token, alone, sees what it sees among the others
    want = reference.npu_lightning_indexer_pto(query[:, -1:], key, weights[:, -1:], **more)
    common = len(set(want.flatten().tolist()) & set(run()[:, -1].flatten().tolist()))
    if common < 0.999 * K:  # a few may change places with others of nearly the same score
        raise SystemExit(f"indexer {S1=} {S2=} {dtype}: {common} of {K} positions agree: not timed")
    return f"lightning indexer, S1={S1}, {S2 // 1024}K keys", run, 2 * S1 * S2 * 64 * D


def attention_case(S1: int, N1: int, S2: int, dtype: torch.dtype):
    query, rope = torch.randn(1, S1, N1, L).to(dtype), torch.randn(1, S1, N1, R).to(dtype)
    key, key_rope, (lengths, block_table) = paged(S2, L, dtype), paged(S2, R, dtype), tables(S2)
    indices = torch.stack([torch.randperm(S2 - S1)[:K] for _ in range(S1)]).int()[None, :, None]
    more = {"block_table": block_table, "actual_seq_lengths_kv": lengths, "key_rope": key_rope}

    def run():
        return custom_pypto.npu_sparse_flash_attention_pto(
            query, key, None, indices, 192**-0.5, query_rope=rope, **more
        )

    want = reference.npu_sparse_flash_attention_pto(
        query[:, -1:], key, None, indices[:, -1:], 192**-0.5, query_rope=rope[:, -1:], **more
    ).float()
    error = ((run()[:, -1:].float() - want).abs().amax(-1) / want.abs().amax(-1)).max()
    if error > (1e-5 if dtype == torch.float32 else 2**-7):
        raise SystemExit(f"attention {S1=} {N1=} {dtype}: relative error {error:.1e}: not timed")
    return f"sparse attention, S1={S1}, {N1} heads", run, 2 * S1 * N1 * K * (2 * L + R)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="into benchmarks/RESULTS.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(machine())
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
        cases = [
            (indexer_case, shape) for shape in [(1, 8192), (1, 65536), (4, 65536), (256, 8192)]
        ] + [
            (attention_case, shape)
            for shape in [(64, 128, 8192), (4, 128, 65536), (1, 128, 65536), (4, 16, 65536)]
        ]
        for make, shape in cases:
            name, run, flop = make(*shape, dtype)
            times = interleaved({"op": run, "mm": lambda a=a, b=b: a @ b}, args.repeats)
            # share of the rate of torch.mm: its seconds per operation over ours
            share = ratio(times["mm"], times["op"]) * flop / (2 * 2048**3)
            seconds = statistics.median(times["op"])
            rate = f"{flop / seconds / 1e9:.0f}"
            rows.append([name, str(dtype)[6:], f"{seconds * 1e3:.2f}", rate, f"{share:.2f}"])
            print(*rows[-1], sep="  ", flush=True)
    if args.write:
        text = table(["op", "dtype", "ms", "GFLOP/s", "of torch.mm 2048^3"], rows)
        command = f"python benchmarks/bench_ops.py --threads {args.threads}"
        write_section(f"Ops, {args.threads} thread(s)", f"{command} --write", text)


if __name__ == "__main__":
    main()
