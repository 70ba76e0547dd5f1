"""The NPU kernels of layer ops, beside the checks of ``verify`` (test_programs.py)."""

import pytest
import torch
from cases import INT_MAX, INT_MIN, copied
from cases.npu_checks import check_by_its_rule
from cases.npu_programs import HALF
from model_harness import no_grad_and_one_thread  # noqa: F401
from tiny import tiny_model, token_ids
from with_pypto import simulation

from custom_pypto import layer_ops, models, npu
from custom_pypto.descriptions import LAYER_KERNELS
from custom_pypto.reference import MODULES

pytestmark = pytest.mark.sim
CONNECTION, GROUPS = MODULES["hyper_connection"].arguments, MODULES["pool_groups"].arguments
STREAMS = CONNECTION(torch.bfloat16, 1, 2, 32, 2)
# three sequences of 6 new tokens, of which the last one begins with none
POOLED = GROUPS(torch.bfloat16, 3, 6, 4, 32, True) | dict(start=torch.tensor([9, 4, 0]).int())
POOLED |= dict(lengths=POOLED["start"] + 6)


def no_launch(kernel, tensors) -> None:
    raise AssertionError("launched")


UNSUPPORTED = {
    "hyper_connection: streams.dtype must be bfloat16 or float16 on an NPU, got float32; convert "
    "it, or run on the CPU": CONNECTION(torch.float32, 1, 2, 32, 2),
    "hyper_connection: streams.size(2) must be 4 on an NPU, got 2; run on the CPU": CONNECTION(
        torch.bfloat16, 1, 2, 32, 2, count=2
    ),
    "hyper_connection: streams.size(3) must be a positive multiple of 16 on an NPU, got 24; run on "
    "the CPU": CONNECTION(torch.bfloat16, 1, 2, 24, 2),
    "hyper_connection: iterations must be from 1 to 64 on an NPU, got 0; run on the CPU": (
        STREAMS | dict(iterations=0)
    ),
    "hyper_connection: iterations must be from 1 to 64 on an NPU, got 65; run on the CPU": (
        STREAMS | dict(iterations=65)
    ),
    "pool_groups: state.dtype must be bfloat16 or float16 on an NPU, got float32; convert it, or "
    "run on the CPU": GROUPS(torch.float32, 3, 6, 4, 32, True),
    "pool_groups: bias.size(0) must be at most 128 on an NPU, got 129; run on the CPU": GROUPS(
        torch.bfloat16, 1, 1, 129, 16, False
    ),
    "pool_groups: width must be a multiple of 16 on an NPU, got 8; run on the CPU": GROUPS(
        torch.bfloat16, 1, 1, 4, 8, False
    ),
    "pool_groups: state.size(1) must be at least 4 (rows of bias) on an NPU, got 3; run on the "
    "CPU": POOLED | dict(state=POOLED["state"][:, :3].contiguous()),
    "pool_groups: state must be contiguous on an NPU, got strides (2944, 128, 128, 1); allocate it "
    "as a separate tensor, not as a view into wider rows": POOLED
    | dict(state=POOLED["state"][:, :12]),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_what_the_programs_do_not_support_is_rejected_with_the_remedy(message):
    op = message.partition(":")[0]
    with pytest.raises(RuntimeError) as rejected:
        npu.implementations(no_launch)[op](**UNSUPPORTED[message])
    assert str(rejected.value) == message
    assert not npu.runs(op, *UNSUPPORTED[message].values())


VALUES = [INT_MIN, *(pytest.param(n, marks=pytest.mark.slow) for n in (-1, 5, 10**6)), INT_MAX]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", ["blocks", "start", "lengths"])
def test_no_block_and_no_length_leads_outside(name, value, both_ways):
    x = copied(POOLED)
    x[name][0] = value
    check_by_its_rule("pool_groups", x)
    x[name][:] = value
    check_by_its_rule("pool_groups", x)


def test_tokens_of_a_state_without_blocks_do_not_count(both_ways):
    check_by_its_rule("pool_groups", POOLED | dict(state=POOLED["state"][:0]))


@pytest.mark.parametrize("name", ["state", "values"])
def test_tokens_of_other_groups_do_not_count(name, both_ways):
    """Rows that no complete group has are NaN."""
    x = copied(POOLED)
    expected = layer_ops.pool_groups(**x)
    if name == "values":  # the last token of 9 + 6, and two of 4 + 6
        x["values"][0, -3:] = torch.nan
        x["values"][1, -2:] = torch.nan
        x["values"][2, -2:] = torch.nan
    else:  # 9 tokens before begin with 4 of the group before the first new one
        own = x["state"][x["blocks"].long()]
        own[0, 9:] = own[1, 4:] = own[2] = torch.nan
        unused = torch.full_like(x["state"], torch.nan)
        unused[x["blocks"].long()] = own
        x["state"] = unused
    got = check_by_its_rule("pool_groups", x)
    assert got[1].equal(expected[1]) and got[0].isfinite().all()


def test_a_gate_of_nan_shows(interpreted):
    x = copied(POOLED)
    x["values"][1, 0, 64:] = torch.nan
    assert layer_ops.pool_groups(**x)[0][1, 0].isnan().any()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_no_token_or_no_sequence_launches_nothing(dtype):
    for op, x in (
        ("hyper_connection", CONNECTION(dtype, 1, 0, 32, 2)),
        ("pool_groups", GROUPS(dtype, 2, 6, 4, 32, True) | dict(values=torch.ones(2, 0, 128))),
    ):
        if op == "pool_groups":
            x["values"] = x["values"].to(dtype)
        results = npu.implementations(no_launch)[op](**x)
        assert all(y.numel() == 0 for y in results)


def test_the_binary_of_a_class_serves_every_number_of_tokens():
    found = []
    calls = [("hyper_connection", CONNECTION(torch.bfloat16, 1, n, 32, 2)) for n in (7, 20, 32)]
    calls += [("pool_groups", GROUPS(torch.bfloat16, n, n + 1, 4, 32, True)) for n in (1, 2, 3)]
    for op, x in calls:
        npu.implementations(lambda kernel, tensors: found.append(kernel))[op](**x)
    assert len(set(map(id, found))) == len(LAYER_KERNELS)


@pytest.mark.parametrize("tokens", [7, pytest.param(23, marks=pytest.mark.slow)])
def test_layers_of_deepseek_v4_run_the_programs(tokens):
    """Where their limits allow; equal to the CPU's within rounding."""
    model = tiny_model("deepseek_v4", hc_mult=4, index_head_dim=128).bfloat16()
    model = models.use_custom_pypto(model)
    ids = token_ids(1, tokens + 1)

    def logits():
        cache = models.PagedCache(model, 1, 64)
        first = model(ids[:, :tokens], cache=cache).logits
        return torch.cat([first, model(ids[:, tokens:], cache=cache).logits], 1)

    expected, names = logits(), []
    with simulation.on_cpu(), pytest.MonkeyPatch.context() as patch:
        for op in LAYER_KERNELS:
            call = getattr(layer_ops, op)
            patch.setattr(
                layer_ops, op, lambda *a, op=op, call=call: (names.append(op), call(*a))[1]
            )
        got = logits()
    assert set(names) == {*LAYER_KERNELS}
    torch.testing.assert_close(got, expected, rtol=0, atol=2**-4 * expected.abs().max())
