"""``npu_dense_lightning_indexer_grad_kl_loss_pto`` on an NPU."""

import torch
from torch import Tensor

from . import every_key
from .common import Arguments, KernelCall, Limits, by_head, log_of_sums, padded, program, rows
from .key_sequences import zero_sums

OP = "npu_dense_lightning_indexer_grad_kl_loss_pto"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.heads(128)
    every_key.check(limits)


def kernel_call(a: Arguments, results: tuple[Tensor, ...]) -> KernelCall | None:
    keys = every_key.key_sequences(a)
    *gradients, loss = results
    loss.zero_()  # the program adds to it
    if a.query.numel() == 0 or keys.empty:
        for gradient in gradients:
            gradient.zero_()
        return None
    d_query, d_key, d_weights = gradients
    written = dict(
        d_query=rows(d_query),
        d_key=rows(d_key),
        d_weights=d_weights.view(-1, 1),
        loss=loss.view(1, 1),
    )
    facts = program(OP).Facts(
        **every_key.common_facts(a, keys),
        attention_heads=a.query.size(-2),
        scale=a.scale_value,
    )
    size = facts.tiling.chunk
    common = every_key.common_tensors(a, keys, size)
    tensors = common | _attention(a, facts, size) | _index(a, facts, common, size)
    return KernelCall(facts, tensors | written)


def _attention(a: Arguments, facts, size: int) -> dict[str, Tensor]:
    query = a.query if a.query_rope is None else torch.cat([a.query, a.query_rope], -1)
    key = a.key if a.key_rope is None else torch.cat([a.key, a.key_rope], -1)
    # heads behind those of a token have a sum of 0
    statistics = (
        by_head(x.unsqueeze(-1), facts.attention_rows) for x in (a.softmax_max, a.softmax_sum)
    )
    return dict(
        attending=by_head(query, facts.attention_rows),
        attended=padded(rows(key), rows=size),  # the last tile ends behind the keys
        attention_lse=log_of_sums(*statistics),
    )


def _index(a: Arguments, facts, common: dict[str, Tensor], size: int) -> dict[str, Tensor | None]:
    def of_tokens(x: Tensor) -> Tensor:
        return every_key.without_padding(x, a.layout, common["query_lengths"], facts.ragged)

    counts = torch.div(common["key_lengths"], a.cmp_ratio, rounding_mode="floor")
    if a.layout == "TND":
        counts = counts + common["key_starts"]
    ragged = a.actual_seq_klen is not None
    key = every_key.without_padding(a.key_index, a.layout, counts, ragged)
    tokens = a.query_index[..., 0, 0].numel()
    count = len(rows(key)) + size
    return dict(
        query=by_head(of_tokens(a.query_index), facts.rows),
        weights=by_head(of_tokens(a.weights.unsqueeze(-1)), facts.rows),
        key=padded(rows(key), rows=size),
        index_lse=log_of_sums(a.softmax_max_index, a.softmax_sum_index).view(-1, 1),
        places=torch.arange(count, dtype=torch.int32, device=key.device),
        loss_terms=torch.zeros(1, tokens, dtype=torch.float32, device=key.device),
        **zero_sums(a.key_index, size, dict(sums=a.key_index.size(-1))),
    )
