"""``verify --standard`` calls torch_npu's ops and tells a right one from a wrong one.

Without torch_npu, ops of its names and schemas stand in for its own, on the CPU.
"""

import re

import pytest
import torch

import custom_pypto
from custom_pypto.__main__ import main
from custom_pypto.verify_standard import verify_standard

INDEXER = """npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *,
    Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
    Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND",
    int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807,
    int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)"""
GRADIENT = """npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy,
    Tensor sparse_indices, Tensor weights, Tensor? actual_seq_lengths_query=None,
    Tensor? actual_seq_lengths_key=None, str layout="BSND", int sparse_mode=3,
    int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807) -> (Tensor, Tensor,
    Tensor)"""


def run(standard, capsys, op: str, schema: str, function) -> tuple[bool, str]:
    """The result of the checks of ``op`` with ``function`` as torch_npu's op, and what is said."""
    library = torch.library.Library("npu", "FRAGMENT")
    name = library.define(schema)
    library.impl(name, function, "CPU")
    standard.append(library)
    passed = verify_standard("cpu", op)
    return passed, capsys.readouterr().out


@pytest.fixture
def standard():
    if hasattr(torch.ops.npu, "npu_lightning_indexer"):
        pytest.skip("torch_npu is loaded: its ops cannot be replaced")
    libraries = []
    yield libraries
    for library in libraries:
        library._destroy()


def indexer(*args, **kwargs):
    return custom_pypto.npu_lightning_indexer_pto(*args, **kwargs), args[0].new_empty(0)


def gradient(*args, **kwargs):
    return custom_pypto.npu_lightning_indexer_grad_pto(*args, **kwargs)


def test_a_right_op_passes(standard, capsys):
    passed, said = run(standard, capsys, "npu_lightning_indexer_pto", INDEXER, indexer)
    assert passed
    # keys of several tokens are ours alone
    assert "8 ok, 0 FAILED, 2 rejected" in said
    assert "torch_npu's op has no argument cmp_ratio, here 4" in said


def test_a_gradient_passes_where_the_layouts_of_query_and_key_are_one(standard, capsys):
    passed, said = run(standard, capsys, "npu_lightning_indexer_grad_pto", GRADIENT, gradient)
    assert passed
    assert "2 ok, 0 FAILED, 8 rejected" in said
    assert "torch_npu's op has no argument " in said


def test_a_wrong_op_fails(standard, capsys):
    def halved(*args, **kwargs):
        d_query, d_key, d_weights = gradient(*args, **kwargs)
        return d_query / 2, d_key, d_weights

    passed, said = run(standard, capsys, "npu_lightning_indexer_grad_pto", GRADIENT, halved)
    assert not passed
    assert "0 ok, 2 FAILED, 8 rejected" in said


def test_an_error_of_an_op_is_said(standard, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("K must be 2048\nand more")

    passed, said = run(standard, capsys, "npu_lightning_indexer_pto", INDEXER, broken)
    assert not passed
    assert "0 ok, 0 FAILED, 10 rejected" in said
    assert "        K must be 2048\n" in said and "and more" not in said


def test_an_op_that_torch_npu_lacks_is_named(standard, capsys):
    assert not verify_standard("cpu", "npu_quant_rows_pto")
    assert "missing torch_npu has no npu_quant_rows\n" in capsys.readouterr().out


def test_without_an_npu_the_command_says_what_is_missing(capsys):
    assert main(["verify", "--standard"]) == 1
    assert re.fullmatch(
        r"missing: (an NPU: here|.*torch_npu).*\nremedy:  .+\n", capsys.readouterr().out
    )
    with pytest.raises(SystemExit):
        main(["verify", "--standard", "--device", "cpu"])
    assert "--standard runs on an NPU, got --device cpu" in capsys.readouterr().err


@pytest.mark.ascend_host
def test_the_simulator_takes_every_call_up_to_the_operator(capsys):
    """It has two of CANN's operators, computed by our CPU kernels; torch_npu itself accepts names,
    order and types."""
    assert verify_standard()
    lines = capsys.readouterr().out.splitlines()
    computed = {line.split()[1] for line in lines if line.startswith("ok ")}
    assert computed == {"npu_lightning_indexer", "npu_sparse_flash_attention"}
    rejected = [after for row, after in zip(lines, lines[1:], strict=False) if row[:6] == "reject"]
    assert len(rejected) > 40
    reasons = ("not in libopapi.so", "torch_npu's op has no argument", "only supported with CANN")
    for reason in rejected:
        assert any(known in reason for known in reasons), reason
    for name in ("QuantLightningIndexer", "LightningIndexerGrad", "DenseLightningIndexerGradKL"):
        assert any(f"aclnn{name}" in reason for reason in rejected), name
