"""The ops through torchair into GE graphs, on the host stand-in for CANN."""

import contextlib
import inspect
import itertools
import warnings
from collections import Counter

import cases
import ge_graphs
import pytest
import torch
from cases import in_a_wider_row
from cases.npu_kv_quant_sparse_flash_attention_pto import inputs as kv_quant_inputs
from cases.npu_kv_quant_update_pto import inputs as kv_update_inputs
from cases.npu_lightning_indexer_prolog_pto import inputs as prolog_inputs
from cases.npu_lightning_indexer_pto import inputs as indexer_inputs
from cases.npu_quant_index_update_pto import inputs as update_inputs
from cases.npu_quant_lightning_indexer_pto import inputs as quant_inputs
from cases.npu_quant_rows_pto import inputs as rows_inputs
from cases.npu_sparse_attention_pto import fused_inputs, of_angles_and_slots
from cases.npu_sparse_flash_attention_pto import inputs as attention_inputs
from torch import Tensor

import custom_pypto
from custom_pypto import converter
from custom_pypto.descriptions import OPS, ge_type
from custom_pypto.graph import ops

pytestmark = pytest.mark.ascend_host

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WEIGHTS = ("w_dq", "w_uq_qr", "w_uk", "w_dkv_kr", "gamma_cq", "gamma_ckv")
WEIGHTS += ("w_idx_qb", "w_idx_k", "w_idx_proj", "in_gamma_k", "in_beta_k")
WEIGHTS += ("wq_b", "wq_b_scale", "wk", "weights_proj", "ln_gamma_k", "ln_beta_k")


STATISTICS = "npu_sparse_flash_attention_pto.softmax_lse"
OVERLOADS = [*OPS, STATISTICS]


def overload(op: str) -> torch._ops.OpOverload:
    packet, _, name = op.partition(".")
    return getattr(getattr(torch.ops.custom_pypto, packet), name or "default")


def constructor(op: str) -> str:
    return op.removeprefix("npu_").replace(".", "_")


def not_default(op: str) -> dict:
    wanted = dict(return_softmax_lse=True) if op == STATISTICS else {}
    return cases.not_default(op.partition(".")[0]) | wanted


def outputs(result) -> tuple[Tensor, ...]:
    return () if result is None else result if isinstance(result, tuple) else (result,)


# ---- inputs --------------------------------------------------------------------------------------


def add(*shape: int, dtype=F32) -> dict:
    return dict(self=torch.randn(shape).to(dtype), other=torch.randn(shape).to(dtype))


def index(lengths_query, lengths_key, dtype=BF16, **arguments) -> dict:
    return indexer_inputs(lengths_query, lengths_key, dim=128, dtype=dtype, **arguments)


def attend(lengths_query, lengths_key, dtype=BF16, **arguments) -> dict:
    return attention_inputs(lengths_query, lengths_key, dtype=dtype, **arguments)


def quant_index(lengths_query, lengths_key, dtype=F16, block_size=32, **arguments) -> dict:
    sizes = dict(dim=128, block_size=block_size, dtype=dtype)
    return quant_inputs(lengths_query, lengths_key, **sizes, **arguments)


def kv_quant(lengths_query, lengths_key, dtype=BF16, **arguments) -> dict:
    sizes = dict(latent=512, rope=64, dtype=dtype)
    return kv_quant_inputs(lengths_query, lengths_key, **sizes, **arguments)


def kv_update(lengths_query, lengths_key, dtype=BF16, **arguments) -> dict:
    sizes = dict(latent=512, rope=64, dtype=dtype)
    return kv_update_inputs(lengths_query, lengths_key, **sizes, **arguments)


def update(lengths_query, lengths_key, dtype=BF16, **arguments) -> dict:
    return update_inputs(lengths_query, lengths_key, dim=128, dtype=dtype, **arguments)


def prolog(lengths_query, lengths_key, dtype=BF16, **arguments) -> dict:
    sizes = dict(hidden=64, q_rank=32, dim=128, dtype=dtype)
    return prolog_inputs(lengths_query, lengths_key, **sizes, **arguments)


def fuse(lengths, S1, dtype=BF16, **arguments) -> dict:
    sizes = dict(hidden=48, q_rank=32, index_dim=128, dtype=dtype)
    return fused_inputs(lengths, S1, **sizes | arguments)


