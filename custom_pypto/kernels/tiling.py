"""Tile settings of the kernels, chosen per shape class from the host-side facts of a call.

The entries of ``INDEXER``, ``ATTENTION`` and ``PROLOG`` were searched in PyPTO's cost model, those
of ``STREAMS`` are the best of about ten; ``bash run.sh bench npu`` prints its estimates.
The comment above an entry gives its reason.
"""

from dataclasses import dataclass, replace
from math import gcd


@dataclass(frozen=True)
class IndexerTiling:
    """Settings of :mod:`.npu_lightning_indexer_pto`; any combination gives right results."""

    part: int  # a chunk is scored whole, or only its first 1 / part if that has all keys
    keys: int  # keys per tile of the weighted sum over the heads; fewer of many heads
    l1_reuse: int  # blocks of keys per cube task
    tiles: int  # tiles of keys per vector task
    m: int = 128  # cube tiles: rows of query, keys
    n: int = 128
    sort: int = 8192  # elements that one sort takes
    fan_in: int = 32768  # candidates per merge
    # from the shape, by indexer_tiling
    tokens: int = 1  # query tokens of a sequence that share the load of a block of keys
    chunk: int = 8192  # keys per row of scores that is sorted at once
    chunks: int = 1  # most chunks that a block table may hold

    @property
    def pass_options(self) -> dict:
        return {
            "cube_l1_reuse_setting": {-1: self.l1_reuse},
            "vec_nbuffer_setting": {-1: 1},
        }


