"""hyper_connection as a PyPTO program, in a loop over tiles of tokens; within a tile:

1. vector: a part of a token's N D numbers in float32, and its sum of squares;
2. cube: that part by ``weight``, in float32. Two products, by the first 16 rows and by the last
   N N, as loads of whole tiles would reach behind (2 + N) N rows (:func:`.pypto_versions.behind`);
3. vector: sums of the parts, the root, ``post`` and the gates of ``collapsed``; ``comb``;
4. vector: ``collapsed``, some columns of some tokens for each task.

The weight is read once per tile. Workspace, per tile of M tokens: ``4 * M * (N D + 32 * parts)``
bytes and the gates.
"""

import functools
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

import pypto

from . import F32, PYPTO_DTYPES, Arguments, arguments, loop, runtime_options
from .pypto_versions import div, jit, reciprocal
from .tiling import StreamTiling, largest_divisor, stream_tiling

ROWS = 16  # of a tile of the weight; N = 4 has (2 + N) N = 24, 16 of them of comb


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One binary serves every number of tokens of a class of :func:`stream_tiling`."""

    dtype: str  # of streams
    iterations: int
    eps: float
    norm_eps: float
    tokens: InitVar[int]
    tiling: StreamTiling = field(init=False)

    def __post_init__(self, tokens: int):
        object.__setattr__(self, "tiling", stream_tiling(tokens=tokens))


def sigmoid(x):
    return reciprocal(pypto.add(pypto.exp(pypto.mul(x, -1.0)), 1.0))


def total(parts: list):
    return functools.reduce(pypto.add, parts)


class Tile:
    """A tile of consecutive tokens, and its stages."""

    def __init__(self, a: Arguments, tile, facts: Facts):
        self.a, self.facts, self.tiling = a, facts, facts.tiling
        self.start = tile * self.tiling.tokens
        self.rows = (a.post.shape[0] - self.start).min(self.tiling.tokens)
        self.count = a.post.shape[1]

    def view(self, x, first, *widths):
        """``widths`` of the last dims of the tokens' rows of ``x``, from ``first`` on."""
        at = [self.start, *[0] * (len(widths) - 1), first]
        return pypto.view(x, [self.tiling.tokens, *widths], at, valid_shape=[self.rows, *widths])

    def part_of(self, z, first, width):
        """``width`` columns of a tensor of this tile."""
        shape = [self.tiling.tokens, width]
        return pypto.view(z, shape, [0, first], valid_shape=[self.rows, width])

    def products(self) -> tuple:
        """The sums of squares ``[M, 1]``, and the products with the first and the last 16 rows of
        the weight, a list of parts of each."""
        a, tiling, (rows, width) = self.a, self.tiling, self.a.weight.shape
        part = largest_divisor(width, 16, tiling.part)
        k0 = largest_divisor(part, 16, 128)
        k = [k0, largest_divisor(part, k0, 1024)]
        squares, first, last = [], [], []
        for begin in range(0, width, part):
            pypto.set_vec_tile_shapes(tiling.rows, part)
            x = pypto.cast(self.view(a.streams, begin, part), F32)
            squares.append(pypto.sum(pypto.mul(x, x), -1, keepdim=True))
            pypto.set_cube_tile_shapes([max(tiling.tokens, 16)] * 2, k, [ROWS] * 2)
            for row, parts in (0, first), (rows - ROWS, last):
                w = pypto.view(a.weight, [ROWS, part], [row, begin])
                parts.append(pypto.matmul(x, w, F32, b_trans=True))
        return squares, first, last

    def numbers(self, products, root, first):
        """The numbers of a token, from the one of row ``first`` of the weight on."""
        scale, base = (pypto.view(x, [1, ROWS], [0, first]) for x in (self.a.scales, self.a.base))
        return pypto.add(pypto.mul(pypto.mul(total(products), root), scale), base)

    def gates(self) -> tuple:
        """Writes ``post``; the gates of ``collapsed`` and the numbers of ``comb``."""
        a, facts, N = self.a, self.facts, self.count
        squares, first, last = self.products()
        pypto.set_vec_tile_shapes(self.tiling.gate_rows, ROWS)
        mean = pypto.mul(total(squares), 1.0 / a.weight.shape[1])
        root = pypto.rsqrt(pypto.add(mean, facts.norm_eps))
        gates = self.numbers(first, root, 0)
        mixed = self.numbers(last, root, a.weight.shape[0] - ROWS)
        # the tile's last dim must be a whole number of 32-byte blocks, though only N wide
        pypto.set_vec_tile_shapes(self.tiling.gate_rows, 8)
        post = pypto.mul(sigmoid(self.part_of(gates, N, N)), 2.0)
        pypto.assemble(post, [self.start, 0], a.post)
        pre = pypto.add(sigmoid(self.part_of(gates, 0, N)), facts.eps)
        return pre, mixed

    def comb(self, mixed) -> None:
        """Writes ``comb``: rows and columns stay in the vector core through all iterations."""
        facts, N = self.facts, self.count
        pypto.set_vec_tile_shapes(self.tiling.gate_rows, N, 8)
        c = pypto.reshape(mixed, [self.tiling.tokens, N, N], valid_shape=[self.rows, N, N])
        c = pypto.exp(pypto.sub(c, pypto.amax(c, dim=-1, keepdim=True)))
        c = pypto.add(div(c, pypto.sum(c, -1, keepdim=True)), facts.eps)
        for dim in (-2, *(-1, -2) * (facts.iterations - 1)):
            c = div(c, pypto.add(pypto.sum(c, dim, keepdim=True), facts.eps))
        pypto.assemble(c, [self.start, 0, 0], self.a.comb)

    def collapse(self, pre) -> None:
        """Writes ``collapsed``."""
        out, N = self.a.collapsed, self.count
        tokens, width = self.a.post.shape[0], out.shape[1]
        streams = pypto.reshape(self.a.streams, [tokens, N, width], inplace=True)
        shape = [self.tiling.tokens, N, 1]
        pre = pypto.reshape(pre, shape, valid_shape=[self.rows, N, 1])
        columns = largest_divisor(width, 16, self.tiling.columns)
        for column in range(0, width, columns):
            pypto.set_vec_tile_shapes(self.tiling.rows, N, columns)
            x = pypto.cast(self.view(streams, column, N, columns), F32)
            x = pypto.sum(pypto.mul(x, pre), -2)
            pypto.set_vec_tile_shapes(self.tiling.rows, columns)
            pypto.assemble(pypto.cast(x, out.dtype), [self.start, column], out)