def transposed(x: Tensor) -> Tensor:
    """The same values in another order of strides."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


# op, its calls by one compilation, whether sizes are symbols
CALLS = {
    "add": ("add_custom", lambda: [add(3, 5, dtype=BF16)], False),
    "add-sizes": ("add_custom", lambda: [add(3, 5, dtype=F16), add(2, 7, dtype=F16)], True),
    "index-no-query-lengths": (
        "npu_lightning_indexer_pto",
        lambda: [index([3, 3], [20, 5]) | dict(actual_seq_lengths_query=None)],
        False,
    ),
    "index-strided": (
        "npu_lightning_indexer_pto",
        lambda: [
            {
                name: transposed(x) if name in ("query", "weights", "block_table") else x
                for name, x in index([2, 3], [20, 5]).items()
            }
        ],
        False,
    ),
    "index-sizes": (
        "npu_lightning_indexer_pto",
        lambda: [
            index([2, 1], [20, 5]),
            index([3, 3, 2], [50, 1, 8], heads=7, block_size=32, seed=1),
            index([1, 5], [17, 90], heads=3, block_size=48, seed=2),
        ],
        True,
    ),
    "index-compressed-sizes": (
        "npu_lightning_indexer_pto",
        lambda: [
            index([2, 1], [83, 21], cmp_ratio=4),
            index([3, 3, 2], [203, 6, 33], heads=7, block_size=32, cmp_ratio=4, seed=1),
        ],
        True,
    ),
    "index-packed-sizes": (
        "npu_lightning_indexer_pto",
        lambda: [
            not_default("npu_lightning_indexer_pto"),
            index(
                [3, 1, 1],
                [50, 4, 8],
                F16,
                weights_dtype=F32,
                layout_query="TND",
                sparse_count=4,
                sparse_mode=0,
                cmp_ratio=4,
                heads=3,
            ),
        ],
        True,
    ),
    "quant-index-no-query-lengths": (
        "npu_quant_lightning_indexer_pto",
        lambda: [quant_index([3, 3], [20, 5]) | dict(actual_seq_lengths_query=None)],
        False,
    ),
    "quant-index-sizes": (
        "npu_quant_lightning_indexer_pto",
        lambda: [
            quant_index([2, 1], [20, 5]),
            quant_index([3, 3, 2], [50, 1, 8], heads=7, block_size=32, seed=1),
        ],
        True,
    ),
    "quant-index-packed-sizes": (
        "npu_quant_lightning_indexer_pto",
        lambda: [
            not_default("npu_quant_lightning_indexer_pto"),
            quant_index(
                [3, 1, 1],
                [50, 4, 8],
                F16,
                scale_dtype=F32,
                layout_query="TND",
                sparse_count=4,
                sparse_mode=0,
                heads=3,
            ),
        ],
        True,
    ),
    "quant-rows-sizes": (
        "npu_quant_rows_pto",
        lambda: [rows_inputs([n], [], dim=128, dtype=BF16, heads=h) for n, h in ((3, 4), (5, 2))],
        True,
    ),
    "quant-update-sizes": (
        "npu_quant_index_update_pto",
        lambda: [
            update([2, 1], [20, 5], hadamard=True),
            update([3, 1, 1], [50, 4, 8], block_size=32, hadamard=True, seed=1),
        ],
        True,
    ),
    "quant-update": (
        "npu_quant_index_update_pto",
        lambda: [update([2, 1], [20, 5], F16, slot_dtype=torch.int64)],
        False,
    ),
    "prolog-sizes": (
        "npu_lightning_indexer_prolog_pto",
        lambda: [
            prolog([2, 1], [20, 5], w8a8=True),
            prolog([3, 1, 1], [50, 4, 8], w8a8=True, block_size=32, seed=1),
        ],
        True,
    ),
    "prolog-no-scales": (
        "npu_lightning_indexer_prolog_pto",
        lambda: [prolog([2, 1], [20, 5], F16)],
        False,
    ),
    "kv-quant-sizes": (
        "npu_kv_quant_sparse_flash_attention_pto",
        lambda: [
            kv_quant([2, 1], [20, 5]),
            kv_quant([3, 3, 2], [50, 1, 8], heads=7, block_size=32, sparse_count=5, seed=1),
        ],
        True,
    ),
    "kv-quant-packed-sizes": (
        "npu_kv_quant_sparse_flash_attention_pto",
        lambda: [
            not_default("npu_kv_quant_sparse_flash_attention_pto"),
            kv_quant(
                [3, 1, 1],
                [50, 4, 8],
                F16,
                layout_query="TND",
                sparse_mode=0,
                sparse_count=4,
                block_size=32,
            ),
        ],
        True,
    ),
    "kv-update-sizes": (
        "npu_kv_quant_update_pto",
        lambda: [
            kv_update([2, 1], [20, 5]),
            kv_update([3, 1, 1], [50, 4, 8], block_size=32, seed=1),
        ],
        True,
    ),
    "kv-update": (
        "npu_kv_quant_update_pto",
        lambda: [kv_update([2, 1], [20, 5], F16, slot_dtype=torch.int64)],
        False,
    ),
    "attend-no-query-lengths": (
        "npu_sparse_flash_attention_pto",
        lambda: [attend([3, 3], [20, 5], F16) | dict(actual_seq_lengths_query=None)],
        False,
    ),
    "attend-no-rope": (
        "npu_sparse_flash_attention_pto",
        lambda: [attend([2, 3], [20, 5], rope=0, own_value=True)],
        False,
    ),
    "attend-sizes": (
        "npu_sparse_flash_attention_pto",
        lambda: [
            attend([2, 1], [20, 5]),
            attend([3, 3, 2], [50, 2, 8], heads=7, latent=48, rope=32, block_size=32)
            | dict(scale_value=attend([2], [5])["scale_value"]),
        ],
        True,
    ),
    "attend-packed-sizes": (
        "npu_sparse_flash_attention_pto",
        lambda: [
            not_default("npu_sparse_flash_attention_pto"),
            attend(
                [3, 1, 1],
                [50, 4, 8],
                F16,
                layout_query="TND",
                sparse_mode=0,
                own_value=True,
                sinks=True,
                heads=3,
                sparse_count=5,
            ),
        ],
        True,
    ),
    "attend-statistics-sizes": (
        STATISTICS,
        lambda: [
            attend([2, 1], [20, 5]) | dict(return_softmax_lse=True),
            attend([3, 3, 2], [50, 2, 8], heads=7, latent=48, rope=32, block_size=32)
            | dict(scale_value=attend([2], [5])["scale_value"], return_softmax_lse=True),
        ],
        True,
    ),
    "attend-no-statistics": (
        STATISTICS,
        lambda: [attend([2, 1], [20, 5], sinks=True) | dict(return_softmax_lse=False)],
        False,
    ),
    "add-rows": ("add_custom", lambda: [add(4, 1, 5, dtype=F16)], False),
    "index-weights-of-float32": (
        "npu_lightning_indexer_pto",
        lambda: [index([1, 2], [5, 16], F16, weights_dtype=F32, sparse_count=16, heads=4)],
        False,
    ),
    "attend-rope-and-value": (
        "npu_sparse_flash_attention_pto",
        lambda: [attend([2, 1], [20, 5], own_value=True, latent=32, rope=16)],
        False,
    ),
    "fuse-angles-of-float32": (
        "npu_sparse_attention_pto",
        lambda: [
            of_angles_and_slots(
                fuse([20, 5], 1, F16, softmax_scale=0.25, eps=1e-5, sparse_count=16)
            )
        ],
        False,
    ),
    "fuse": ("npu_sparse_attention_pto", lambda: [fuse([20, 5], 1, sparse_count=8)], False),
    "fuse-sizes": (
        "npu_sparse_attention_pto",
        lambda: [
            fuse([20, 5], 2, sparse_count=8),
            fuse([50, 2, 9], 3, block_size=32, sparse_count=8, seed=1),
        ],
        True,
    ),
    "fuse-int64-sizes": (
        "npu_sparse_attention_pto",
        lambda: [
            not_default("npu_sparse_attention_pto"),
            of_angles_and_slots(
                fuse([9, 40, 3], 3, F16, rope=32, softmax_scale=0.4, eps=0.5, sparse_count=4)
            ),
        ],
        True,
    ),
} | {
    f"{constructor(op)}-not-default": (op, lambda op=op: [not_default(op)], False)
    for op in OVERLOADS
}


# ---- compiled as eager ---------------------------------------------------------------------------


def split(inputs: dict) -> tuple[dict, dict]:
    """Tensors, and the rest."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    return tensors, {name: x for name, x in inputs.items() if name not in tensors}


