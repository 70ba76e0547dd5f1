import torch
from torch import Tensor

from .sequences import key_slots, query_tokens


def scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """``sum_h weights[h] * relu(query[h] . keys[j])`` of one token, in float32."""
    # + 0.0 turns -0 into +0: the two are equal scores
    return weights.float() @ torch.relu(query.float() @ keys.float().T) + 0.0


def npu_lightning_indexer_pto(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "PA_BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
) -> Tensor:
    """The best ``sparse_count`` positions by :func:`scores`; the lower position first if equal."""
    batch = len(actual_seq_lengths_query) if layout_query == "TND" else query.size(0)
    slots = key_slots(key, layout_key, actual_seq_lengths_key, block_table, batch)
    out = query.new_full((*query.shape[:-2], 1, sparse_count), -1, dtype=torch.int32)
    rows, q, w = out.view(-1, 1, sparse_count), query.flatten(0, -3), weights.flatten(0, -2)
    k = key.reshape(-1, key.size(-1))
    lengths_key = [len(s) for s in slots]
    for token in query_tokens(
        query, layout_query, actual_seq_lengths_query, lengths_key, sparse_mode
    ):
        slot = slots[token.sequence][: token.visible]
        position = (slot >= 0).nonzero().squeeze(1)
        score = scores(q[token.row], k[slot[position]], w[token.row])
        # torch.sort ranks NaN first; stable: the lower position first among equals
        best = torch.sort(score, descending=True, stable=True).indices[:sparse_count]
        rows[token.row, 0, : len(best)] = position[best].int()
    return out
