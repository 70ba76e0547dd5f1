import torch
from torch import Tensor

from .sequences import key_slots, query_tokens


def npu_sparse_flash_attention_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "PA_BSND",
    sparse_mode: int = 3,
) -> Tensor:
    """Softmax attention of each token over the rows of the latent cache that its indices name."""
    batch = len(actual_seq_lengths_query) if layout_query == "TND" else query.size(0)
    slots = key_slots(key, layout_kv, actual_seq_lengths_kv, block_table, batch)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    latent = key.reshape(-1, key.size(-1))
    v = latent if value is None else value.reshape(-1, value.size(-1))
    k, q = latent, query
    if query_rope is not None:
        k = torch.cat([latent, key_rope.reshape(-1, key_rope.size(-1))], -1)
        q = torch.cat([query, query_rope], -1)
    q, indices = q.flatten(0, -3), sparse_indices.flatten(0, -3)[:, 0].long()
    rows = out.view(-1, *query.shape[-2:])
    lengths_kv = [len(s) for s in slots]
    for token in query_tokens(
        query, layout_query, actual_seq_lengths_query, lengths_kv, sparse_mode
    ):
        index = indices[token.row]
        before_end = (index == -1).cumsum(0) == 0  # -1 ends the row
        index = index[before_end & (index >= 0) & (index < token.visible)]
        slot = slots[token.sequence][index]
        slot = slot[slot >= 0]
        if len(slot):
            logits = q[token.row].float() @ k[slot].float().T * scale_value
            rows[token.row] = (logits.softmax(-1) @ v[slot].float()).to(out.dtype)
    return out