def run(function, tensors: dict) -> dict:
    """The result, and what the tensors hold after the call, of which ``function`` gets copies."""
    given = {
        name: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="npu").copy_(x)
        for name, x in tensors.items()
    }
    for name in WEIGHTS:  # have their sizes for good, as a module's parameters have
        if name in given:
            torch._dynamo.mark_static(given[name])
    results = {f"result {i}": x.cpu() for i, x in enumerate(outputs(function(given)))}
    return results | {name: x.cpu() for name, x in given.items()}


@contextlib.contextmanager
def one_graph():
    """A list that will hold the graph of what is compiled meanwhile, into one graph in all.

    A warning is an error: torchair warns where it cannot infer shapes.
    """
    with (
        ge_graphs.converted() as graphs,
        warnings.catch_warnings(),
        # sizes that are equal by chance are not the same size
        torch.fx.experimental._config.patch(use_duck_shape=False),
    ):
        warnings.simplefilter("error", UserWarning)
        # of torch_npu, about the memory of a tensor, once; spelled in two ways
        warnings.filterwarnings("ignore", message="Cannot create tensor with inter")
        # of torch_npu 2.10, in every compilation
        warnings.filterwarnings("ignore", message="After using .*set_deterministic_level")
        yield graphs
    assert len(graphs) == 1


