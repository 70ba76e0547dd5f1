"""The layer ops have their place in each layer, and no number leads one of them astray."""

import inspect
import re
from random import Random

import pytest
import torch
from cases import INT_MAX, INT_MIN, changed
from cases import layer_ops as cases
from fuzz.generate import DRAWN, generate
from fuzz.judge import lacks_kernels, on_cpu
from processes import at_the_end_of_memory, in_a_process
from repository import REPOSITORY, tracked_files

from custom_pypto import layer_ops, reference
from custom_pypto.descriptions import ALL_OPS, LAYER_OPS
from custom_pypto.schemas import overload

# what the CPU has: no ops of tensors
QUESTIONS = ("cpu_isa", "has_bf16", "multiplies_bf16", "weight_formats")
HUGE = 2**63 - 1


def test_every_op_of_the_library_is_public_or_a_layer_op():
    names = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("custom_pypto::")
    }
    ops = {name.partition(".")[0].removesuffix("_backward") for name in names}
    assert ops - set(QUESTIONS) == {*ALL_OPS, *LAYER_OPS}


def test_each_layer_op_has_its_place_in_each_layer():
    assert [*LAYER_OPS] == sorted(LAYER_OPS) == layer_ops.__all__ == [*cases.CALLS]
    for op in LAYER_OPS:
        assert inspect.isfunction(getattr(reference.layer_ops, op))
    page = (REPOSITORY / "docs/cpu_kernels.md").read_text()
    section = page.partition("## Layer ops\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` ", section, re.MULTILINE)
    assert sorted(rows) == [*LAYER_OPS]


def test_the_fuzzer_draws_every_op():
    assert set(DRAWN) == {*ALL_OPS, *LAYER_OPS} and len(DRAWN) == 32
    assert min(DRAWN.values()) > 0


@pytest.mark.parametrize("op", LAYER_OPS)
def test_functions_and_definitions_have_the_arguments_of_the_op(op):
    function = getattr(layer_ops, op)
    assert function.__doc__
    empty = inspect.Parameter.empty
    want = [
        (a.name, a.default_value if a.has_default_value() else empty)
        for a in overload(op)._schema.arguments
    ]
    for one in (function, getattr(reference.layer_ops, op)):
        parameters = inspect.signature(one).parameters.values()
        assert [(p.name, p.default) for p in parameters] == want


def test_no_other_module_calls_them_by_the_dispatcher():
    calls = re.compile(rf"ops\.custom_pypto\.({'|'.join(LAYER_OPS)})\b")
    folders = ("custom_pypto/", "models/", "integrations/", "examples/")
    files = [name for name in tracked_files() if name.endswith(".py") and name.startswith(folders)]
    assert len(files) > 150
    assert [name for name in files if calls.search((REPOSITORY / name).read_text())] == []


# ---- numbers that led an op out of its tensors, or nowhere -------------------------------------

