"""The ops on NPU tensors: check the contract, allocate the output, launch the PyPTO kernel.

The only file between the ops and the PyPTO programs. Nothing is read back from the device: lengths,
block ids and indices are checked by the kernels themselves, so that a call neither waits for the
device nor stops a graph capture. PyPTO launches on the current stream and takes its workspace from
torch's allocator.

Every op takes ``launch(kernel, tensors, written)`` first, which runs a kernel on its arguments and
knows which of them it writes: :func:`on_device` here, the interpreter in
:mod:`custom_pypto.simulation`. ``check_<op>`` refuses what the contract allows and the NPU programs
cannot take; it reads nothing but sizes, strides and dtypes, and serves graph mode too.
"""

import functools
import importlib
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .requirements import pypto_problem

Launch = Callable[[Callable, Sequence[Tensor], Sequence[Tensor]], None]

DTYPES = (torch.bfloat16, torch.float16)


def on_device(kernel: Callable, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Launches the kernel on the current stream of the tensors' device."""
    with torch.npu.device(tensors[0].device):
        kernel(*tensors)


@functools.cache
def program(op: str):
    """The module of an op's PyPTO program; PyPTO is looked for and imported when first needed."""
    if problem := pypto_problem():
        raise RuntimeError(
            f"{op}: {problem['what']} to run on an NPU; {problem['remedy']}, "
            "or move the tensors to the CPU, whose kernels need no PyPTO"
        )
    return importlib.import_module(f"custom_pypto.kernels.{op}")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ready_on_host(op: str, **control: Tensor | None) -> bool:
    """Whether lengths, block tables and slots are final before the launch, by the caller's word.

    ``CUSTOM_PYPTO_READY_ON_HOST=1`` lets PyPTO's control flow read them before the work queued
    ahead of the kernel is done. It is wrong wherever an op on the device computes them, as
    ``lengths += 1`` does, and therefore off by default; such an op would copy a strided one.
    """
    ready = os.environ.get("CUSTOM_PYPTO_READY_ON_HOST", "0") == "1"
    for argument, tensor in control.items():
        require(
            not ready or tensor is None or tensor.is_contiguous(),
            op,
            argument,
            "contiguous with CUSTOM_PYPTO_READY_ON_HOST=1",
            f"strides {None if tensor is None else tensor.stride()}",
            "pass it contiguous, or unset the variable",
        )
    return ready


def contract(op: str, *args, **kwargs) -> Tensor:
    """Checks the arguments as on every device and returns the output, not yet written."""
    overload = getattr(torch.ops.custom_pypto, op).default
    return overload.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.Meta), *args, **kwargs)


def require(condition: bool, op: str, argument: str, expected: str, got, remedy: str) -> None:
    if not condition:
        raise RuntimeError(f"{op}: {argument} must be {expected} on an NPU, got {got}; {remedy}")


def require_dtype(op: str, argument: str, tensor: Tensor) -> None:
    require(
        tensor.dtype in DTYPES,
        op,
        f"{argument}.dtype",
        "bfloat16 or float16",
        name(tensor.dtype),
        "convert it, or run on the CPU",
    )


def require_paged(op: str, argument: str, layout: str) -> None:
    require(
        layout == "PA_BSND",
        op,
        argument,
        "PA_BSND",
        layout,
        "keep the keys in a paged cache with a block table",
    )


def require_contiguous(op: str, argument: str, cache: Tensor | None) -> None:
    require(
        cache is None or cache.is_contiguous(),
        op,
        argument,
        "contiguous",
        f"strides {None if cache is None else cache.stride()}",
        "give it a cache of its own instead of a part of a wider row",
    )


def require_heads(op: str, query: Tensor, most: int) -> None:
    heads = query.size(-2)
    argument = f"query.size({query.dim() - 2})"
    require(heads <= most, op, argument, f"at most {most}", heads, "run on the CPU")


def require_sortable(op: str, sparse_count: int, keys: int) -> None:
    """What PyPTO's sort takes: longer rows of candidates do not fit the vector cores' memory."""
    require(
        sparse_count <= 4096 or keys <= 8192,
        op,
        "sparse_count",
        f"at most 4096 for a block table of {keys} keys, more than 8192,",
        sparse_count,
        "select fewer keys, or run on the CPU",
    )


