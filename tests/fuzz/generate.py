"""One random call of one op, small and hostile.

Most calls keep the op's contract, so that the op must accept them; ``Case.broken`` names the change
of the other calls, which may still keep the contract.
"""

import math
from dataclasses import dataclass, field
from random import Random

import cases
import torch
from cases import DTYPES, layer_ops
from cases.hostile import Maker
from torch import Tensor

from custom_pypto.descriptions import ALL_OPS, LAYER_OPS
from custom_pypto.schemas import overload

# op -> how often it is drawn
DRAWN = {op: cases.of(op).WEIGHT for op in ALL_OPS} | dict.fromkeys(LAYER_OPS, layer_ops.WEIGHT)


@dataclass
class Case:
    op: str
    arguments: dict
    values: str  # random, integers, special or tiny
    broken: list[str] = field(default_factory=list)


OTHER_DTYPES = [
    *DTYPES,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
# values of schema types
OTHER_VALUES = {
    "str": ["", "BSND", "TND", "PA_BSND", "bsnd", "BNSD", "BSND ", "TND\0", "Ü" * 40, None, 3],
    "int": [
        *(-(2**63), -(2**32) + 3, -1, 0, 1, 2, 3, 64, 2047, 2048, 2049, 3072, 8192, 8193, 9216),
        *(2**31, 2**32 + 3, 2**63 - 1, 2**64, None, 1.5, "2"),
    ],
    "float": [
        *(0.0, -0.0, -1.0, 5e-324, 1e-300, 1e300, 3e38, torch.inf, -torch.inf, torch.nan, None),
        "1",
    ],
    "bool": [None, 0, 1, 1.5, "", "x"],
    "List[int]": [(), (1,), (0, 2), (2**63 - 1, 32), (128, 2**63 - 1), (-1, -1), (1, 1, 1), 4],
}
MOST = 2**20  # elements of a changed tensor


def other_tensor(rng: Random, x: Tensor) -> tuple[str, object]:
    """The tensor with one property changed, and the property."""
    if x.layout != torch.strided or x.device.type == "meta":  # changed before
        return "unchanged", x
    dim = rng.randrange(x.dim()) if x.dim() else 0
    how = rng.choice(
        ["none", "dtype", "rank", "size", "size", "device", "stride", "sparse", "type"]
    )
    if how == "none":
        return "None", None
    if how == "type":
        wrong = rng.choice([1, "x", [1.0], x.tolist() if 0 < x.numel() < 9 else 2.5])
        return f"a {type(wrong).__name__}", wrong
    if how == "dtype":
        dtype = rng.choice([d for d in OTHER_DTYPES if d != x.dtype])
        return f"as {dtype}", torch.zeros(x.shape, dtype=dtype)
    if how == "device":
        return "on meta", x.to("meta")
    if how == "sparse":
        return "sparse", torch.sparse_coo_tensor(size=x.shape, dtype=x.dtype)
    if how == "stride":
        if x.dim() < 2 or not x.numel():
            return "unchanged", x
        return "transposed in memory", x.transpose(dim, -1).contiguous().transpose(dim, -1)
    if how == "rank" or not x.dim():
        same = rng.choice([x.flatten(), x.unsqueeze(dim), x.new_zeros(())])
        return f"of shape {tuple(same.shape)}", same
    shape = list(x.shape)
    shape[dim] = rng.choice([0, 1, 2, shape[dim] + 1, shape[dim] + 16, max(shape[dim] - 1, 0)])
    if rng.random() < 0.1:  # nothing in it, and yet large
        shape[dim] = rng.choice([2**31, 2**33, 2**40])
        others = [d for d in range(x.dim()) if d != dim]
        if not others:
            return "unchanged", x
        shape[rng.choice(others)] = 0
    if math.prod(shape) > MOST:  # was large, and is no longer empty
        return "unchanged", x
    return f"of shape {tuple(shape)}", torch.zeros(shape, dtype=x.dtype)


def is_large(x) -> bool:
    return isinstance(x, Tensor) and max(x.shape, default=0) > MOST


def break_one(rng: Random, op: str, arguments: dict) -> str:
    """Changes one argument in place; says which and how."""
    name = rng.choice(list(arguments))
    x = arguments[name]
    types = {argument.name: str(argument.type) for argument in overload(op)._schema.arguments}
    kind = types[name].removeprefix("Optional[").removesuffix("]")
    if isinstance(x, Tensor):
        what, other = other_tensor(rng, x)
        # of no expert, they still give a zero for each row or column: more than memory holds
        of_zeros = ("weight_only_linear", "weight"), ("weighted_sum", "x")
        if (op, name) in of_zeros and is_large(other):
            return "unchanged"
        x = other
    elif kind in OTHER_VALUES:
        x = rng.choice(OTHER_VALUES[kind])
        what = repr(x)
    else:  # an optional argument that was left out
        tensors = [t for t in arguments.values() if isinstance(t, Tensor)]
        x = rng.choice([*tensors, 0.5])
        what = "given"
    arguments[name] = x
    return f"{name} {what}"


def empty_and_large(rng: Random, op: str, arguments: dict) -> str:
    """Consistent shapes without elements, one size of which exceeds any memory."""
    huge = rng.choice([2**31, 2**33, 2**40])
    if arguments.get("layout_query") != "BSND":
        return break_one(rng, op, arguments)
    key_layout = arguments.get("layout_key", arguments.get("layout_kv"))
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            continue
        shape = list(x.shape)
        if name in ("query", "weights", "sparse_indices", "query_rope"):
            shape[:2] = huge, 0
        elif name in ("key", "value", "key_rope") and key_layout == "BSND":
            shape[:2] = huge, 0
        elif name == "block_table":
            shape = [huge, 0]
        elif name.startswith("actual"):
            arguments[name] = x.new_zeros(1).expand(huge)
            continue
        arguments[name] = x if shape == list(x.shape) else torch.zeros(shape, dtype=x.dtype)
    return "empty and large"


def generate(rng: Random) -> Case:
    op = rng.choices(list(DRAWN), list(DRAWN.values()))[0]
    m = Maker(rng)
    make = layer_ops.CALLS[op] if op in LAYER_OPS else cases.of(op).random_call
    case = Case(op, make(m), m.values)
    fate = rng.random()
    if fate < 0.25:
        case.broken = [break_one(rng, op, case.arguments) for _ in range(rng.choice([1, 1, 1, 2]))]
    elif fate < 0.26:
        case.broken = [empty_and_large(rng, op, case.arguments)]
    return case
