"""Calls that an op must reject, each of which breaks one rule: rows of a test's parameters, which
are op, arguments, and the error's text after the name of the op. ``rejected`` in ``<op>.py`` lists
those of an op; the rules of queries, keys, lengths and block tables, which two ops share, are here.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from . import int32


def table(op: str, default: dict) -> Callable:
    """``row(message, inputs, **change)``: the call of ``inputs | change``, named by its message."""

    import pytest  # benchmarks take inputs from here, on machines without it

    def row(message: str, inputs: dict = default, /, **change):
        words = re.sub(r"[^\w.]+", "-", message)[:80]
        return pytest.param(op, inputs | change, message, id=f"{op}-{words}")

    return row


def tensors(inputs: dict) -> list[str]:
    return [name for name, x in inputs.items() if isinstance(x, Tensor)]


def each(inputs: dict, names: Iterable[str], change: Callable[[Tensor], Tensor]) -> dict:
    return {name: change(inputs[name]) for name in names}


def transposed(x: Tensor) -> Tensor:
    """The same shape, but with strided rows."""
    return x.transpose(1, 3).contiguous().transpose(1, 3)


def strided_rows(row: Callable, inputs: dict, names: Iterable[str]) -> list:
    """Tensors whose last dim must be contiguous."""
    rows = []
    for name in names:
        x = transposed(inputs[name])
        message = f"{name}.stride(-1) must be 1 (contiguous last dim), got {x.stride(-1)}; call "
        rows.append(row(f"{message}.contiguous()", **{name: x}))
    return rows


def none(row: Callable, inputs: dict, optional: Iterable[str] = ()) -> list:
    """None for each required tensor."""
    required = [name for name in tensors(inputs) if name not in optional]
    message = "{} must be a tensor, got None"
    return [row(message.format(name), **{name: None}) for name in required]


COUNT = "sparse_count must be 1 to 2048, or 3072 to 8192 in steps of 1024, got "
SCALE = "from 1e-38 to 2e38 (finite and positive in float32), got "
# the last ones: subnormal, 0 and infinite in float32
SCALES = [0.0, -1.0, float("inf"), float("nan"), 1e-40, 1e-300, 1e300, 3e38]
BLOCK_SIZE = "key.size(1) must be a multiple of 16 up to 1024 (block_size), got "
MODE = "sparse_mode must be 0 (every key) or 3 (causal, right-aligned), got "
QUERY_DTYPE = "query.dtype must be bfloat16, float16 or float32, got "
WINDOW = "9223372036854775807 (2**63 - 1: no window)"
WINDOW_REMEDY = "omit it (sparse_mode and the lengths determine the keys that a token sees)"

# appended to the error of a tensor with the rank of another layout
NEEDS_TND = (
    "; [T1, N1, D] needs layout_query 'TND', {} 'PA_BSND' or 'TND', and actual_seq_lengths_query: "
    "int32 inclusive prefix sums of query tokens [B]"
)
NEEDS_BSND = (
    "; [B, S1, N1, D] needs layout_query 'BSND', {} 'PA_BSND' or 'BSND', and "
    "actual_seq_lengths_query None or int32 query tokens of each sequence [B]"
)
KEYS_NEED_TND = (
    "; [T2, 1, D] needs layout_query and {} 'TND', and int32 inclusive prefix sums [B] in "
    "actual_seq_lengths_query and {}"
)
KEYS_NEED_FOUR_DIMS = (
    "; [blocks, block_size, 1, D] needs {0} 'PA_BSND' and block_table; [B, S2, 1, D] needs "
    "layout_query and {0} 'BSND'"
)
ARE_PAGED = "; {0} is 'PA_BSND', pass 'BSND' for keys that are not paged"
LACKS_HEAD_DIM = "; [blocks, block_size, D] lacks the head dim: pass key.unsqueeze(2)"


class Op(NamedTuple):
    """One of the two ops: its keys' layout and lengths by name, and a call in each layout."""

    row: Callable
    layout: str
    lengths: str
    pa: dict
    bsnd: dict
    tnd: dict
    tnd_pa: dict