def check(op: str, calls: list[dict], dynamic: bool = False):
    """One GE graph computes and writes in all calls, to the bit, what eager mode does.

    Returns the graph.
    """
    constants = split(calls[0])[1]

    def call(tensors):
        return overload(op)(**tensors, **constants)

    torch.compiler.reset()
    function = ge_graphs.compiled(call, dynamic=dynamic)
    with one_graph() as graphs:
        for inputs in calls:
            tensors, same = split(inputs)
            assert same == constants
            expected, got = run(call, tensors), run(function, tensors)
            for name, x in expected.items():
                torch.testing.assert_close(
                    got[name], x, rtol=0, atol=0, equal_nan=True, msg=f"{op}: {name} differs"
                )
    return graphs[0]


@pytest.mark.parametrize("name", CALLS)
def test_the_graph_does_what_eager_mode_does(name):
    op, calls, dynamic = CALLS[name]
    calls = calls()
    graph = check(op, calls, dynamic)
    assert ge_graphs.differences_from_prototype(graph) == []
    (node,) = ge_graphs.nodes(graph)
    for inputs in calls:
        arguments = [inputs[tensor.name] for tensor in node.input_desc]
        sizes = [None if x is None else x.size() for x in arguments]
        on_meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in inputs.items()}
        results = outputs(overload(op)(**on_meta))
        written = [inputs[output.name] for output in node.output_desc[len(results) :]]
        shapes = [list(x.size()) for x in (*results, *written)]
        assert ge_graphs.inferred_shapes(node, sizes) == shapes
    unfed = {
        tensor.name
        for tensor, source in zip(node.input_desc, node.input, strict=True)
        if not source
    }
    assert unfed == {name for name in inputs if inputs[name] is None} - {"softmax_scale"}


def test_no_size_becomes_a_constant_of_the_graph(monkeypatch):
    monkeypatch.setattr(f"{__name__}.WEIGHTS", ())
    others = dict(hidden=32, q_rank=16, heads=2, nope=32, latent=48, rope=32, index_heads=2)
    inputs = fuse([20, 5], 2, sparse_count=8)
    graph = check(
        "npu_sparse_attention_pto",
        [inputs, fuse([50, 2, 9], 3, block_size=32, sparse_count=8, **others)],
        dynamic=True,
    )
    # but sizes of weights should be constants: one of w_uq_qr is a product of others
    (node,) = ge_graphs.nodes(graph)
    with pytest.raises(AssertionError, match="GE would reject"):
        ge_graphs.inferred_shapes(node, [inputs[t.name].size() for t in node.input_desc])


