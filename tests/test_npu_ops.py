"""What holds for every op: registration, Meta, compilation, strides, threads, gradients.

A new op is tested here as soon as ``cases`` has its inputs.
"""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from cases import (
    DTYPES,
    FIVE_SHAPES,
    LAYOUT_IDS,
    LAYOUTS,
    changed,
    copied,
    in_a_wider_row,
    inputs_of,
    is_float8,
    of,
    on_meta,
    without_nan,
    written,
)
from cases.npu_programs import HALF
from cases.rejections import tensors
from numerics import assert_close_to_rows, assert_within_its_bound
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

import custom_pypto
from custom_pypto.descriptions import ALL_OPS, TRAINING
from custom_pypto.schemas import overload
from custom_pypto.weight_formats import WEIGHT_FORMATS

INDEXER, QUANT_INDEXER = "npu_lightning_indexer_pto", "npu_quant_lightning_indexer_pto"
ATTENTION = "npu_sparse_flash_attention_pto"
QUANT_ATTENTION = "npu_kv_quant_sparse_flash_attention_pto"
FUSED = "npu_sparse_attention_pto"
PROLOG = "npu_lightning_indexer_prolog_pto"
QUANT_ROWS, QUANT_UPDATE = "npu_quant_rows_pto", "npu_quant_index_update_pto"
LINEAR = "weight_only_linear"
SPARSE_LOSS = "npu_sparse_lightning_indexer_grad_kl_loss_pto"
DENSE_LOSS = "npu_dense_lightning_indexer_grad_kl_loss_pto"
STATISTICS = "npu_dense_lightning_indexer_softmax_lse_pto"


def in_dtypes(dtypes: list, id: str = "", **arguments) -> dict[str, dict]:
    names = {dtype: id + str(dtype).removeprefix("torch.") for dtype in dtypes}
    return {name: dict(dtype=dtype) | arguments for dtype, name in names.items()}


def in_layouts(keys: str, calls: dict[str, dict]) -> dict[str, dict]:
    """Each call, and each pair of ``layout_query`` and the argument ``keys``."""
    named = list(calls.items())
    pairs = list(zip(LAYOUTS, LAYOUT_IDS, strict=True))
    found = {}
    for i in range(max(len(named), len(pairs))):
        (id, arguments), ((query, key), layouts) = named[i % len(named)], pairs[i % len(pairs)]
        found[f"{id}-{layouts}"] = {"layout_query": query, keys: key} | arguments
    return found