def require_checkable(op: str, table_width: int, keys: int, blocks: int) -> None:
    """A row of the table is checked at once, in float32, which is exact up to 2^24."""
    require(
        table_width <= 32768,
        op,
        "block_table.size(1)",
        "at most 32768",
        table_width,
        "use larger blocks or a smaller table",
    )
    require(
        keys + blocks <= 2**24 - 2**13,
        op,
        "block_table",
        "of fewer than 16 million keys and cache blocks together",
        f"{keys} keys and {blocks} blocks",
        "use a smaller table or cache",
    )


def rows(tensor: Tensor) -> Tensor:
    """``[..., W]`` as ``[rows, W]``."""
    return tensor.contiguous().view(-1, tensor.size(-1))


def query_lengths(lengths: Tensor | None, layout: str, tokens: int, otherwise: Tensor) -> Tensor:
    """What the kernels take: lengths, or prefix sums that do not decrease."""
    if lengths is None:
        return otherwise.contiguous()  # of the right shape, and not read
    if layout == "TND":
        return lengths.clamp(0, tokens).cummax(0).values
    return lengths.contiguous()


def check_add_custom(self: Tensor) -> None:
    require(
        self.dtype in (*DTYPES, torch.float32),
        "add_custom",
        "self.dtype",
        "bfloat16, float16 or float32",
        name(self.dtype),
        "convert it, or run on the CPU",
    )


def add_custom(launch: Launch, self: Tensor, other: Tensor) -> Tensor:
    op = "add_custom"
    out = contract(op, self, other)
    check_add_custom(self)
    if out.numel():
        flat = self.new_empty(out.numel())
        tensors = (self.reshape(-1).contiguous(), other.reshape(-1).contiguous(), flat)
        launch(program(op).kernel(dtype=name(self.dtype)), tensors, (flat,))
        out = flat.view(out.shape)
    return out


def add_custom_backward(launch: Launch, self: Tensor) -> tuple[Tensor, Tensor]:
    return self.clone(), self.clone()


def check_npu_lightning_indexer_pto(
    query: Tensor, key: Tensor, block_table: Tensor | None, layout_key: str, sparse_count: int
) -> None:
    op = "npu_lightning_indexer_pto"
    require_dtype(op, "query", query)
    require_paged(op, "layout_key", layout_key)
    dim = query.size(-1)
    require(dim == 128, op, f"query.size({query.dim() - 1})", "128", dim, "run on the CPU")
    require_heads(op, query, 64)
    require_contiguous(op, "key", key)
    keys = block_table.size(1) * key.size(1)
    require_sortable(op, sparse_count, keys)
    # positions go through float32
    require(
        keys <= 2**24, op, "block_table", "of at most 16 million keys", keys, "use a smaller table"
    )


