from collections.abc import Iterator

import torch
from torch import Tensor

from . import npu_sparse_flash_attention_pto as forward
from .checks import GRADIENT_ROUNDING, excess, of_sequences
from .sequences import selected_rows

DIFFERENTIABLE = ("query", "key", "value", "query_rope", "key_rope", "sinks")
# arguments of the forward that have another name here
RENAMED = {
    "actual_seq_lengths_query": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "layout_query": "layout",
}


def npu_sparse_flash_attention_grad_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int = 1,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    layout: str = "BSND",
    sparse_mode: int = 3,
    *,
    layout_kv: str | None = None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """By autograd in float64. The softmax is computed again: ``out`` and the statistics of another
    call show as an error."""
    given = dict(zip(DIFFERENTIABLE, (query, key, value, query_rope, key_rope, sinks), strict=True))
    leaves = {n: x.detach().double().requires_grad_() for n, x in given.items() if x is not None}
    flat = {n: _flat(n, x) for n, x in leaves.items()}
    g = d_out.double().flatten(0, -3)
    # zeros where no token selects a key
    total = torch.stack([(0 * x).sum() for x in leaves.values()]).sum()
    for row, slots, _ in selected_rows(
        query,
        key,
        sparse_indices,
        layout_query=layout,
        layout_kv=layout_kv or layout,
        actual_seq_lengths_query=actual_seq_qlen,
        actual_seq_lengths_kv=actual_seq_kvlen,
        block_table=block_table,
        sparse_mode=sparse_mode,
    ):
        probabilities, values, _ = _attention(flat, row, slots, scale_value)
        total = total + (probabilities @ values * g[row]).sum()
    found = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    absent = dict.fromkeys(DIFFERENTIABLE, query.new_empty(0)) | dict(
        sinks=query.new_empty(0).float()
    )
    return tuple(
        absent[name] if x is None else found[name].to(x.dtype) for name, x in given.items()
    )


def _flat(name: str, x: Tensor) -> Tensor:
    """Rows of the cache, rows of the query by head, or the sinks."""
    if name in ("key", "value", "key_rope"):
        return x.reshape(-1, x.size(-1))
    return x if name == "sinks" else x.flatten(0, -3)


