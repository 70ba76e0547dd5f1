"""Judges a case: the op must reject it with its own message and write nothing, or its result, its
caches and the memory around them must match the reference."""

from unittest.mock import patch

import torch
from cases import on_meta, written
from layer_numerics import assert_equals_reference
from numerics import ROW_TOLERANCE, assert_close_to_rows, assert_same_selection, reference
from torch import Tensor

import custom_pypto
from custom_pypto import layer_ops
from custom_pypto.descriptions import LAYER_OPS, TRAINING, WEIGHTS
from custom_pypto.reference import MODULES
from custom_pypto.reference.npu_kv_quant_sparse_flash_attention_pto import dequantized_latents
from custom_pypto.schemas import overload

from .generate import Case

PARTS = ("npu_lightning_indexer_pto", "npu_sparse_flash_attention_pto")  # of the fused op
# smaller results may be 0: the dot products of AVX512-BF16 flush subnormal numbers to 0
SMALLEST = {torch.bfloat16: 2**-126, torch.float16: 2**-24, torch.float32: 2**-126}
SMALLEST_SCORE = 2**-105  # of a sum of some thousand such numbers, times up to 2^10

SENSITIVE = ("hyper_connection", "collapse_streams", "expanded_attention")


def memory_of(arguments: dict) -> dict[int, Tensor]:
    """The storages of the tensors as bytes, by the address of torch's storage object."""
    storages = (x.untyped_storage() for x in arguments.values() if on_cpu(x))
    empty = torch.empty(0, dtype=torch.uint8)
    return {storage._cdata: empty.new_empty(0).set_(storage) for storage in storages}


def copied(arguments: dict) -> dict:
    """Copies of the arguments that share memory as the originals do."""
    memory = {place: x.clone().untyped_storage() for place, x in memory_of(arguments).items()}
    copies = {}
    for name, x in arguments.items():
        if on_cpu(x):
            own = memory[x.untyped_storage()._cdata]
            x = torch.empty(0, dtype=x.dtype).set_(own, x.storage_offset(), x.size(), x.stride())
        copies[name] = x
    return copies


def on_cpu(x) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and x.device.type == "cpu"


def names_op(message: str, op: str) -> bool:
    """Whether the error is the op's own, or torch's for an argument that does not match the schema,
    a tensor whose backend has no kernel of the op, or no tensor at all."""
    own = (f"{op}: ", f"custom_pypto::{op}() ")
    missing = tuple(f"Could not run 'custom_pypto::{op}{end}" for end in ("' ", "."))
    no_tensor = "no tensor arguments" in message and f"schema custom_pypto::{op}." in message
    return message.startswith(own + missing) or no_tensor