def npu_lightning_indexer_pto(
    launch: Launch,
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
    op = "npu_lightning_indexer_pto"
    out = contract(
        op,
        query,
        key,
        weights,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_key,
        block_table=block_table,
        layout_query=layout_query,
        layout_key=layout_key,
        sparse_count=sparse_count,
        sparse_mode=sparse_mode,
    )
    check_npu_lightning_indexer_pto(query, key, block_table, layout_key, sparse_count)
    tokens, (batch, width) = out.numel() // sparse_count, block_table.shape
    if tokens == 0:
        return out
    if key.numel() == 0 or block_table.numel() == 0:
        return out.fill_(-1)
    kernel = program(op).kernel(
        dtype=name(query.dtype),
        weights_dtype=name(weights.dtype),
        heads=query.size(-2),
        block_size=key.size(1),
        sparse_count=sparse_count,
        layout=layout_query,
        ragged=actual_seq_lengths_query is not None,
        sparse_mode=sparse_mode,
        tokens=tokens,
        batch=batch,
        table_width=width,
        ready_on_host=ready_on_host(
            op,
            actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_key=actual_seq_lengths_key,
            block_table=block_table,
        ),
    )
    indices = out.view(-1, sparse_count)
    launch(
        kernel,
        (
            rows(query),
            weights.contiguous().view(-1, 1),
            rows(key),
            query_lengths(actual_seq_lengths_query, layout_query, tokens, actual_seq_lengths_key),
            actual_seq_lengths_key.contiguous(),
            block_table.contiguous(),
            indices,
        ),
        (indices,),
    )
    return out


def check_npu_sparse_flash_attention_pto(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    key_rope: Tensor | None,
    block_table: Tensor | None,
    layout_kv: str,
) -> None:
    op = "npu_sparse_flash_attention_pto"
    require_dtype(op, "query", query)
    require_paged(op, "layout_kv", layout_kv)
    require_heads(op, query, 128)
    for argument, cache in dict(key=key, value=value, key_rope=key_rope).items():
        require_contiguous(op, argument, cache)
    width = block_table.size(1)
    require_checkable(op, width, width * key.size(1), key.size(0))


def npu_sparse_flash_attention_pto(
    launch: Launch,
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
    op = "npu_sparse_flash_attention_pto"
    out = contract(
        op,
        query,
        key,
        value,
        sparse_indices,
        scale_value,
        block_table=block_table,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_kv=actual_seq_lengths_kv,
        query_rope=query_rope,
        key_rope=key_rope,
        sparse_block_size=sparse_block_size,
        layout_query=layout_query,
        layout_kv=layout_kv,
        sparse_mode=sparse_mode,
    )
    check_npu_sparse_flash_attention_pto(query, key, value, key_rope, block_table, layout_kv)
    count = sparse_indices.size(-1)
    if out.numel() == 0:
        return out
    if key.numel() == 0 or block_table.numel() == 0 or count == 0:
        return out.zero_()
    tokens = sparse_indices.numel() // count
    rope = query_rope is not None
    kernel = program(op).kernel(
        dtype=name(query.dtype),
        rope=rope,
        heads=query.size(-2),
        block_size=key.size(1),
        scale=scale_value,
        layout=layout_query,
        ragged=actual_seq_lengths_query is not None,
        sparse_mode=sparse_mode,
        tokens=tokens,
        table_width=block_table.size(1),
        ready_on_host=ready_on_host(
            op,
            actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_kv=actual_seq_lengths_kv,
        ),
    )
    result = out.view(-1, out.size(-1))
    launch(
        kernel,
        (
            rows(query),
            *([rows(query_rope)] if rope else []),
            rows(key),
            *([rows(key_rope)] if rope else []),
            rows(key if value is None else value),
            rows(sparse_indices),
            query_lengths(actual_seq_lengths_query, layout_query, tokens, actual_seq_lengths_kv),
            actual_seq_lengths_kv.contiguous(),
            block_table.contiguous(),
            result,
        ),
        (result,),
    )
    return out


def check_npu_sparse_attention_pto(
    x: Tensor,
    w_dq: Tensor,
    w_uk: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_table: Tensor,
    w_idx_k: Tensor,
    w_idx_proj: Tensor,
    index_k_cache: Tensor,
    sparse_count: int,
) -> None:
    op = "npu_sparse_attention_pto"
    require_dtype(op, "x", x)
    heads, index_heads, index_dim = w_uk.size(0), w_idx_proj.size(1), w_idx_k.size(1)
    require(index_dim == 128, op, "w_idx_k.size(1)", "128", index_dim, "run on the CPU")
    require(
        index_heads <= 64, op, "w_idx_proj.size(1)", "at most 64", index_heads, "run on the CPU"
    )
    require(heads <= 128, op, "w_uk.size(0)", "at most 128", heads, "run on the CPU")
    widths = {
        "x.size(2)": x.size(-1),
        "w_dq.size(1)": w_dq.size(1),
        "w_uk.size(1)": w_uk.size(1),
        "kr_cache.size(3)": kr_cache.size(-1),
    }
    for argument, width in widths.items():
        legal = width > 0 and width % 16 == 0
        require(legal, op, argument, "a positive multiple of 16", width, "run on the CPU")
    keys_of_table = block_table.size(1) * kv_cache.size(1)
    require_sortable(op, sparse_count, keys_of_table)
    require_checkable(op, block_table.size(1), keys_of_table, kv_cache.size(0))
    caches = dict(kv_cache=kv_cache, kr_cache=kr_cache, index_k_cache=index_k_cache)
    for argument, cache in caches.items():
        require_contiguous(op, argument, cache)


def npu_sparse_attention_pto(
    launch: Launch,
    x: Tensor,
    w_dq: Tensor,
    w_uq_qr: Tensor,
    w_uk: Tensor,
    w_dkv_kr: Tensor,
    gamma_cq: Tensor,
    gamma_ckv: Tensor,
    sin: Tensor,
    cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    block_table: Tensor,
    act_seqs: Tensor,
    w_idx_qb: Tensor,
    w_idx_k: Tensor,
    w_idx_proj: Tensor,
    in_gamma_k: Tensor,
    in_beta_k: Tensor,
    index_k_cache: Tensor,
    *,
    softmax_scale: float | None = None,
    eps: float = 1e-6,
    sparse_count: int = 2048,
) -> Tensor:
    op = "npu_sparse_attention_pto"
    out = contract(
        op,
        x,
        w_dq,
        w_uq_qr,
        w_uk,
        w_dkv_kr,
        gamma_cq,
        gamma_ckv,
        sin,
        cos,
        cache_index,
        kv_cache,
        kr_cache,
        block_table,
        act_seqs,
        w_idx_qb,
        w_idx_k,
        w_idx_proj,
        in_gamma_k,
        in_beta_k,
        index_k_cache,
        softmax_scale=softmax_scale,
        eps=eps,
        sparse_count=sparse_count,
    )
    check_npu_sparse_attention_pto(
        x,
        w_dq,
        w_uk,
        kv_cache,
        kr_cache,
        block_table,
        w_idx_k,
        w_idx_proj,
        index_k_cache,
        sparse_count,
    )
    heads, nope, latent = w_uk.shape
    index_heads, index_dim = w_idx_proj.size(1), w_idx_k.size(1)
    rope, tokens = kr_cache.size(-1), x.size(0) * x.size(1)
    if out.numel() == 0:
        return out
    if kv_cache.numel() == 0:
        return out.zero_()
    if block_table.numel() == 0:  # nothing is visible, but the caches are written
        act_seqs, block_table = torch.zeros_like(act_seqs), act_seqs.new_zeros(len(act_seqs), 1)
    if sin.dtype != cos.dtype:
        sin, cos = sin.float(), cos.float()
    kernel = program(op).kernel(
        dtype=name(x.dtype),
        angle_dtype=name(sin.dtype),
        slot_words=cache_index.element_size() // 4,
        heads=heads,
        index_heads=index_heads,
        block_size=kv_cache.size(1),
        scale=(nope + rope) ** -0.5 if softmax_scale is None else softmax_scale,
        eps=eps,
        sparse_count=sparse_count,
        hidden=x.size(-1),
        tokens=tokens,
        batch=x.size(0),
        table_width=block_table.size(1),
        ready_on_host=ready_on_host(
            op, cache_index=cache_index, act_seqs=act_seqs, block_table=block_table
        ),
    )
    caches = dict(
        kv_cache=rows(kv_cache), kr_cache=rows(kr_cache), index_k_cache=rows(index_k_cache)
    )
    result = out.view(-1, latent)
    launch(
        kernel,
        (
            rows(x),
            w_dq.contiguous(),
            w_uq_qr.contiguous(),
            rows(w_uk),
            w_dkv_kr.contiguous(),
            gamma_cq.contiguous().view(1, -1),
            gamma_ckv.contiguous().view(1, -1),
            rows(sin),
            rows(cos),
            cache_index.contiguous().view(1, -1).view(torch.int32),
            caches["kv_cache"],
            caches["kr_cache"],
            w_idx_qb.contiguous(),
            w_idx_k.contiguous(),
            w_idx_proj.contiguous(),
            in_gamma_k.contiguous().view(1, -1),
            in_beta_k.contiguous().view(1, -1),
            caches["index_k_cache"],
            # what one stage of the program leaves for the next
            x.new_empty(tokens, heads * latent),
            x.new_empty(tokens, heads, rope),
            x.new_empty(tokens, index_heads, index_dim),
            x.new_empty(tokens, index_heads, dtype=torch.float32),
            act_seqs.contiguous(),
            block_table.contiguous(),
            x.new_empty(tokens, sparse_count, dtype=torch.int32),
            result,
        ),
        (*caches.values(), result),
    )
    return out


def implementations(launch: Launch) -> dict[str, Callable]:
    """Of each op of the schema, the function that runs it with ``launch``."""
    ops = (
        add_custom,
        add_custom_backward,
        npu_lightning_indexer_pto,
        npu_sparse_flash_attention_pto,
        npu_sparse_attention_pto,
    )
    return {op.__name__: functools.partial(op, launch) for op in ops}


_library = torch.library.Library("custom_pypto", "IMPL")
for _name, _function in implementations(on_device).items():
    _library.impl(_name, _function, "PrivateUse1")