def _attention(
    x: dict[str, Tensor], row: int, slots: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Probabilities ``[N1, keys]``, values ``[keys, L]``, and the sinks' probabilities ``[N1]``."""
    logits = x["query"][row] @ x["key"][slots].T
    if "query_rope" in x:
        logits = logits + x["query_rope"][row] @ x["key_rope"][slots].T
    logits = logits * scale
    if "sinks" in x:
        logits = torch.cat([logits, x["sinks"][:, None]], -1)
    probabilities = logits.softmax(-1)
    values = x.get("value", x["key"])[slots]
    n = len(slots)
    return probabilities[:, :n], values, probabilities[:, n] if "sinks" in x else None


def with_gradient(call: dict, d_out: Tensor) -> dict:
    """The arguments of the gradient of a call of ``npu_sparse_flash_attention_pto``."""
    call = dict(layout_kv="PA_BSND") | call | dict(return_softmax_lse=True)
    out, largest, total = forward.npu_sparse_flash_attention_pto(**call)
    del call["return_softmax_lse"]
    renamed = {RENAMED.get(name, name): x for name, x in call.items()}
    return renamed | dict(d_out=d_out, out=out, softmax_max=largest, softmax_sum=total)


def _with_gradient(call: dict) -> dict:
    g = torch.Generator().manual_seed(5)
    query = call["query"]
    return with_gradient(call, torch.randn(query.shape, generator=g).to(query.dtype))


def checks(dtypes: list[torch.dtype]) -> Iterator[tuple]:
    sizes = [([1], 1, 16), ([300, 0, 700], 1, 128), ([131, 5], 4, 16)]
    yield from of_sequences(dtypes, sizes, lambda *x: _with_gradient(forward.arguments(*x)))
    sinks = [([300, 3], 2, 128)]
    more = ", sinks, no RoPE"
    yield from of_sequences(dtypes, sinks, lambda *x: _with_gradient(forward.with_sinks(*x)), more)
    for dtype in dtypes:
        yield dtype, "packed, tokens [1, 2], keys [1100, 1500], K 1024", _packed(dtype)


def _packed(dtype: torch.dtype) -> dict:
    """Within the limits of torch_npu's op."""
    g = torch.Generator().manual_seed(6)
    tokens, keys, heads, latent, rope, K = [1, 2], [1100, 1500], 128, 512, 64, 1024

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    visible = [
        n - count + i + 1 for n, count in zip(keys, tokens, strict=True) for i in range(count)
    ]
    indices = [torch.randperm(n, generator=g)[:K] for n in visible]
    ends = [torch.tensor(x, dtype=torch.int32).cumsum(0).int() for x in (tokens, keys)]
    call = dict(
        query=normal(sum(tokens), heads, latent),
        key=normal(sum(keys), 1, latent),
        value=None,
        sparse_indices=torch.stack(indices).int().unsqueeze(1),
        scale_value=192**-0.5,
        query_rope=normal(sum(tokens), heads, rope),
        key_rope=normal(sum(keys), 1, rope),
        actual_seq_lengths_query=ends[0],
        actual_seq_lengths_kv=ends[1],
        layout_query="TND",
        layout_kv="TND",
    )
    return _with_gradient(call)


def error(got: tuple, expected: tuple, mine: dict, theirs: dict) -> tuple[float, float]:
    """Of finite elements, relative to the sum of the magnitudes of their terms."""
    dtype = theirs["query"].dtype
    flushed = _flushed(**theirs) if dtype == torch.bfloat16 else 0
    return excess(got, expected, _magnitudes(**theirs), flushed), GRADIENT_ROUNDING[dtype]


def _flushed(
    query: Tensor, key: Tensor, d_out: Tensor, sparse_indices: Tensor, scale_value: float, **call
) -> float:
    """What an element may lose: products of bfloat16 may take each number below 2^-126 as 0, an
    operand P or dS, a sum on its way, and a term of dP, which reaches dS by the scale."""
    others = [call.get(name) for name in ("value", "query_rope", "key_rope")]
    operands = [query, key, d_out, *(x for x in others if x is not None)]
    finite = [x.double().nan_to_num(0, 0, 0).abs().flatten() for x in operands]
    largest = float(torch.cat([*finite, torch.ones(1)]).max())
    terms = sparse_indices.size(-1) + 2 * query[..., 0].numel()  # of a query, of a key
    return 2**-126 * terms * (1 + 2 * scale_value * query.size(-1)) * largest


def _magnitudes(
    scale_value: float,
    d_out: Tensor,
    layout: str = "BSND",
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    **call,
) -> list[Tensor]:
    """The sums of the magnitudes of each gradient's terms."""
    flat = {
        name: _flat(name, call[name].double())
        for name in DIFFERENTIABLE
        if call.get(name) is not None
    }
    g = d_out.double().flatten(0, -3).abs()
    found = {name: torch.zeros_like(x) for name, x in flat.items()}
    same = {name: call.get(name) for name in ("query", "key", "sparse_indices", "block_table")}
    for row, slots, _ in selected_rows(
        **same,
        layout_query=layout,
        layout_kv=call.get("layout_kv") or layout,
        actual_seq_lengths_query=actual_seq_qlen,
        actual_seq_lengths_kv=actual_seq_kvlen,
        sparse_mode=call.get("sparse_mode", 3),
    ):
        p, values, of_sink = _attention(flat, row, slots, scale_value)
        dots = g[row] @ values.abs().T
        delta = (p * dots).sum(-1, keepdim=True)
        d_logits = scale_value * p * (dots + delta)
        for query, key in (("query", "key"), ("query_rope", "key_rope")):
            if query in flat:
                found[query][row] += d_logits @ flat[key][slots].abs()
                found[key].index_add_(0, slots, d_logits.T @ flat[query][row].abs())
        found["value" if "value" in flat else "key"].index_add_(0, slots, p.T @ g[row])
        if of_sink is not None:
            found["sinks"] += of_sink * delta[:, 0]
    zero = d_out.new_zeros(0)
    return [found[n].view_as(call[n]) if call.get(n) is not None else zero for n in DIFFERENTIABLE]
