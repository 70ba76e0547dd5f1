from collections.abc import Iterator

import torch
from torch import Tensor


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of the last dim as int8, and its scale, in float32.

    A row with an infinity or NaN has that as its scale; its products that are NaN become 0.
    """
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    # 127 / largest would be the reciprocal times 127, which rounds twice
    steps = torch.full_like(largest, 127)
    quantized = (rows * (steps / largest)).round().clamp(-127, 127).nan_to_num(0)
    return quantized.to(torch.int8), (largest / steps).squeeze(-1)


def rotated(x: Tensor, hadamard: Tensor | None) -> Tensor:
    return x if hadamard is None else (x.float() @ hadamard.float()).to(x.dtype)


def npu_quant_rows_pto(x: Tensor, *, hadamard: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, scales = quantize(rotated(x, hadamard))
    return rows, scales.half()


def hadamard_matrix(dim: int) -> Tensor:
    """Sylvester's, of a power of two, times ``dim ** -0.5``: symmetric and orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * dim**-0.5


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    for dtype in dtypes:
        for shape in ([1, 64, 128], [131, 128], [3, 2, 64, 128]):
            yield dtype, f"x {shape}", dict(x=index_rows(*shape).to(dtype))
        x = index_rows(40, 128).to(dtype)
        matrix = hadamard_matrix(128).to(dtype)
        yield dtype, "x [40, 128], hadamard", dict(x=x, hadamard=matrix)


def index_rows(*shape: int, seed: int = 1) -> Tensor:
    """Normal rows with channels of outliers, a row of zeros and magnitudes of any kind."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    x[..., ::37] *= 20
    rows = x.flatten(0, -2)
    rows[::7] = 0
    rows[1::7] *= 2.0 ** torch.randint(-30, 12, (len(rows[1::7]), 1), generator=g)
    return x


def error(got: tuple, expected: tuple, mine: dict, theirs: dict) -> tuple[float, float]:
    """The largest error in steps of the scale of its row."""
    steps = (dequantized_rows(*got) - dequantized_rows(*expected)).abs() / expected[1].double()[
        ..., None
    ]
    bound = 0.0
    if theirs.get("hadamard") is not None:
        # sums may round to a neighbour in the dtype of x, the largest one as well, then to another
        # of the 127 steps
        bound = 2 * 127 * torch.finfo(theirs["x"].dtype).eps + 1
    return float(steps.nan_to_num(nan=torch.inf).amax()), bound


def dequantized_rows(rows: Tensor, scales: Tensor) -> Tensor:
    return rows.double() * scales.double()[..., None]
