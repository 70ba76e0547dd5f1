"""Every rule of the ops, broken one at a time: the exact words, the same from CPU and Meta, and
nothing written."""

import re

import numpy
import pytest
import torch
from cases import copied, inputs_of, not_default, of, on_meta, rejection
from cases.rejections import tensors

import custom_pypto
from custom_pypto import npu
from custom_pypto.descriptions import ALL_OPS
from custom_pypto.schemas import bound


def assert_unchanged(got: dict, expected: dict) -> None:
    for name in tensors(expected):
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "op, inputs, message", [row for op in ALL_OPS for row in of(op).rejected()]
)
def test_rejects_in_these_words_and_writes_nothing(op, inputs, message):
    given = copied(inputs)
    assert rejection(getattr(custom_pypto, op), given) == f"{op}: {message}"
    assert_unchanged(given, inputs)


@pytest.mark.parametrize(
    "op, inputs, name",
    [
        pytest.param(op, inputs, name, id=f"{op}-{name}")
        for op in ALL_OPS
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


@pytest.mark.parametrize(
    "op, message",
    [
        ("npu_quant_lightning_indexer_pto", "key.size(0) must be at most 16 million on an NPU"),
        *(
            (op, "block_table must be of fewer than 16 million keys and cache blocks in total")
            for op in ("npu_sparse_flash_attention_pto", "npu_kv_quant_sparse_flash_attention_pto")
        ),
    ],
)
def test_an_npu_rejects_a_cache_of_more_blocks_than_it_counts(op, message):
    x = on_meta(inputs_of(op, on_npu=True, dtype=torch.bfloat16))

    def with_blocks(blocks: int) -> dict:
        caches = {
            n: y
            for n, y in x.items()
            if n in ("key", "key_rope", "key_dequant_scale")
            if y is not None
        }
        larger = {n: y.new_empty(blocks, *y.shape[1:]) for n, y in caches.items()}
        return bound(op, (), x | larger)

    keys = x["block_table"].size(1) * x["key"].size(1)
    most = 2**24 - 2**13 - (0 if "indexer" in op else keys)
    npu.check(op, with_blocks(most))
    with pytest.raises(RuntimeError, match=re.escape(f"{op}: {message}")):
        npu.check(op, with_blocks(most + 1))


WRONG_TYPES = {
    "number-as-str": ("sparse_count", "16", "an int of 64 bits, got str '16'; pass 16"),
    "float": ("sparse_count", 16.0, "an int of 64 bits, got float 16.0"),
    "too-large": ("sparse_count", 2**63, f"an int of 64 bits, got int {2**63}"),
    "list": (
        "actual_seq_lengths_key",
        [40, 33],
        "a tensor or None, got list [40, 33]; pass torch.tensor([40, 33], dtype=torch.int32)",
    ),
    "numpy": (
        "actual_seq_lengths_key",
        numpy.array([40, 33]),
        "a tensor or None, got a ndarray of int64; "
        "pass torch.as_tensor(actual_seq_lengths_key, dtype=torch.int32)",
    ),
    "numpy-floats": (
        "weights",
        numpy.ones((2, 3, 4), numpy.float32),
        "a tensor, got a ndarray of float32; pass torch.as_tensor(weights)",
    ),
    "str-for-tensor": ("weights", "ones", "a tensor, got str 'ones'"),
    "int-for-str": ("layout_key", 3, "a str, got int 3"),
    "tensor-for-str": ("layout_key", torch.ones(2), "a str, got a tensor"),
    "str-for-bool": ("return_value", "yes", "a bool, got str 'yes'"),
}


@pytest.mark.parametrize("argument, value, message", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_a_value_of_another_type_is_named_with_the_remedy(argument, value, message):
    op = "npu_lightning_indexer_pto"
    given = inputs_of(op, (3, 2), (40, 33)) | {argument: value}
    with pytest.raises(TypeError) as rejected:
        custom_pypto.npu_lightning_indexer_pto(**given)
    assert str(rejected.value) == f"{op}: {argument} must be {message}"


def test_a_positional_argument_of_another_type_is_named():
    with pytest.raises(TypeError, match="^add_custom: y must be a tensor, got float 1.0$"):
        custom_pypto.add_custom(torch.ones(1), 1.0)