def test_the_fused_op_is_fed_a_copy_of_each_cache_and_of_nothing_else():
    graph = check("npu_sparse_attention_pto", [fuse([20, 5], 1, sparse_count=8)])
    (node,) = ge_graphs.nodes(graph)
    copies = {move.name: move for move in graph.op if move.type == "TensorMove"}
    fed = dict(zip((t.name for t in node.input_desc), node.input, strict=True))
    copied = {name: source for name, source in fed.items() if source.split(":")[0] in copies}
    assert list(copied) == [output.name for output in node.output_desc[1:]]
    assert len(copied) == len(copies) == 3
    data = {x.name for x in graph.op if x.type == "Data"}
    assert all(move.input[0].split(":")[0] in data for move in copies.values())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_nodes_feed_each_other(dynamic):
    indexed = index([2, 1], [20, 5], sparse_count=4)
    attended = attend([2, 1], [20, 5])  # the same lengths, and another cache
    del attended["sparse_indices"]
    x, y = split(indexed), split(attended)

    def call(tensors):
        to_index = {name: tensors[f"index.{name}"] for name in x[0]} | x[1]
        to_attend = {name: tensors[f"attend.{name}"] for name in y[0]} | y[1]
        for _ in range(2):  # layers
            indices = overload("npu_lightning_indexer_pto")(**to_index)
            attention = overload("npu_sparse_flash_attention_pto")(
                sparse_indices=indices, **to_attend
            )
            to_attend["query"] = overload("add_custom")(attention, to_attend["query"])
        return to_attend["query"]

    tensors = {f"index.{name}": t for name, t in x[0].items()}
    tensors |= {f"attend.{name}": t for name, t in y[0].items()}
    torch.compiler.reset()
    with one_graph() as graphs:
        got = run(ge_graphs.compiled(call, dynamic=dynamic), tensors)["result 0"]
    torch.testing.assert_close(got, run(call, tensors)["result 0"], rtol=0, atol=0, equal_nan=True)
    assert ge_graphs.differences_from_prototype(graphs[0]) == []
    nodes = ge_graphs.nodes(graphs[0])
    types = ["LightningIndexerPto", "SparseFlashAttentionPto", "AddCustom"]
    assert [node.type for node in nodes] == 2 * types
    # what torchair infers of a node must not depend on the nodes before
    rules = [node.attr["_inference_rule"].s for node in nodes]
    assert all(rules) and rules[:3] == rules[3:]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_readers_see_what_was_written_before_them_and_in_two_caches(dynamic):
    queries, keys = (
        rows_inputs([4], [], dim=128, dtype=BF16),
        update([2, 2], [40, 5], block_size=32),
    )
    read = cases.without_nan(quant_index([1, 1], [20, 5], sparse_count=4, sparse_mode=0))
    keys["scale_cache"].fill_(0.01)
    # positions 1 and 3 of each sequence, then 0 and 2
    keys["x"] = 2 * torch.randn(2, 2, 128, generator=torch.Generator().manual_seed(0)).to(BF16)
    keys["slots"] = read["block_table"][:, :1] * 32 + cases.int32([1, 3])
    fed = ("query", "key", "query_dequant_scale", "key_dequant_scale")
    tensors, constants = split({name: x for name, x in read.items() if name not in fed})
    tensors |= {"x": queries["x"].view(2, 2, 4, 128)}
    tensors |= {f"update.{name}": x for name, x in split(keys)[0].items()}

    def call(tensors):
        tensors = dict(tensors)
        query, scale = overload("npu_quant_rows_pto")(tensors.pop("x"))
        written = {n: tensors.pop(f"update.{n}") for n in ("x", "slots", "cache", "scale_cache")}
        found = []
        for _ in range(2):  # layers
            overload("npu_quant_index_update_pto")(**written)
            found.append(
                overload("npu_quant_lightning_indexer_pto")(
                    query=query,
                    key=written["cache"],
                    query_dequant_scale=scale,
                    key_dequant_scale=written["scale_cache"],
                    **tensors,
                    **constants,
                )
            )
            written["x"] = overload("add_custom")(written["x"], written["x"])
            written["slots"] = written["slots"] - 1
        return tuple(found)

    torch.compiler.reset()
    with one_graph() as graphs:
        got, expected = run(ge_graphs.compiled(call, dynamic=dynamic), tensors), run(call, tensors)
    for name, x in expected.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(expected["result 0"], expected["result 1"])
    assert ge_graphs.differences_from_prototype(graphs[0]) == []
    types = ["QuantIndexUpdatePto", "QuantLightningIndexerPto", "AddCustom"]
    assert [n.type for n in ge_graphs.nodes(graphs[0])] == ["QuantRowsPto", *types, *types[:2]]


# ---- the converters ------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OVERLOADS)
def test_a_converter_is_named_after_its_op_and_tells_the_schema(op):
    function = inspect.unwrap(overload(op)._ge_converter)
    assert function.__name__ == f"convert_{op.replace('.', '_')}"
    text = function.__doc__.removeprefix("NB: func: ")
    assert torch._C.parse_schema(f"custom_pypto::{text}") == overload(op)._schema


def test_registering_again_changes_nothing():
    before = [overload(op)._ge_converter for op in OVERLOADS]
    converter.register()
    assert [overload(op)._ge_converter for op in OVERLOADS] == before
    assert converter.problem() is None