# of the attention ops: fill tile registers, where a CPU has them
WIDE, FUSED_WIDE = dict(latent=64, rope=32), dict(latent=64, rope=32, index_dim=64)
# op -> id -> arguments of a call; an op that is not listed has one of default arguments
CALLS = {
    INDEXER: in_layouts(
        "layout_key",
        {
            f"K-{count}": dict(sparse_count=count, dtype=dtype)
            for count, dtype in zip((1, 16, 2048, 3072), [*DTYPES, torch.float32], strict=True)
        },
    ),
    QUANT_INDEXER: in_layouts("layout_key", {"few": {}}),
    ATTENTION: in_layouts(
        "layout_kv",
        {
            "rope": WIDE,
            "no-rope": dict(latent=64, rope=0),
            "value-bf16": dict(**WIDE, own_value=True, dtype=torch.bfloat16),
            "sinks": dict(**WIDE, sinks=True),
            "strided-fp16": dict(**WIDE, strided=True, dtype=torch.float16),
        },
    ),
    QUANT_ATTENTION: in_layouts("layout_kv", in_dtypes(HALF)),
    FUSED: in_dtypes(DTYPES, **FUSED_WIDE, sparse_count=8),
    PROLOG: {"plain": {}, "w8a8": dict(w8a8=True)},
    QUANT_UPDATE: {"plain": {}, "hadamard": dict(hadamard=True)},
    QUANT_ROWS: in_dtypes(DTYPES) | in_dtypes(DTYPES, "hadamard-", hadamard=True),
    LINEAR: {kind: dict(kind=kind) for kind in WEIGHT_FORMATS}
    | in_dtypes(DTYPES, "no-", experts=0),
}
# op -> arguments with which no tensor is absent
EVERY_TENSOR = {
    ATTENTION: dict(**WIDE, own_value=True, sinks=True),
    FUSED: dict(**FUSED_WIDE, sparse_count=8),
    PROLOG: dict(w8a8=True),
    QUANT_UPDATE: dict(hadamard=True),
    QUANT_ROWS: dict(hadamard=True),
}
# op -> id -> sizes that no other size of the call equals: equal sizes would share a symbol
INDEX, ATTEND = dict(heads=11, dim=48, integers=True), dict(heads=11, latent=64, rope=48)
SIZES = {
    INDEXER: in_layouts("layout_key", {"five": dict(**INDEX, sparse_count=27)}),
    QUANT_INDEXER: in_layouts("layout_key", {"five": dict(**INDEX, sparse_count=27)}),
    ATTENTION: in_layouts(
        "layout_kv",
        {
            "five": dict(**ATTEND, sparse_count=27),
            "statistics": dict(**ATTEND, sparse_count=27, sinks=True),
        },
    ),
    QUANT_ATTENTION: in_layouts("layout_kv", {"five": dict(heads=11, rope=48, sparse_count=27)}),
    FUSED: {"five": dict(heads=13, index_heads=11, nope=24, latent=64, rope=32, index_dim=80)},
    QUANT_ROWS: {"hadamard": dict(hadamard=True)},
    LINEAR: {
        f"{kind}-{experts}-experts": dict(kind=kind, experts=experts)
        for kind in WEIGHT_FORMATS
        for experts in (0, 7)
    },
    "npu_sparse_flash_attention_grad_pto": {"five": dict(**ATTEND, sparse_count=27)},
}


def in_both(call: tuple, *names: str) -> dict[str, tuple]:
    """The call with these arguments for sequences one after the other, and padded ones."""
    *lengths, arguments = call
    layouts = ("TND", "BSND")
    return {layout: (*lengths, arguments | dict.fromkeys(names, layout)) for layout in layouts}


# op -> id -> calls that divide their work between threads in different ways
LONG_INDEX = dict(heads=8, dim=64, block_size=128, sparse_count=2048)
LONG_ATTEND = dict(heads=8, latent=64, rope=16, block_size=128)
TRAINED = [70, 5], [300, 40], dict(sparse_count=100, heads=5)
OVER_EVERY_KEY = [150, 5], [1500, 40], dict(heads=5)
THREADS = {
    INDEXER: {
        "one-token": ([1], [9000], LONG_INDEX),
        "ragged": ([1, 2, 1], [3000, 10, 2500], LONG_INDEX),
        "prefill": ([37], [2600], LONG_INDEX),
    },
    ATTENTION: {
        "decode": ([1], [5000], LONG_ATTEND | dict(sparse_count=2048)),
        "ragged": ([1, 3, 1], [3000, 30, 2500], LONG_ATTEND | dict(sparse_count=2048)),
        "dense": ([70], [300], LONG_ATTEND | dict(sparse_count=200)),
        "gather": ([30], [3000], LONG_ATTEND | dict(sparse_count=40)),
    },
    QUANT_ROWS: {"many": ([125], [], dict(dim=128))},
    LINEAR: {
        "few-rows": ([7], [700], dict(experts=0)),
        "one-part": ([40], [70], dict(experts=0)),
        "experts": ([60], [300], {}),
    },
    "npu_sparse_flash_attention_grad_pto": in_both(TRAINED, "layout_query", "layout_kv"),
    "npu_lightning_indexer_grad_pto": in_both(TRAINED, "layout_query", "layout_key"),
    SPARSE_LOSS: in_both(TRAINED, "layout"),
    DENSE_LOSS: in_both(OVER_EVERY_KEY, "layout"),
    STATISTICS: in_both(OVER_EVERY_KEY, "layout"),
}
DEFAULT = {op: {"default": {}} for op in ALL_OPS}
# ops with lengths in lists, whose number a graph has as a constant
LISTS = [
    op for op in ALL_OPS if "SymInt[]" in str(getattr(torch.ops.custom_pypto, op).default._schema)
]
# of the compilations, those that a run without --all takes: one of each mechanism
COMPILED = {
    *(f"{FUSED}-five", f"{QUANT_UPDATE}-default"),  # write, and return something or nothing
    f"{ATTENTION}-statistics-TND-PA_BSND",  # an overload with several outputs
    *(f"{INDEXER}-five-BSND-PA_BSND", f"{LINEAR}-int4-7-experts"),
}