def judge(case: Case) -> str:
    """``rejected``, ``equal`` or, if the result has no element, ``empty``.

    Raises AssertionError for anything else.
    """
    op = getattr(layer_ops if case.op in LAYER_OPS else custom_pypto, case.op)
    arguments, expected = copied(case.arguments), case.arguments
    try:
        got = op(**arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        message = str(error)
        assert case.broken or lacks_kernels(case.op), (
            f"rejects a call that keeps its contract: {message}"
        )
        assert names_op(message, case.op), f"the error does not name the op: {message}"
        assert_same_memory(arguments, expected)
        known = message.startswith(case.op) and not lacks_kernels(case.op)
        if known and all(map(on_cpu, tensors(arguments))):
            assert_meta_rejects(op, arguments, message)
        return "rejected"
    if all(x.device.type == "meta" for x in tensors(arguments)):
        return "empty"  # no values to compare
    assert_same_kinds(op(**on_meta(arguments)), got)
    # a writer returns nothing
    writes = next((arguments[name] for name in ("slots", "out") if name in arguments), None)
    if (*outputs(got), writes)[
        0
    ].numel() == 0:  # possibly more sequences than fit in the reference's memory
        assert_same_memory(arguments, expected)
        return "empty"
    if case.op == "npu_sparse_flash_attention_pto":
        assert_same_attention(outputs(got), expected)
    elif case.op in ("npu_lightning_indexer_pto", "npu_quant_lightning_indexer_pto"):
        if not got.equal(getattr(reference, case.op)(**expected)):
            assert case.values not in ("integers", "special"), "selects other keys"
            assert_same_selection(got, expected, SMALLEST_SCORE)
    elif case.op == "npu_kv_quant_sparse_flash_attention_pto":
        assert same_numbers(got, attention_of_dequantized(**expected)), "differs"
    elif case.op in LAYER_OPS:
        expected = copied(case.arguments)
        # a legal change of eps or scale to any number leaves quotients and logits without a bound
        if not (case.broken and case.op in SENSITIVE):
            assert_equals_reference(case.op, got, expected)
        for name in written(case.op):
            if expected[name] is not None:
                assert same_numbers(arguments[name], expected[name]), f"writes another {name}"
                expected[name].copy_(arguments[name])
    elif case.op in TRAINING | WEIGHTS:
        # a legal change of one argument of a loss leaves the statistics of another call
        if case.op in WEIGHTS or not case.broken:
            exact = getattr(reference, case.op)(**expected)
            error, bound = MODULES[case.op].error(got, exact, arguments, expected)
            assert error <= bound, f"{error} from the reference, {bound} allowed"
    else:
        expected = copied(case.arguments)
        assert_same_bits(got, arguments, expected, case)
    assert_same_memory(arguments, expected)
    return "equal"


def lacks_kernels(op: str) -> bool:
    """Whether this CPU rejects every call."""
    return op == "expanded_attention" and not torch.ops.custom_pypto.multiplies_bf16()


def assert_same_attention(got: tuple, expected: dict) -> None:
    expected = dict(expected)
    wanted = bool(expected.pop("return_softmax_lse", False))
    exact = reference.npu_sparse_flash_attention_pto(**expected, return_softmax_lse=True)
    if not close(got[0], exact[0]):
        assert_close_at_a_closer_look(got[0], expected)
    assert len(got) == 1 + 2 * wanted
    # errors of a logit, of an exponential of the difference of two, and of a sum of them
    rounding = 2**-22 * largest_logit(**expected)
    of_sum = 2 * rounding + 2**-20 + 2**-25 * expected["sparse_indices"].size(-1)
    for mine, other, near in zip(got[1:], exact[1:], ((0, rounding), (of_sum, 0)), strict=False):
        torch.testing.assert_close(mine, other, rtol=near[0], atol=near[1], equal_nan=True)


def attention_of_dequantized(
    query: Tensor, key: Tensor, rope_head_dim: int, key_quant_mode, value_quant_mode, value, **same
) -> Tensor:
    """Our unquantized op on the rows of the reference."""
    latent = query.size(-1) - rope_head_dim
    rows, key_rope = dequantized_latents(key, latent, query.dtype)
    ropes = dict(query_rope=query[..., latent:], key_rope=key_rope)
    op = custom_pypto.npu_sparse_flash_attention_pto
    return op(query[..., :latent], rows, None, **ropes, **same)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def definition(op: str):
    """The reference; that of the fused op with our ops for its parts, which are judged apart, on as
    many threads as the op: scores may nearly tie, and torch's products depend on the threads."""
    if op != "npu_sparse_attention_pto":
        return getattr(reference, op)
    parts = {name: getattr(custom_pypto, name) for name in PARTS}
    with_parts = patch.multiple(MODULES[op], rms_norm=torch.ops.custom_pypto.rms_norm, **parts)
    return with_parts(getattr(MODULES[op], op))


def assert_same_bits(got, arguments: dict, expected: dict, case: Case) -> None:
    """Results and caches; those of rotated rows within the op's own bound.

    Writes the caches into ``expected``; the caller compares the memory around them.
    """
    exact = definition(case.op)(**expected)
    caches = written(case.op)
    mine = *outputs(got), *(arguments[name] for name in caches)
    theirs = *outputs(exact), *(expected[name] for name in caches)
    # a NaN carries the sign of one of its operands
    if not all(same_numbers(a, b) for a, b in zip(mine, theirs, strict=True)):
        # sums in another order, on another number of threads
        matrices = (case.arguments.get(name) for name in ("hadamard", "hadamard_q"))
        rotated = any(x is not None for x in matrices) and case.values in ("random", "tiny")
        assert rotated, "differs from the reference"
        error, bound = MODULES[case.op].error(got, exact, arguments, expected)
        assert error <= bound, f"{error} from the reference, {bound} allowed"
    for name in caches:
        take_rows(arguments[name], expected[name])


def take_rows(cache: Tensor, to: Tensor) -> None:
    if bits(cache).equal(bits(to)):
        return
    # row by row, since they may overlap
    for block, other in zip(cache, to, strict=True):
        for row, other_row in zip(block, other, strict=True):
            other_row.copy_(row)


def tensors(arguments: dict) -> list[Tensor]:
    return [x for x in arguments.values() if isinstance(x, Tensor)]


def assert_close_at_a_closer_look(got: Tensor, arguments: dict) -> None:
    """Allows the errors of rounding: in rows whose sums cancel; of large logits, whose rounding
    scales the weights; and of weights below 2^-126, which are flushed to 0."""
    attention = reference.npu_sparse_flash_attention_pto
    query, key, value = (arguments.get(name) for name in ("query", "key", "value"))
    keys = arguments["sparse_indices"].size(-1)
    # Four roundings of 2^-24: two dot products, and their products with the scale. One more per
    # key, halved because sums grow: if one key is selected repeatedly, all round the same way.
    tolerance = ROW_TOLERANCE[query.dtype] + 2**-22 * largest_logit(**arguments) + 2**-25 * keys
    added = (key if value is None else value).abs()
    largest = float(added.double().nan_to_num(0, 0, 0).max()) if added.numel() else 0.0
    magnitude = attention(**arguments | dict(value=added))
    assert_close(got, attention(**arguments), tolerance, magnitude, 2**-126 * keys * largest)


def largest_logit(
    query: Tensor,
    key: Tensor,
    *,
    scale_value: float,
    query_rope=None,
    key_rope=None,
    sinks=None,
    **_,
) -> float:
    """An upper bound of the finite logits, sinks among them."""
    pairs = [(query, key), (query_rope, key_rope)]
    logit = scale_value * sum(largest_dot(q, k) for q, k in pairs if q is not None)
    return logit if sinks is None else max(logit, float(sinks.nan_to_num(0, 0, 0).abs().max()))


def largest_dot(query: Tensor, key: Tensor) -> float:
    """An upper bound of the dot products of finite rows."""
    q, k = (x.double().nan_to_num(0, 0, 0).abs() for x in (query, key))
    return float(q.sum(-1).max() * k.max()) if k.numel() else 0.0


def bits(x: Tensor) -> Tensor:
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.flatten()).view(torch.uint8)


