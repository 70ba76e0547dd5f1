"""The MLA and lightning-indexer prologs of the fused op, as PyPTO loops over tiles of tokens.

They make both queries, the index weights and the cache rows of the new tokens; within a tile:

1. cube: ``x`` by ``w_dq``, ``w_dkv_kr``, ``w_idx_k`` and ``w_idx_proj``; H is split over cores, the
   parts stay float32;
2. vector: sums of the parts; RMSNorm of the query latent; RMSNorm, LayerNorm and RoPE of the keys;
3. cube: query latent by ``w_uq_qr`` and ``w_idx_qb``, some heads per task, then ``w_uk`` per head;
   vector: RoPE of both queries;
4. vector: the key rows of each token into the three caches, where its slot exists.

The MLA RoPE rotates interleaved pairs, the indexer's the two halves of its first R dims.

Every weight is read once per tile of tokens. Memory: the four outputs in global memory,
``T * (N1 * (L + R) + NI * DI)`` elements and ``T * NI`` float32; workspace, for each tile of M
tokens, ``4 * M * split * (Q + L + R + DI + NI)`` bytes of sums and M rows of each result.
"""

import contextlib
import functools

import pypto

from .tiling import PrologTiling, cube_tile

FLOAT = pypto.DT_FP32
INDEX_KEY_EPS = 1e-6  # LayerNorm of the index key, whatever the eps of the RMSNorms


@contextlib.contextmanager
def one_task():
    """The operations of a tile within become one task, where PyPTO would make several."""
    pypto.set_pass_options(sg_set_scope=1)
    yield
    pypto.set_pass_options(sg_set_scope=-1)


def rounded(x, dtype):
    """Float32 values that ``dtype`` holds: the reference rounds here."""
    return pypto.cast(pypto.cast(x, dtype), FLOAT)


def mean(x):
    return pypto.mul(pypto.sum(x, -1, keepdim=True), 1.0 / x.shape[-1])


def rms_norm(x, gamma, eps, dtype):
    scale = pypto.rsqrt(pypto.add(mean(pypto.mul(x, x)), eps))
    return pypto.cast(
        pypto.mul(rounded(pypto.mul(x, scale), dtype), pypto.cast(gamma, FLOAT)), dtype
    )


def layer_norm(x, gamma, beta, eps):
    centred = pypto.sub(x, mean(x))
    scale = pypto.rsqrt(pypto.add(mean(pypto.mul(centred, centred)), eps))
    y = pypto.mul(pypto.mul(centred, scale), pypto.cast(gamma, FLOAT))
    return pypto.add(y, pypto.cast(beta, FLOAT))


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


