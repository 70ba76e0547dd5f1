"""What the results of the NPU kernels must be."""

import shutil
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from numerics import assert_close_to_rows, assert_same_selection, reference

import custom_pypto
from custom_pypto import layer_ops
from custom_pypto.descriptions import KERNELS, LAYER_KERNELS
from custom_pypto.reference import MODULES
from custom_pypto.requirements import installed_version

from . import copied
from .npu_programs import (
    ATTENTION,
    DENSE_LOSS,
    FUSED,
    GRADIENT,
    INDEX_GRADIENT,
    INDEX_LOSS,
    INDEXER,
    INT8_ATTENTION,
    INT8_INDEXER,
    attention_case,
    dense_loss_case,
    fused_case,
    gradient_case,
    index_case,
    index_gradient_case,
    index_loss_case,
    int8_attention_case,
    int8_index_case,
    statistics_case,
)
from .npu_sparse_attention_pto import CACHES

needs_gcc = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++, which compiles the generated code, is not installed"
)
pypto_0_2_0_only = pytest.mark.skipif(
    installed_version("pypto") != "0.2.0", reason="a mistake of PyPTO 0.2.0 only"
)
# probabilities are rounded before they meet the values, the result once more
ATTENTION_TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
HALF_ARGUMENTS = ("query", "key", "value", "query_rope", "key_rope")


def block_ids_clamped(x: dict) -> dict:
    """What the programs make of a block id inside a length but outside the cache."""
    return x | dict(block_table=x["block_table"].clamp(0, x["key"].size(0) - 1))


def check_selected_by(op: str, x: dict, like: dict | None = None) -> None:
    """The program selects from ``x`` what the reference selects from it, or from ``like``."""
    assert_same_selection(getattr(custom_pypto, op)(**x), like or x)


check_selection = partial(check_selected_by, "npu_lightning_indexer_pto")
check_int8_selection = partial(check_selected_by, "npu_quant_lightning_indexer_pto")


def check_attention(x: dict, like: dict | None = None) -> None:
    """The program makes of ``x`` what the reference makes of it, or of ``like``."""
    got = custom_pypto.npu_sparse_flash_attention_pto(**x)
    x = like or x
    expected = reference.npu_sparse_flash_attention_pto(**x)
    if "return_softmax_lse" in x:
        (got, *ours), (expected, *theirs) = got, expected
        for name, mine, other in zip(("max", "sum"), ours, theirs, strict=True):
            # logits of at most some hundred, of float32 products and sums
            torch.testing.assert_close(mine, other, rtol=2**-13, atol=2**-13, msg=name)
    assert_close_to_rows(got, expected, ATTENTION_TOLERANCE[got.dtype])
    exact = {n: t.float() if t is not None and n in HALF_ARGUMENTS else t for n, t in x.items()}
    exact = reference.npu_sparse_flash_attention_pto(**exact | dict(return_softmax_lse=False))
    ours, theirs = ((t.float() - exact).square().mean().sqrt() for t in (got, expected))
    # the reference rounds its result only, the program its probabilities too
    assert ours <= 2 * theirs + 1e-7, f"root mean square error {ours:.2g}, reference {theirs:.2g}"


def check_int8_attention(x: dict, like: dict | None = None) -> None:
    got = custom_pypto.npu_kv_quant_sparse_flash_attention_pto(**x)
    expected = reference.npu_kv_quant_sparse_flash_attention_pto(**like or x)
    assert_close_to_rows(got, expected, ATTENTION_TOLERANCE[got.dtype])


def run(op, x: dict) -> dict:
    """Output and caches of a call on copies."""
    x = copied(x)
    return dict(out=op(**x)) | {name: x[name] for name in CACHES}


def check_fused(x: dict) -> None:
    """Output and caches; K must be no less than the keys, or rounding may change the selection."""
    got = run(custom_pypto.npu_sparse_attention_pto, x)
    expected = run(reference.npu_sparse_attention_pto, x)
    for name in ("out", *CACHES):
        tolerance = 4 * ATTENTION_TOLERANCE[x["x"].dtype]  # four matmuls in a row, each rounded
        assert_close_to_rows(got[name], expected[name], tolerance)
    slots = x["cache_index"].flatten().long()
    for name in CACHES:
        rows = [c.flatten(0, 2) for c in (x[name], got[name])]
        untouched = torch.ones(len(rows[0]), dtype=torch.bool)
        untouched[slots[(slots >= 0) & (slots < len(untouched))]] = False
        before, after = (r[untouched] for r in rows)
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def check_by_its_rule(op: str, x: dict, like: dict | None = None):
    """The results, which with the caches are right by the op's rule for errors; the reference takes
    ``like`` instead."""
    mine, theirs = copied(x), copied(like or x)
    got = getattr(layer_ops if op in LAYER_KERNELS else custom_pypto, op)(**mine)
    expected = getattr(reference, op)(**theirs)
    error, bound = MODULES[op].error(got, expected, mine, theirs)
    assert error <= bound, f"{error} from the reference, {bound} allowed"
    return got


class Program(NamedTuple):
    """Calls of an op that its NPU kernel takes.

    ``fast``: those whose generated code runs by default. ``data``: arguments that change no code.
    """

    case: Callable[..., dict]
    calls: dict[str, dict]
    fast: list[str]
    check: Callable[[dict], object]
    data: list[dict] = [{}]


BOTH = [dict(hostile=False), dict(hostile=True)]
LAYOUTS = [dict(layout="TND"), dict(layout="BSND")]


def by_its_rule(op: str, case: Callable, calls: dict, fast: list[str], data=BOTH) -> dict:
    return {op: Program(case, calls, fast, partial(check_by_its_rule, op), data)}


PROGRAMS = {
    "npu_lightning_indexer_pto": Program(
        index_case,
        INDEXER,
        # one-key, a table of one tile of keys: its valid shape was lost where it was sorted in the
        # same graph
        ["one-key", "two-tokens"],
        check_selection,
    ),
    "npu_sparse_flash_attention_pto": Program(
        attention_case,
        ATTENTION,
        ["two-tiles-of-keys", "4-heads", "latent-48-rope-32", "sinks"],
        check_attention,
        BOTH,
    ),
    "npu_quant_lightning_indexer_pto": Program(
        int8_index_case, INT8_INDEXER, ["packed"], check_int8_selection
    ),
    "npu_kv_quant_sparse_flash_attention_pto": Program(
        int8_attention_case, INT8_ATTENTION, ["packed"], check_int8_attention, BOTH
    ),
    "npu_sparse_attention_pto": Program(fused_case, FUSED, [], check_fused),
}
PROGRAMS |= by_its_rule(
    "npu_sparse_flash_attention_grad_pto",
    gradient_case,
    GRADIENT,
    ["packed-keys"],
)
PROGRAMS |= by_its_rule(
    "npu_lightning_indexer_grad_pto",
    index_gradient_case,
    INDEX_GRADIENT,
    ["5-heads"],
)
PROGRAMS |= by_its_rule(
    "npu_sparse_lightning_indexer_grad_kl_loss_pto",
    index_loss_case,
    INDEX_LOSS,
    ["by-sequence"],
)
for op, case in (
    ("npu_dense_lightning_indexer_grad_kl_loss_pto", dense_loss_case),
    ("npu_dense_lightning_indexer_softmax_lse_pto", statistics_case),
):
    PROGRAMS |= by_its_rule(op, case, DENSE_LOSS, ["ragged-and-empty"], LAYOUTS)
# ops without calls of their own make those of `verify`
VERIFIED = [op for op in KERNELS if op not in PROGRAMS]
