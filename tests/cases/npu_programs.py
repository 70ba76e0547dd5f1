"""Calls of the ops that the NPU programs take, and what their results must be."""

import shutil
from collections.abc import Collection

import pytest
import torch
from numerics import assert_close_to_rows, assert_same_selection, reference

import custom_pypto
from custom_pypto.descriptions import OPS
from custom_pypto.reference import MODULES
from custom_pypto.requirements import installed_version

from . import copied
from .npu_kv_quant_sparse_flash_attention_pto import inputs as int8_attention_inputs
from .npu_lightning_indexer_pto import inputs as indexer_inputs
from .npu_quant_lightning_indexer_pto import inputs as int8_indexer_inputs
from .npu_sparse_attention_pto import CACHES, fused_inputs
from .npu_sparse_flash_attention_grad_pto import inputs as gradient_inputs
from .npu_sparse_flash_attention_pto import inputs as attention_inputs

needs_gcc = pytest.mark.skipif(
    shutil.which("g++") is None, reason="g++, which compiles the generated code, is not installed"
)
pypto_0_2_0_only = pytest.mark.skipif(
    installed_version("pypto") != "0.2.0", reason="a mistake of PyPTO 0.2.0 only"
)
HALF = [torch.bfloat16, torch.float16]
# probabilities are rounded before they meet the values, the result once more
ATTENTION_TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
HALF_ARGUMENTS = ("query", "key", "value", "query_rope", "key_rope")


# calls that both test modules make, the interpreter's and the generated code's
INDEXER = {
    "one-key": dict(lengths_query=[1], lengths_key=[1], sparse_count=16),
    "ragged-and-empty": dict(lengths_query=[1, 1, 1], lengths_key=[300, 0, 1000], sparse_count=128),
    "padded-and-shorter-than-the-query": dict(
        lengths_query=[4, 3, 2, 1], lengths_key=[131, 3, 1, 700], sparse_count=16
    ),
    "packed": dict(
        lengths_query=[4, 0, 3], lengths_key=[140, 9, 300], sparse_count=64, layout_query="TND"
    ),
    "packed-keys": dict(
        lengths_query=[4, 0, 3],
        lengths_key=[140, 9, 300],
        sparse_count=64,
        layout_query="TND",
        layout_key="TND",
    ),
    "keys-by-sequence": dict(
        lengths_query=[3, 2], lengths_key=[140, 30], sparse_count=64, layout_key="BSND"
    ),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[140, 30], sparse_count=16, sparse_mode=0),
    "prefill": dict(lengths_query=[40, 9], lengths_key=[200, 9], sparse_count=16),
    # tiles of 4 tokens, padding among them
    "four-per-tile": dict(lengths_query=[9, 6], lengths_key=[2500, 4], sparse_count=64),
    # DeepSeek-V4: lengths around a multiple of the ratio, and below it
    "compressed": dict(
        lengths_query=[1, 4, 2, 3], lengths_key=[399, 800, 4, 2], sparse_count=512, cmp_ratio=4
    ),
    "compressed-every-key": dict(
        lengths_query=[2, 3], lengths_key=[403, 3], sparse_count=16, cmp_ratio=4, sparse_mode=0
    ),
    "compressed-packed": dict(
        lengths_query=[9, 0, 6],
        lengths_key=[2050, 9, 7],
        sparse_count=64,
        cmp_ratio=4,
        layout_query="TND",
    ),
    "compressed-by-128": dict(
        lengths_query=[3, 2], lengths_key=[2560, 128], sparse_count=16, cmp_ratio=128
    ),
}