def each(table: dict[str, dict], taken: Callable[[str, int], bool] = lambda id, i: True):
    """A test of each call of the table: op -> id -> arguments; those not taken only with --all."""
    params = [
        pytest.param(op, x, id=id, marks=[] if taken(id, i) else pytest.mark.slow)
        for op, calls in table.items()
        for i, (name, x) in enumerate(calls.items())
        for id in [f"{op}-{name}"]
    ]
    return pytest.mark.parametrize("op, arguments", params)


def overloads(op: str) -> list[tuple]:
    """Each overload, and the flag that it has more than the default one, off and on."""
    default, whole = getattr(torch.ops.custom_pypto, op).default, overload(op)
    if whole is default:
        return [(default, {})]
    flag = whole._schema.arguments[-1].name
    return [(default, {}), (whole, {flag: False}), (whole, {flag: True})]


def outcome(op, x: dict, **more) -> list[Tensor]:
    """What a call returns, and then its tensors, which some ops write."""
    returned = tree_leaves(op(**x, **more))
    return [y for y in returned if y is not None] + [x[name] for name in tensors(x)]


def assert_same(op: str, got: list[Tensor], expected: list[Tensor]) -> None:
    for mine, other in zip(got, expected, strict=True):
        if op == FUSED and mine.is_floating_point():
            assert_close_to_rows(mine, other)  # torch.mm sums strided rows in another order
        else:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@each(DEFAULT | CALLS, lambda id, i: i == 0)
def test_op_is_registered_as_torch_expects(op, arguments):
    x = without_nan(inputs_of(op, (2, 3), (20, 33), **arguments))
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks.append("test_aot_dispatch_dynamic")
    if any(is_float8(x[name]) for name in tensors(x)):
        checks.remove("test_schema")  # multiplies each tensor, which torch cannot in 8 bits
    for called, more in overloads(op):
        torch.library.opcheck(called, (), x | more, test_utils=checks)


@pytest.mark.parametrize("op", [INDEXER, ATTENTION])
def test_the_default_overload_returns_the_first_result_of_the_one_with_a_flag(op):
    (default, _), (whole, without), (_, wanted) = overloads(op)
    x = inputs_of(op, (2, 3), (20, 33))
    first, *others = whole(**x, **without)
    assert not any(y.numel() for y in others)
    for y in (first, whole(**x, **wanted)[0]):
        assert torch.equal(default(**x), y)


@each(DEFAULT | CALLS)
def test_meta_gives_the_shape_and_dtype_of_the_result(op, arguments):
    run = getattr(custom_pypto, op)
    x = inputs_of(op, (2, 3), (20, 33), **arguments)
    strided = changed(x, lambda y: in_a_wider_row(y) if y.dim() > 1 else y)
    for given in (x, strided):
        for _, more in overloads(op):
            results = (tree_leaves(run(**y, **more)) for y in (copied(given), on_meta(given)))
            for real, meta in zip(*results, strict=True):
                if real is None:
                    assert meta is None
                    continue
                expected = real.shape, real.stride(), real.dtype, "meta"
                assert (meta.shape, meta.stride(), meta.dtype, meta.device.type) == expected


@each(DEFAULT | SIZES | dict.fromkeys(LISTS, {}), lambda id, i: id in COMPILED)
def test_five_shapes_compile_at_most_twice_and_equal_eager(op, arguments):
    run, counter = getattr(custom_pypto, op), CompileCounterWithBackend("aot_eager")
    more = dict(return_softmax_lse=True) if "sinks" in arguments else {}
    compiled = torch.compile(run, backend=counter, dynamic=True, fullgraph=True)
    for lengths in FIVE_SHAPES:
        x = inputs_of(op, *lengths, **arguments)
        x = without_nan(x) if op == FUSED else x
        assert_same(op, outcome(compiled, copied(x), **more), outcome(run, copied(x), **more))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(THREADS)
