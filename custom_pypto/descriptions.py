"""What each op is beside its schema: the one list of the ops, read wherever all of them are meant.

The schema (``csrc/ops_def_registration.cpp``) says what an op's arguments are; an entry here says
what a schema cannot. From both follow the functions registered on NPUs, the converters of graph
mode, the GE prototypes with their constructors, the logged ops.

This module imports the standard library only, so that it can be read where torch does not load.
"""

from typing import NamedTuple

Dtypes = tuple[str, ...]

# as torch names them; of the NPU programs, the CPU takes more
HALF: Dtypes = ("bfloat16", "float16")
FLOAT: Dtypes = (*HALF, "float32")
INT32: Dtypes = ("int32",)


class Description(NamedTuple):
    """Of one op.

    Args:
        outputs: names and dtypes of what the op returns; a schema names none.
        dtypes: of the tensors that an NPU takes in other dtypes than bfloat16 and float16.
        absent: the value that stands for None in a GE attribute, which cannot hold None.
        notes: what a reader of the GE prototype must know that its chain does not say; paragraphs.
    """

    outputs: dict[str, Dtypes]
    dtypes: dict[str, Dtypes] = {}
    absent: dict[str, object] = {}
    notes: tuple[str, ...] = ()


OPS = {
    "add_custom": Description(outputs={"out": FLOAT}, dtypes={"self": FLOAT, "other": FLOAT}),
    "npu_lightning_indexer_pto": Description(
        outputs={"sparse_indices": INT32},
        dtypes={
            "weights": FLOAT,
            "actual_seq_lengths_query": INT32,
            "actual_seq_lengths_key": INT32,
            "block_table": INT32,
        },
        notes=("query and key share a dtype, weights have that one or float32.",),
    ),
    "npu_sparse_flash_attention_pto": Description(
        outputs={"attention_out": HALF},
        dtypes={
            "sparse_indices": INT32,
            "block_table": INT32,
            "actual_seq_lengths_query": INT32,
            "actual_seq_lengths_kv": INT32,
        },
        notes=("all floating-point tensors share a dtype.",),
    ),
    "npu_sparse_attention_pto": Description(
        outputs={"attention_out": HALF},
        dtypes={
            "sin": FLOAT,
            "cos": FLOAT,
            "cache_index": ("int32", "int64"),
            "block_table": INT32,
            "act_seqs": INT32,
        },
        absent={"softmax_scale": 0.0},
        notes=(
            "weights and caches have the dtype of x, sin and cos that one or float32.",
            "The caches are inputs and, under the same names, outputs: GE's way to say that an "
            "operator writes them in place. softmax_scale 0.0 stands for the schema's None, which "
            "no GE attribute can hold; the op itself takes positive scales only.",
        ),
    ),
}


def ge_type(op: str) -> str:
    """The GE operator of an op: ``npu_sparse_attention_pto`` -> ``SparseAttentionPto``."""
    return "".join(word.capitalize() for word in op.removeprefix("npu_").split("_"))


def spelled(dtypes: Dtypes) -> str:
    """``bfloat16, float16 or float32``."""
    *others, last = dtypes
    return f"{', '.join(others)} or {last}" if others else last