def assert_close(
    got: Tensor,
    expected: Tensor,
    tolerance: float | None = None,
    magnitude: Tensor | None = None,
    smallest: float = 0.0,
) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if not got.equal(expected) and got.numel():
        smallest = max(smallest, SMALLEST[got.dtype])
        assert_close_to_rows(got, expected, tolerance, magnitude=magnitude, smallest=smallest)


def close(got: Tensor, expected: Tensor) -> bool:
    try:
        assert_close(got, expected)
    except AssertionError:
        return False
    return True


def assert_same_memory(got: dict, expected: dict) -> None:
    for a, b in zip(memory_of(got).values(), memory_of(expected).values(), strict=True):
        assert a.equal(b), "a call wrote outside the caches, or was rejected after writing"


def assert_meta_rejects(op, arguments: dict, message: str) -> None:
    # torch reads the numbers of a tensor that is given as a list, and a meta tensor has none
    schema = overload(op.__name__)._schema.arguments
    lists = {one.name for one in schema if "List" in str(one.type)} & arguments.keys()
    try:
        op(**on_meta(arguments) | {name: arguments[name] for name in lists})
    except (RuntimeError, TypeError) as error:
        assert str(error) == message, f"CPU and Meta reject in different words: {message} | {error}"
    else:
        raise AssertionError(f"Meta accepts a call that the CPU rejects: {message}")


def outputs(result: Tensor | tuple | None) -> tuple[Tensor, ...]:
    return () if result is None else result if isinstance(result, tuple) else (result,)


def assert_same_kinds(meta: Tensor | tuple, got: Tensor | tuple) -> None:
    for m, g in zip(outputs(meta), outputs(got), strict=True):
        same = (m.shape, m.stride(), m.dtype) == (g.shape, g.stride(), g.dtype)
        assert same and g.device.type == "cpu", "Meta returns another shape, stride or dtype"