X, ANGLES = torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 4)
ROWS = torch.zeros(1, 2, dtype=torch.int64)
STREAMS = torch.ones(1, 1, 4, 8), torch.ones(24, 32), torch.zeros(24), torch.ones(3)
REJECTED = {
    # with R they had a negative sum
    "rotate: first must be at least 0, and at most D - R, got 9223372036854775807": lambda: (
        layer_ops.rotate(X, ANGLES, ANGLES, HUGE, True)
    ),
    # a division by zero
    "pool_groups: width must be at least 1, got 0": lambda: layer_ops.pool_groups(
        torch.zeros(2, 3, 1, 0),
        torch.zeros(1).int(),
        torch.zeros(1, 4, 0),
        torch.zeros(4, 0),
        torch.zeros(1).int(),
        torch.ones(1).int(),
        0,
    ),
    # as many blocks as none
    "convert_weight: scales.size(0) must be 1 (blocks of weight, the last one may be shorter), "
    "got 0": lambda: layer_ops.convert_weight(
        torch.zeros(40, 64).to(torch.float8_e4m3fn),
        torch.zeros(0, 2),
        (HUGE, 32),
        torch.zeros(40, 64),
    ),
    # hours
    "hyper_connection: iterations must be from 0 to 1000, got 1099511627776": lambda: (
        layer_ops.hyper_connection(*STREAMS, 2**40, 1e-6, 1e-6)
    ),
    # products beyond 64 bits
    "cache_slots: block must be from 1 to 2^31 - 1, got 9223372036854775807": lambda: (
        layer_ops.cache_slots(torch.ones(1, 2).int(), ROWS, ROWS == 0, HUGE)
    ),
    "window_rows: window, count and ring must be at most 2^31 - 1, got 9223372036854775807": (
        lambda: layer_ops.window_rows(ROWS, ROWS == 0, None, HUGE, 4, 4, 2)
    ),
    # slots of memory that nothing had written
    "cache_slots: valid.device must be cpu (device of the first argument), got meta": lambda: (
        layer_ops.cache_slots(torch.ones(1, 2).int(), ROWS, (ROWS == 0).to("meta"), 4)
    ),
}


@pytest.mark.parametrize("message", REJECTED)
def test_numbers_that_lead_out_of_a_tensor_are_rejected(message):
    with pytest.raises(RuntimeError) as error:
        REJECTED[message]()
    assert message in str(error.value)


def test_positions_of_any_size_see_what_is_before_them():
    positions = torch.tensor([[-(2**63), -1, 2**63 - 1]])
    rows = layer_ops.window_rows(positions, positions != 5, None, 2, 4, 4, 3)
    assert rows.tolist() == [[[-2, -2, -1, -1, -1], [-2, -2, -1, -1, -1], [3, 2, 4, 5, 6]]]


@pytest.mark.parametrize("block", [INT_MIN, -1, 2, INT_MAX])
def test_tokens_of_a_block_outside_of_the_state_do_not_count(block):
    state, values = torch.ones(2, 3, 1, 4), torch.ones(1, 1, 4)
    one = torch.ones(1).int()
    # of the only group all tokens but the new one are in that block
    sums, complete = layer_ops.pool_groups(
        state, block * one, 5 * values, torch.zeros(3, 2), 2 * one, 3 * one, 2
    )
    assert complete.all() and sums.tolist() == [[[5, 5]]]
    # lengths that do not fit leave no token at all
    sums, complete = layer_ops.pool_groups(
        state, block * one, 5 * values, torch.zeros(3, 2), 3 * one, INT_MAX * one, 2
    )
    assert complete.all() and sums.tolist() == [[[0, 0]]]


def test_streams_without_a_number_are_connected_by_what_is_added():
    """As the product of transformers, which has no term."""
    post, comb, collapsed = layer_ops.hyper_connection(
        torch.ones(1, 1, 1, 0), torch.ones(3, 0), torch.zeros(3), torch.ones(3), 1, 0.0, 1e-6
    )
    assert post.tolist() == [[[1]]] and comb.tolist() == [[[[1]]]] and collapsed.shape == (1, 1, 0)


def calls_at_the_end_of_memory() -> int:
    """The number of calls that were computed; any read behind an argument ends the process."""
    computed = 0
    for number in range(1500):
        case = generate(Random(f"9:{number}"))
        if case.op not in LAYER_OPS:
            continue
        arguments = changed(case.arguments, placed)
        try:
            getattr(layer_ops, case.op)(**arguments)
            computed += 1
        except (RuntimeError, TypeError, ValueError):
            assert case.broken or lacks_kernels(case.op)
    return computed


def placed(x: torch.Tensor) -> torch.Tensor:
    return at_the_end_of_memory(x) if on_cpu(x) and x.numel() and x.is_contiguous() else x


def test_nothing_behind_an_argument_is_read():
    assert in_a_process(calls_at_the_end_of_memory) > 300
