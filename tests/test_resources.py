"""What the ops and models take of memory: no more with every call, and no more than documented."""

import ctypes
import re
import resource

import psutil
import pytest
import torch
from cases import inputs_of
from processes import FLAT, MIB, growth, in_a_process, peak_of, status
from tiny import tiny_model, token_ids

import custom_pypto
from custom_pypto import models
from custom_pypto.descriptions import ALL_OPS


def growth_of_op(op: str, calls: int, rejected: bool) -> int:
    inputs = inputs_of(op, (3, 1), (40, 7))
    function = getattr(custom_pypto, op)
    if not rejected:
        return growth(lambda: function(**inputs), calls)
    *_, name = (name for name, value in inputs.items() if isinstance(value, torch.Tensor))
    inputs[name] = inputs[name].double()

    def call():
        try:
            function(**inputs)
        except RuntimeError:
            return
        raise AssertionError("not rejected")

    return growth(call, calls)


def growth_of_ops(calls: int, rejected: bool) -> dict[str, int]:
    torch.set_num_threads(2)
    return {op: growth_of_op(op, calls, rejected) for op in ALL_OPS}


def growth_of_generation(calls: int) -> int:
    torch.set_num_threads(1)
    model = models.use_custom_pypto(tiny_model(), block_size=16)
    ids = token_ids(2, 12)
    return growth(lambda: model.generate(ids, max_new_tokens=4, do_sample=False), calls)


def growth_of_a_leak(calls: int, size: int) -> int:
    kept = []
    return growth(lambda: kept.append(bytearray(size)), calls)


