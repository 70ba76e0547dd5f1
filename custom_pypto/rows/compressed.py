"""Compressed rows: those of consecutive groups of ``r`` tokens.

Row ``g`` is ``sum_i softmax_i(Z_i + bias_i) * C_i`` of values C and gates Z, the softmax per
channel, over the tokens ``i`` of group ``g``, with overlap also of the group before (DeepSeek-V4,
technical report, section 2.3). With overlap C, Z and the bias are twice as wide: half for the next
group's row, then half for the group's own. What is cached has a norm, and the rotation of the
position of its group's first token.
"""

import torch
from torch import Tensor


def pooled(values: Tensor, gates: Tensor, exists: Tensor, width: int) -> Tensor:
    """The rows ``[B, n, width]`` of n groups, before their norm.

    Args:
        values: ``[B, n, r, width]`` float32 C of their tokens; with overlap ``[B, n + 1, r, 2 *
            width]``, from the group before the first on.
        gates: of the same shape, Z and bias.
        exists: ``[B, n, r]`` bool, or of n + 1 groups: which tokens there are.
    """
    exists = exists[..., None]
    # memory of no token may hold anything
    values, gates = torch.where(exists, values, 0), torch.where(exists, gates, -torch.inf)
    if values.size(-1) > width:
        values, gates = (
            torch.cat([x[:, :-1, :, :width], x[:, 1:, :, width:]], 2) for x in (values, gates)
        )
    return (values * gates.softmax(2)).sum(2)
