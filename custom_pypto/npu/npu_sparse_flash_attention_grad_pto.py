"""``npu_sparse_flash_attention_grad_pto`` on an NPU."""

import torch
from torch import Tensor

from .common import Arguments, KernelCall, Limits, by_head, name, program, query_lengths, rows
from .key_sequences import KeySequences, zero_sums

OP = "npu_sparse_flash_attention_grad_pto"
OUTPUTS = "d_query", "d_key", "d_value", "d_query_rope", "d_key_rope", "d_sinks"


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    limits.dtype("query")
    limits.heads(128)
    limits.contiguous("key", "value", "key_rope")
    key_sequences(a).check(limits)


def key_sequences(a: Arguments) -> KeySequences:
    return KeySequences(a.key, a.layout_kv or a.layout, a.actual_seq_kvlen, a.block_table)


def kernel_call(a: Arguments, results: tuple[Tensor, ...]) -> KernelCall | None:
    keys, K = key_sequences(a), a.sparse_indices.size(-1)
    if a.query.numel() == 0 or keys.empty or K == 0:
        for gradient in results:
            gradient.zero_()
        return None
    given = dict(zip(OUTPUTS, results, strict=True))
    written = {n: rows(x) for n, x in given.items() if x.numel()}
    if a.sinks is not None:  # the program adds to it
        written["d_sinks"] = given["d_sinks"].zero_().view(1, -1)
    facts = program(OP).Facts(
        dtype=name(a.query.dtype),
        heads=a.query.size(-2),
        scale=a.scale_value,
        layout=a.layout,
        ragged=a.actual_seq_qlen is not None,
        sparse_mode=a.sparse_mode,
        rope=a.query_rope is not None,
        own_value=a.value is not None,
        sinks=a.sinks is not None,
        ready_on_host=Limits(OP, a).ready_on_host("actual_seq_qlen", "actual_seq_kvlen"),
        **keys.facts(),
    )
    of_keys = keys.tensors()
    inputs = _of_tokens(a, facts, of_keys["key_lengths"]) | of_keys | _of_cache(a, K)
    return KernelCall(facts, dict.fromkeys(OUTPUTS) | inputs | written)


def _of_tokens(a: Arguments, facts, key_lengths: Tensor) -> dict[str, Tensor | None]:
    def statistic(x: Tensor) -> Tensor:
        return by_head(x.unsqueeze(-1), facts.rows)

    rope, sinks, total = a.query_rope, a.sinks, statistic(a.softmax_sum)
    tokens = a.sparse_indices.numel() // a.sparse_indices.size(-1)
    return dict(
        query_and_d_out=by_head(torch.stack([a.query, a.d_out], -3), facts.rows),
        query_rope=None if rope is None else by_head(rope, facts.rows),
        softmax_max=statistic(a.softmax_max),
        softmax_sum=total,
        indices=rows(a.sparse_indices),
        query_lengths=query_lengths(a.actual_seq_qlen, a.layout, tokens, key_lengths),
        sinks=None if sinks is None else statistic(sinks),
        sink_terms=None if sinks is None else torch.zeros_like(total),
    )


def _of_cache(a: Arguments, count: int) -> dict[str, Tensor | None]:
    latent, own = a.key.size(-1), a.value is not None
    rope = 0 if a.key_rope is None else a.key_rope.size(-1)
    return dict(
        key=rows(a.key),
        key_rope=None if a.key_rope is None else rows(a.key_rope),
        value=rows(a.key if a.value is None else a.value),
        **zero_sums(a.key, count, dict(sums=latent + rope, value_sums=latent * own)),
    )
