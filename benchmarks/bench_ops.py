"""Time of the ops on this CPU, compared with the least that torch would take.

Every case is first compared with custom_pypto.reference. Its limit is the time of torch.mm for as
many operations in the same dtype, and of torch for reading the bytes that the op must read: keys by
a sum of as many bytes of floats, selected rows by index_select. FLOP counts: 2 * S1 * S2 * 64 * 128
for the indexer (the time includes top-k, the count does not), 2 * S1 * N1 * 2048 * (576 + 512) for
the attention, for that of a prompt 2 * N1 * (S1 * (S1 + 1) / 2 * (192 + 128) + S1 * 512 * 256): its
keys and values are expanded from latents. The time of a top-k is the indexer's time for 2048 keys
minus its time for 1.

The op, and what reads, are called after torch.mm, as between the other layers of a model; the op
then again at once: the difference is the cost of cold caches and torch's dispatch.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import floors
import inputs
import torch
from inputs import BLOCK, D, K, L, R, as_loaded
from measure import Benchmark, Floor, in_own_process, interleaved, median_ms, no_floor, ratio

import custom_pypto
from custom_pypto.reference.npu_kv_quant_sparse_flash_attention_pto import dequantized_latents
from custom_pypto.rows.expanded import Heads, expanded_attention, in_float32
from custom_pypto.rows.latents import int8_row_bytes

CASES = [*floors.OPS, *floors.PROMPTS]
# of the float32 indexer on AVX2
AVX2_FLOOR = ("indexer", 256, 8192), 0.6


def nothing_to_read() -> None:
    """Rows in the CPU's caches."""


class Case(NamedTuple):
    name: str
    run: Callable
    flop: int
    read: Callable = nothing_to_read  # by torch, the bytes that the op reads from memory


def in_int8(x: dict) -> dict:
    """The call of the int8 indexer on the same rows."""
    query, query_scale = custom_pypto.npu_quant_rows_pto(x["query"])
    key, key_scale = map(as_loaded, custom_pypto.npu_quant_rows_pto(x["key"].nan_to_num(0)))
    scales = dict(query_dequant_scale=query_scale, key_dequant_scale=key_scale)
    x = {name: value for name, value in x.items() if name != "cmp_ratio"}
    return x | scales | dict(query=query, key=key, query_quant_mode=0, key_quant_mode=0)


