"""Work-arounds for versions of PyPTO; no other program names a version.

A docstring gives the symptom and the version that ends it; "not tried" means that the work-around
has not been removed on CANN 9.1. ``tests/test_pypto_faults.py`` has programs that show the bugs of
docs/pypto_versions.md. Differences between versions are detected in PyPTO's functions, not by its
number, which several releases share.
"""

import functools
import inspect
from collections.abc import Callable
from functools import partial

import pypto
from pypto.experimental import gather_in_l1

from . import F16, F32, I8, I32, PYPTO_DTYPES, begin_task, loop
from .tiling import round_up


def _where_taken(function: Callable, **options) -> Callable:
    """``function`` with those of the ``options`` that it takes in this PyPTO."""
    taken = inspect.signature(function).parameters
    return partial(function, **{name: o for name, o in options.items() if name in taken})


# The default of CANN 9.2 is a compiler that parses the source of a kernel and of its helpers; it
# takes neither generators nor variable arguments (docs/pypto_versions.md).
jit = _where_taken(pypto.frontend.jit, new_ir=False)

# CANN 9.1 rounds better by default, in several instructions; 0.2.0 has the chip's instruction only.
_INTRINSIC = getattr(getattr(pypto, "PrecisionType", None), "INTRINSIC", None)
div = _where_taken(pypto.div, precision_type=_INTRINSIC)
reciprocal = _where_taken(pypto.reciprocal, precision_type=_INTRINSIC)


@functools.cache
def signature(kernel: Callable) -> dict[str, str]:
    """Name -> dtype, by torch's name, of the tensors of a PyPTO kernel, in their order.

    0.2.0, CANN 9.1 and 9.2 show them in a private attribute only.
    """
    names = {dtype: name for name, dtype in PYPTO_DTYPES.items()}
    annotated = kernel._original_func.__annotations__
    return {name: names[tensor.dtype] for name, tensor in annotated.items()}


def product_tile(dtype: str) -> int:
    """Rows and columns of the tiles in which a product loads its operands: 32 bytes."""
    return 32 if dtype == "int8" else 16


def behind(count: int, tile: int = 16) -> int:
    """Rows or columns that a product loads from behind the ``count`` of its operand.

    0.2.0: operands are loaded in whole tiles (``TLoadND2NZ``), the last one from behind the tensor
    if it is not full; mended in CANN 9.1. Callers append so many, never to a cache; tiles divide
    the columns of weights (:func:`.tiling.cube_tile`).
    """
    return -count % tile


# 0.2.0: a row of fewer indices is compared with one of another static width, which is no valid C++;
# CANN 9.1 compiles 16, and was wrong for the second of two tokens.
LEAST_INDICES = 64


def padded_indices(count: int) -> int:
    """The width of a row of ``count`` indices: a multiple of 16, at least ``LEAST_INDICES``."""
    return max(round_up(count, 16), LEAST_INDICES)


def pieces(index, size: int, parts: int) -> list:
    """Indices of parts of rows, in a cache seen as ``parts`` rows for each of its own: per part a
    list of int32 tensors with ``size`` consecutive indices, the last one shorter.

    Each is a tensor of its own. 0.2.0: several gathers in one operand of a product take the indices
    from the first tensor of the graph if they are views of one tensor; mended in CANN 9.1.
    """
    if parts > 1:
        # as integers, since float32 could not hold the products; all at once, so one task
        index = pypto.mul(pypto.cast(index, I32), parts)
    starts = range(0, index.shape[1], size)
    shapes = [[1, min(size, index.shape[1] - start)] for start in starts]
    views = [pypto.view(index, s, [0, start]) for start, s in zip(starts, shapes, strict=True)]
    if parts == 1:
        return [[pypto.cast(view, I32) for view in views]]
    return [[pypto.add(view, part) for view in views] for part in range(parts)]


def gathered(rows, index: list, *, table, block_size: int, transposed: bool):
    """The rows of a paged cache at ``index``, from :func:`pieces`, as right operand of a matmul.

    Each gather takes whole rows of the cache seen by parts. CANN 9.1 and 9.2:
    ``gather_in_l1`` takes its start column as 0, so that the second and later output tiles repeat
    the first; 0.2.0 is right.
    """
    parts = len(index)
    width, block_size = rows.shape[1] // parts, block_size * parts
    if parts > 1:
        rows = pypto.reshape(rows, [rows.shape[0] * parts, width], inplace=True)
    options = dict(is_b_matrix=True, is_trans=transposed)
    found = [
        [gather_in_l1(rows, piece, table, block_size, width, **options) for piece in part]
        for part in index
    ]
    if parts == len(found[0]) == 1:
        return found[0][0]
    keys = sum(piece.shape[1] for piece in index[0])
    joined = pypto.tensor([keys, parts * width], rows.dtype, "rows")
    for column, part in enumerate(found):
        for i, piece in enumerate(part):
            pypto.assemble(piece, [i * index[0][0].shape[1], column * width], joined)
    return joined


