"""The MLA and lightning-indexer prologs of the fused op, as PyPTO loops over tiles of tokens.

They compute both queries, the index weights and the cache rows of new tokens; within a tile:

1. cube: ``x`` by ``w_dq``, ``w_dkv_kr``, ``w_idx_k`` and ``w_idx_proj``; H is split over cores, the
   parts stay float32;
2. vector: sums of the parts; RMSNorm of the query latent; RMSNorm, LayerNorm and RoPE of the keys;
3. cube: query latent by ``w_uq_qr`` and ``w_idx_qb``, some heads per task; vector: RoPE of both
   queries;
4. vector: the key rows of each token into the three caches, where its slot exists;
5. cube, in a loop of its own (:func:`absorb`): the queries by ``w_uk``, per head.

The MLA RoPE rotates interleaved pairs, the indexer's the two halves of its first R dims.

Every weight is read once per tile of tokens. Memory: the outputs in global memory,
``T * (N1 * (L + P + 2 * R) + NI * DI)`` elements and ``T * NI`` float32; workspace, per tile of M
tokens, ``4 * M * split * (Q + L + R + DI + NI)`` bytes of sums and M rows of each result.
"""

import functools
from dataclasses import InitVar, dataclass, field

import pypto

from . import F32, Arguments, begin_task, end_task
from .pypto_versions import assemble_side_by_side, behind
from .slots import SlotFacts, write_rows
from .tiling import PrologTiling, cube_tile, prolog_tiling

INDEX_KEY_EPS = 1e-6  # LayerNorm of the index key, whatever the eps of the RMSNorms


@dataclass(frozen=True, kw_only=True)
class PrologFacts(SlotFacts):
    """One binary serves every number of tokens of a class of :func:`prolog_tiling`."""

    dtype: str
    angle_dtype: str  # of sin and cos
    eps: float
    tokens: InitVar[int]
    hidden: InitVar[int]
    tiling: PrologTiling = field(init=False)
    ready_on_host: bool

    def __post_init__(self, tokens: int, hidden: int):
        object.__setattr__(self, "tiling", prolog_tiling(tokens=tokens, hidden=hidden))

    @property
    def rows_at_once(self) -> int:
        """The rows of the hidden states that are loaded for a tile, valid or not."""
        return self.tiling.tokens + behind(self.tiling.tokens)

    def missing_rows(self, tokens: int) -> int:
        """The rows to append to the hidden states of ``tokens``."""
        return behind(tokens, self.rows_at_once)

    def missing_columns(self, heads: int) -> int:
        """The columns to append to the projection to the weights of ``heads`` heads."""
        return behind(heads)


def rounded(x, dtype):
    """Float32 values that ``dtype`` holds: the reference rounds here."""
    return pypto.cast(pypto.cast(x, dtype), F32)


def mean(x):
    return pypto.mul(pypto.sum(x, -1, keepdim=True), 1.0 / x.shape[-1])


def rms_norm(x, gamma, eps, dtype):
    scale = pypto.rsqrt(pypto.add(mean(pypto.mul(x, x)), eps))
    return pypto.cast(pypto.mul(rounded(pypto.mul(x, scale), dtype), pypto.cast(gamma, F32)), dtype)


def layer_norm(x, gamma, beta, eps):
    centred = pypto.sub(x, mean(x))
    scale = pypto.rsqrt(pypto.add(mean(pypto.mul(centred, centred)), eps))
    y = pypto.mul(pypto.mul(centred, scale), pypto.cast(gamma, F32))
    return pypto.add(y, pypto.cast(beta, F32))


def rotated(first, second, sin, cos, dtype):
    """First and second members of the pairs after RoPE."""
    return (
        pypto.cast(pypto.sub(pypto.mul(first, cos), pypto.mul(second, sin)), dtype),
        pypto.cast(pypto.add(pypto.mul(second, cos), pypto.mul(first, sin)), dtype),
    )


def columns(x, start, width):
    """Part of the last dim; a view keeps the number of valid rows."""
    *lead, _ = x.shape
    return pypto.view(x, [*lead, width], [0] * len(lead) + [start])