def checked_indexer(op: str, x: dict) -> Case:
    S1, S2 = x["query"].size(1), int(x["actual_seq_lengths_key"])
    run = partial(getattr(custom_pypto, op), **x)
    inputs.compare(op, inputs.last_token(x), run()[:, -1:])
    name = f"lightning indexer, S1={S1}, {S2 // 1024}K keys"
    read = as_loaded(torch.ones(x["key"].nbytes // 4)).sum
    return Case(name, run, 2 * S1 * S2 * x["query"].size(2) * D, read)


def indexer_case(S1: int, S2: int, dtype: torch.dtype) -> Case:
    return checked_indexer("npu_lightning_indexer_pto", inputs.indexer(S1, S2, dtype))


def int8_indexer_cases(S1: int, S2: int) -> tuple[Case, Case]:
    x = inputs.indexer(S1, S2)
    quantized = checked_indexer("npu_quant_lightning_indexer_pto", in_int8(x))
    return checked_indexer("npu_lightning_indexer_pto", x), quantized


def gather(x: dict) -> Callable:
    """Reads the rows that are selected, each once, in random order."""
    rows = [as_loaded(x[name].flatten(0, 2)) for name in ("key", "key_rope")]
    selected = x["sparse_indices"].unique().long()
    blocks = x["block_table"][0].long()[selected // BLOCK]
    slots = (blocks * BLOCK + selected % BLOCK)[torch.randperm(len(selected))]
    return inputs.gathering(rows, [slots])


def attention_of(x: dict, op: Callable = custom_pypto.npu_sparse_flash_attention_pto) -> Case:
    S1, N1 = x["query"].shape[1:3]
    name = f"sparse attention, S1={S1}, {N1} heads"
    read = gather(x) if "key_rope" in x else nothing_to_read
    return Case(name, partial(op, **x), 2 * S1 * N1 * K * (2 * L + R), read)


def attention_case(S1: int, N1: int, S2: int, dtype: torch.dtype) -> Case:
    x = inputs.attention(S1, N1, S2, dtype)
    case = attention_of(x)
    inputs.compare("npu_sparse_flash_attention_pto", inputs.last_token(x), case.run()[:, -1:])
    return case


def prompt_case(S1: int, N1: int, dtype: torch.dtype) -> Case:
    """Attention of a prompt that selects every key it sees."""
    nope = value = 128
    heads = Heads(
        torch.randn(1, S1, N1, nope).to(dtype),
        torch.randn(1, S1, N1, R).to(dtype),
        (torch.randn(N1, nope + value, L) / L**0.5).to(dtype),
        (nope + R) ** -0.5,
        None,
    )
    rows = torch.randn(1, S1, L).to(dtype), torch.randn(1, S1, R).to(dtype)
    indices = torch.arange(S1, dtype=torch.int32).expand(1, S1, 1, S1)
    ends = torch.arange(1, S1 + 1)[None]
    run = partial(expanded_attention, heads, indices, ends, *rows)
    few = heads._replace(q_nope=heads.q_nope[:, -4:], q_rope=heads.q_rope[:, -4:])
    want = in_float32(few, indices[:, -4:, 0], ends[:, -4:], *rows).float()
    if (apart := float((run()[:, -4:].float() - want).norm() / want.norm())) > 2**-6:
        raise SystemExit(f"attention of a prompt differs by {apart:.1e} from float32; not timed")
    flop = 2 * N1 * (S1 * (S1 + 1) // 2 * (nope + R + value) + S1 * L * (nope + value))
    return Case(f"attention of a prompt, S1={S1}, {N1} heads", run, flop)


def int8_attention_cases(S1: int, N1: int, S2: int) -> tuple[Case, Case]:
    """On the dequantized rows, and on those of int8: the same to the bit."""
    x = inputs.attention(S1, N1, S2)
    key, key_rope = (x[name].nan_to_num(0) for name in ("key", "key_rope"))
    cache = as_loaded(torch.zeros(*key.shape[:-1], int8_row_bytes(L, R), dtype=torch.int8))
    slots = torch.arange(key.size(0) * key.size(1)).view(key.shape[:2])
    custom_pypto.npu_kv_quant_update_pto(key.squeeze(2), key_rope.squeeze(2), slots, cache)
    rows = map(as_loaded, dequantized_latents(cache, L, torch.bfloat16))
    bfloat16 = attention_of(x | dict(zip(("key", "key_rope"), rows, strict=True)))
    query = torch.cat([x.pop("query"), x.pop("query_rope")], -1)
    for name in ("key_rope", "sinks"):
        x.pop(name)
    x |= dict(query=query, key=cache, key_quant_mode=2, value_quant_mode=2)
    int8 = attention_of(x, custom_pypto.npu_kv_quant_sparse_flash_attention_pto)
    if not torch.equal(bfloat16.run(), int8.run()):
        raise SystemExit(f"attention of int8 {S1=} {N1=}: other bits; not timed")
    return bfloat16, int8


MAKE = {"indexer": indexer_case, "attention": attention_case, "prompt": prompt_case}
# the op in bfloat16, and over the same rows in int8
MAKE_INT8 = {"indexer": int8_indexer_cases, "attention": int8_attention_cases}


def case_of(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    return MAKE[name](*shape, dtype)


def times(case: Case, dtype: torch.dtype, repeats: int) -> dict[str, list[float]]:
    """Seconds of torch.mm, of the op right after it, on cold caches, of the op again, and of
    torch's reading after another torch.mm."""
    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    calls = {"mm": lambda: a @ b, "op": case.run, "again": case.run}
    return interleaved(calls | {"mm again": calls["mm"], "read": case.read}, repeats)


def share(case: Case, seconds: dict[str, list[float]]) -> float:
    """The limit over the op's time."""
    computing = ratio(seconds["mm"], seconds["op"]) * case.flop / (2 * 2048**3)
    return computing + ratio(seconds["read"], seconds["op"])


def few(key: tuple, repeats: int) -> int:
    return 5 if key[1] > 4 else repeats


def top_k_share(ascending: bool, repeats: int) -> float:
    """Of the time of torch.topk, for 2048 of 128K scores, random, or ascending: every key scores
    higher than all before."""
    S2 = 131072
    key = torch.zeros(S2 // BLOCK, BLOCK, 1, 16, dtype=torch.bfloat16)
    scores = torch.arange(S2) if ascending else torch.rand(S2)
    # two dims, because bfloat16 has no 128K steps
    low = torch.arange(S2) % 512 // 2 if ascending else torch.rand(S2)
    key.view(S2, 16)[:, 0] = (scores / scores.max() * 255).floor()
    key.view(S2, 16)[:, 1] = low / 256
    query = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
    query[..., :2] = 1
    run = partial(
        custom_pypto.npu_lightning_indexer_pto,
        query,
        key,
        torch.ones(1, 1, 1),
        actual_seq_lengths_key=torch.tensor([S2], dtype=torch.int32),
        block_table=torch.arange(S2 // BLOCK, dtype=torch.int32)[None],
    )
    calls = {
        "all": partial(run, sparse_count=K),
        "one": partial(run, sparse_count=1),
        "torch": partial(scores.float().topk, K, sorted=False),
    }
    # a small difference of two calls
    seconds = interleaved(calls, max(repeats, 51))
    rounds = zip(seconds["all"], seconds["one"], seconds["torch"], strict=True)
    return statistics.median((all_ - one) / torchs for all_, one, torchs in rounds)


def int8_times(key: tuple, repeats: int) -> tuple[str, dict[str, list[float]]]:
    """The name of a case, and seconds of both ops, one after the other."""
    bfloat16, int8 = MAKE_INT8[key[0]](*key[1:])
    calls = {"bfloat16": bfloat16.run, "int8": int8.run}
    return int8.name, interleaved(calls, few(key, repeats))


def int8_speedup(key: tuple, repeats: int) -> float:
    seconds = int8_times(key, repeats)[1]
    return ratio(seconds["bfloat16"], seconds["int8"])


def parts() -> list[Case]:
    """Parts of a short call: dispatch without arithmetic, a gather without attention, and attention
    to rows in the CPU caches."""
    x, one = torch.ones(16), torch.ones(1, dtype=torch.int32)
    query, key = torch.ones(1, 1, 1, 16).bfloat16(), torch.ones(1, 16, 1, 16).bfloat16()
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    table = dict(block_table=zero.view(1, 1))
    index = partial(
        custom_pypto.npu_lightning_indexer_pto,
        *(query, key, torch.ones(1, 1, 1)),
        actual_seq_lengths_key=one,
        **table,
    )
    attend = partial(
        custom_pypto.npu_sparse_flash_attention_pto,
        *(query, key, None, zero, 1.0),
        actual_seq_lengths_kv=one,
        **table,
    )
    far = gather(inputs.attention(1, 1, 65536))
    near = [
        attention_case(S1, N1, 4096, torch.bfloat16)
        for S1, N1 in ((1, 128), (4, 64), (4, 32), (4, 16))
    ]
    return [
        Case("x + x, 16 numbers", lambda: x + x, 0),
        Case("add_custom, 16 numbers", lambda: custom_pypto.add_custom(x, x), 0),
        Case("lightning indexer, one key of 16 dims", index, 0),
        Case("sparse attention, one key of 16 dims", attend, 0),
        Case("torch.index_select, 2048 rows of latent and RoPE, 64K keys", far, 0),
        *(Case(f"{case.name}, 4K keys", case.run, case.flop) for case in near),
    ]


def int8_floors(repeats: int) -> Iterator[Floor]:
    for key, least in floors.here(floors.INT8).items():
        measure = partial(int8_speedup, key, repeats)
        yield Floor(f"int8 over bfloat16, {key[0]} {key[1:]}", measure, least)


def avx2_share() -> float:
    torch.set_num_threads(1)
    case = case_of(*AVX2_FLOOR[0], dtype=torch.float32)
    return share(case, times(case, torch.float32, 5))


def op_floors(threads: int, repeats: int) -> Iterator[Floor]:
    torch.set_num_threads(1)
    bfloat16 = torch.ops.custom_pypto.cpu_isa() in ("avx512_bf16", "amx")
    found = floors.OPS if bfloat16 else dict.fromkeys(floors.OPS)
    for key, least in (found | floors.here(floors.PROMPTS)).items():
        if least is None:
            yield no_floor(f"{key[0]} {key[1:]}, bfloat16")
            continue
        case = case_of(*key)

        def measure(case=case, key=key) -> float:
            return share(case, times(case, torch.bfloat16, few(key, repeats)))

        yield Floor(case.name, measure, least)
    for ascending in (False, True):
        name = f"top-k 2048 of 128K, {'ascending' if ascending else 'random'}, of torch.topk's time"
        yield Floor(name, partial(top_k_share, ascending, repeats), floors.TOP_K, at_least=False)
    key, least = AVX2_FLOOR
    if torch.ops.custom_pypto.cpu_isa() == "generic":
        yield no_floor(f"{key[0]} {key[1:]}, float32, kernels avx2")
        return
    # torch.mm multiplies with AVX2, too
    both = dict(CUSTOM_PYPTO_CPU_ISA="avx2", MKL_ENABLE_INSTRUCTIONS="AVX2")
    measure = partial(in_own_process, avx2_share, **both)
    yield Floor(f"{key[0]} {key[1:]}, float32, kernels avx2", measure, least)


def op_rows(threads: int, repeats: int) -> Iterator[list[str]]:
    for dtype in (torch.bfloat16, torch.float32):
        for key in CASES:
            case = case_of(*key, dtype=dtype)
            seconds = times(case, dtype, repeats)
            rate = f"{case.flop / statistics.median(seconds['op']) / 1e9:.0f}"
            ms = [median_ms(seconds[call]) for call in ("op", "again")]
            yield [case.name, str(dtype)[6:], *ms, rate, f"{share(case, seconds):.2f}"]


def part_rows(repeats: int) -> Iterator[list[str]]:
    for case in parts():
        seconds = times(case, torch.bfloat16, repeats)
        ms = [median_ms(seconds[call], 3) for call in ("op", "again")]
        yield [case.name, *ms]


def int8_rows(repeats: int) -> Iterator[list[str]]:
    for key in floors.INT8:
        name, seconds = int8_times(key, repeats)
        speedup = ratio(seconds["bfloat16"], seconds["int8"])
        ms = [median_ms(seconds[op]) for op in ("bfloat16", "int8")]
        yield [name, *ms, f"{speedup:.2f}"]


BENCHMARKS = {
    "ops": Benchmark(
        ["op", "dtype", "ms", "ms again", "GFLOP/s", "limit / time"],
        op_rows,
        op_floors,
        cases=2,
        variant="threads: {threads}",
    ),
    "parts": Benchmark(
        ["call", "ms after torch.mm", "ms again"],
        part_rows,
    ),
    "int8_ops": Benchmark(
        ["op", "ms in bfloat16", "ms in int8", "speedup"],
        int8_rows,
        int8_floors,
    ),
}
