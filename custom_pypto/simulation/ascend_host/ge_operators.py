"""The GE operators that torchair emits, computed with torch on NPU tensors."""

import functools
import inspect
import re
from collections.abc import Callable

import torch
from torch import Tensor


def dtype_of(number: int) -> torch.dtype:
    """The dtype of GE's number."""
    from torchair.ge._ge_graph import ge_type_to_torch_type

    return ge_type_to_torch_type(number)


def _ints(values: Tensor) -> list[int]:
    return values.flatten().tolist()  # GE takes a scalar for one value


def _assign_add(ref, value, use_locking):
    ref.add_(value)
    return ()


def _gather(x, indices, axis, is_preprocessed, negative_index_support, batch_dims=0):
    axis, places = axis.item() % x.dim(), indices.flatten().long()
    if negative_index_support:
        places = torch.where(places < 0, places + x.size(axis), places)
    rows = x.index_select(axis, places)
    return rows.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def _gather_rows(
    x, indices, validate_indices, is_preprocessed, negative_index_support, batch_dims=0
):
    return x[indices.long()]


def _index(x, indices, indices_mask):
    given = iter(indices)
    return x[tuple(next(given).long() if mask else slice(None) for mask in indices_mask)]


def _layer_norm(x, normalized_shape, gamma, beta, epsilon):
    y, *statistics = torch.native_layer_norm(x, _ints(normalized_shape), gamma, beta, epsilon)
    return y, *(statistic.float() for statistic in statistics)


def _linear(x1, x2, bias, transpose_x1, transpose_x2):
    y = _matmul(x1, x2, transpose_x1, transpose_x2)
    return y if bias is None else y + bias


def _matmul(x1, x2, adj_x1, adj_x2):
    return torch.matmul(x1.mT if adj_x1 else x1, x2.mT if adj_x2 else x2)


def _reduce_mean(x, axes, keep_dims, noop_with_empty_axes):
    if noop_with_empty_axes and axes.numel() == 0:
        return x
    return x.mean(_ints(axes), keep_dims)  # torch, too, reduces all axes if none are given


def _scatter_nd_update(var, indices, updates, use_locking):
    torch.ops.npu.npu_scatter_nd_update_(var, indices, updates)
    return ()


def _slice(
    x,
    begin,
    end,
    axes,
    strides,
    begin_mask=0,
    end_mask=0,
    ellipsis_mask=0,
    new_axis_mask=0,
    shrink_axis_mask=0,
):
    parts = [slice(None)] * x.dim()
    for axis, *part in zip(*(_ints(t) for t in (axes, begin, end, strides)), strict=True):
        parts[axis] = slice(*part)
    return x[tuple(parts)]


def _split(x, size_splits, split_dim, num_split):
    sizes, dim = _ints(size_splits), split_dim.item()
    rest = x.size(dim) - sum(size for size in sizes if size != -1)  # -1: what is left
    return x.split([rest if size == -1 else size for size in sizes], dim)


def _topk(x, k, dim, largest, sorted, sort_policy):
    values, indices = x.topk(k.item(), dim, largest, sorted)
    return values, indices.int()


# GE's prototypes of the operators that torchair looks up before it makes a node of them: names of
# the inputs, with ? those of optional ones, of the outputs, and of the attributes with their kinds
PROTOTYPES = {
    "LightningIndexer": (
        "query key weights actual_seq_lengths_query? actual_seq_lengths_key? block_table?",
        "sparse_indices sparse_values",
        "layout_query:STRING layout_key:STRING sparse_count:INT sparse_mode:INT pre_tokens:INT "
        "next_tokens:INT return_values:BOOL",
    ),
    "SparseFlashAttention": (
        "query key value sparse_indices block_table? actual_seq_lengths_query? "
        "actual_seq_lengths_kv? query_rope? key_rope? sinks?",
        "attention_out softmax_max softmax_sum",
        "scale_value:FLOAT sparse_block_size:INT layout_query:STRING layout_kv:STRING "
        "sparse_mode:INT pre_tokens:INT next_tokens:INT attention_mode:INT return_softmax_lse:BOOL",
    ),
}


def _standard(type: str, function: str, **renamed: str) -> Callable:
    """torch_npu's op, with the prototype's names of its arguments but for those ``renamed``."""
    inputs, _, attributes = PROTOTYPES[type]
    required = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            name.rstrip("?"),
            inspect.Parameter.KEYWORD_ONLY,
            default=None if name.endswith("?") else required,
        )
        for name in [*inputs.split(), *re.findall(r"(\w+):", attributes)]
    ]

    def compute(**given):
        op = getattr(torch.ops.npu, function)
        return op(**{renamed.get(name, name): value for name, value in given.items()})

    compute.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return compute