def bounded(x, rows: int, columns: int, first: int = 0):
    """``columns`` of the argument ``x`` from ``first`` on, of at most ``rows`` rows, to gather from
    in UB.

    0.2.0: no address is generated for an argument that is gathered whole; not tried on CANN 9.1.
    """
    return pypto.view(x, [rows, columns], [0, first], valid_shape=[x.shape[0], columns])


def computed(x):
    """The float32 values of ``x``, a result of a gather in UB or a part of a moved tensor, to be
    written.

    0.2.0: these are written by arithmetic only; not tried on CANN 9.1.
    """
    x = x if x.dtype == F32 else pypto.cast(x, F32)
    return pypto.mul(x, 1.0)


def floats(x):
    """The bytes ``x`` as float32, of which views may be taken.

    0.2.0: a view of a view is of the first type; not tried on CANN 9.1.
    """
    return pypto.add(pypto.view(input=x, dtype=F32), 0.0)


def words(x):
    """The bytes of ``x`` as float32 to be written, never the other way round.

    0.2.0: narrow rows are viewed wrongly as a type of fewer bytes; not tried on CANN 9.1.
    """
    return pypto.clone(pypto.view(input=x, dtype=F32))


def filled(like, value: float):
    """``value`` in the shape of ``like``, whose elements are finite, to divide by or into.

    0.2.0: the quotient of a number and a tensor is the tensor's reciprocal times the number, which
    rounds twice; not tried on CANN 9.1.
    """
    return pypto.add(pypto.mul(like, 0.0), value)


def rounded_to_int8(x):
    """The integers next to ``x``, ties to even, as int8.

    0.2.0: casts to int8 exist from float16 only; not tried on CANN 9.1.
    """
    x = pypto.cast(x, I32, pypto.CastMode.CAST_RINT)
    return pypto.cast(pypto.cast(x, F16), I8, pypto.CastMode.CAST_TRUNC)


RADIX = 4096  # float32 counts to RADIX**2 exactly


def number(value):
    """The symbolic scalar ``value``, clamped to what float32 counts exactly, as ``[1, 1]``.

    0.2.0: element-wise operations take no symbolic scalars, and the interpreter fills with 0 for
    one; not tried on CANN 9.1. The valid elements of two rows are counted instead. Each row holds
    one more, since none may be empty.
    """
    value = value.max(0).min(RADIX * (RADIX - 2))
    pypto.set_vec_tile_shapes(1, RADIX)
    total = None
    for digit, weight in (value % RADIX, 1.0), (value // RADIX, float(RADIX)):
        row = pypto.full([1, RADIX], weight, F32, valid_shape=[1, digit + 1])
        row = pypto.sum(row, dim=-1, keepdim=True)
        total = row if total is None else pypto.add(total, row)
    return pypto.add(total, -1.0 - RADIX)


def begin_sort(token: int) -> None:
    """``begin_task`` for the sort of a tile's ``token``: its row passes through memory.

    0.2.0: a row sorted in the task that made it loses its valid shape (``InferParamIndex``), and
    keys that the token does not see are selected; mended in CANN 9.1.
    """
    begin_task(2 + token)


def padded_row(row, valid):
    """``row``, -inf from the element ``valid`` on, to be sorted.

    0.2.0: top-k of k elements wants k valid ones; not tried on CANN 9.1.
    """
    row = pypto.view(row, row.shape, [0, 0], valid_shape=[1, valid])
    return pypto.fillpad(row, "constant", float("-inf"))


def places_or_minus_one(places, values, least: float):
    """int32 ``places``, -1 where ``values`` are below ``least``.

    0.2.0: the compiler loses the second valid shape in a graph, which would mark these places; not
    tried on CANN 9.1.
    """
    places = pypto.where(pypto.lt(values, least), -1.0, pypto.cast(places, F32))
    return pypto.cast(places, I32)


def infinite_where(condition, other):
    """-inf where ``condition`` holds, else ``other``.

    0.2.0: ``full`` of -inf is -inf in the generated code and the lowest finite number in the
    interpreter; not tried on CANN 9.1.
    """
    return pypto.where(condition, float("-inf"), other)


def assemble_side_by_side(parts, at: list, out) -> None:
    """Writes ``parts`` next to each other, the first one at ``at``.

    0.2.0: ``concat`` forgets how many rows are valid; not tried on CANN 9.1.
    """
    *lead, column = at
    for part in parts:
        pypto.assemble(part, [*lead, column], out)
        column += part.shape[-1]


def after_all(name: str):
    """A loop of one iteration that waits for all tasks before it.

    0.2.0: a reader of an argument with a dynamic dim waits for its last writer only; the smallest
    program is right on CANN 9.1, which is no proof.
    """
    return loop(name, 1, submit_before_loop=True)
