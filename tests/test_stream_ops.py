"""The ops of DeepSeek-V4's streams, router and cached rows equal what torch computes without
them."""

import itertools
from typing import NamedTuple

import pytest
import torch
from cases import DTYPES, INT_MAX, INT_MIN
from layer_numerics import assert_equals_reference, assert_within, of_mix
from model_harness import no_grad_and_one_thread  # noqa: F401
from tiny import tiny_model
from torch import Tensor

from custom_pypto import layer_ops, models
from custom_pypto.models import compression
from custom_pypto.models.one_op import RootRouter

ops = torch.ops.custom_pypto
FLOAT32 = torch.finfo(torch.float32).eps


class NewTokens(NamedTuple):
    start: Tensor
    lengths: Tensor


def group_arguments(dtype, rate, overlap, tokens, seed=0, width=24):
    """Of four sequences of which the first has padding only, in a pool of six blocks."""
    g = torch.Generator().manual_seed(seed)
    wide = (2 if overlap else 1) * width
    ring = (2 if overlap else 1) * rate + 3
    # NaN: rows behind the cached tokens may hold anything
    pool = torch.full((6, ring, 1, 2 * wide), torch.nan)
    blocks = torch.tensor([3, 1, 5, 2], dtype=torch.int32)
    real = torch.randint(0, tokens + 1, (4,), generator=g)
    real[0] = 0
    start = torch.randint(0, 5 * rate, (4,), generator=g)
    for block, cached in zip(blocks, start.tolist(), strict=True):
        rows = torch.arange(max(0, cached - ring), cached) % ring
        pool[block, rows] = torch.randn(len(rows), 1, 2 * wide, generator=g)
    values = torch.randn(4, tokens, 2 * wide, generator=g)
    for row, count in zip(values, real.tolist(), strict=True):
        row[: tokens - count] = torch.nan  # padding
    bias = torch.randn(rate, wide, generator=g)
    bounds = NewTokens(start.int(), (start + real).int())
    return pool.to(dtype), blocks, values.to(dtype), bias, width, bounds


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapping"])
@pytest.mark.parametrize("tokens", [1, 3, 4, 9, 40])
def test_pooled_groups_equal_those_of_torch(dtype, overlap, tokens):
    found = 0
    for rate, seed in itertools.product((4, 16), range(4)):
        arguments = group_arguments(dtype, rate, overlap, tokens, seed)
        *tensors, bounds = arguments
        names = "state", "blocks", "values", "bias", "width"
        given = dict(zip(names, tensors, strict=True), start=bounds.start, lengths=bounds.lengths)
        assert_equals_reference("pool_groups", layer_ops.pool_groups(**given), given)
        sums, groups, complete = compression.completed(*arguments, training=False)
        want = compression.completed(*arguments, training=True)
        assert groups.equal(want[1]) and complete.equal(want[2]) and sums.isfinite().all()
        found += complete.sum()
        pool, *others = arguments
        values = others[1].abs().nan_to_num().amax(), pool.abs().nan_to_num().amax()
        # n weights, each an exponential within two steps of a difference within one, and a sum
        # and a quotient, on either side; the row is their mean of values
        count = rate * (2 if overlap else 1)
        bound = 2 * (2 * count + 6) * FLOAT32 * max(values).float()
        assert ((sums - want[0])[complete].abs() <= bound).all()
    assert found > 0 or tokens < 4


def test_no_number_in_a_tensor_makes_pooled_groups_read_elsewhere():
    pool, blocks, values, bias, width, bounds = group_arguments(torch.float32, 4, True, 6)
    for block, start, length in itertools.product((INT_MIN, -1, 6, INT_MAX), repeat=3):
        made = [torch.full((4,), x, dtype=torch.int32) for x in (block, start, length)]
        sums, complete = ops.pool_groups(pool, made[0], values, bias, *made[1:], width)
        assert sums[~complete].eq(0).all()
        sums, complete = ops.pool_groups(pool, made[0], values, bias, *bounds, width)
        assert sums[~complete].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_streams_equal_those_of_transformers(dtype):
    model = models.use_custom_pypto(tiny_model("deepseek_v4")).to(dtype)
    layer = model.model.layers[0]
    assert type(layer).__name__ in model._no_split_modules
    streams, x = torch.randn(2, 3, 4, 40).to(dtype), torch.randn(2, 3, 40).to(dtype)
    post, comb = torch.rand(2, 3, 4), torch.rand(2, 3, 4, 4)
    got = layer_ops.mix_streams(streams, x, post, comb)
    arguments = dict(streams=streams, x=x, post=post, comb=comb)
    assert_equals_reference("mix_streams", got, arguments)
    added = post.to(dtype).unsqueeze(-1) * x.unsqueeze(-2)
    want = added + torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
    assert_within(got, want, of_mix(want, **arguments)[0])