def test_result_does_not_depend_on_the_number_of_threads(op, arguments, dtype):
    lengths_query, lengths_key, sizes = arguments
    x = inputs_of(op, lengths_query, lengths_key, **sizes, dtype=dtype)
    if op == INDEXER:
        x["key"][:, ::3] = 0  # a third of the scores tie
    _, more = overloads(op)[-1]
    results = []
    for threads in (1, 2, 3, 7, 40, 2):
        torch.set_num_threads(threads)
        results.append(outcome(getattr(custom_pypto, op), x, **more))
        assert_same(op, results[-1], results[0])


EVERY_INPUT = {
    op: without_nan(inputs_of(op, (3, 2), (40, 33), **EVERY_TENSOR.get(op, {}))) for op in ALL_OPS
}
NAMES = [(op, name) for op, x in EVERY_INPUT.items() for name in tensors(x)]
WRITTEN = {(op, name) for op in ALL_OPS for name in written(op)}
FLOATS = [
    (op, name)
    for op, name in NAMES
    if EVERY_INPUT[op][name].is_floating_point() and (op, name) not in WRITTEN
]
DIFFERENTIABLE = [
    op
    for op in ALL_OPS
    if hasattr(torch.ops.custom_pypto, f"{op}_backward")
    or op.replace("_pto", "_grad_pto") in TRAINING
]


def contiguous_rows(op: str) -> set[str]:
    """The tensors whose rows must be contiguous, by the rules of the op."""
    messages = [message for *_, message in (row.values for row in of(op).rejected())]
    return {m.partition(".")[0] for m in messages if ".stride(-1) must be 1 " in m}


@pytest.mark.parametrize("op, name", NAMES)
def test_strided_inputs_give_the_same_as_contiguous_ones(op, name):
    run, x = getattr(custom_pypto, op), EVERY_INPUT[op]
    expected = outcome(run, copied(x))
    right = x[name]
    views = [in_a_wider_row(right)] if right.dim() > 1 and len(right) > 1 else []
    if name not in contiguous_rows(op):
        views.append(right.repeat_interleave(2, -1)[..., ::2])
        if right.dim() > 1 < min(right.shape[-2:]):
            views.append(right.mT.contiguous().mT)
    for view in views:
        assert not view.is_contiguous()
        assert_same(op, outcome(run, copied(x) | {name: view}), expected)


@pytest.mark.parametrize("op, name", [(op, n) for op, n in FLOATS if op not in DIFFERENTIABLE])
def test_a_backward_that_is_not_implemented_says_so(op, name):
    for _, more in overloads(op):
        x = copied(EVERY_INPUT[op])
        x[name].requires_grad_()
        for y in tree_leaves(getattr(custom_pypto, op)(**x, **more)):
            if y is None or not y.is_floating_point():
                assert y is None or not y.requires_grad
                continue
            with pytest.raises(RuntimeError, match=f"{op}.*not implemented"):
                y.sum().backward()
            assert x[name].grad is None


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", ALL_OPS)
def test_inputs_that_require_gradients_give_the_same(op, mode):
    run, x = getattr(custom_pypto, op), copied(EVERY_INPUT[op])
    expected = outcome(run, copied(x))
    for name in [n for o, n in FLOATS if o == op]:
        x[name].requires_grad_()
    with mode():
        got = outcome(run, x)
    assert_same(op, got, expected)
    assert not any(x[name].requires_grad for o, name in WRITTEN if o == op)
    if mode is not nullcontext:
        assert not any(y.requires_grad for y in got[: -len(tensors(x))])


@pytest.mark.parametrize("lengths", [([0], [5]), ([2], [0]), ([0, 0], [3, 3])])
@pytest.mark.parametrize("op", [op for op in ALL_OPS if "_grad_" in op])
def test_without_tokens_or_keys_gradients_are_zeros(op, lengths):
    for result in assert_within_its_bound(op, inputs_of(op, *lengths)):
        assert not result.any()