def prolog(
    x,
    w_dq,
    w_uq_qr,
    w_uk,
    w_dkv_kr,
    gamma_cq,
    gamma_ckv,
    sin,
    cos,
    cache_index,
    kv_cache,
    kr_cache,
    w_idx_qb,
    w_idx_k,
    w_idx_proj,
    in_gamma_k,
    in_beta_k,
    index_k_cache,
    q_latent,
    q_rope,
    q_index,
    index_weights,
    *,
    eps: float,
    slot_words: int,
    tiling: PrologTiling,
):
    """Arguments as in the op's schema, with these views: ``x [T, H]``, ``w_uk [N1 * P, L]``, the
    gammas and beta ``[1, .]``, ``sin`` and ``cos [T, R]``, ``cache_index [1, T * slot_words]``
    int32 (an int64 one seen as words, low word first), the caches ``[slots, .]``. Written: the
    caches, ``q_latent [T, N1 * L]``, ``q_rope [T, N1, R]``, ``q_index [T, NI, DI]`` and
    ``index_weights [T, NI]`` float32. If two tokens name one slot, either row may remain.
    """
    dtype, T = x.dtype, x.shape[0]
    Q, L, R = w_dq.shape[1], w_uk.shape[1], sin.shape[1]
    N1 = (w_uq_qr.shape[1] - w_uk.shape[0]) // R
    P = w_uk.shape[0] // N1
    NI, DI = w_idx_proj.shape[1], w_idx_k.shape[1]
    M, V, half = tiling.tokens, tiling.rows, R // 2

    def up_tile(width):
        # whole heads per task: what reads one head then waits for one task
        return cube_tile(M, Q, max(tiling.up_n // width, 1) * width, left_stays=True)

    def project(w, n, start, rows):
        """``x @ w`` as a float32 sum of ``split`` parts, so that few columns fill all cores."""
        K, N = w.shape[0] // tiling.split, w.shape[1]
        pypto.set_cube_tile_shapes(*cube_tile(M, K, n))
        parts = [
            pypto.matmul(
                pypto.view(x, [M, K], [start, k], valid_shape=[rows, K]),
                pypto.view(w, [K, N], [k, 0]),
                FLOAT,
            )
            for k in range(0, K * tiling.split, K)
        ]
        pypto.set_vec_tile_shapes(V, N)
        return functools.reduce(pypto.add, parts)

    for tile in pypto.loop(0, (T + M - 1) // M, 1, name="PROLOG", idx_name="prolog_tile"):
        pypto.set_pass_options(**tiling.pass_options)  # of this loop only
        start, rows = tile * M, (T - tile * M).min(M)
        latent = rms_norm(
            rounded(project(w_dq, tiling.down_n, start, rows), dtype), gamma_cq, eps, dtype
        )
        c_kv = rounded(project(w_dkv_kr, tiling.side_n, start, rows), dtype)
        k_index = rounded(project(w_idx_k, tiling.side_n, start, rows), dtype)
        weights = project(w_idx_proj, tiling.side_n, start, rows)
        pypto.assemble(pypto.mul(weights, (NI * DI) ** -0.5), [start, 0], index_weights)

        pypto.set_vec_tile_shapes(V, half)
        angle = [
            pypto.cast(pypto.view(a, [M, half], [start, 0], valid_shape=[rows, half]), FLOAT)
            for a in (sin, cos)
        ]
        pypto.set_vec_tile_shapes(V, L)
        k_latent = rms_norm(columns(c_kv, 0, L), gamma_ckv, eps, dtype)
        pypto.set_vec_tile_shapes(V, R)
        even, odd = interleaved_pairs(columns(c_kv, L, R), rows)
        k_rope = pypto.concat(rotated(even, odd, *angle, dtype), -1)
        pypto.set_vec_tile_shapes(V, DI)
        k_index = rounded(layer_norm(k_index, in_gamma_k, in_beta_k, INDEX_KEY_EPS), dtype)
        first, second = columns(k_index, 0, half), columns(k_index, half, half)
        k_index_parts = [*rotated(first, second, *angle, dtype)]
        if DI > R:
            k_index_parts.append(pypto.cast(columns(k_index, R, DI - R), dtype))
        k_index = pypto.concat(k_index_parts, -1)

        pypto.set_vec_tile_shapes(V, half)
        angle = [pypto.reshape(a, [M, 1, half], valid_shape=[rows, 1, half]) for a in angle]
        for h in range(0, NI, tiling.heads):
            heads = min(tiling.heads, NI - h)
            pypto.set_cube_tile_shapes(*up_tile(DI))
            w = pypto.view(w_idx_qb, [Q, heads * DI], [0, h * DI])
            q = pypto.matmul(latent, w, dtype)
            pypto.set_vec_tile_shapes(V, heads, DI)
            q = pypto.reshape(q, [M, heads, DI], valid_shape=[rows, heads, DI])
            q = pypto.cast(q, FLOAT)
            with one_task():
                first, second = columns(q, 0, half), columns(q, half, half)
                for i, half_R in enumerate(rotated(first, second, *angle, dtype)):
                    pypto.assemble(half_R, [start, h, i * half], q_index)
                if DI > R:
                    rest = pypto.cast(columns(q, R, DI - R), dtype)
                    pypto.assemble(rest, [start, h, R], q_index)

        for h in range(0, N1, tiling.heads):
            heads = min(tiling.heads, N1 - h)
            pypto.set_cube_tile_shapes(*up_tile(P + R))
            w = pypto.view(w_uq_qr, [Q, heads * (P + R)], [0, h * (P + R)])
            q = pypto.matmul(latent, w, dtype)
            pypto.set_cube_tile_shapes(*cube_tile(M, P, L))
            for i in range(heads):
                w = pypto.view(w_uk, [P, L], [(h + i) * P, 0])
                absorbed = pypto.matmul(columns(q, i * (P + R), P), w, dtype)
                pypto.assemble(absorbed, [start, (h + i) * L], q_latent)
            pypto.set_vec_tile_shapes(V, heads, R)
            q = pypto.reshape(q, [M, heads, P + R], valid_shape=[rows, heads, P + R])
            # the cast stays outside: it would draw the matmul into the task
            q = pypto.cast(columns(q, P, R), FLOAT)
            with one_task():
                even, odd = interleaved_pairs(q, rows)
                # no concat here: it forgets how many rows are valid
                for i, half_R in enumerate(rotated(even, odd, *angle, dtype)):
                    pypto.assemble(half_R, [start, h, i * half], q_rope)

        slots = kv_cache.shape[0]
        for i in pypto.loop(0, rows, 1, name="PROLOG_CACHE", idx_name="prolog_row"):
            word = (start + i) * slot_words
            slot, *high = (cache_index[0, word + j] for j in range(slot_words))
            exists = (slot >= 0) * (slot < slots)
            for half_word in high:
                exists = exists * (half_word == 0)
            slot = slot.max(0).min(slots - 1)
            for keys, cache in (k_latent, kv_cache), (k_rope, kr_cache), (k_index, index_k_cache):
                width = cache.shape[1]
                pypto.set_vec_tile_shapes(1, width)
                # no row where the slot is outside
                key = pypto.view(keys, [1, width], [i, 0], valid_shape=[exists, width])
                pypto.assemble(pypto.clone(key), [slot, 0], cache)