def by_transformers(router, x):
    return type(router).__bases__[-1].forward(router, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_routes_by_roots_equal_those_of_transformers(dtype):
    model = models.use_custom_pypto(tiny_model("deepseek_v4")).to(dtype)
    routers = [m for m in model.modules() if isinstance(m, RootRouter)]
    for router in routers:
        torch.nn.init.normal_(router.weight)
        router.e_score_correction_bias = torch.randn(router.num_experts)
        x = torch.randn(3, 1, router.hidden_dim).to(dtype) * 8  # softplus above its threshold, too
        logits, weights, experts = router(x)
        want_logits, want_weights, want_experts = by_transformers(router, x)
        # sums of products, which round to a neighbour
        sizes = x.flatten(0, 1).float().abs() @ router.weight.float().abs().T
        step = torch.finfo(dtype).eps
        assert ((logits - want_logits).abs() <= (step + 64 * FLOAT32) * sizes).all()
        order, want_order = experts.sort(-1), want_experts.sort(-1)
        assert order.values.equal(want_order.values)
        got, want = weights.gather(1, order.indices), want_weights.gather(1, want_order.indices)
        assert got.isnan().equal(want.isnan())  # of float16 whose roots are all 0
        got, want = got.nan_to_num(), want.nan_to_num()
        # a logit a step of its sum of sizes off moves a root by half of it at most; then roundings
        moved = (step + 64 * FLOAT32) * sizes.max() * router.routed_scaling_factor
        assert ((got - want).abs() <= moved + 8 * step * want).all() and got.dtype == dtype
    assert routers


def test_slots_are_those_of_blocks_and_rows():
    table = torch.tensor([[4, 2, 7], [1, 3, 5]], dtype=torch.int32)
    rows = torch.tensor([[0, 9, 11, 12], [3, 4, -1, 2**40]])
    valid = torch.tensor([[True, True, False, True], [True, True, True, True]])
    slots = ops.cache_slots(table, rows, valid, 4)
    # row 12 is behind the last block
    assert slots.tolist() == [4 * 4, 7 * 4 + 1, 0, 0, 1 * 4 + 3, 3 * 4, 0, 0]


@pytest.mark.parametrize("selects", [False, True], ids=["every-row", "selected"])
def test_rows_of_a_window_equal_those_of_torch(selects):
    window, ring, rate, count = 5, 9, 4, 7
    positions = torch.tensor([[-1, 0, 3], [20, 21, 22]])
    valid = torch.tensor([[False, True, True], [True, True, True]])
    g = torch.Generator().manual_seed(0)
    # any number
    indices = torch.randint(-3, 9, (2, 3, count), generator=g, dtype=torch.int32)
    indices[0, 0, :2] = torch.tensor([INT_MIN, INT_MAX])
    given = dict(
        positions=positions,
        valid=valid,
        indices=indices if selects else None,
        window=window,
        ring=ring,
        rate=rate,
        count=count,
    )
    assert_equals_reference("window_rows", layer_ops.window_rows(**given), given)


def test_the_ops_pass_opcheck():
    table, rows = torch.ones(2, 3, dtype=torch.int32), torch.arange(8).view(2, 4)
    torch.library.opcheck(ops.cache_slots.default, (table, rows, rows > 2, 4))
    torch.library.opcheck(ops.window_rows.default, (rows, rows > 2, None, 3, 5, 4, 6))
    torch.library.opcheck(ops.route_roots.default, (torch.randn(3, 8), torch.randn(8), 2, 1.5))
    pool, blocks, values, bias, width, bounds = group_arguments(torch.float32, 4, True, 6)
    pool, values = pool.nan_to_num(), values.nan_to_num()
    torch.library.opcheck(ops.pool_groups.default, (pool, blocks, values, bias, *bounds, width))
    streams, x = torch.randn(2, 3, 4, 40), torch.randn(2, 3, 40)
    weights = torch.rand(2, 3, 4), torch.rand(2, 3, 4, 4)
    torch.library.opcheck(ops.mix_streams.default, (streams, x, *weights))


def test_rejections_name_op_and_argument():
    pool, blocks, values, bias, width, bounds = group_arguments(torch.float32, 4, True, 6)
    with pytest.raises(RuntimeError, match=r"pool_groups: values.size\(2\) must be 96 \(W of sta"):
        ops.pool_groups(pool, blocks, values[..., 1:], bias, *bounds, width)
    with pytest.raises(RuntimeError, match=r"pool_groups: start.dtype must be int32, got int64"):
        ops.pool_groups(pool, blocks, values, bias, bounds.start.long(), bounds.lengths, width)
    with pytest.raises(RuntimeError, match=r"pool_groups: bias.size\(1\) must be half of W, and"):
        ops.pool_groups(pool, blocks, values, bias, *bounds, width + 1)
    rows, table = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"cache_slots: table.size\(0\) must be 1 \(as rows\)"):
        ops.cache_slots(table, rows, rows == 0, 4)
    with pytest.raises(RuntimeError, match=r"window_rows: indices.size\(2\) must be 2 \(count\)"):
        ops.window_rows(rows, rows == 0, table[None, :1].expand(1, 2, 3), 3, 5, 4, 2)
    with pytest.raises(RuntimeError, match=r"route_roots: k must be from 1 to E, got 9"):
        ops.route_roots(torch.zeros(1, 8), torch.zeros(8), 9, 1.0)
    streams, x, weights = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 8), torch.ones(1, 1, 4)
    with pytest.raises(RuntimeError, match=r"mix_streams: comb.size\(3\) must be 4 \(N of streams"):
        ops.mix_streams(streams, x, weights, torch.ones(1, 1, 4, 3))