def test_without_a_converter_torchair_makes_a_callback(monkeypatch):
    """Which compiles against CANN, or needs a prototype of another name. A converter that is
    registered keeps torchair from it, whether GE has a kernel or not, so importing the package does
    not register one by itself."""
    op = "npu_lightning_indexer_pto"  # for add_custom, torchair would find a prototype by its name
    monkeypatch.delattr(overload(op), "_ge_converter")
    tensors, constants = split(index([2, 2], [20, 5]))
    function = ge_graphs.compiled(lambda tensors: overload(op)(**tensors, **constants))
    rejected = "ASCEND_HOME_PATH|No AscendIR NpuLightningIndexerPto"  # the second of torch_npu 2.10
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=rejected):
        run(function, tensors)


def test_the_report_says_that_graph_mode_works():
    way = custom_pypto.env.collect()["ways"]["graph mode with torchair"]
    assert way == {"works": True, "missing": []}


@pytest.mark.parametrize(
    "op, inputs, message",
    [
        pytest.param(
            "add_custom",
            lambda: add(3, dtype=torch.float64),
            "self.dtype must be bfloat16, float16 or float32 on an NPU",
            id="add-dtype",
        ),
        pytest.param(
            "npu_lightning_indexer_pto",
            lambda: index([2, 2], [20, 5], F32),
            "query.dtype must be bfloat16 or float16 on an NPU, got float32",
            id="index-dtype",
        ),
        pytest.param(
            "npu_lightning_indexer_pto",
            lambda: indexer_inputs([2, 2], [20, 5], dim=64, dtype=BF16),
            "query.size(3) must be 128 on an NPU, got 64",
            id="index-dim",
        ),
        pytest.param(
            "npu_lightning_indexer_pto",
            lambda: index([2, 2], [20, 5], heads=65),
            "query.size(2) must be at most 64 on an NPU, got 65",
            id="index-heads",
        ),
        pytest.param(
            "npu_lightning_indexer_pto",
            lambda: index([2, 2], [20, 5], layout_key="BSND"),
            "layout_key must be 'PA_BSND' on an NPU, got 'BSND'; keep the keys in a paged cache",
            id="index-layout",
        ),
        pytest.param(
            "npu_lightning_indexer_pto",
            lambda: index([2, 2], [20, 5], strided=True),
            "key must be contiguous on an NPU, got strides (4608, 144, 144, 1)",
            id="index-strides",
        ),
        pytest.param(
            "npu_lightning_indexer_pto",
            lambda: (
                index([2, 2], [20, 5], sparse_count=5120)
                | dict(block_table=torch.zeros(2, 513, dtype=torch.int32))
            ),
            "sparse_count must be at most 4096 for a block table of 8208 keys",
            id="index-sort",
        ),
        pytest.param(
            "npu_lightning_indexer_pto",
            lambda: (
                index([2, 2], [20, 5], block_size=1024)
                | dict(block_table=torch.zeros(2, 2**14 + 1, dtype=torch.int32))
            ),
            "block_table must be of at most 16 million keys on an NPU",
            id="index-table",
        ),
        pytest.param(
            "npu_quant_lightning_indexer_pto",
            lambda: quant_index([2, 2], [20, 5], heads=65),
            "query.size(2) must be at most 64 on an NPU, got 65",
            id="quant-index-heads",
        ),
        pytest.param(
            "npu_quant_lightning_indexer_pto",
            lambda: quant_index([2, 2], [20, 5], strided=True),
            "key must be contiguous on an NPU, got strides (9216, 144, 144, 1)",
            id="quant-index-strides",
        ),
        pytest.param(
            "npu_quant_lightning_indexer_pto",
            lambda: quant_index([2, 2], [20, 5], block_size=48),
            "key.size(1) must be a multiple of 32 on an NPU, got 48",
            id="quant-index-blocks",
        ),
        pytest.param(
            "npu_kv_quant_sparse_flash_attention_pto",
            lambda: kv_quant_inputs([2, 2], [20, 5]),
            "rope_head_dim must be 64 on an NPU, got 16",
            id="kv-quant-rope",
        ),
        pytest.param(
            "npu_kv_quant_sparse_flash_attention_pto",
            lambda: kv_quant([2, 2], [20, 5], strided=True),
            "key must be contiguous on an NPU, got strides",
            id="kv-quant-strides",
        ),
        pytest.param(
            "npu_kv_quant_update_pto",
            lambda: kv_update_inputs([2, 2], [20, 5]),
            "latent.size(2) must be 512 on an NPU, got 128",
            id="kv-update-latent",
        ),
        pytest.param(
            "npu_quant_rows_pto",
            lambda: rows_inputs([3], [], dim=64, dtype=BF16),
            "x.size(2) must be 128 on an NPU, got 64",
            id="quant-rows-dim",
        ),
        pytest.param(
            "npu_quant_index_update_pto",
            lambda: update([2, 2], [20, 5], strided=True),
            "cache must be contiguous on an NPU, got strides",
            id="quant-update-strides",
        ),
        pytest.param(
            "npu_lightning_indexer_prolog_pto",
            lambda: prolog_inputs([2, 2], [20, 5], q_rank=48, w8a8=True, dim=128, dtype=BF16),
            "q_norm.size(1) must be a positive multiple of 32 on an NPU, got 48",
            id="prolog-rank",
        ),
        pytest.param(
            "npu_lightning_indexer_prolog_pto",
            lambda: prolog([2, 2], [20, 5], heads=65),
            "weights_proj.size(1) must be at most 64 on an NPU, got 65",
            id="prolog-heads",
        ),
        pytest.param(
            "npu_lightning_indexer_prolog_pto",
            lambda: prolog([2, 2], [20, 5], strided=True),
            "idx_k_cache must be contiguous on an NPU, got strides",
            id="prolog-strides",
        ),
        pytest.param(
            "npu_sparse_flash_attention_pto",
            lambda: attend([2, 2], [20, 5], layout_kv="BSND"),
            "layout_kv must be 'PA_BSND' on an NPU, got 'BSND'; keep the keys in a paged cache",
            id="attend-layout",
        ),
        pytest.param(
            "npu_sparse_flash_attention_pto",
            lambda: attend([2, 2], [20, 5], heads=129),
            "query.size(2) must be at most 128 on an NPU, got 129",
            id="attend-heads",
        ),
        pytest.param(
            "npu_sparse_flash_attention_pto",
            lambda: attend([2, 2], [20, 5], strided=True),
            "key must be contiguous on an NPU, got strides",
            id="attend-strides",
        ),
        pytest.param(
            "npu_sparse_flash_attention_pto",
            lambda: (
                attend([2, 2], [20, 5])
                | dict(block_table=torch.zeros(2, 2**15 + 1, dtype=torch.int32))
            ),
            "block_table.size(1) must be at most 32768 on an NPU, got 32769",
            id="attend-table",
        ),
        pytest.param(
            "npu_sparse_attention_pto",
            lambda: fuse([20, 5], 1, index_dim=64),
            "w_idx_k.size(1) must be 128 on an NPU, got 64",
            id="fuse-dim",
        ),
        pytest.param(
            "npu_sparse_attention_pto",
            lambda: fuse([20, 5], 1, q_rank=24),
            "w_dq.size(1) must be a positive multiple of 16 on an NPU, got 24",
            id="fuse-width",
        ),
        pytest.param(
            "npu_sparse_attention_pto",
            lambda: (lambda x: x | dict(kr_cache=in_a_wider_row(x["kr_cache"])))(fuse([20, 5], 1)),
            "kr_cache must be contiguous on an NPU, got strides",
            id="fuse-strides",
        ),
    ],
)
def test_what_an_npu_cannot_take_is_rejected_as_in_eager_mode(op, inputs, message):
    tensors, constants = split(inputs())

    def call(tensors):
        return overload(op)(**tensors, **constants)

    with pytest.raises(RuntimeError) as eager:
        run(call, tensors)
    assert str(eager.value).startswith(f"{op}: {message}")
    for dynamic in (False, True):
        torch.compiler.reset()
        # when it is compiled: if it were run, the stand-in would reject it too
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as graph:
            run(ge_graphs.compiled(call, dynamic=dynamic), tensors)
        assert str(eager.value) in str(graph.value)


