"""The op over stored weights. :mod:`custom_pypto.ops` exports it."""

from torch import Tensor

from .schemas import op_function

__all__ = ["weight_only_linear"]


@op_function
def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None = None,
    *,
    experts: Tensor | None = None,
    block_size: int = 128,
    int8_x: bool = False,
) -> Tensor:
    r"""``x @ W.T`` for a ``W [N, K]`` as it is stored, in 16 bits or fewer; CPU only, no gradient.

    ========================  =====================  ===============================================
    ``weight``                ``scales``             :math:`W_{n,k}` for the stored :math:`v_{n,k}`
    ========================  =====================  ===============================================
    bfloat16 ``[N, K]``       None                   :math:`v`
    int8 ``[N, K]``           float32 ``[N]``        :math:`v\,s_n`
    float8_e4m3fn ``[N, K]``  float32                :math:`v\,s_{n/b,\,k/b}`, b ``block_size``
                              ``[N / b, K / b]``
    uint8 ``[N, K / 2]``      float8_e8m0fnu         :math:`v\,s_{n,\,k/32}`, v of e2m1
                              ``[N, K / 32]``
    uint8 ``[N, K / 2]``      bfloat16               :math:`(v - 8)\,s_{n,\,k/G,\,0} +
                              ``[N, K / G, 2]``      s_{n,\,k/G,\,1}`, v of 0 to 15
    ========================  =====================  ===============================================

    The first two 8-bit and 4-bit formats are those of DeepSeek's published checkpoints: e4m3 in
    square blocks (arXiv:2412.19437, section 3.3), e2m1 with a scale for 32 values (OCP Microscaling
    Formats, version 1.0). Two values share a byte, the first one in its low bits. ``N / b`` and
    ``K / b`` round up.

    Products have a float32 sum. For up to 16 rows the weight is read once, as it is stored, and x
    is rounded to 16 bits with a scale for up to 128 values where the weight is int8 or has 4 bits:
    each product is within 2**-12.4 of the norms' product. More rows are multiplied by float32
    copies of parts of the weight, or, if x is in bfloat16 and the CPU multiplies that faster, by
    bfloat16 ones, within 2**-9; a weight in bfloat16 then without a copy, from 5 rows on. The bits
    are the same on any number of threads.

    Args:
        x: ``[.., K]``; bfloat16, float16 or float32; K a multiple of 32 up to 2**30.
        weight: ``[N, K]``, or ``[E, N, K]`` with ``experts``; last dim contiguous, or of bfloat16
            the dim before it.
        scales: of the format, with a leading E if ``weight`` has it; K / G groups for a G that is a
            multiple of 32.
        experts: int32 or int64 ``[.., k]``, the matrix for each product. x is ``[.., K]``, one row
            for k products, or ``[.., k, K]``. A matrix that does not exist gives zeros.
        block_size: rows and columns of a block of float8_e4m3fn, a multiple of 32 up to 1024. The
            bytes 0x7F and 0xFF, NaN in float8_e4m3fn, count as 480 and -480.
        int8_x: also rounds x to int8, to the nearest multiples of the largest magnitude over 127:
            of each row for a weight in int8, if there are more than 16 tokens (W8A8: with AMX or
            VNNI prompts take less time); of each 32 values for one of 4 bits (W4A8: without AMX
            tokens and prompts take less time). A row with NaN or infinity gives NaN.
    Returns:
        ``[.., N]``, with experts ``[.., k, N]``, in the dtype of x.
    Raises:
        RuntimeError: a constraint above is violated; the message names the argument.

    Example:
        >>> import torch
        >>> weight = torch.arange(64, dtype=torch.int8).view(2, 32)
        >>> weight_only_linear(torch.ones(32), weight, torch.tensor([1.0, 0.5]))
        tensor([496., 760.])
    """
