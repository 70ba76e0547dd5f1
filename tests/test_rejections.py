"""Every rule of the ops, broken one at a time: the exact words, the same from CPU and Meta, and
nothing written."""

import pytest
import torch
from cases import copied, not_default, of, rejection
from cases.rejections import tensors

import custom_pypto
from custom_pypto.descriptions import OPS


def assert_unchanged(got: dict, expected: dict) -> None:
    for name in tensors(expected):
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op, inputs, message", [row for op in OPS for row in of(op).rejected()])
def test_rejects_in_these_words_and_writes_nothing(op, inputs, message):
    given = copied(inputs)
    assert rejection(getattr(custom_pypto, op), given) == f"{op}: {message}"
    assert_unchanged(given, inputs)


@pytest.mark.parametrize(
    "op, inputs, name",
    [
        pytest.param(op, inputs, name, id=f"{op}-{name}")
        for op in OPS
        for inputs in [not_default(op)]
        for name in tensors(inputs)[1:]
    ],
)
def test_rejects_tensors_on_two_devices(op, inputs, name):
    given = copied(inputs)
    with pytest.raises(RuntimeError) as rejected:
        getattr(custom_pypto, op)(**given | {name: given[name].to("meta")})
    assert str(rejected.value) == (
        f"{op}: {name}.device must be cpu (device of the first argument), got meta"
    )
    assert_unchanged(given, inputs)
