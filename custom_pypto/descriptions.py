"""The only lists of ops, with the properties that a schema cannot express.

The schema (``REGISTER_OP`` in ``csrc/ops/<op>.cpp``) declares an op's arguments. Schemas and
entries determine the functions registered on NPUs, the converters of graph mode, the GE prototypes
and the logged ops.

This module imports the standard library only, so that it can be read where torch does not load.
"""

from typing import NamedTuple

Dtypes = tuple[str, ...]

# torch's names; dtypes of the NPU kernels, the CPU supports more
HALF: Dtypes = ("bfloat16", "float16")
FLOAT: Dtypes = (*HALF, "float32")
FLOAT16: Dtypes = ("float16",)
FLOAT32: Dtypes = ("float32",)
INT8: Dtypes = ("int8",)
INT32: Dtypes = ("int32",)
SLOTS: Dtypes = ("int32", "int64")
# of arguments that mean the same in every op that has them
BY_NAME: dict[str, Dtypes] = {
    "weights": FLOAT,
    "slots": SLOTS,
    "cache": INT8,
    **dict.fromkeys(("sparse_indices", "block_table"), INT32),
    **dict.fromkeys(("actual_seq_lengths_query", "actual_seq_lengths_key"), INT32),
    **dict.fromkeys(("actual_seq_lengths_kv", "actual_seq_qlen", "actual_seq_kvlen"), INT32),
    **dict.fromkeys(("softmax_max", "softmax_sum", "sinks"), FLOAT32),
    **dict.fromkeys(("softmax_max_index", "softmax_sum_index"), FLOAT32),
}


class Description(NamedTuple):
    """Properties of one op.

    Args:
        outputs: names and dtypes of the returned tensors (schemas have no names for them).
        dtypes: tensors whose dtypes on an NPU are other than bfloat16 and float16, or than those of
            ``BY_NAME``.
        absent: the value that stands for None in a GE attribute, which cannot hold None.
        notes: paragraphs for readers of the GE prototype, on facts that its declaration lacks.
    """

    outputs: dict[str, Dtypes]
    dtypes: dict[str, Dtypes] = {}
    absent: dict[str, object] = {}
    notes: tuple[str, ...] = ()

    def dtypes_of(self, argument: str) -> Dtypes:
        """Those of a tensor on an NPU."""
        return self.dtypes.get(argument) or BY_NAME.get(argument, HALF)


OPS = {
    "add_custom": Description(outputs={"z": FLOAT}, dtypes={"x": FLOAT, "y": FLOAT}),
    "npu_lightning_indexer_pto": Description(
        outputs={"sparse_indices": INT32, "sparse_values": HALF},
        notes=(
            "query and key share a dtype, weights have that one or float32. Without return_value "
            "sparse_values has no elements.",
        ),
    ),
    "npu_sparse_flash_attention_pto": Description(
        outputs={"attention_out": HALF, "softmax_max": FLOAT32, "softmax_sum": FLOAT32},
        notes=(
            "all floating-point tensors but sinks share a dtype. Without return_softmax_lse the "
            "statistics have no elements.",
        ),
    ),
    "npu_quant_lightning_indexer_pto": Description(
        outputs={"sparse_indices": INT32},
        dtypes={
            "query": INT8,
            "key": INT8,
            "query_dequant_scale": ("float16", "float32"),
            "key_dequant_scale": ("float16", "float32"),
        },
        notes=("the two scales share a dtype.",),
    ),
    "npu_quant_rows_pto": Description(
        outputs={"rows": INT8, "scales": FLOAT16},
        notes=("hadamard has the dtype of x.",),
    ),
    "npu_quant_index_update_pto": Description(
        outputs={},
        dtypes={"scale_cache": FLOAT16},
        notes=(
            "hadamard has the dtype of x.",
            "The caches are inputs and, under the same names, outputs: they are written in place.",
        ),
    ),
    "npu_lightning_indexer_prolog_pto": Description(
        outputs={"query": INT8, "query_scale": FLOAT16, "weights": FLOAT16},
        dtypes={
            "q_norm": (*HALF, "int8"),
            "q_norm_scale": FLOAT32,
            "wq_b": (*HALF, "int8"),
            "wq_b_scale": FLOAT32,
            "cos_idx_rope": FLOAT,
            "sin_idx_rope": FLOAT,
            "idx_k_cache": INT8,
            "idx_k_scale_cache": FLOAT16,
            "idx_k_cache_index": SLOTS,
        },
        notes=(
            "q_norm and wq_b are int8, with both scales, or have the dtype of token_x, without; "
            "all other floating-point inputs have that dtype, cos and sin that one or float32.",
            "The caches are inputs and, under the same names, outputs: they are written in place.",
        ),
    ),
    "npu_sparse_attention_pto": Description(
        outputs={"attention_out": HALF},
        dtypes={"sin": FLOAT, "cos": FLOAT, "cache_index": SLOTS, "act_seqs": INT32},
        absent={"softmax_scale": 0.0},
        notes=(
            "weights and caches have the dtype of x, sin and cos that one or float32.",
            "The caches are inputs and, under the same names, outputs: GE's way to say that an "
            "operator writes them in place. softmax_scale 0.0 stands for the schema's None, which "
            "no GE attribute can hold; the op itself takes positive scales only.",
        ),
    ),
    "npu_kv_quant_sparse_flash_attention_pto": Description(
        outputs={"attention_out": HALF},
        dtypes={
            "key": INT8,
            "value": INT8,
            "key_dequant_scale": FLOAT32,
            "value_dequant_scale": FLOAT32,
        },
        notes=(
            "the RoPE part of the rows of key has the dtype of query. value is key or absent, the "
            "dequantization scales are always absent: rows hold theirs.",
        ),
    ),
    "npu_kv_quant_update_pto": Description(
        outputs={},
        notes=("The cache is an input and, under the same name, an output.",),
    ),
}

