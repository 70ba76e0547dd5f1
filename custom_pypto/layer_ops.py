"""Layer ops: parts of a layer beside its attention, an op each in place of a dozen of torch's.

For a token, what torch prepares for each of these costs more time than its numbers. On the CPU,
:func:`hyper_connection` and :func:`pool_groups` on an NPU too; without a gradient, for
:mod:`custom_pypto.models`, :mod:`custom_pypto.rows` and the plugin for vLLM;
:mod:`custom_pypto.ops` does not export them, and their signatures may change. Each equals the
function of its name in ``custom_pypto/reference/layer_ops.py``, which has the roundings of
transformers, but for the order of sums. They return new tensors and, but for
:func:`convert_weight`, write into none of theirs.

Shapes: B batch, S tokens, T tokens of all sequences, N heads or streams, D width of a row, R
rotated dims, E experts, k experts of a token, r tokens of a compressed row. "Floats" are bfloat16,
float16 and float32. No number in a tensor is trusted: ids and positions may be any.
"""

from collections.abc import Callable

from torch import Tensor

from .schemas import op_function
from .weight_ops import weight_only_linear

__all__ = [
    "activate",
    "cache_slots",
    "collapse_streams",
    "convert_weight",
    "expanded_attention",
    "hyper_connection",
    "invariant_linear",
    "mix_streams",
    "pool_groups",
    "rms_norm",
    "rotate",
    "rotate_pairs",
    "route",
    "route_roots",
    "weighted_sum",
    "window_rows",
]


# ---- rows --------------------------------------------------------------------------------------


@op_function
def activate(x: Tensor, name: str) -> Tensor:
    """``"sigmoid"``, ``"silu"``, ``"softplus"`` (x above 20) of each value, in float32 and rounded
    once. The bits of torch's depend on where in a tensor a value is."""


@op_function
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dim (arXiv:1910.07467).

    Rounded before the product with a weight of the dtype of ``x``, as in DeepSeek-V3.2, and only
    after it with one in float32, as in DeepSeek-V4; without a weight the root is rounded.

    Args:
        x: ``[.., D]`` floats.
        weight: ``[D]``, dtype of ``x`` or float32, or None.
    Returns:
        As ``x``, contiguous.
    """


@op_function
def rotate(x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool) -> Tensor:
    """RoPE (arXiv:2104.09864) of R dims from the ``first`` on: ``x_i cos_i - x_j sin_i`` and
    ``x_j cos_j + x_i sin_j`` become dims i and ``j = i + R/2``. Each product is rounded.

    Args:
        x: ``[B, S, N, D]`` floats.
        cos: ``[B, S, R]``, dtype of ``x``, as ``sin``.
        interleaved: pairs are dims 2i and 2i+1 of ``x``, with the angles of the first R/2;
            otherwise dims i and i + R/2.
    Returns:
        As ``x``, contiguous.
    """


@op_function
def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the last R dims, where pairs of dims 2i and 2i+1 stay in place, rounded once
    (DeepSeek-V4).

    Args:
        x: ``[B, S, N, D]`` floats.
        cos: ``[B, S, R / 2]``, dtype of ``x``, as ``sin``.
    Returns:
        As ``x``, contiguous.
    """


