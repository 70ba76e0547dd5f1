"""A plugin of vLLM that replaces the ops by plain torch, one sequence after the other.

For bench_serving.py alone: what the ops are worth inside an engine.
"""

import torch

import custom_pypto


def rows(cache, table, length):
    """The first ``length`` rows of a sequence, ``[length, width]`` float32."""
    blocks = table[: -(-length // cache.shape[1])].long()
    return cache[blocks].flatten(0, 2)[:length].float()


def sequences(query_ends, lengths):
    """First and last query token and number of keys of each sequence."""
    ends = query_ends.tolist()
    return zip([0, *ends], ends, lengths.tolist(), strict=False)


def lightning_indexer(query, key, weights, **call):
    selected = query.new_full((len(query), 1, call["sparse_count"]), -1, dtype=torch.int32)
    steps = sequences(call["actual_seq_lengths_query"], call["actual_seq_lengths_key"])
    for sequence, (start, end, length) in enumerate(steps):
        keys = rows(key, call["block_table"][sequence], length)
        dots = torch.einsum("thd,sd->ths", query[start:end].float(), keys).relu()
        scores = torch.einsum("ths,th->ts", dots, weights[start:end].float())
        hidden = torch.arange(length) > torch.arange(length - (end - start), length)[:, None]
        scores.masked_fill_(hidden, -torch.inf)
        best, position = scores.topk(min(call["sparse_count"], length))
        position = position.masked_fill(best == -torch.inf, -1)
        selected[start:end, 0, : position.shape[1]] = position.int()
    return selected


def sparse_flash_attention(query, key, value, sparse_indices, scale_value, **call):
    out = torch.empty_like(query)
    steps = sequences(call["actual_seq_lengths_query"], call["actual_seq_lengths_kv"])
    for sequence, (start, end, length) in enumerate(steps):
        latent = rows(key, call["block_table"][sequence], length)
        rope = rows(call["key_rope"], call["block_table"][sequence], length)
        indices = sparse_indices[start:end, 0].long()
        read = torch.zeros(end - start, length + 1, dtype=torch.bool)
        read.scatter_(1, indices.where(indices >= 0, length), True)
        scores = torch.einsum("thd,sd->ths", query[start:end].float(), latent)
        scores += torch.einsum("thd,sd->ths", call["query_rope"][start:end].float(), rope)
        scores = (scores * scale_value).masked_fill(~read[:, None, :length], -torch.inf)
        out[start:end] = torch.einsum("ths,sd->thd", scores.softmax(-1), latent)
    return out


def register():
    custom_pypto.npu_lightning_indexer_pto = lightning_indexer
    custom_pypto.npu_sparse_flash_attention_pto = sparse_flash_attention