ATTENTION = {
    "one-key": dict(lengths_query=[1], lengths_key=[1], sparse_count=16),
    "ragged-and-empty": dict(lengths_query=[1, 1, 1], lengths_key=[300, 0, 1000], sparse_count=128),
    "padded-and-shorter-than-the-query": dict(
        lengths_query=[4, 3, 2, 1], lengths_key=[131, 3, 1, 700], sparse_count=16
    ),
    "packed": dict(
        lengths_query=[4, 0, 3], lengths_key=[140, 9, 300], sparse_count=64, layout_query="TND"
    ),
    "packed-keys": dict(
        lengths_query=[4, 0, 3],
        lengths_key=[140, 9, 300],
        sparse_count=64,
        layout_query="TND",
        layout_kv="TND",
    ),
    "keys-by-sequence": dict(
        lengths_query=[3, 2], lengths_key=[140, 30], sparse_count=64, layout_kv="BSND"
    ),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[140, 30], sparse_count=16, sparse_mode=0),
    "prefill": dict(lengths_query=[20, 9], lengths_key=[50, 9], sparse_count=16),
    "statistics": dict(
        lengths_query=[4, 3, 2, 1], lengths_key=[131, 3, 1, 700], sparse_count=16, statistics=True
    ),
    "sinks": dict(lengths_query=[2, 1], lengths_key=[300, 40], sparse_count=64, sinks=(-9, 9)),
    "sinks-and-statistics-packed": dict(
        lengths_query=[4, 0, 3],
        lengths_key=[140, 9, 300],
        sparse_count=64,
        layout_query="TND",
        sinks=(-9, 9),
        statistics=True,
    ),
    # with exp of a logit or of a sink alone they would be infinite, or 0 / 0
    "sinks-beyond-exp": dict(
        lengths_query=[3, 2],
        lengths_key=[300, 1],
        sparse_count=64,
        sinks=(-1e4, 1e4),
        statistics=True,
    ),
    # two groups of heads, of which the second has sinks of its own
    "sinks-of-128-heads": dict(
        lengths_query=[1], lengths_key=[900], sparse_count=640, rope=0, heads=128, sinks=(-9, 9)
    ),
    # DeepSeek-V4: 128 rows of the window and 512 or 1024 compressed ones
    "window-and-512": dict(
        lengths_query=[2, 1],
        lengths_key=[700, 90],
        sparse_count=640,
        sparse_mode=0,
        rope=0,
        heads=64,
        sinks=(-9, 9),
    ),
    # all compressed rows of a million tokens
    "window-and-8192": dict(
        lengths_query=[1],
        lengths_key=[8320],
        sparse_count=8320,
        sparse_mode=0,
        rope=0,
        sinks=(-9, 18),
        statistics=True,
    ),
    "window-and-1024": dict(
        lengths_query=[1, 2],
        lengths_key=[1200, 90],
        sparse_count=1152,
        sparse_mode=0,
        rope=0,
        heads=64,
        sinks=(-9, 9),
    ),
}

GRADIENT = {
    "one-key": dict(lengths_query=[1], lengths_key=[1], sparse_count=16),
    "ragged-and-empty": dict(lengths_query=[1, 1, 1], lengths_key=[300, 0, 1000], sparse_count=128),
    # more tokens than destinations of the sums, some of them without keys
    "padded-and-shorter-than-the-query": dict(
        lengths_query=[6, 3, 2, 1], lengths_key=[131, 3, 1, 700], sparse_count=16
    ),
    "packed-query": dict(
        lengths_query=[4, 0, 3], lengths_key=[140, 9, 300], sparse_count=64, layout_query="TND"
    ),
    "packed": dict(
        lengths_query=[4, 0, 3],
        lengths_key=[140, 9, 300],
        sparse_count=64,
        layout_query="TND",
        layout_kv="TND",
    ),
    "keys-by-sequence": dict(
        lengths_query=[3, 2], lengths_key=[140, 30], sparse_count=64, layout_kv="BSND"
    ),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[140, 30], sparse_count=16, sparse_mode=0),
    "prefill": dict(lengths_query=[20, 9], lengths_key=[50, 9], sparse_count=16),
    "blocks-of-48": dict(lengths_query=[2, 1], lengths_key=[700, 40], block_size=48),
    "no-rope": dict(lengths_query=[2], lengths_key=[300], rope=0, sparse_count=64),
    "values": dict(lengths_query=[5], lengths_key=[300], own_value=True, sparse_count=64),
    # with exp of a logit or of a sink alone they would be infinite, or 0 / 0
    "sinks-beyond-exp": dict(
        lengths_query=[3, 2], lengths_key=[300, 1], sparse_count=64, sinks=(-1e4, 1e4)
    ),
    # heads that fill no tile
    "sinks-of-5-heads": dict(
        lengths_query=[2, 1], lengths_key=[300, 40], sparse_count=64, heads=5, sinks=(-9, 9)
    ),
    # rows of rope longer than a tile of the scores
    "latent-48-rope-32": dict(
        lengths_query=[2, 1], lengths_key=[300, 40], latent=48, rope=32, sparse_count=100
    ),
    "latent-32-rope-48": dict(
        lengths_query=[2, 1], lengths_key=[300, 40], latent=32, rope=48, sparse_count=64
    ),
}