def in_layouts(op: str, inputs: Callable, layout: str, lengths: str) -> Op:
    def call(layout_query: str, layout_key: str) -> dict:
        return inputs([3, 2], [40, 33], **{"layout_query": layout_query, layout: layout_key})

    pa, bsnd, tnd = call("BSND", "PA_BSND"), call("BSND", "BSND"), call("TND", "TND")
    return Op(table(op, pa), layout, lengths, pa, bsnd, tnd, call("TND", "PA_BSND"))


def shared(op: Op) -> list:
    parts = [layout_names, dtypes, keys, query_shapes, key_shapes, lengths, block_tables, modes]
    return [row for part in parts for row in part(op)]


def shared_by_int8(op: Op) -> list:
    parts = [layout_names, keys, query_shapes, key_shapes, lengths, block_tables, modes]
    return [row for part in parts for row in part(op)]


def layout_names(op: Op) -> list:
    row, layout = op.row, op.layout
    query = "layout_query must be 'BSND' or 'TND', got "
    bsnd = f"{layout} must be 'PA_BSND' or 'BSND' (layout_query), got "
    tnd = f"{layout} must be 'PA_BSND' or 'TND' (layout_query), got "
    return [
        row(f"{query}'BNSD'", layout_query="BNSD"),
        row(f"{query}'PA_BSND'", layout_query="PA_BSND"),
        row(f"{bsnd}'SBND'", **{layout: "SBND"}),
        row(f"{bsnd}'TND'", op.tnd, layout_query="BSND"),
        row(f"{tnd}'BSND'", op.tnd, **{layout: "BSND"}),
    ]


def dtypes(op: Op) -> list:
    row, query, key = op.row, op.pa["query"], op.pa["key"]
    key_dtype = "key.dtype must be float32 (dtype of query), got bfloat16"
    return [
        row(f"{QUERY_DTYPE}int32", query=query.int()),
        row(f"{QUERY_DTYPE}float64", query=query.double()),
        row(key_dtype, key=key.bfloat16()),
    ]


def keys(op: Op) -> list:
    row, key = op.row, op.pa["key"]
    heads = "must be 1 (N2: one key head), got 2"
    stride = "key.stride(-1) must be 1 (contiguous last dim), got 16; call .contiguous()"
    batch = "key.size(0) must be 2 (B of query), got 1"
    return [
        row(f"key.size(2) {heads}", key=key.repeat(1, 1, 2, 1)),
        row(f"key.size(1) {heads}", op.tnd, key=op.tnd["key"].repeat(1, 2, 1)),
        row(stride, key=transposed(key)),
        *(row(f"{BLOCK_SIZE}{n}", key=key.new_zeros(9, n, 1, key.size(-1))) for n in (24, 0, 1040)),
        row(batch, op.bsnd, key=op.bsnd["key"][:1]),
    ]


def query_shapes(op: Op) -> list:
    """Queries in a layout that the call does not name."""
    row, query = op.row, op.pa["query"]
    bsnd = "query must be of shape [B, S1, N1, D] (layout_query 'BSND'), got "
    tnd = "query must be of shape [T1, N1, D] (layout_query 'TND'), got "
    packed = f"{bsnd}[8, 4, 32]" + NEEDS_TND.format(op.layout)
    padded = f"{tnd}[2, 4, 4, 32]" + NEEDS_BSND.format(op.layout)
    return [
        row(packed, query=query.flatten(0, 1)),
        row(packed, op.bsnd, query=query.flatten(0, 1)),
        row(padded, op.tnd_pa, query=query),
        row(padded, op.tnd, query=query),
        row(f"{bsnd}[32, 32]", query=query.flatten(0, 2)),
    ]


