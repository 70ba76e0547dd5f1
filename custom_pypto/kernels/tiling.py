"""Tile settings of the kernels, chosen per shape class from what the host knows of a call."""

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True)
class IndexerTiling:
    """Settings of :mod:`.npu_lightning_indexer_pto`; any combination gives right results."""

    tokens: int  # query tokens of a sequence that share the load of a block of keys
    chunk: int  # keys per row of scores that is sorted at once
    chunks: int  # how many of them a block table may hold
    part: int  # a chunk that is not full is scored whole or in this fraction
    keys: int  # keys per tile of the weighted sum over the heads
    l1_reuse: int  # blocks of keys per cube task
    vec_nbuffer: int  # tiles of keys per vector task
    m: int = 128  # cube tiles: rows of query, keys
    n: int = 128
    sort: int = 8192  # elements that one sort takes
    fan_in: int = 32768  # candidates per merge

    @property
    def pass_options(self) -> dict:
        return {
            "cube_l1_reuse_setting": {-1: self.l1_reuse},
            "vec_nbuffer_setting": {-1: self.vec_nbuffer},
        }


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def indexer_tiling(
    *, tokens: int, batch: int, heads: int, block_size: int, table_width: int
) -> IndexerTiling:
    """For ``tokens`` query tokens of ``batch`` sequences with block tables of ``table_width``."""
    capacity = max(table_width * block_size, 1)
    # one sort takes 8192 scores; a smaller table is one smaller sort
    chunk = min(power_of_two(capacity), 8192)
    # a power of two, so that an engine's table may grow without a compilation at each step
    chunks = power_of_two(-(-capacity // chunk))
    # 128 rows fill the cube; more tokens per load than that gain nothing
    per_load = max(min(128 // heads, tokens // batch, 4), 1)
    shared = 1 << (per_load.bit_length() - 1) if heads <= 64 else 1
    # as many terms as 64 KiB of UB hold, but enough tiles per chunk to fill the cores
    keys = max(256, min(16384 // power_of_two(heads), 512))
    if tokens == 1 and chunks == 1:
        # one short row: many small tasks fill the cores
        return IndexerTiling(shared, chunk, chunks, 4, keys, l1_reuse=4, vec_nbuffer=1)
    # one vector task per cube task: scheduling costs more than idle cores
    return IndexerTiling(shared, chunk, chunks, 4, keys, l1_reuse=8, vec_nbuffer=4)


@dataclass(frozen=True)
class AttentionTiling:
    """Settings of :mod:`.npu_sparse_flash_attention_pto`; see :func:`attention_tiling`."""

    heads: int  # per group: a group is one chain of score, softmax and output tasks
    score_keys: int  # per score tile
    output_columns: int  # per output tile
    output_keys: int  # whose probabilities are copied into L1 at once
    rows: int  # heads per softmax tile
    l1_reuse: int  # cube tiles that share an operand per task; 0: as the compiler likes
    vec_nbuffer: int  # softmax tiles per task; 0: as the compiler likes
    table_apart: bool = False  # the block table is checked in a task of its own

    def cube_tiles(self, heads: int, latent: int, keys: int) -> tuple[tuple, tuple]:
        """Cube tiles ([m], [k], [n]) of both matmuls, in L0 and L1 each."""
        m = -(-min(self.heads, heads) // 16) * 16
        n, columns = min(self.score_keys, keys), min(self.output_columns, latent)
        # a tile across the border of latent and rope would make the compiler write both to memory
        k = gcd(latent, 512)
        scores = [m, m], [min(128, k), k], [n, n]
        k = min(128, keys)  # whole tiles of L0 in L1, or compilation fails
        output = [m, m], [k, min(self.output_keys, -(-keys // k) * k)], [columns, columns]
        return scores, output

    def softmax_rows(self, keys: int) -> int:
        """``rows``, or fewer where float32 rows of ``keys`` would not fit UB."""
        return max(1, min(self.rows, 2**14 // keys))

    @property
    def pass_options(self) -> dict:
        settings = {"cube_l1_reuse_setting": self.l1_reuse, "vec_nbuffer_setting": self.vec_nbuffer}
        return {name: {-1: n} for name, n in settings.items() if n}


def attention_tiling(*, tokens: int) -> AttentionTiling:
    """For ``tokens`` query tokens of all sequences together."""
    if tokens <= 2:
        # two groups of heads in parallel, each of small tasks, fill the cores
        return AttentionTiling(64, 256, 64, 1024, rows=8, l1_reuse=2, vec_nbuffer=0)
    # one group: keys and values are gathered once per token; tiles as large as L0C, so few edges;
    # softmax tasks of 20 heads, because their number rather than their length delays the outputs
    if tokens <= 8:
        # three score tasks per token keep the 24 cube cores busy just once; they wait for the
        # checks, which are shorter apart, and for which there are vector cores to spare
        return AttentionTiling(
            128, 256, 256, 512, rows=4, l1_reuse=3, vec_nbuffer=5, table_apart=True
        )
    if tokens <= 16:
        return AttentionTiling(128, 256, 256, 512, rows=4, l1_reuse=3, vec_nbuffer=5)
    # the cores are busy all the time: score tasks of one size, which leave no core waiting
    return AttentionTiling(128, 256, 256, 512, rows=4, l1_reuse=2, vec_nbuffer=5)


# bytes of a cube core's buffers on Atlas A2/A3
L0_BYTES, L0C_BYTES, L1_BYTES = 64 << 10, 128 << 10, 512 << 10


def largest_divisor(size: int, unit: int, limit: int) -> int:
    """The largest divisor of ``size``, a multiple of ``unit``, that is up to ``limit``."""
    return max(d for d in range(unit, max(limit, unit) + 1, unit) if size % d == 0)


def cube_tile(m: int, k: int, n: int, *, left_stays: bool = False) -> tuple[list[int], ...]:
    """``pypto.set_cube_tile_shapes`` for 2-byte ``[m, k] @ [k, N]`` with ``n`` columns per task.

    Few large copies win: each takes as much of k as L1 holds. ``left_stays``: the left operand is
    copied once per task, if it leaves half of L1 (PyPTO cannot compile that for a view of an
    argument).
    """
    m = -(-m // 16) * 16
    n = min(n, L0C_BYTES // 4 // m)
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
    up_n: int  # columns per cube task of w_uq_qr and w_idx_qb, rounded to whole heads
    heads: int  # heads per vector task; UB holds 64 pairs of token and head
    one_tile: bool  # the call has no more than ``tokens``: what follows need not wait for all of it
    cube_nbuffer: int = 2  # like cube tasks merged into one

    @property
    def pass_options(self) -> dict:
        # every task has weights of its own: nothing in L1 to share
        return {
            "cube_l1_reuse_setting": {-1: 1},
            "cube_nbuffer_setting": {-1: self.cube_nbuffer},
        }


def prolog_tiling(*, tokens: int, hidden: int) -> PrologTiling:
    """For ``tokens`` rows of ``hidden`` elements."""
    # H in quarters: with columns of 192, merged by two, the projections of x are 26 tasks for the
    # 24 cube cores. Below 4096 the products are shorter than the sums would be
    split = 4 if hidden >= 4096 and hidden % 64 == 0 else 1
    if tokens <= 16:
        # the weights are what counts: few, large tasks of them, but not so large that the indexer
        # waits for one beside it. A vector task of 4 rows waits longer for copies than it computes
        tile = 4 if tokens <= 4 else 16
        return PrologTiling(
            tile, 4, split, down_n=192, side_n=192, up_n=384, heads=16, one_tile=True
        )
    # scheduling of the vector tasks takes longer than the products: larger tasks. Up to 128 tokens
    # share a load of the weights, which is what counts where bandwidth has a limit; L0C holds
    # 128 rows of one head of w_uq_qr
    tile = 64 if tokens <= 64 else 128
    return PrologTiling(tile, 8, split, down_n=256, side_n=192, up_n=384, heads=8, one_tile=False)