_KL = Description(
    outputs={"d_query_index": HALF, "d_key_index": HALF, "d_weights": FLOAT, "loss": FLOAT32},
    absent={"actual_seq_qlen": (), "actual_seq_klen": ()},
    notes=(
        "all floating-point tensors but weights and the statistics share a dtype, weights have "
        "that one or float32.",
        "Lengths without an element stand for None of the schema: every row counts.",
    ),
)
_OF_INDEX = {"softmax_max_index": FLOAT32, "softmax_sum_index": FLOAT32}

# gradients and losses
TRAINING = {
    "npu_sparse_flash_attention_grad_pto": Description(
        outputs={
            "d_query": HALF,
            "d_key": HALF,
            "d_value": HALF,
            "d_query_rope": HALF,
            "d_key_rope": HALF,
            "d_sinks": FLOAT32,
        },
        absent={"layout_kv": ""},
        notes=(
            "all floating-point tensors but sinks and the statistics share a dtype.",
            'layout_kv "" stands for None of the schema: as layout. Gradients of absent inputs '
            "have no elements.",
        ),
    ),
    "npu_lightning_indexer_grad_pto": Description(
        outputs={"d_query": HALF, "d_key": HALF, "d_weights": FLOAT},
        dtypes={"dy": FLOAT},
        absent={"layout_key": ""},
        notes=(
            "query and key share a dtype, dy and weights have that one or float32.",
            'layout_key "" stands for None of the schema: as layout.',
        ),
    ),
    "npu_sparse_lightning_indexer_grad_kl_loss_pto": _KL,
    "npu_dense_lightning_indexer_softmax_lse_pto": Description(
        outputs=_OF_INDEX,
        absent=_KL.absent,
        notes=_KL.notes,
    ),
    "npu_dense_lightning_indexer_grad_kl_loss_pto": _KL,
}
OPS |= TRAINING
# linear layers over stored weights, on the CPU only: torch_npu has its own
WEIGHTS = {"weight_only_linear": Description(outputs={"out": FLOAT})}
ALL_OPS = OPS | WEIGHTS
# parts of a layer beside its attention, no public functions: they have one file in a layer of this
# package, custom_pypto/layer_ops.py, and no graph or format of their own; on the CPU, and on an NPU
# those of LAYER_KERNELS
LAYER_OPS = (
    "activate",
    "cache_slots",
    "collapse_streams",
    "convert_weight",
    "expanded_attention",
    "hyper_connection",
    "invariant_linear",
    "mix_streams",
    "pool_groups",
    "rms_norm",
    "rotate",
    "rotate_pairs",
    "route",
    "route_roots",
    "weighted_sum",
    "window_rows",
)

LAYER_KERNELS = {
    "hyper_connection": Description(outputs={"post": FLOAT32, "comb": FLOAT32, "collapsed": HALF}),
    "pool_groups": Description(outputs={"sums": FLOAT32, "complete": ("bool",)}),
}
#: ops with an NPU kernel
KERNELS = OPS | LAYER_KERNELS


def ge_type(op: str) -> str:
    """The GE operator of an op: ``npu_sparse_attention_pto`` -> ``SparseAttentionPto``."""
    return "".join(word.capitalize() for word in op.removeprefix("npu_").split("_"))


def spelled(dtypes: Dtypes) -> str:
    """``bfloat16, float16 or float32``."""
    *others, last = dtypes
    return f"{', '.join(others)} or {last}" if others else last


def sparse_count_problem(count: int) -> str | None:
    """Why the indexers, and the attentions, do not take so many selected keys."""
    if 1 <= count <= 2048 or count in range(3072, 8193, 1024):
        return None
    return f"must be 1 to 2048, or 3072 to 8192 in steps of 1024, got {count}"