# What each type computes, as GE documents it; a new type needs a line here only. The parameters are
# the inputs and attributes of GE's prototype by their names (a dynamic input is a list; else_ is
# GE's else); a default is the only supported value of that attribute. A function returns the
# outputs, except those that are also inputs: it writes these in place.
OPERATORS: dict[str, Callable] = {
    "Add": lambda x1, x2: x1 + x2,
    "AssignAdd": _assign_add,
    "BatchMatMul": _matmul,
    "BroadcastTo": lambda x, shape: x.expand(_ints(shape)),
    "Cast": lambda x, dst_type: x.to(dtype_of(dst_type)),
    "ClipByValueV2": lambda x, clip_value_min, clip_value_max: x.clamp(
        clip_value_min, clip_value_max
    ),
    "ConcatV2": lambda x, concat_dim, N: torch.cat(x, concat_dim.item()),
    "Cos": lambda x: x.cos(),
    "Cumsum": lambda x, axis, exclusive=False, reverse=False: x.cumsum(axis.item(), dtype=x.dtype),
    "Exp": lambda x, base=-1.0, scale=1.0, shift=0.0: x.exp(),
    "Fill": lambda dims, value: value.reshape(()).expand(_ints(dims)),
    "FloorDiv": lambda x1, x2: x1 // x2,
    "FloorMod": lambda x1, x2: x1 % x2,
    "Gather": _gather_rows,
    "GatherElements": lambda x, index, dim: x.gather(dim, index.long()),
    "GatherV2": _gather,
    "Greater": lambda x1, x2: x1 > x2,
    "GreaterEqual": lambda x1, x2: x1 >= x2,
    "Identity": lambda x: x,
    "IndexByTensor": _index,
    "LayerNormV4": _layer_norm,
    "LightningIndexer": _standard(
        "LightningIndexer", "npu_lightning_indexer", return_values="return_value"
    ),
    "Less": lambda x1, x2: x1 < x2,
    "LessEqual": lambda x1, x2: x1 <= x2,
    "Log1p": lambda x: x.log1p(),
    "LogicalAnd": lambda x1, x2: x1 & x2,
    "LogicalNot": lambda x: ~x,
    "MaskedFill": lambda x, mask, value: x.masked_fill(mask, value.reshape(())),
    "MatMul": _linear,
    "Maximum": lambda x1, x2: x1.maximum(x2),
    "Mul": lambda x1, x2: x1 * x2,
    "Muls": lambda x, value: x * value,
    "Neg": lambda x: -x,
    "Pack": lambda x, axis, N: torch.stack(x, axis),
    "Pow": lambda x1, x2: x1.pow(x2),
    "Range": lambda start, limit, delta: torch.arange(
        start.item(), limit.item(), delta.item(), dtype=start.dtype, device=start.device
    ),
    "RealDiv": lambda x1, x2: x1 / x2,
    "ReduceMean": _reduce_mean,
    "ReduceSum": lambda x, axes, keep_dims: x.sum(_ints(axes), keep_dims, dtype=x.dtype),
    "Reshape": lambda x, shape, axis=0, num_axes=-1: x.reshape(_ints(shape)),
    "Rsqrt": lambda x: x.rsqrt(),
    "ScatterElements": lambda data, indices, updates, axis, reduction="none": data.scatter(
        axis, indices.long(), updates
    ),
    "ScatterNdUpdate": _scatter_nd_update,
    "SelectV2": lambda condition, then, else_: then.where(condition, else_),
    "Shape": lambda x, dtype: torch.tensor(x.shape, dtype=dtype_of(dtype), device=x.device),
    "Sigmoid": lambda x: x.sigmoid(),
    "Sin": lambda x: x.sin(),
    "SoftmaxV2": lambda x, axes, half_to_float=False: x.softmax(*axes),
    "SparseFlashAttention": _standard("SparseFlashAttention", "npu_sparse_flash_attention"),
    "SplitV": _split,
    "Sqrt": lambda x: x.sqrt(),
    "Squeeze": lambda x, axis: x.squeeze(axis) if axis else x.squeeze(),
    "StridedSliceV2": _slice,
    "Sub": lambda x1, x2: x1 - x2,
    "Swish": lambda x, scale=1.0: torch.nn.functional.silu(x),
    "Sxpy": lambda x1, x2, alpha: x1 - alpha * x2,
    "TensorMove": lambda x: x.clone(),
    "TopKV2": _topk,
    "Transpose": lambda x, perm: x.permute(_ints(perm)),
    "Unpack": lambda x, num, axis: x.unbind(axis),
    "Unsqueeze": lambda x, axes: functools.reduce(Tensor.unsqueeze, axes, x),
    "ZerosLike": lambda x: torch.zeros_like(x),
}
