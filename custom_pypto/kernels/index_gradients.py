"""Scores of an indexer and their gradients, as stages of programs for a token's keys.

With ``products[h, j] = query[h] . key[j]``, float32 ``[heads, keys]``::

    scores[j]        = sum_h weights[h] * relu(products[h, j])
    d_weights[h]     = sum_j d_scores[j] * relu(products[h, j])
    d_products[h, j] = d_scores[j] * weights[h] if products[h, j] > 0, else 0
    d_query          = d_products x keys        d_keys = d_products^T x query

``d_products`` are rounded to the dtype of query and keys. Those of a token are scaled to at most
``LARGEST`` before, and products of them scaled back: float16 has no numbers below 6e-8, and few
digits below 6e-5, while the gradient of a divergence over 2048 keys is about 1e-4.
"""

from typing import NamedTuple

import pypto

from . import F32
from .index_scores import in_float32
from .pypto_versions import div
from .tiling import power_of_two

LARGEST = 2.0**14
TINY = 1e-30  # as a bound it scales gradients that are all 0


def weights_of(weights, at, heads: int):
    """The weights ``[heads, 1]`` from row ``at`` on, float32."""
    pypto.set_vec_tile_shapes(heads, 16)
    return in_float32(pypto.view(weights, [heads, 1], [at, 0]))


def index_scores(products, weights):
    """``[1, keys]`` from ``products`` and ``weights [heads, 1]``."""
    heads, keys = products.shape
    # terms take 64 KiB of UB
    pypto.set_vec_tile_shapes(heads, min(2**14 // power_of_two(heads), keys))
    return pypto.sum(pypto.mul(pypto.relu(products), weights), dim=0, keepdim=True)


class DScores(NamedTuple):
    """Gradients of scores, float32."""

    values: object  # [1, keys]
    scaled: object  # [1, keys]; times weights at most LARGEST
    unit: object  # [1, columns], all equal, that a product of scaled gradients is multiplied by


def scaled(d_scores, weights, columns: int) -> DScores:
    """``d_scores [tokens, keys]``, with ``columns`` of query and keys; ``weights [heads, 1]`` of
    all tokens.
    """
    (tokens, keys), heads = d_scores.shape, weights.shape[0]
    pypto.set_vec_tile_shapes(heads, 16)
    heaviest = pypto.amax(pypto.abs(weights), dim=0, keepdim=True)
    pypto.set_vec_tile_shapes(1, keys)
    most = pypto.amax(pypto.abs(d_scores), dim=-1, keepdim=True)
    if tokens > 1:
        pypto.set_vec_tile_shapes(tokens, 16)
        most = pypto.amax(most, dim=0, keepdim=True)
    most = pypto.mul(most, heaviest)
    most = pypto.maximum(most, TINY)
    pypto.set_vec_tile_shapes(1, max(keys, columns))
    to_largest = div(pypto.add(pypto.mul(most, 0.0), LARGEST), most)
    if tokens > 1:
        # a row: elements of a column, which CANN 9.1 packs, have no address that it may broadcast
        to_largest = pypto.add(pypto.full([1, keys], 0.0, F32), to_largest)
    unit = pypto.add(pypto.full([1, columns], 0.0, F32), pypto.mul(most, 1 / LARGEST))
    return DScores(d_scores, pypto.mul(d_scores, to_largest), unit)


def d_products(products, d_scores: DScores, weights, dtype, rows: int) -> tuple:
    """Scaled ``d_products`` in ``dtype``, and ``d_weights [heads, 1]`` float32, in tiles of
    ``rows`` heads.
    """
    pypto.set_vec_tile_shapes(rows, products.shape[1])
    active = pypto.relu(products)
    d_weights = pypto.sum(pypto.mul(active, d_scores.values), dim=-1, keepdim=True)
    terms = pypto.mul(pypto.where(pypto.gt(products, 0.0), 1.0, 0.0), d_scores.scaled)
    return pypto.cast(pypto.mul(terms, weights), dtype), d_weights


def unscaled(product, d_scores: DScores, rows: int):
    """``product`` of scaled ``d_products``, in tiles of ``rows``."""
    pypto.set_vec_tile_shapes(rows, product.shape[1])
    return pypto.mul(product, d_scores.unit)