def calls(table: dict, fast: Collection[str] | None = None) -> list:
    """The parameters of a test, those that are not ``fast`` marked as slow."""
    slow = {id for id in table if fast is not None and id not in fast}
    return [
        pytest.param(arguments, id=id, marks=[pytest.mark.slow] if id in slow else [])
        for id, arguments in table.items()
    ]


def index_case(lengths_query, lengths_key, **arguments):
    defaults = dict(heads=64, dim=128, block_size=128, dtype=torch.bfloat16)
    return indexer_inputs(lengths_query, lengths_key, **defaults | arguments)


def check_selection(x: dict, like: dict | None = None) -> None:
    """The program selects from ``x`` what the reference selects from it, or from ``like``."""
    assert_same_selection(custom_pypto.npu_lightning_indexer_pto(**x), like or x)


def block_ids_clamped(x: dict) -> dict:
    """What the programs make of a block id inside a length but outside the cache."""
    return x | dict(block_table=x["block_table"].clamp(0, x["key"].size(0) - 1))


def attention_case(lengths_query, lengths_key, *, sinks=None, statistics=False, **arguments):
    """``sinks``: those of the first and of the last head. Logits are about -9 to 9."""
    defaults = dict(heads=16, latent=512, rope=64, block_size=128, dtype=torch.bfloat16)
    x = attention_inputs(lengths_query, lengths_key, **defaults | arguments)
    if sinks is not None:
        x["sinks"] = torch.linspace(*sinks, x["query"].size(-2))
    return x | (dict(return_softmax_lse=True) if statistics else {})


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


def gradient_case(lengths_query, lengths_key, *, sinks=None, **arguments):
    """``sinks``: as in :func:`attention_case`."""
    defaults = dict(heads=16, latent=512, rope=64, block_size=128, dtype=torch.bfloat16)
    arguments = defaults | arguments
    if sinks is not None:
        arguments["sinks"] = torch.linspace(*sinks, arguments["heads"])
    return gradient_inputs(lengths_query, lengths_key, **arguments)


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


# those of the calls above that the ops on int8 caches take
INT8_INDEXER = {id: x for id, x in INDEXER.items() if not {"cmp_ratio", "layout_key"} & {*x}}
INT8_ATTENTION = {
    id: x
    for id, x in ATTENTION.items()
    if not {"sinks", "statistics", "rope", "layout_kv"} & {*x} and id != "every-key"
}
# ops without calls of their own here make those of `verify`
VERIFIED = [
    op
    for op in OPS
    if op
    not in (
        "add_custom",
        "npu_lightning_indexer_pto",
        "npu_sparse_flash_attention_pto",
        "npu_sparse_flash_attention_grad_pto",
        "npu_lightning_indexer_grad_pto",
        "npu_sparse_lightning_indexer_grad_kl_loss_pto",
        "npu_dense_lightning_indexer_softmax_lse_pto",
        "npu_dense_lightning_indexer_grad_kl_loss_pto",
        "npu_sparse_attention_pto",
        "npu_quant_lightning_indexer_pto",
        "npu_kv_quant_sparse_flash_attention_pto",
    )
]


def int8_index_case(lengths_query, lengths_key, **arguments):
    defaults = dict(heads=64, dim=128, block_size=128)
    return int8_indexer_inputs(lengths_query, lengths_key, **defaults | arguments)


def check_int8_selection(x: dict, like: dict | None = None) -> None:
    assert_same_selection(custom_pypto.npu_quant_lightning_indexer_pto(**x), like or x)


def int8_attention_case(lengths_query, lengths_key, **arguments):
    defaults = dict(heads=16, latent=512, rope=64, block_size=128)
    return int8_attention_inputs(lengths_query, lengths_key, **defaults | arguments)


def check_int8_attention(x: dict, like: dict | None = None) -> None:
    got = custom_pypto.npu_kv_quant_sparse_flash_attention_pto(**x)
    expected = reference.npu_kv_quant_sparse_flash_attention_pto(**like or x)
    assert_close_to_rows(got, expected, ATTENTION_TOLERANCE[got.dtype])


def check_by_its_rule(op: str, x: dict) -> None:
    """Results and caches, by the op's rule for errors."""
    mine, theirs = copied(x), copied(x)
    got = getattr(custom_pypto, op)(**mine)
    expected = getattr(reference, op)(**theirs)
    error, bound = MODULES[op].error(got, expected, mine, theirs)
    assert error <= bound