def interleaved_pairs(x, rows):
    """Even and odd members of the last dim of ``x``; its first dim has ``rows`` valid rows."""
    *lead, width = x.shape
    valid = [rows, *lead[1:]]
    tile = pypto.get_vec_tile_shapes()[:-1]
    # the tile's last dim must be a whole number of 32-byte blocks, though only 2 wide
    pypto.set_vec_tile_shapes(*tile, width // 2, 8)
    pairs = pypto.reshape(x, [*lead, width // 2, 2], valid_shape=[*valid, width // 2, 2])
    members = pypto.transpose(pairs, len(lead), len(lead) + 1)
    members = pypto.reshape(members, [*lead, width], valid_shape=[*valid, width])
    pypto.set_vec_tile_shapes(*tile, width)
    return columns(members, 0, width // 2), columns(members, width // 2, width // 2)


class Tile:
    """A tile of consecutive tokens of the program's arguments ``a``, and its stages."""

    def __init__(self, a: Arguments, tile, tiling: PrologTiling):
        M = tiling.tokens
        self.a, self.tiling, self.dtype = a, tiling, a.x.dtype
        self.start, self.rows = tile * M, (a.sin.shape[0] - tile * M).min(M)
        self.half = a.sin.shape[1] // 2  # pairs that RoPE rotates

    def view(self, x, first, width):
        shape, valid = [self.tiling.tokens, width], [self.rows, width]
        return pypto.view(x, shape, [self.start, first], valid_shape=valid)

    def project(self, w, n):
        """``x @ w`` as a float32 sum of ``split`` parts, so that few columns fill all cores."""
        K, N = w.shape[0] // self.tiling.split, w.shape[1]
        pypto.set_cube_tile_shapes(*cube_tile(self.tiling.tokens, K, n, columns=N))
        parts = [
            pypto.matmul(self.view(self.a.x, k, K), pypto.view(w, [K, N], [k, 0]), F32)
            for k in range(0, K * self.tiling.split, K)
        ]
        pypto.set_vec_tile_shapes(self.tiling.rows, N)
        return functools.reduce(pypto.add, parts)

    def keys(self, c_kv, k_index, angle, eps):
        """The rows for ``kv_cache``, ``kr_cache`` and ``index_k_cache``."""
        a, V, dtype = self.a, self.tiling.rows, self.dtype
        L, R = a.kv_cache.shape[1], a.kr_cache.shape[1]
        pypto.set_vec_tile_shapes(V, L)
        k_latent = rms_norm(columns(c_kv, 0, L), a.gamma_ckv, eps, dtype)
        pypto.set_vec_tile_shapes(V, R)
        even, odd = interleaved_pairs(columns(c_kv, L, R), self.rows)
        k_rope = pypto.concat(rotated(even, odd, *angle, dtype), -1)
        k_index = self.index_key(k_index, a.in_gamma_k, a.in_beta_k, INDEX_KEY_EPS, angle)
        return k_latent, k_rope, k_index

    def index_key(self, key, gamma, beta, eps, angle):
        """Index keys after LayerNorm and RoPE."""
        half, R, D = self.half, 2 * self.half, key.shape[1]
        pypto.set_vec_tile_shapes(self.tiling.rows, D)
        key = rounded(layer_norm(key, gamma, beta, eps), self.dtype)
        parts = [*rotated(columns(key, 0, half), columns(key, half, half), *angle, self.dtype)]
        if D > R:
            parts.append(pypto.cast(columns(key, R, D - R), self.dtype))
        return pypto.concat(parts, -1)

    def up(self, latent, w, width, h, n, dtype=None):
        """``latent @ w`` for the heads from ``h`` on that become one task, and their number."""
        heads = min(self.tiling.heads, w.shape[1] // width - h)
        # whole heads per task: a reader of one head then waits for one task
        n = max(n // width, 1) * width
        tile = self.tiling.tokens, w.shape[0], n
        tile = cube_tile(*tile, columns=heads * width, left_stays=True)
        pypto.set_cube_tile_shapes(*tile)
        w = pypto.view(w, [w.shape[0], heads * width], [0, h * width])
        return pypto.matmul(latent, w, dtype or self.dtype), heads

    def by_head(self, x, heads):
        """``x [M, heads * width]`` as ``[M, heads, width]``."""
        shape = [heads, x.shape[1] // heads]
        return pypto.reshape(x, [x.shape[0], *shape], valid_shape=[self.rows, *shape])

    def store_rotated(self, first, second, angle, h, out):
        halves = rotated(first, second, *angle, self.dtype)
        assemble_side_by_side(halves, [self.start, h, 0], out)

    def index_query(self, latent, angle):
        """Writes ``q_index``."""
        a, half, R = self.a, self.half, 2 * self.half
        _, NI, DI = a.q_index.shape
        for h in range(0, NI, self.tiling.heads):
            q = self.index_heads(latent, h)
            begin_task()
            first, second = columns(q, 0, half), columns(q, half, half)
            self.store_rotated(first, second, angle, h, a.q_index)
            if DI > R:
                rest = pypto.cast(columns(q, R, DI - R), self.dtype)
                pypto.assemble(rest, [self.start, h, R], a.q_index)
            end_task()

    def index_heads(self, latent, h):
        """Float32 queries of the heads from ``h`` on that become one task, before RoPE."""
        D = self.a.q_index.shape[2]
        q, heads = self.up(latent, self.a.w_idx_qb, D, h, self.tiling.index_n)
        pypto.set_vec_tile_shapes(self.tiling.rows, heads, D)
        return pypto.cast(self.by_head(q, heads), F32)

    def angle(self):
        pypto.set_vec_tile_shapes(self.tiling.rows, self.half)
        return [pypto.cast(self.view(x, 0, self.half), F32) for x in (self.a.sin, self.a.cos)]

    def by_token(self, angle):
        pypto.set_vec_tile_shapes(self.tiling.rows, self.half)
        return [self.by_head(x, 1) for x in angle]

    def query(self, latent, angle):
        """Writes ``q_heads``, all columns by ``w_uq_qr``, and ``q_rope``."""
        a, (_, N1, R) = self.a, self.a.q_rope.shape
        P = a.w_uk.shape[0] // N1
        for h in range(0, N1, self.tiling.heads):
            q, heads = self.up(latent, a.w_uq_qr, P + R, h, self.tiling.up_n)
            pypto.assemble(q, [self.start, h * (P + R)], a.q_heads)
            pypto.set_vec_tile_shapes(self.tiling.rows, heads, R)
            # the cast stays outside: inside it would pull the matmul into the task
            q = pypto.cast(columns(self.by_head(q, heads), P, R), F32)
            begin_task()
            even, odd = interleaved_pairs(q, self.rows)
            self.store_rotated(even, odd, angle, h, a.q_rope)
            end_task()

    def absorb(self):
        """Writes ``q_latent``: the part without RoPE times ``w_uk``."""
        a, (_, N1, R), L = self.a, self.a.q_rope.shape, self.a.w_uk.shape[1]
        P = a.w_uk.shape[0] // N1
        pypto.set_cube_tile_shapes(*cube_tile(self.tiling.tokens, P, L, columns=L))
        for h in range(N1):
            w = pypto.view(a.w_uk, [P, L], [h * P, 0])
            q = self.view(a.q_heads, h * (P + R), P)
            pypto.assemble(pypto.matmul(q, w, self.dtype), [self.start, h * L], a.q_latent)


def prolog(a: Arguments, facts: PrologFacts) -> None:
    """Arguments as in the op's schema, with these views: ``x [T, H]``, ``w_uk [N1 * P, L]``, the
    gammas and beta ``[1, .]``, ``sin`` and ``cos [T, R]``, ``cache_index [1, T * slot_words]``
    int32, the caches ``[slots, .]``. Written: the caches, ``q_heads [., N1 * (P + R)]`` for
    :func:`absorb`, ``q_rope [T, N1, R]``, ``q_index [T, NI, DI]`` and ``index_weights [T, NI]``
    float32. If two tokens name one slot, either row may remain.

    ``x`` and ``q_heads`` have the rows of whole tiles (``missing_rows``), ``w_idx_proj`` has the
    columns of whole tiles (``missing_columns``).
    """
    tiling, eps = facts.tiling, facts.eps
    dtype, T, M = a.x.dtype, a.sin.shape[0], tiling.tokens
    _, NI, DI = a.q_index.shape
    for i in pypto.loop((T + M - 1) // M, name="PROLOG", idx_name="prolog_tile"):
        pypto.set_pass_options(**tiling.pass_options)  # of this loop only
        tile = Tile(a, i, tiling)
        latent = rounded(tile.project(a.w_dq, tiling.down_n), dtype)
        latent = rms_norm(latent, a.gamma_cq, eps, dtype)
        c_kv = rounded(tile.project(a.w_dkv_kr, tiling.side_n), dtype)
        k_index = rounded(tile.project(a.w_idx_k, tiling.side_n), dtype)
        weights = columns(tile.project(a.w_idx_proj, tiling.side_n), 0, NI)
        pypto.assemble(pypto.mul(weights, (NI * DI) ** -0.5), [tile.start, 0], a.index_weights)

        angle = tile.angle()
        keys = tile.keys(c_kv, k_index, angle, eps)
        angle = tile.by_token(angle)
        tile.index_query(latent, angle)
        tile.query(latent, angle)
        written = [*zip(keys, (a.kv_cache, a.kr_cache, a.index_k_cache), strict=True)]
        slots, words = a.cache_index, facts.slot_words
        write_rows("PROLOG_CACHE", written, slots, tile.start, tile.rows, slot_words=words)


def absorb(a: Arguments, tile, tiling: PrologTiling) -> None:
    """Writes the rows of ``q_latent [T, N1 * L]`` of a tile of :func:`prolog`."""
    for _ in pypto.loop(1, name="ABSORB", idx_name="absorb"):
        pypto.set_pass_options(**tiling.absorb_options)  # of this loop only
        Tile(a, tile, tiling).absorb()
