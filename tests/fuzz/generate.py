"""One random call of one op: small, with values, strides and arguments of the most hostile kind.

Most calls keep the op's contract, so that it must not refuse them; ``Case.broken`` says what was
changed in the others, which may still be within it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

import torch
from cases import DTYPES, INT_MAX, INT_MIN, LAYOUTS
from torch import Tensor

CACHES = ("kv_cache", "kr_cache", "index_k_cache")
BLOCK_SIZES = [16, 16, 16, 32, 48]


@dataclass
class Case:
    op: str
    arguments: dict
    values: str  # random, integers, special or tiny
    broken: list[str] = field(default_factory=list)


class Maker:
    """Tensors of one case: where they lie and what is in them is up to ``rng``."""

    def __init__(self, rng: Random):
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.getrandbits(63))
        # exact: what is summed in another order is the same number
        self.values = rng.choice(["random", "random", "integers", "special", "tiny"])
        self.dtype = rng.choice(DTYPES)

    def floats(self, dtype: torch.dtype | None = None) -> Callable[[int], Tensor]:
        """Makes n floats; NaN and infinities only among integers, where no sum is rounded."""
        g = self.generator

        def fill(n: int) -> Tensor:
            if self.values == "random":
                x = torch.randn(n, generator=g)
            elif self.values == "tiny":  # down to subnormal numbers and below
                exponent = torch.randint(-150, 1, (n,), generator=g)
                x = torch.ldexp(torch.randn(n, generator=g), exponent)
            else:
                x = torch.randint(-2, 3, (n,), generator=g).float()
                if self.values == "special" and n and self.rng.random() < 0.3:
                    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
                    where = torch.randint(n, (1 + n // 200,), generator=g)
                    x[where] = special[torch.randint(4, where.shape, generator=g)]
            return x.to(dtype or self.dtype)

        return fill

    def ints(self, low: int, high: int, dtype=torch.int32) -> Callable[[int], Tensor]:
        """Makes n integers of low … high, and sometimes anything."""
        rng = self.rng
        extremes = [INT_MIN, INT_MIN + 1, -2, -1, 0, 1, high - 1, high, high + 1, INT_MAX - 1]
        extremes.append(INT_MAX)
        if dtype == torch.int64:
            extremes += [-(2**63), 2**63 - 1, 2**32, -(2**32)]
        wild = rng.choice([0, 0, 0.1, 0.5])

        def fill(n: int) -> Tensor:
            x = torch.randint(low, max(high, low) + 1, (n,), generator=self.generator)
            for i in range(n if wild and n < 100 else 0):
                if rng.random() < wild:
                    x[i] = rng.choice(extremes)
            return x.to(dtype)

        return fill

    def prefix_sums(self, total: int) -> Callable[[int], Tensor]:
        """Makes n prefix sums, mostly rising and mostly within ``total``."""
        if self.rng.random() < 0.3:
            return self.ints(-1, total + 1)

        def fill(n: int) -> Tensor:
            most = 2 * total // n + 1 if n else 0
            sums = accumulate(self.rng.randint(0, most) for _ in range(n))
            return torch.tensor(list(sums), dtype=torch.int32)

        return fill

    def tensor(self, shape: tuple, fill: Callable[[int], Tensor], dense_rows=False) -> Tensor:
        """``dense_rows``: the last stride is 1. Any other may be anything but negative."""
        rng = self.rng
        if rng.random() < 0.5 or not shape:
            flat = fill(_numel(shape))
            return flat.view(shape)
        # memory order of the dims, then gaps, then strides of 0 or so small that rows overlap
        order = list(range(len(shape)))
        if rng.random() < 0.4:
            inner = order[:-1] if dense_rows else order
            rng.shuffle(inner)
            order = inner + order[len(inner) :]
        strides, step = [0] * len(shape), 1
        for d in reversed(order):
            gap = rng.choice([0, 0, 0, 1, 3, 16])
            if not (dense_rows and d == len(shape) - 1):
                step += gap
            strides[d] = step
            step *= max(shape[d], 1)
        overlap = rng.random()
        for d in range(len(shape) - 1 if dense_rows else len(shape)):
            if shape[d] == 1 and rng.random() < 0.3:
                strides[d] = rng.choice([0, 1, 7, 2**40, 2**59])  # reaches nothing
            elif overlap < 0.15:
                strides[d] = 0 if rng.random() < 0.5 else strides[d]
            elif overlap < 0.3:
                strides[d] = rng.randint(0, strides[d])
        offset = rng.choice([0, 0, 1, 3, 5, 16])
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        size = offset + (reach + 1 if _numel(shape) else 0)
        return fill(size).as_strided(shape, strides, offset)


def _numel(shape: tuple) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def add(m: Maker) -> dict:
    dtype = m.rng.choice([*DTYPES, torch.float64])
    shape = tuple(m.rng.choice([0, 1, 2, 3, 7, 17]) for _ in range(m.rng.randint(0, 4)))
    return {name: m.tensor(shape, m.floats(dtype)) for name in ("self", "other")}


@dataclass
class Sequences:
    """Sizes and the arguments that say where the tokens and keys of the sequences are."""

    layout_query: str
    layout_key: str
    tokens: tuple  # leading sizes of the query
    rows: tuple  # leading sizes of the keys
    capacity: int  # keys a sequence can have
    arguments: dict


def sequences(m: Maker, large: bool) -> Sequences:
    """``large``: so many keys that they fill several chunks, top-k buffers and parts."""
    rng = m.rng
    layout_query, layout_key = rng.choice(LAYOUTS)
    B, S1 = rng.choice([0, 1, 1, 1, 2, 2, 3]), rng.choice([0, 1, 1, 1, 2, 2, 3, 5])
    S2 = (
        rng.randint(0, 1400) if large else rng.choice([0, 1, 5, 15, 16, 17, 33, rng.randint(0, 70)])
    )
    if large:
        B = 1
    length = m.ints(S2 // 2 if large else 0, S2 + 2)
    tokens, arguments = (B, S1), dict(actual_seq_lengths_query=None)
    if layout_query == "TND":
        tokens = (B * S1,)
        arguments["actual_seq_lengths_query"] = m.tensor((B,), m.prefix_sums(B * S1))
    elif rng.random() < 0.7:
        arguments["actual_seq_lengths_query"] = m.tensor((B,), m.ints(0, S1 + 1))
    if layout_key == "PA_BSND":
        block_size = 1024 if large and rng.random() < 0.2 else rng.choice(BLOCK_SIZES)
        width = -(-S2 // block_size) + rng.choice([0, 0, 1])
        blocks = rng.choice([0, 1, 2, 3, B * width, B * width + 1])
        rows, capacity = (blocks, block_size), width * block_size
        table = m.tensor((B, width), m.ints(0 if blocks else -1, blocks - 1))
        arguments |= dict(block_table=table, lengths_key=m.tensor((B,), length))
    elif layout_key == "TND":
        rows, capacity = (B * S2,), S2
        arguments |= dict(block_table=None, lengths_key=m.tensor((B,), m.prefix_sums(B * S2)))
    else:
        rows, capacity = (B, S2), S2
        given = rng.random() < 0.7
        arguments |= dict(block_table=None, lengths_key=m.tensor((B,), length) if given else None)
    return Sequences(layout_query, layout_key, tokens, rows, capacity, arguments)


def heads_of(m: Maker) -> int:
    return m.rng.choice([1, 1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 33, 48, 64, 65, 129])


def index(m: Maker) -> dict:
    large = m.rng.random() < 0.02
    s = sequences(m, large)
    heads, dim = heads_of(m), m.rng.choice([16, 16, 32, 48])
    arguments = s.arguments
    arguments["actual_seq_lengths_key"] = arguments.pop("lengths_key")
    return dict(
        query=m.tensor((*s.tokens, heads, dim), m.floats()),
        key=m.tensor((*s.rows, 1, dim), m.floats(), dense_rows=True),
        weights=m.tensor((*s.tokens, heads), m.floats(m.rng.choice([m.dtype, torch.float32]))),
        layout_query=s.layout_query,
        layout_key=s.layout_key,
        sparse_count=m.rng.choice([1, 2, 3, 7, 8, 16, 40, 64, 2048] + [3072, 8192] * large),
        sparse_mode=m.rng.choice([0, 3]),
        **arguments,
    )


def scale(m: Maker, width: int) -> float:
    """Extreme ones only where logits are exact, so that all that matters is which is largest."""
    ordinary = m.rng.random() * 3 * width**-0.5
    if m.values in ("random", "tiny"):
        return ordinary + 1e-3
    # none that makes weights of 2^-149 … 2^-126 of logits that are apart: 0 here, not everywhere
    return m.rng.choice([0.01, 0.05, 1e-3, 1e-30, 1e-38, 1e3, 1e30])


def attend(m: Maker) -> dict:
    rng = m.rng
    large = rng.random() < 0.02
    s = sequences(m, large)
    heads, latent, rope = heads_of(m), rng.choice([16, 16, 32, 48]), rng.choice([0, 16, 16, 32])
    K = rng.choice([513, 700, 1200]) if large else rng.choice([0, 1, 2, 7, 8, 16, 40, 100])
    arguments = s.arguments
    arguments["actual_seq_lengths_kv"] = arguments.pop("lengths_key")
    key = m.tensor((*s.rows, 1, latent), m.floats(), dense_rows=True)
    value = None
    if rng.random() < 0.3:
        value = rng.choice([key, m.tensor(key.shape, m.floats(), dense_rows=True)])
    query_rope = key_rope = None
    if rope:
        query_rope = m.tensor((*s.tokens, heads, rope), m.floats())
        key_rope = m.tensor((*s.rows, 1, rope), m.floats(), dense_rows=True)
        if rng.random() < 0.2:  # as engines keep them
            row = m.tensor((*s.rows, 1, latent + rope), m.floats(), dense_rows=True)
            key, key_rope = row.split([latent, rope], -1)
            value = None if value is None else key
    return dict(
        query=m.tensor((*s.tokens, heads, latent), m.floats()),
        key=key,
        value=value,
        sparse_indices=m.tensor(
            (*s.tokens, 1, K), m.ints(rng.choice([0, 0, -1]), max(s.capacity - 1, 0))
        ),
        scale_value=scale(m, latent + rope),
        query_rope=query_rope,
        key_rope=key_rope,
        sparse_block_size=1,
        layout_query=s.layout_query,
        layout_kv=s.layout_key,
        sparse_mode=rng.choice([0, 3]),
        **arguments,
    )


def fuse(m: Maker) -> dict:
    rng = m.rng
    B, S1 = rng.choice([0, 1, 1, 1, 2]), rng.choice([0, 1, 1, 1, 2, 3])
    H, Q = rng.choice([0, 1, 16, 40]), rng.choice([0, 3, 16, 24])
    N1, P, L = rng.choice([1, 2, 3, 17]), rng.choice([0, 1, 8, 16]), rng.choice([16, 32])
    R = rng.choice([16, 16, 32])
    heads, D = rng.choice([1, 2, 3, 17]), rng.choice([R, R + 16, 48])
    block_size, blocks = rng.choice(BLOCK_SIZES), rng.choice([0, 1, 2, 3, 4])
    width = rng.choice([0, 1, 2, 3])
    slots = blocks * block_size
    index_dtype = rng.choice([torch.int32, torch.int64])
    sizes = dict(kv_cache=L, kr_cache=R, index_k_cache=D)
    if rng.random() < 0.25:  # parts of one row
        row = m.tensor((blocks, block_size, 1, sum(sizes.values())), m.floats(), dense_rows=True)
        caches = dict(zip(sizes, row.split(list(sizes.values()), -1), strict=True))
    else:
        caches = {
            name: m.tensor((blocks, block_size, 1, n), m.floats(), dense_rows=True)
            for name, n in sizes.items()
        }
    x = dict(
        x=m.tensor((B, S1, H), m.floats()),
        w_dq=m.tensor((H, Q), m.floats()),
        w_uq_qr=m.tensor((Q, N1 * (P + R)), m.floats()),
        w_uk=m.tensor((N1, P, L), m.floats()),
        w_dkv_kr=m.tensor((H, L + R), m.floats()),
        gamma_cq=m.tensor((Q,), m.floats()),
        gamma_ckv=m.tensor((L,), m.floats()),
        sin=m.tensor((B, S1, R), m.floats(rng.choice([m.dtype, torch.float32]))),
        cos=m.tensor((B, S1, R), m.floats(rng.choice([m.dtype, torch.float32]))),
        cache_index=m.tensor((B, S1), m.ints(-1, slots, index_dtype)),
        kv_cache=caches["kv_cache"],
        kr_cache=caches["kr_cache"],
        block_table=m.tensor((B, width), m.ints(0 if blocks else -1, blocks - 1)),
        act_seqs=m.tensor((B,), m.ints(0, width * block_size + 1)),
        w_idx_qb=m.tensor((Q, heads * D), m.floats()),
        w_idx_k=m.tensor((H, D), m.floats()),
        w_idx_proj=m.tensor((H, heads), m.floats()),
        in_gamma_k=m.tensor((D,), m.floats()),
        in_beta_k=m.tensor((D,), m.floats()),
        index_k_cache=caches["index_k_cache"],
        softmax_scale=rng.choice([None, 0.01, 0.05]),
        eps=rng.choice([1e-6, 0.0, 1.0]),
        sparse_count=rng.choice([1, 2, 8, 16, 2048]),
    )
    if rng.random() < 0.05:  # memory of a cache is read as something else
        name = rng.choice([n for n, t in x.items() if isinstance(t, Tensor) and t.dtype == m.dtype])
        cache, wanted = x[rng.choice(CACHES)], x[name]
        if cache.untyped_storage().nbytes() >= wanted.nbytes:
            strides = torch.empty(wanted.shape, device="meta").stride()
            x[name] = cache.as_strided(wanted.shape, strides, 0)
    return x


OPS = {
    "add_custom": (1, add),
    "npu_lightning_indexer_pto": (7, index),
    "npu_sparse_flash_attention_pto": (7, attend),
    "npu_sparse_attention_pto": (5, fuse),
}


# ---- breaking the contract ----------------------------------------------------------------------

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
STRINGS = ["", "BSND", "TND", "PA_BSND", "bsnd", "BNSD", "BSND ", "TND\0", "Ü" * 40, None, 3]
INTS = [-(2**63), -(2**32) + 3, -1, 0, 1, 2, 3, 64, 2047, 2048, 2049, 3072, 8192, 8193, 9216]
INTS += [2**31, 2**32 + 3, 2**63 - 1, 2**64, None, 1.5, "2"]
FLOATS = [0.0, -0.0, -1.0, 5e-324, 1e-300, 1e300, 3e38, torch.inf, -torch.inf, torch.nan, None, "1"]


MOST = 2**20  # elements of a changed tensor


def other_tensor(rng: Random, x: Tensor) -> tuple[str, object]:
    """The tensor with something about it changed, and what."""
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
    if _numel(shape) > MOST:  # was large, and empty no longer
        return "unchanged", x
    return f"of shape {tuple(shape)}", torch.zeros(shape, dtype=x.dtype)


def break_one(rng: Random, arguments: dict) -> str:
    """Changes one argument in place; says which and how."""
    name = rng.choice(list(arguments))
    x = arguments[name]
    if isinstance(x, Tensor):
        what, x = other_tensor(rng, x)
    elif name.startswith("layout"):
        x = rng.choice(STRINGS)
        what = repr(x)
    elif name in ("sparse_count", "sparse_mode", "sparse_block_size"):
        x = rng.choice(INTS)
        what = repr(x)
    elif name in ("scale_value", "softmax_scale", "eps"):
        x = rng.choice(FLOATS)
        what = repr(x)
    else:  # an optional argument that was left out
        tensors = [t for t in arguments.values() if isinstance(t, Tensor)]
        x = rng.choice([*tensors, 0.5])
        what = "given"
    arguments[name] = x
    return f"{name} {what}"


def empty_and_large(rng: Random, op: str, arguments: dict) -> str:
    """Consistent shapes without an element, one size of which no memory would hold."""
    huge = rng.choice([2**31, 2**33, 2**40])
    sizes = dict(npu_lightning_indexer_pto="weights", npu_sparse_flash_attention_pto="query_rope")
    if op not in sizes or arguments["layout_query"] != "BSND":
        return break_one(rng, arguments)
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
    op = rng.choices(list(OPS), [weight for weight, _ in OPS.values()])[0]
    m = Maker(rng)
    case = Case(op, OPS[op][1](m), m.values)
    fate = rng.random()
    if fate < 0.25:
        case.broken = [break_one(rng, case.arguments) for _ in range(rng.choice([1, 1, 1, 2]))]
    elif fate < 0.26:
        case.broken = [empty_and_large(rng, op, case.arguments)]
    return case