def key_shapes(op: Op) -> list:
    """Keys in a layout that the call does not name."""
    row, key, packed = op.row, op.pa["key"], op.tnd["key"]
    needs_tnd = KEYS_NEED_TND.format(op.layout, op.lengths)
    paged = "key must be of shape [blocks, block_size, 1, D] (paged), got [8, 16, 32]"
    paged += LACKS_HEAD_DIM + needs_tnd
    bsnd = "key must be of shape [B, S2, 1, D] (BSND), got [75, 1, 32]" + needs_tnd
    tnd = "key must be of shape [T2, 1, D] (TND), got "
    paged_as_tnd = f"{tnd}[8, 16, 1, 32]" + KEYS_NEED_FOUR_DIMS.format(op.layout)
    return [
        row(paged, key=key[:, :, 0]),
        row(paged, op.tnd_pa, key=key[:, :, 0]),
        row(bsnd, op.bsnd, key=packed),
        row(paged_as_tnd, op.tnd, key=key),
        row(f"{tnd}[75, 32]", op.tnd, key=packed[:, 0]),
    ]


def lengths(op: Op) -> list:
    row, name = op.row, op.lengths
    meaning = "keys of each sequence [B], for a paged cache"
    packed = "inclusive prefix sums of keys [B], for 'TND'"
    batch = f"{name}.size(0) must be 2 (B), got "
    of_query, are_paged = "actual_seq_lengths_query", ARE_PAGED.format(op.layout)
    packed_query = "inclusive prefix sums of query tokens [B], for 'TND'"
    no_query = f"{of_query} must be an int32 tensor: {packed_query}, got None"

    def given(message: str, values, inputs: dict = op.pa):
        return row(message, inputs, **{name: values})

    def given_query(message: str, values):
        return row(f"{of_query}{message}", **{of_query: values})

    return [
        row(f"{name} must be an int32 tensor: {meaning}, got None{are_paged}", **{name: None}),
        given(f"{name}.dtype must be int32 ({meaning}), got int64", torch.tensor([40, 33])),
        given(f"{name} must be of shape [B], got [1, 2]", int32([[40, 33]])),
        given(f"{batch}3", int32([40, 33, 1])),
        given(f"{batch}1", int32([40]), op.bsnd),
        given(f"{batch}1", int32([40]), op.tnd),
        row(f"{name} must be an int32 tensor: {packed}, got None", op.tnd, **{name: None}),
        row(no_query, op.tnd_pa, actual_seq_lengths_query=None),
        given_query(
            ".dtype must be int32 (query tokens of each sequence [B]), got int64",
            torch.tensor([3, 2]),
        ),
        given_query(" must be of shape [B], got []", int32(3)),
        given_query(".size(0) must be 2 (B), got 1", int32([3])),
    ]


def block_tables(op: Op) -> list:
    row, table = op.row, op.pa["block_table"]
    shape = "[B, blocks per sequence]"
    missing = f"block_table must be an int32 tensor: block ids {shape}, for a paged cache, got None"
    unused = f"block_table must be None ({op.layout} is '{{}}', not 'PA_BSND'), got a tensor"
    batch = "block_table.size(0) must be 2 (B), got 1"
    return [
        row(missing + ARE_PAGED.format(op.layout), block_table=None),
        row("block_table.dtype must be int32 (block ids), got int64", block_table=table.long()),
        row(f"block_table must be of shape {shape}, got [4]", block_table=table[0]),
        row(batch, block_table=table[:1]),
        row(batch, op.tnd_pa, block_table=table[:1]),
        row(unused.format("BSND"), op.bsnd, block_table=table),
        row(unused.format("TND"), op.tnd, block_table=table),
    ]


def modes(op: Op) -> list:
    row = op.row
    return [
        *(row(f"{MODE}{n}", sparse_mode=n) for n in (-1, 1, 2, 4, 2**32 + 3)),
        # a keyword of torch_npu's standard ops
        *(
            row(f"{name} must be {WINDOW}, got {n}; {WINDOW_REMEDY}", **{name: n})
            for name in ("pre_tokens", "next_tokens")
            for n in (0, -1, 128, 2**63 - 2)
        ),
    ]


def optional(op: Op) -> list[str]:
    """Tensors of the call that may be None, or whose absence another rule rejects."""
    return ["block_table", op.lengths, "actual_seq_lengths_query", "query_rope", "key_rope"]