@op_function
def route(
    logits: Tensor,
    bias: Tensor,
    groups: int,
    kept: int,
    k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The k experts with the largest ``sigmoid(logits) + bias`` among the ``kept`` groups with the
    largest sums of their best two (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    Args:
        logits: ``[T, E]`` float32, its last dim contiguous.
        bias: ``[E]`` float32, which chooses and does not weigh.
        groups: of E / groups consecutive experts, at least two.
        normalize: sigmoids of the chosen to a sum of 1.
        scale: of the weights.
    Returns:
        Weights ``[T, k]`` float32 and experts ``[T, k]`` int64, best first, the lower of equals
        first, and a NaN before all numbers.
    """


@op_function
def route_roots(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """The k experts with the largest ``sqrt(softplus(logits)) + bias`` (DeepSeek-V4, technical
    report).

    Args:
        logits: ``[T, E]`` floats.
        bias: ``[E]`` float32, which chooses and does not weigh.
        scale: the sum of the weights of a token.
    Returns:
        Weights ``[T, k]`` in the dtype of ``logits`` and experts ``[T, k]`` int64, in the order of
        :func:`route`.
    """


@op_function
def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """``sum_i weights_i x_i`` of the k rows of each token, in float32 and rounded once.

    Args:
        x: ``[T, k, D]`` floats.
        weights: ``[T, k]`` float32.
    Returns:
        ``[T, D]`` in the dtype of ``x``.
    """


# ---- streams of manifold-constrained hyper-connections (arXiv:2512.24880) ----------------------


@op_function
def hyper_connection(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The input of a block from the streams of its residual, and how its output joins them.

    The normed streams of a token times ``weight``, scaled and added to ``base``, are numbers of N
    pre, N post and N x N comb. ``collapsed = sum_n (sigmoid(pre_n) + eps) streams_n``; ``post`` is
    ``2 sigmoid(.)``; ``comb`` is ``softmax(.) + eps``, whose columns, then in turn rows and
    columns, are divided by their sum + eps (Sinkhorn-Knopp).

    Args:
        streams: ``[B, S, N, D]`` floats.
        weight: ``[(2 + N) N, N D]`` float32.
        base: ``[(2 + N) N]`` float32.
        scale: ``[3]`` float32, of pre, post and comb.
        iterations: of both normalisations, up to 1000.
        norm_eps: of the RMS norm of a token's N D numbers.
    Returns:
        ``post [B, S, N]`` and ``comb [B, S, N, N]`` in float32; ``collapsed [B, S, D]`` in the
        dtype of ``streams``.
    """


@op_function
def collapse_streams(
    streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor, eps: float, norm_eps: float
) -> Tensor:
    """``collapsed`` of :func:`hyper_connection`, before the head.

    Args:
        streams: ``[B, S, N, D]`` floats.
        weight: ``[N, N D]`` float32.
        base: ``[N]`` float32.
        scale: ``[1]`` float32.
    Returns:
        ``[B, S, D]`` in the dtype of ``streams``.
    """


@op_function
def mix_streams(streams: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """``post_n x + sum_m comb_mn streams_m``: the streams behind a block with the output ``x``.

    Gates, both terms and their sum are rounded to the dtype of ``streams``.

    Args:
        streams: ``[B, S, N, D]`` floats.
        x: ``[B, S, D]``, dtype of ``streams``.
        post: ``[B, S, N]`` float32.
        comb: ``[B, S, N, N]`` float32.
    Returns:
        As ``streams``, contiguous.
    """


# ---- rows of a cache ---------------------------------------------------------------------------


@op_function
def pool_groups(
    state: Tensor,
    blocks: Tensor,
    values: Tensor,
    bias: Tensor,
    start: Tensor,
    lengths: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """The compressed rows (:mod:`custom_pypto.rows.compressed`) of the groups of r tokens that new
    tokens complete.

    Args:
        state: ``[blocks, ring, 1, W]`` floats, ``[C | Z]`` of cached tokens: token t of a sequence
            in row ``t % ring`` of its block.
        blocks: ``[B]`` int32; tokens of a block outside of ``state`` do not count.
        values: ``[B, S, W]`` of the new tokens, dtype of ``state``, padding first.
        bias: ``[r, W / 2]`` float32.
        start: ``[B]`` int32, tokens before the new ones.
        lengths: ``[B]`` int32, tokens with them.
        width: D; ``W / 2``, or with overlap ``W / 4``.
    Returns:
        Sums ``[B, ceil(S / r), D]`` float32, from group ``start // r`` on, 0 for incomplete ones;
        and which are complete, ``[B, ceil(S / r)]`` bool.
    """


@op_function
def cache_slots(table: Tensor, rows: Tensor, valid: Tensor, block: int) -> Tensor:
    """``table[b, row // block] * block + row % block``: where rows are in a flattened cache.

    Args:
        table: ``[B, blocks per sequence]`` int32.
        rows: ``[B, n]`` int64, of the sequence.
        valid: ``[B, n]`` bool.
        block: rows of a block.
    Returns:
        ``[B * n]`` int64; 0 for rows that are not ``valid`` or not in the table. A slot of a block
        id from outside of the cache is outside of it as well.
    """


@op_function
def window_rows(
    positions: Tensor,
    valid: Tensor,
    indices: Tensor | None,
    window: int,
    ring: int,
    rate: int,
    count: int,
) -> Tensor:
    """The rows that each token attends to: of its window of tokens in a ring, row ``t % ring``,
    then of compressed rows behind it (DeepSeek-V4).

    Args:
        positions: ``[B, S]`` int64.
        valid: ``[B, S]`` bool; other tokens have no window.
        indices: ``[B, S, count]`` int32 compressed rows, or None: the first ``count``. A token sees
            the first ``(position + 1) // rate``.
        window: tokens up to each one, with it.
    Returns:
        ``[B, S, window + count]`` int32; -2, which attention skips, for no token of the window; -1
        for no compressed row.
    """


# ---- weights and prompts -----------------------------------------------------------------------


@op_function
def invariant_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    *,
    experts: Tensor | None = None,
    block_size: int = 128,
) -> Tensor:
    """:func:`weight_only_linear` whose bits of a row are the same whatever other rows there are,
    also over a weight in float32, float16 or bfloat16, ``[N, K]`` or ``[E, N, K]`` of any strides.
    A stored weight is multiplied as for few rows. Another one, or one in bfloat16 with K no
    multiple of 32, is multiplied in float32: sums of 256 products each, in order."""


@op_function
def convert_weight(
    weight: Tensor,
    scales: Tensor | None,
    block: tuple[int, int] | None,
    out: Tensor,
    out_scales: Tensor | None = None,
) -> None:
    """Writes a matrix of a checkpoint into ``out``, in the format of its dtype.

    Values are ``weight * scales`` in float32, then rounded as :func:`weight_only_linear` reads
    them: to int8 by the largest magnitude of a row / 127, to 4 bits by minimum and maximum of each
    group of G values.

    Args:
        weight: ``[N, K]`` floats or float64; with ``scales`` float8_e4m3fn, or int8
            ``[N, K / 2]``: two of e2m1, the first in the low bits.
        scales: ``[N / block[0], K / block[1]]``, rounded up, floats or float8_e8m0fnu.
        block: rows and columns of a scale.
        out: ``[N, K]`` floats or int8, or uint8 ``[N, K / 2]``; written.
        out_scales: of int8 ``[N]`` float32, of uint8 ``[N, K / G, 2]`` bfloat16, scale and zero;
            written.
    """


@op_function
def expanded_attention(
    q_nope: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    weight: Tensor,
    indices: Tensor,
    ends: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of a prompt to keys and values of every head (:mod:`custom_pypto.rows.expanded`).

    Keys are ``[weight[:nope] latent | k_rope]``, values ``weight[nope:] latent``, both rounded;
    needs a CPU that multiplies bfloat16.

    Args:
        q_nope: ``[B, S, H, nope]`` bfloat16, as all floats.
        q_rope: ``[B, S, H, R]``, or None with ``k_rope``.
        latent: ``[B, n, L]``, finite; L is a multiple of 32.
        k_rope: ``[B, n, R]``.
        weight: ``[H, nope + v, L]``.
        indices: ``[B, S, K]`` int32: -1 ends a row; others from outside of the keys are skipped.
        ends: ``[B, S]`` int64, the number of keys that a token sees, at most n.
    Returns:
        ``[B, S, H, v]`` bfloat16, 0 for a token that names no key; and ``[]`` bool, whether no
        token names a key twice. If one does, the first is undefined.
    """


# ---- of ops ------------------------------------------------------------------------------------


def experts(
    x: Tensor,
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    ids: Tensor,
    weights: Tensor,
    gate: Callable[[Tensor], Tensor],
    product: Callable[..., Tensor] = weight_only_linear,
) -> Tensor:
    """``sum_i weights_i down_i gate(up_i x)`` over the k experts of each token.

    Args:
        weights: ``[T, k]``.
        x, up, down, ids, gate, product: of :func:`expert_outputs`.
    Returns:
        As ``x``.
    """
    return weighted_sum(expert_outputs(x, up, down, ids, gate, product), weights.float())


def expert_outputs(
    x: Tensor,
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    ids: Tensor,
    gate: Callable[[Tensor], Tensor],
    product: Callable[..., Tensor] = weight_only_linear,
) -> Tensor:
    """``down_i gate(up_i x)`` of each of the k experts of each token.

    Args:
        x: ``[T, D]``.
        up: weight and scales of :func:`weight_only_linear`, gates and values of the E experts.
        down: the same, back to D.
        ids: ``[T, k]``; an id of no expert here, as of another rank's, gives zeros.
        gate: the activation, from ``[T, k, .]``.
        product: with the arguments of :func:`weight_only_linear`, which it stands for.
    Returns:
        ``[T, k, D]``.
    """
    gated = gate(product(x, up[0], up[1], experts=ids))
    return product(gated, down[0], down[1], experts=ids)
