"""Calls of the ops that the NPU programs take, and what their results must be."""

import torch
from numerics import assert_close_to_rows, assert_same_selection, reference

import custom_pypto

from . import copied
from .npu_lightning_indexer_pto import inputs as indexer_inputs
from .npu_sparse_attention_pto import CACHES, fused_inputs
from .npu_sparse_flash_attention_pto import inputs as attention_inputs

HALF = [torch.bfloat16, torch.float16]
# probabilities are rounded before they meet the values, the result once more
ATTENTION_TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
HALF_ARGUMENTS = ("query", "key", "value", "query_rope", "key_rope")


def index_case(lengths_query, lengths_key, **arguments):
    defaults = dict(heads=64, dim=128, block_size=128, dtype=torch.bfloat16)
    return indexer_inputs(lengths_query, lengths_key, **defaults | arguments)


def check_selection(x: dict, like: dict | None = None) -> None:
    """The program selects from ``x`` what the reference selects from it, or from ``like``."""
    assert_same_selection(custom_pypto.npu_lightning_indexer_pto(**x), like or x)


def block_ids_clamped(x: dict) -> dict:
    """What the programs make of a block id inside a length but outside the cache."""
    return x | dict(block_table=x["block_table"].clamp(0, x["key"].size(0) - 1))


def attention_case(lengths_query, lengths_key, **arguments):
    defaults = dict(heads=16, latent=512, rope=64, block_size=128, dtype=torch.bfloat16)
    return attention_inputs(lengths_query, lengths_key, **defaults | arguments)


def check_attention(x: dict, like: dict | None = None) -> None:
    """The program makes of ``x`` what the reference makes of it, or of ``like``."""
    got = custom_pypto.npu_sparse_flash_attention_pto(**x)
    x = like or x
    expected = reference.npu_sparse_flash_attention_pto(**x)
    assert_close_to_rows(got, expected, ATTENTION_TOLERANCE[got.dtype])
    exact = {n: t.float() if t is not None and n in HALF_ARGUMENTS else t for n, t in x.items()}
    exact = reference.npu_sparse_flash_attention_pto(**exact)
    ours, theirs = ((t.float() - exact).square().mean().sqrt() for t in (got, expected))
    # the reference rounds its result only, the program its probabilities too
    assert ours <= 2 * theirs + 1e-7, f"root mean square error {ours:.2g}, reference {theirs:.2g}"


def fused_case(lengths, S1, **arguments):
    sizes = dict(hidden=128, q_rank=64, heads=4, nope=32, latent=512, rope=64)
    index = dict(index_heads=64, index_dim=128, block_size=128, dtype=torch.bfloat16)
    return fused_inputs(lengths, S1, **sizes | index | arguments)


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
