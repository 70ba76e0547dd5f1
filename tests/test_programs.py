"""The NPU programs of all ops, interpreted and as generated code, against the references."""

import pytest
import torch
from cases.npu_checks import PROGRAMS, VERIFIED, check_by_its_rule, needs_gcc
from cases.npu_programs import HALF
from with_pypto import simulation

import custom_pypto
from custom_pypto.reference import MODULES

pytest_plugins = ["program_fixtures"]
pytestmark = pytest.mark.sim
ROWS = [(op, id) for op, program in PROGRAMS.items() for id in program.calls]


def row(number: int, *values, slow: bool):
    name = "-".join(map(str, (*ROWS[number], *values)))
    return pytest.param(
        *(*ROWS[number], *values), id=name, marks=[pytest.mark.slow] if slow else []
    )


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "op, id, data",
    [
        row(i, data, slow=data != i % len(PROGRAMS[op].data))
        for i, (op, _) in enumerate(ROWS)
        for data in range(len(PROGRAMS[op].data))
    ],
)
def test_results_equal_the_reference(op, id, data, dtype, interpreted):
    program = PROGRAMS[op]
    program.check(program.case(**program.calls[id] | program.data[data], dtype=dtype))


@needs_gcc
@pytest.mark.parametrize(
    "op, id, dtype",
    # the generated code of the other dtype differs in the type alone
    [row(i, HALF[i % 2], slow=id not in PROGRAMS[op].fast) for i, (op, id) in enumerate(ROWS)],
)
def test_generated_code_equals_the_reference(op, id, dtype):
    """To the same bits again, since the task graph orders all additions to a row; only indices that
    name a row twice leave the order of two open."""
    program = PROGRAMS[op]
    for data in program.data:
        hostile = data.get("hostile", False)
        x = program.case(**program.calls[id] | data, dtype=dtype)
        with simulation.on_cpu(generated=True, unordered_adds=hostile):
            program.check(x)
            if "grad" in op and not hostile:
                first, second = (getattr(custom_pypto, op)(**x) for _ in range(2))
                for one, other in zip(first, second, strict=True):
                    assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("op", VERIFIED)
def test_writers_of_int8_write_what_the_reference_writes(op, dtype, interpreted):
    for _, _, x in MODULES[op].checks([dtype]):
        check_by_its_rule(op, x)


@needs_gcc
@pytest.mark.parametrize("op", VERIFIED)
def test_generated_writers_of_int8_write_what_the_reference_writes(op, generated):
    for _, _, x in MODULES[op].checks([torch.bfloat16]):
        check_by_its_rule(op, x)