def test_what_a_later_call_breaks_is_rejected_too():
    op = "npu_lightning_indexer_pto"
    tensors, constants = split(index([2, 2], [20, 5], sparse_count=4))

    def call(tensors):
        return overload(op)(**tensors, **constants)

    torch.compiler.reset()
    function = ge_graphs.compiled(call, dynamic=True)
    with one_graph() as graphs:
        run(function, tensors)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="at most 64 on an NPU"):
            run(function, split(index([2, 2], [20, 5], heads=65))[0])
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="must be 128 on an NPU"):
            run(function, split(indexer_inputs([2, 2], [20, 5], dim=64, dtype=BF16))[0])
        run(function, split(index([3, 2, 2], [20, 5, 40], heads=64, block_size=32))[0])
    assert [list(n.input_desc[0].shape.dim) for n in ge_graphs.nodes(graphs[0])] == [[-1] * 4]


# ---- tests of the tests --------------------------------------------------------------------------

# their default is the only value that an NPU takes, and that no result can tell apart
ONE_VALUE = {
    *("layout_key", "layout_kv", "sparse_block_size"),
    *("attention_mode", "quant_scale_repo_mode", "tile_size", "rope_head_dim"),
    ("npu_lightning_indexer_prolog_pto", "layout_query"),
}
ATTRIBUTES = [
    (op, parameter.name)
    for op in OVERLOADS
    for parameter in inspect.signature(getattr(ops, constructor(op))).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY
    if not {parameter.name, (op, parameter.name)} & ONE_VALUE
]
PAIRS = [
    (op, *pair)
    for op in OVERLOADS
    if op != "add_custom"  # a sum of two
    for inputs in [not_default(op)]
    for pair in itertools.combinations(split(inputs)[0], 2)
    if len({(inputs[name].size(), inputs[name].dtype) for name in pair}) == 1
]


