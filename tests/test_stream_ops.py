"""The ops of DeepSeek-V4's streams and compressed rows equal what torch computes without them."""

import itertools
from typing import NamedTuple

import pytest
import torch
from cases import DTYPES, INT_MAX, INT_MIN
from model_harness import no_grad_and_one_thread  # noqa: F401
from tiny import tiny_model
from torch import Tensor

from custom_pypto import models
from custom_pypto.models import compression

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


def completed_with_gradients(*arguments):
    with torch.enable_grad():  # which the op has not
        return compression.completed(*arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapping"])
@pytest.mark.parametrize("tokens", [1, 3, 4, 9, 40])
def test_pooled_groups_equal_those_of_torch(dtype, overlap, tokens):
    found = 0
    for rate, seed in itertools.product((4, 16), range(4)):
        arguments = group_arguments(dtype, rate, overlap, tokens, seed)
        sums, groups, complete = compression.completed(*arguments)
        want = completed_with_gradients(*arguments)
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
    got = ops.mix_streams(streams, x, post, comb)
    added = post.to(dtype).unsqueeze(-1) * x.unsqueeze(-2)
    want = added + torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
    # sums of four products in another order, which may round to a neighbour, and then their sum
    step = torch.finfo(dtype).eps
    sizes = added.abs() + torch.matmul(comb.transpose(-1, -2), streams.abs().float())
    assert ((got - want).abs() <= (2 * step + 4 * FLOAT32) * sizes).all() and got.dtype == dtype


def test_the_ops_pass_opcheck():
    pool, blocks, values, bias, width, bounds = group_arguments(torch.float32, 4, True, 6)
    pool, values = pool.nan_to_num(), values.nan_to_num()
    torch.library.opcheck(
        ops.pool_groups.default, (pool, blocks, values, bias, *bounds, width)
    )
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
    streams, x, weights = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 8), torch.ones(1, 1, 4)
    with pytest.raises(RuntimeError, match=r"mix_streams: comb.size\(3\) must be 4 \(N of streams"):
        ops.mix_streams(streams, x, weights, torch.ones(1, 1, 4, 3))