@pytest.mark.parametrize("calls", [500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rejected", [False, True], ids=["computed", "rejected"])
def test_memory_is_flat_however_often_an_op_is_called(rejected, calls):
    grown = in_a_process(growth_of_ops, calls, rejected)
    assert grown.keys() == ALL_OPS.keys() and max(grown.values()) < FLAT, grown


@pytest.mark.parametrize("calls", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_memory_is_flat_however_often_a_model_generates(calls):
    assert in_a_process(growth_of_generation, calls) < FLAT


def test_a_leak_would_show():
    assert in_a_process(growth_of_a_leak, 10_000, 512) > FLAT


# ---- workspace ------------------------------------------------------------------------------


def indexer_call(keys: int, tokens: int, dtype: torch.dtype, heads: int, dim: int, count: int):
    blocks = -(-keys // 128)
    key = torch.zeros(blocks, 128, 1, dim, dtype=dtype)
    disorder = torch.rand(blocks * 128)  # scores without an order
    int8 = dtype == torch.int8
    key.view(-1, dim)[:, 0] = 1 if int8 else disorder
    arguments = dict(
        query=torch.ones(1, tokens, heads, dim, dtype=dtype),
        key=key,
        weights=torch.ones(1, tokens, heads),
        actual_seq_lengths_key=torch.tensor([keys], dtype=torch.int32),
        block_table=torch.arange(blocks, dtype=torch.int32)[None],
        sparse_count=count,
    )
    if int8:
        arguments |= dict(query_quant_mode=0, key_quant_mode=0)
        arguments["query_dequant_scale"] = torch.ones(1, tokens, heads)
        arguments["key_dequant_scale"] = disorder.view(blocks, 128, 1)
        return lambda: custom_pypto.npu_quant_lightning_indexer_pto(**arguments)
    return lambda: custom_pypto.npu_lightning_indexer_pto(**arguments)


def indexer_peak(threads: int, *case) -> int:
    """Bytes that the call takes at its peak, beyond its inputs."""
    torch.set_num_threads(threads)
    # threads and code are there from the first call on
    for dtype in (torch.float32, torch.int8):
        indexer_call(256, 1, dtype, 16, 16, 1)()
    return peak_of(indexer_call(*case))


def documented_workspace(threads, keys, tokens, dtype, heads, dim, count) -> int:
    """The formula of docs/npu_lightning_indexer_pto.md; int8 takes less, but for its scales."""
    rows = -(-heads // 64) * 64 if heads > 32 else 32 if heads > 16 else 16
    group = min(tokens, 8)
    groups = -(-tokens // group)
    split = threads > 1 and groups < 8 * threads
    top_k = 8 * (2 * count + 1168)
    parts = groups * -(-8 * threads // groups) * group if split else 0
    of_thread = 4 * group * rows * (dim + 1) + 512 * dim
    of_thread += (1 if split else group) * (top_k + 16 * count)
    scales = (512 * threads + 8 * heads * tokens) * (dtype == torch.int8)
    return threads * of_thread + parts * top_k + 4 * tokens * count + scales


@pytest.mark.parametrize(
    "threads, tokens, dtype, count",
    [
        pytest.param(1, 1, torch.bfloat16, 8192, id="one-token"),
        pytest.param(1, 9, torch.float16, 8192, id="two-groups-of-tokens-widened"),
        pytest.param(2, 1, torch.bfloat16, 2048, id="one-token-split-over-two-threads"),
        pytest.param(2, 12, torch.float32, 2048, id="groups-split-over-two-threads"),
        pytest.param(3, 300, torch.bfloat16, 2048, id="many-tokens"),
        pytest.param(1, 1, torch.int8, 8192, id="one-token-int8"),
        pytest.param(3, 300, torch.int8, 2048, id="many-tokens-int8"),
    ],
)
def test_the_indexers_workspace_at_a_million_keys_is_the_documented_one(
    threads, tokens, dtype, count
):
    heads, dim = (64, 128) if tokens == 1 else (16, 16)
    case = (2**20, tokens, dtype, heads, dim, count)
    taken = in_a_process(indexer_peak, threads, *case)
    limit = documented_workspace(threads, *case)
    # half a MiB: Linux counts in batches of 64 pages a thread, code is touched for the first time
    assert limit / 4 < taken < limit + MIB // 2


# ---- a cache that does not fit --------------------------------------------------------------


M_ARENA_MAX = -8  # of mallopt


def tokens_that_fit(tokens: int, batch_size: int, room: int | None):
    """The error of a cache that does not fit; whether the tokens that it names do fit, and more."""
    model = models.use_custom_pypto(tiny_model(), block_size=16)
    # glibc would answer a rejection with another arena, 64 MiB of the limited address space
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    # threads and their memory start outside what is limited
    torch.set_num_threads(1)
    models.PagedCache(model, batch_size, 16, block_size=16)
    if room:
        limit = status("VmSize") + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def rejection(tokens: int) -> str | None:
        try:
            models.PagedCache(model, batch_size, tokens, block_size=16)
        except torch.OutOfMemoryError as error:
            return str(error)
        return None

    said = rejection(tokens)
    fit = int(re.search(r"; (\d+) tokens per sequence would fit", said)[1])
    return said, fit, rejection(fit), rejection(fit + fit // 4)


BYTES_OF_A_TOKEN = 3 * (64 + 16 + 32) * 4


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_cache_that_the_process_may_not_have_says_how_many_tokens_fit(batch_size):
    room = 2048 * MIB  # nothing is written there
    tokens = room // BYTES_OF_A_TOKEN
    said, fit, at_that, at_more = in_a_process(tokens_that_fit, 2 * tokens, batch_size, room)
    assert f"batch_size={batch_size}, max_cache_len={2 * tokens} needs" in said
    assert f"needs {2 * batch_size * room / 2**30:.1f} GiB on cpu" in said
    assert "pass a smaller max_cache_len" in said
    assert at_that is None, "what would fit does not"
    assert at_more is not None, "more than what would fit does"
    assert 0.8 * tokens < fit * batch_size < tokens


def test_a_cache_of_absurd_size_says_how_many_tokens_fit():
    said, fit, at_that, _ = in_a_process(tokens_that_fit, 10**13, 1, None)
    assert "max_cache_len=10000000000000 needs" in said and at_that is None
    total = psutil.virtual_memory().total
    assert 0 < fit * BYTES_OF_A_TOKEN <= total  # no more than the machine has, whatever it promises