@contextlib.contextmanager
def found(op: str):
    """By the values, or when the stand-in runs the node: it has another shape, or is rejected."""
    node = f"ge_executor: {ge_type(op.replace('.', '_'))} node"
    wrong = f"^{op}: |^{op.partition('.')[0]}: |^{node}"
    with pytest.raises((AssertionError, RuntimeError), match=wrong):
        yield


def test_there_are_attributes_and_inputs_to_confuse():
    attributes, pairs = (Counter(op for op, *_ in confused) for confused in (ATTRIBUTES, PAIRS))
    assert attributes >= Counter(
        npu_lightning_indexer_pto=4, npu_sparse_flash_attention_pto=3, npu_sparse_attention_pto=3
    )
    assert pairs >= Counter(
        npu_lightning_indexer_pto=1, npu_sparse_flash_attention_pto=2, npu_sparse_attention_pto=4
    )


@pytest.mark.parametrize("op, attribute", ATTRIBUTES)
def test_an_attribute_that_a_converter_drops_is_found(op, attribute, monkeypatch):
    right = getattr(ops, constructor(op))
    default = inspect.signature(right).parameters[attribute].default

    def wrong(*inputs, **attributes):
        value = attributes[attribute]
        other = False if isinstance(value, bool) else type(value)(1)
        attributes[attribute] = other if default is inspect.Parameter.empty else default
        return right(*inputs, **attributes)

    monkeypatch.setattr(ops, constructor(op), wrong)
    with found(op):
        check(op, [not_default(op)])


@pytest.mark.parametrize("op, one, other", PAIRS)
def test_inputs_that_a_converter_swaps_are_found(op, one, other, monkeypatch):
    right = getattr(ops, constructor(op))

    def wrong(*inputs, **attributes):
        named = inspect.signature(right).bind(*inputs, **attributes).arguments
        named[one], named[other] = named[other], named[one]
        return right(**named)

    monkeypatch.setattr(ops, constructor(op), wrong)
    with found(op):
        check(op, [not_default(op)])


def rename_input(node):
    node.input_desc[2].name = "weight"


def rename_output(node):
    node.output_desc[0].name = "indices"


def exchange_inputs(node):
    node.input_desc[0].name, node.input_desc[1].name = "key", "query"


def unfeed(node):
    node.input[0] = ""


def cut(node):
    del node.input[-1]


def add_attribute(node):
    node.attr["return_value"].b = True


def drop_attribute(node):
    del node.attr["sparse_count"]


def change_kind(node):
    node.attr["sparse_mode"].f = 3.0


def test_a_node_that_is_not_as_its_prototype_is_found():
    op = "npu_lightning_indexer_pto"
    right = check(op, [not_default(op)])
    for change, difference in {
        rename_input: "inputs ['query', 'key', 'weight', ",
        rename_output: "outputs ['indices']",
        exchange_inputs: "inputs ['key', 'query', ",
        unfeed: "query is required and not fed",
        cut: "5 edges",
        add_attribute: "attribute return_value is b, not None",
        drop_attribute: "attribute sparse_count is None, not i",
        change_kind: "attribute sparse_mode is f, not i",
    }.items():
        graph = type(right)()
        graph.CopyFrom(right)
        (node,) = ge_graphs.nodes(graph)
        change(node)
        (found,) = ge_graphs.differences_from_prototype(graph)
        assert found.startswith(f"LightningIndexerPto: {difference}")