INDEXER = {
    # one short row: many small tasks fill the cores
    "1 token, 1 chunk": IndexerTiling(
        part=4,
        keys=512,
        l1_reuse=4,
        tiles=1,
    ),
    # one vector task per cube task: scheduling costs more than idle cores
    "more": IndexerTiling(
        part=4,
        keys=512,
        l1_reuse=8,
        tiles=4,
    ),
    # the cores are busy all the time: a load of a block serves 4 tokens of 64 heads, which fill
    # L0A and L0C, and a vector task takes half a chunk
    "4 tokens per tile": IndexerTiling(
        part=4,
        keys=512,
        l1_reuse=16,
        tiles=16,
        m=256,
    ),
}


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def indexer_tiling(
    *,
    tokens: int,
    batch: int,
    heads: int,
    block_size: int,
    table_width: int,
    most_shared: int = 4,
) -> IndexerTiling:
    """For ``tokens`` query tokens of ``batch`` sequences with block tables of ``table_width``; at
    most ``most_shared`` tokens share a load.
    """
    capacity = max(table_width * block_size, 1)
    # one sort takes 8192 scores; a smaller table is one smaller sort
    chunk = min(power_of_two(capacity), 8192)
    # a power of two, so that an engine's table may grow without a compilation at each step
    chunks = power_of_two(-(-capacity // chunk))
    # 256 rows fill L0A
    per_load = max(min(256 // heads, tokens // batch, most_shared), 1)
    shared = 1 << (per_load.bit_length() - 1)
    few = "1 token, 1 chunk" if tokens == chunks == 1 else "more"
    tiling = INDEXER["4 tokens per tile" if shared == 4 else few]
    # terms must fit 64 KiB of UB
    keys = min(tiling.keys, 16384 // power_of_two(heads))
    return replace(tiling, tokens=shared, chunk=chunk, chunks=chunks, keys=keys)


def score_tiles(m: int, latent: int, rope: int, n: int) -> tuple[list[int], ...]:
    """Cube tiles of ``m`` rows and ``n`` keys for ``[m, latent + rope] @ [latent + rope, keys]``.

    A tile across the border of latent and rope would make the compiler write both to memory, and
    several tiles of one gather repeat the first (:func:`.pypto_versions.gathered`): a row of rope
    that is longer than a tile is gathered in parts, which are tiles.
    """
    k = gcd(latent, 512)
    if k < rope:
        k = gcd(k, rope)
    return [m, m], [min(128, k), k], [n, n]


@dataclass(frozen=True)
class AttentionTiling:
    """Settings of :mod:`.npu_sparse_flash_attention_pto`; any gives right results."""

    heads: int  # per group: a group is one chain of score, softmax and output tasks
    score_keys: int  # per score tile
    output_columns: int  # per output tile
    output_keys: int  # keys whose probabilities are copied into L1 at once
    rows: int  # heads per softmax tile
    l1_reuse: int  # cube tiles that share an operand per task; 0: the compiler chooses
    vec_nbuffer: int  # softmax tiles per task; 0: the compiler chooses
    apart: bool = False  # the indices of the values are a task of their own, parallel to the scores

    def cube_tiles(self, heads: int, latent: int, rope: int, keys: int) -> tuple[tuple, tuple]:
        """Cube tiles ([m], [k], [n]) of both matmuls, in L0 and L1 each."""
        m = round_up(min(self.heads, heads), 16)
        columns = gcd(self.output_columns, latent)
        scores = score_tiles(m, latent, rope, min(self.score_keys, keys))
        k = min(128, keys)  # whole tiles of L0 in L1, or compilation fails
        output = [m, m], [k, min(self.output_keys, round_up(keys, k))], [columns, columns]
        return scores, output

    def splits(self, heads: int, latent: int, rope: int, keys: int) -> list[tuple[int, int]]:
        """``(indices per gather, parts of a row)`` of the right operands: rope, latent (unless
        split like rope), values. A part is the share of a row in a tile.
        """
        scores, output = self.cube_tiles(heads, latent, rope, keys)
        (_, k), (_, n), (_, columns) = scores[1], scores[2], output[2]
        of_scores = dict.fromkeys([(n, max(rope // k, 1)), (n, latent // k)])
        return [*of_scores, (output[1][1], latent // columns)]

    def softmax_rows(self, keys: int, *, sinks: bool) -> int:
        """``rows``, or fewer where float32 rows of ``keys`` would not fit UB; with sinks, which
        every tile loads, as many as fit.
        """
        most = max(1, min(128, 2**14 // keys))
        return 1 << (most.bit_length() - 1) if sinks else min(self.rows, most)

    @property
    def pass_options(self) -> dict:
        settings = {"cube_l1_reuse_setting": self.l1_reuse, "vec_nbuffer_setting": self.vec_nbuffer}
        return {name: {-1: n} for name, n in settings.items() if n}


# From 3 tokens on one group: keys and values are gathered once per token; tiles as large as L0C, so
# few edges. Up to 8 tokens softmax tasks of 20 heads: their number, not their length, delays the
# outputs.
ATTENTION = {
    # two groups of heads in parallel, each of small tasks, fill the cores; probabilities in two
    # loads, so that a product need not wait for the gather of all values
    "1-2 tokens": AttentionTiling(
        heads=64,
        score_keys=256,
        output_columns=64,
        output_keys=1024,
        rows=8,
        l1_reuse=2,
        vec_nbuffer=0,
        apart=True,
    ),
    # half the columns double the output tasks, two score tiles per task give more score tasks:
    # there are cores for them
    "3-4 tokens": AttentionTiling(
        heads=128,
        score_keys=256,
        output_columns=128,
        output_keys=1024,
        rows=4,
        l1_reuse=2,
        vec_nbuffer=5,
        apart=True,
    ),
    # three score tasks per token keep the 24 cube cores busy just once
    "5-8 tokens": AttentionTiling(
        heads=128,
        score_keys=256,
        output_columns=256,
        output_keys=512,
        rows=4,
        l1_reuse=3,
        vec_nbuffer=5,
        apart=True,
    ),
    # softmax tasks of 40 heads: the fewer edges count more since CANN 9.1
    "9-16 tokens": AttentionTiling(
        heads=128,
        score_keys=256,
        output_columns=256,
        output_keys=512,
        rows=8,
        l1_reuse=3,
        vec_nbuffer=5,
        apart=True,
    ),
    # two score and two softmax tasks per token: scheduling costs more than idle cores
    "17-32 tokens": AttentionTiling(
        heads=128,
        score_keys=256,
        output_columns=256,
        output_keys=512,
        rows=4,
        l1_reuse=4,
        vec_nbuffer=16,
    ),
    # the tokens alone fill the cores: one score task for each, half of the edges again
    "more tokens": AttentionTiling(
        heads=128,
        score_keys=256,
        output_columns=256,
        output_keys=512,
        rows=4,
        l1_reuse=8,
        vec_nbuffer=16,
    ),
}


def attention_tiling(*, tokens: int) -> AttentionTiling:
    """For ``tokens`` query tokens of all sequences together."""
    if tokens <= 2:
        return ATTENTION["1-2 tokens"]
    if tokens <= 4:
        return ATTENTION["3-4 tokens"]
    if tokens <= 8:
        return ATTENTION["5-8 tokens"]
    if tokens <= 16:
        return ATTENTION["9-16 tokens"]
    return ATTENTION["17-32 tokens" if tokens <= 32 else "more tokens"]


# bytes of a cube core's buffers on Atlas A2/A3
L0_BYTES, L0C_BYTES, L1_BYTES = 64 << 10, 128 << 10, 512 << 10


def largest_divisor(size: int, unit: int, limit: int) -> int:
    """The largest divisor of ``size`` that is a multiple of ``unit`` and at most ``limit``."""
    return max(d for d in range(unit, max(limit, unit) + 1, unit) if size % d == 0)


def cube_tile(
    m: int, k: int, n: int, *, columns: int, left_stays: bool = False
) -> tuple[list[int], ...]:
    """``pypto.set_cube_tile_shapes`` for 2-byte ``[m, k] @ [k, columns]``, at most ``n`` columns
    per task.

    The tiles divide the columns (:func:`.pypto_versions.behind`). Few large copies win: each takes
    as much of k as L1 holds. ``left_stays``: the left operand is copied once per task, if it leaves
    half of L1 (PyPTO cannot compile that for a view of an argument).
    """
    m = round_up(m, 16)
    n = largest_divisor(columns, 16, min(n, columns, L0C_BYTES // 4 // m))
    k0 = largest_divisor(k, 16, min(128, L0_BYTES // 2 // max(m, n)))
    if left_stays and m * k <= L1_BYTES // 4:
        return [m, m], [k0, k, largest_divisor(k, k0, (L1_BYTES // 2 - m * k) // n)], [n, n]
    return [m, m], [k0, largest_divisor(k, k0, L1_BYTES // 2 // (m + n))], [n, n]


@dataclass(frozen=True)
class PrologTiling:
    """Settings of the prolog of :mod:`.npu_sparse_attention_pto`; any gives right results."""

    tokens: int  # per tile: the weights are read once for each
    rows: int  # tokens per vector task
    split: int  # parts of H, summed by the vector cores
    down_n: int  # columns per cube task of w_dq
    side_n: int  # columns per cube task of w_dkv_kr, w_idx_k and w_idx_proj
    up_n: int  # columns per cube task of w_uq_qr, rounded to whole heads
    index_n: int  # columns per cube task of w_idx_qb
    heads: int  # heads per vector task; UB holds 64 pairs of token and head
    cube_nbuffer: int = 2  # similar cube tasks merged into one
    absorb_nbuffer: int = 2  # heads of w_uk per cube task

    @property
    def pass_options(self) -> dict:
        # every task has weights of its own: nothing in L1 to share
        return {
            "cube_l1_reuse_setting": {-1: 1},
            "cube_nbuffer_setting": {-1: self.cube_nbuffer},
        }

    @property
    def absorb_options(self) -> dict:
        return {**self.pass_options, "cube_nbuffer_setting": {-1: self.absorb_nbuffer}}


# H in quarters: with columns of 192, merged by two, the projections of x are 26 tasks for the 24
# cube cores. Up to 16 tokens loading weights dominates: few, large tasks, at most one round of the
# cores for w_uq_qr and w_idx_qb. Above 16, scheduling of the vector tasks takes longer than the
# products: larger tasks.
PROLOG = {
    # a vector task of 4 rows waits longer for copies than it computes; tasks of w_uk for 6 heads
    # are one round of the cores
    "1-4 tokens": PrologTiling(
        tokens=4,
        rows=4,
        split=4,
        down_n=96,
        side_n=96,
        up_n=384,
        index_n=128,
        heads=16,
        cube_nbuffer=4,
        absorb_nbuffer=6,
    ),
    "5-16 tokens": PrologTiling(
        tokens=16,
        rows=4,
        split=4,
        down_n=192,
        side_n=192,
        up_n=768,
        index_n=768,
        heads=16,
    ),
    "17-64 tokens": PrologTiling(
        tokens=64,
        rows=8,
        split=4,
        down_n=256,
        side_n=192,
        up_n=384,
        index_n=384,
        heads=8,
        absorb_nbuffer=6,
    ),
    # 128 tokens share a load of the weights, which dominates where bandwidth is limited; L0C holds
    # 128 rows of one head of w_uq_qr
    "more tokens": PrologTiling(
        tokens=128,
        rows=8,
        split=4,
        down_n=256,
        side_n=192,
        up_n=384,
        index_n=384,
        heads=8,
    ),
}


def prolog_tiling(*, tokens: int, hidden: int) -> PrologTiling:
    """For ``tokens`` rows of ``hidden`` elements."""
    if tokens <= 4:
        tiling = PROLOG["1-4 tokens"]
    elif tokens <= 16:
        tiling = PROLOG["5-16 tokens"]
    else:
        tiling = PROLOG["17-64 tokens" if tokens <= 64 else "more tokens"]
    # shorter products would take less time than the sums of their parts
    splits = hidden >= 1024 * tiling.split and hidden % (16 * tiling.split) == 0
    return tiling if splits else replace(tiling, split=1)


@dataclass(frozen=True)
class StreamTiling:
    """Settings of :mod:`.hyper_connection`; any gives right results."""

    tokens: int  # per tile: the weight is read once for each
    part: int  # most numbers of a token per product
    rows: int  # tokens per vector task
    columns: int  # most of ``collapsed`` per vector task
    gate_rows: int  # tokens whose gates are one vector task

    # every task has a part of the weight of its own: nothing in L1 to share
    pass_options = {"cube_l1_reuse_setting": {-1: 1}, "cube_nbuffer_setting": {-1: 1}}


STREAMS = {
    # a tile of one token computes no invalid rows; smaller parts: their sum would take longer
    "1-4 tokens": StreamTiling(tokens=1, part=4096, rows=1, columns=1024, gate_rows=1),
    # 16 rows fill a tile of the cube unit; iterations over 4 tokens take half of those over 16
    "5-32 tokens": StreamTiling(tokens=16, part=2048, rows=4, columns=512, gate_rows=4),
    # the tokens fill the cores: fewer products, each with its edges
    "more tokens": StreamTiling(tokens=64, part=2048, rows=4, columns=512, gate_rows=4),
}


def stream_tiling(*, tokens: int) -> StreamTiling:
    if tokens <= 4:
        return STREAMS["1-4 tokens"]
    return STREAMS["5-32 tokens" if tokens <= 32 else "more tokens"]
