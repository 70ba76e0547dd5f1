"""``npu_sparse_lightning_indexer_grad_kl_loss_pto`` on an NPU."""

import torch
from torch import Tensor

from .common import (
    Arguments,
    KernelCall,
    Limits,
    by_head,
    log_of_sums,
    name,
    program,
    query_lengths,
    rows,
)
from .key_sequences import KeySequences, as_tensor, zero_sums
from .npu_lightning_indexer_grad_pto import OUTPUTS

OP = "npu_sparse_lightning_indexer_grad_kl_loss_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    limits.heads(128)
    limits.heads(64, "query_index")
    limits.contiguous("key", "key_rope", "key_index")
    key_sequences(a).check(limits)


def key_sequences(a: Arguments) -> KeySequences:
    return KeySequences(a.key, a.layout, a.actual_seq_klen, cmp_ratio=a.cmp_ratio)


def kernel_call(a: Arguments, results: tuple[Tensor, ...]) -> KernelCall | None:
    keys, K = key_sequences(a), a.sparse_indices.size(-1)
    *gradients, loss = results
    loss.zero_()  # the program adds to it
    if a.query.numel() == 0 or keys.empty or K == 0:
        for gradient in gradients:
            gradient.zero_()
        return None
    d_query, d_key, d_weights = gradients
    written = dict(zip(OUTPUTS, (rows(d_query), rows(d_key), d_weights.view(-1, 1)), strict=True))
    written["loss"] = loss.view(1, 1)
    facts = program(OP).Facts(
        dtype=name(a.query.dtype),
        weights_dtype=name(a.weights.dtype),
        heads=a.query.size(-2),
        index_heads=a.query_index.size(-2),
        scale=a.scale_value,
        rope=a.query_rope is not None,
        layout=a.layout,
        ragged=a.actual_seq_qlen is not None,
        sparse_mode=a.sparse_mode,
        **keys.facts(),
    )
    of_keys, indices = keys.tensors(), rows(a.sparse_indices)
    lengths = as_tensor(a.actual_seq_qlen, a.query)
    index = dict(
        query_index=by_head(a.query_index, facts.index_rows),
        key_index=rows(a.key_index),
        weights=by_head(a.weights.unsqueeze(-1), facts.index_rows),
        indices=indices,
        query_lengths=query_lengths(lengths, a.layout, len(indices), of_keys["key_lengths"]),
        loss_terms=torch.zeros(1, len(indices), dtype=torch.float32, device=a.query.device),
    )
    sums = zero_sums(a.key_index, K, dict(sums=a.key_index.size(-1)))
    tensors = _attention(a, facts.rows) | index | of_keys | sums | written
    return KernelCall(facts, tensors)


def _attention(a: Arguments, heads: int) -> dict[str, Tensor | None]:
    rope = a.query_rope is not None
    # heads behind those of a token have a sum of 0
    statistics = (by_head(x.unsqueeze(-1), heads) for x in (a.softmax_max, a.softmax_sum))
    return dict(
        query=by_head(a.query, heads),
        query_rope=by_head(a.query_rope, heads) if rope else None,
        key=rows(a.key),
        key_rope=rows(a.key_rope) if rope else None,
        attention_lse=log_of_sums(*statistics),
    )