def program(a: Arguments, facts: Facts) -> None:
    """Arguments as in the op's schema, with these views: ``streams [T, N D]``, ``base`` and
    ``scales [1, (2 + N) N]``, a scale for each number. Written: ``post [T, N]``,
    ``comb [T, N, N]`` and ``collapsed [T, D]``.
    """
    M = facts.tiling.tokens
    for i in loop("CONNECTION", (a.post.shape[0] + M - 1) // M):
        pypto.set_pass_options(**facts.tiling.pass_options)  # of this loop only
        tile = Tile(a, i, facts)
        pre, mixed = tile.gates()
        tile.comb(mixed)
        tile.collapse(pre)


@functools.cache
def kernel(facts: Facts) -> Callable:
    """The kernel of :func:`program`."""
    matrix, rows = [pypto.STATIC] * 2, [pypto.DYNAMIC, pypto.STATIC]
    dtype = PYPTO_DTYPES[facts.dtype]

    @jit(runtime_options=runtime_options(ready_on_host=False))
    def hyper_connection(
        streams: pypto.Tensor(rows, dtype),
        weight: pypto.Tensor(matrix, F32),
        base: pypto.Tensor(matrix, F32),
        scales: pypto.Tensor(matrix, F32),
        post: pypto.Tensor(rows, F32),
        comb: pypto.Tensor([pypto.DYNAMIC, pypto.STATIC, pypto.STATIC], F32),
        collapsed: pypto.Tensor(rows, dtype),
    ):
        program(arguments(locals()), facts)

    return hyper_connection
