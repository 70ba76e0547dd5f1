"""PyPTO kernels of a few lines, for what the host runs of them."""

import torch
from with_pypto import pypto

from custom_pypto.kernels.pypto_versions import jit

ROWS, WIDTH = pypto.DYNAMIC, pypto.STATIC


def assert_product(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``a @ b`` of half precision, whose products float32 holds: each addition of a sum, in any
    order, rounds by at most 2^-24 of the magnitudes.
    """
    a, b = a.double(), b.double()
    assert bool(((got - a @ b).abs() <= len(b) * 2**-24 * (a.abs() @ b.abs())).all())


def affine_kernel(body=None, *, barrier=True):
    """``out = factor * x + 1`` and ``x = 2 * out`` in place, in tiles of 8 rows, with ``barrier``
    between; or whatever ``body`` does.
    """

    @jit
    def affine(
        x: pypto.Tensor([ROWS, WIDTH], pypto.DT_FP32),
        out: pypto.Tensor([ROWS, WIDTH], pypto.DT_FP32),
        factor: float = 3.0,
    ):
        (body or both)(x, out, factor)

    def tiles(name, source, barrier):
        rows = (source.shape[0] + 7) // 8
        for i in pypto.loop(rows, name=name, idx_name=name.lower(), submit_before_loop=barrier):
            pypto.set_vec_tile_shapes(8, 64)
            valid = [(source.shape[0] - i * 8).min(8), source.shape[1]]
            yield i, pypto.view(source, [8, source.shape[1]], [i * 8, 0], valid_shape=valid)

    def both(x, out, factor):
        for i, row in tiles("ROWS", x, False):
            pypto.assemble(pypto.add(pypto.mul(row, factor), 1.0), [i * 8, 0], out)
        for i, row in tiles("IN_PLACE", out, barrier):
            pypto.assemble(pypto.mul(row, 2.0), [i * 8, 0], x)

    return affine


def product_kernel():
    """``out = a @ b`` in a tile of 16 rows, whatever the rows of ``a``."""

    @jit
    def product(
        a: pypto.Tensor([WIDTH, WIDTH], pypto.DT_BF16),
        b: pypto.Tensor([WIDTH, WIDTH], pypto.DT_BF16),
        out: pypto.Tensor([WIDTH, WIDTH], pypto.DT_FP32),
    ):
        pypto.set_cube_tile_shapes([16, 16], [64, 64], [64, 64])
        for _ in pypto.loop(1, name="PRODUCT", idx_name="i"):
            pypto.assemble(pypto.matmul(a, b, pypto.DT_FP32), [0, 0], out)

    return product


def selected_kernel():
    """``out = weights @ rows[index]``, paged, in tiles of 128 of 256 columns."""

    @jit
    def selected(
        weights: pypto.Tensor([WIDTH, WIDTH], pypto.DT_BF16),
        rows: pypto.Tensor([WIDTH, WIDTH], pypto.DT_BF16),
        index: pypto.Tensor([WIDTH, WIDTH], pypto.DT_INT32),
        table: pypto.Tensor([WIDTH, WIDTH], pypto.DT_INT32),
        out: pypto.Tensor([WIDTH, WIDTH], pypto.DT_FP32),
    ):
        for _ in pypto.loop(1, name="SELECTED", idx_name="i"):
            pypto.set_cube_tile_shapes([16, 16], [64, 64], [128, 128])
            chosen = pypto.view(index, [1, 64], [0, 0])
            blocks = pypto.view(table, [1, 8], [0, 0])
            values = pypto.experimental.gather_in_l1(
                rows, chosen, blocks, 16, 256, is_b_matrix=True, is_trans=False
            )
            pypto.assemble(pypto.matmul(weights, values, pypto.DT_FP32), [0, 0], out)

    return selected


def scatter_kernel(*, rows_per_task=8, barrier=True):
    """``sums[index] += x`` of 16 rows at a time, in tasks of ``rows_per_task``, then
    ``out = 2 * sums``; ``barrier`` between.
    """

    @jit
    def scatter(
        x: pypto.Tensor([ROWS, WIDTH], pypto.DT_FP32),
        index: pypto.Tensor([ROWS], pypto.DT_INT32),
        sums: pypto.Tensor([WIDTH, WIDTH], pypto.DT_FP32),
        out: pypto.Tensor([ROWS, WIDTH], pypto.DT_FP32),
    ):
        for i in pypto.loop(x.shape[0] // 16, name="ADD", idx_name="i"):
            pypto.set_vec_tile_shapes(16, 64)
            rows = pypto.mul(pypto.view(x, [16, x.shape[1]], [i * 16, 0]), 1.0)
            pypto.set_vec_tile_shapes(rows_per_task)
            places = pypto.view(index, [16], [i * 16])
            pypto.index_put_(sums, (places,), rows, accumulate=True)
        for i in pypto.loop(
            out.shape[0] // 8, name="READ", idx_name="j", submit_before_loop=barrier
        ):
            pypto.set_vec_tile_shapes(8, 64)
            row = pypto.view(sums, [8, sums.shape[1]], [i * 8, 0])
            pypto.assemble(pypto.mul(row, 2.0), [i * 8, 0], out)

    return scatter
