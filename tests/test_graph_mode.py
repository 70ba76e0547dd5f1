"""The ops through torchair into GE graphs, on the host simulator of CANN."""

import inspect

import cases
import ge_graphs
import pytest
import torch
from cases.npu_lightning_indexer_pto import on_npu as index
from cases.npu_quant_index_update_pto import on_npu as update
from cases.npu_quant_lightning_indexer_pto import on_npu as quant_index
from cases.npu_quant_rows_pto import on_npu as rows
from cases.npu_sparse_attention_pto import on_npu as fuse
from cases.npu_sparse_flash_attention_pto import on_npu as attend
from ge_graphs import check, one_graph, outputs, run, split
from torch import Tensor

import custom_pypto
from custom_pypto import converter
from custom_pypto.descriptions import OPS
from custom_pypto.schemas import overload

pytestmark = pytest.mark.ascend_host


# of the calls of an op besides the one with every input, those that a run without --all takes: new
# sizes of an op with several outputs, of one that writes, of one that pads; lists; statistics
TAKEN = {
    "lightning_indexer_pto-sizes",
    "sparse_flash_attention_pto-statistics-sizes",
    "sparse_attention_pto-sizes",
    "quant_index_update_pto-sizes",
    "sparse_lightning_indexer_grad_kl_loss_pto-packed",
}
CALLS = [(f"{op}-not-default", op, [cases.not_default(op)], True) for op in OPS]
for op in OPS:
    for name, calls in cases.of(op).graph_calls().items():
        id = f"{op}-{name}"
        CALLS.append((id, op, calls, id in TAKEN))
CALLS = [
    pytest.param(op, calls, id=id, marks=[] if taken else pytest.mark.slow)
    for id, op, calls, taken in CALLS
]
STATIC_TOO = [pytest.param(False, marks=pytest.mark.slow), True]
each_kind = pytest.mark.parametrize("dynamic", STATIC_TOO, ids=["static", "dynamic"])


# ---- compiled as eager ---------------------------------------------------------------------------


@pytest.mark.parametrize("op, calls", CALLS)
def test_the_graph_does_what_eager_mode_does(op, calls):
    graph = check(op, calls, dynamic=len(calls) > 1)
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
    tensors = {tensor.name for tensor in node.input_desc}
    assert unfed == {name for name in tensors if inputs[name] is None}


def test_no_size_becomes_a_constant_of_the_graph(monkeypatch):
    monkeypatch.setattr(ge_graphs, "WEIGHTS", ())
    others = dict(hidden=32, q_rank=16, heads=2, nope=32, latent=48, rope=32, index_heads=2)
    inputs = fuse([2], [20, 5], sparse_count=8)
    graph = check(
        "npu_sparse_attention_pto",
        [inputs, fuse([3], [50, 2, 9], block_size=32, sparse_count=8, **others)],
        dynamic=True,
    )
    # but sizes of weights should be constants: one of w_uq_qr is a product of others
    (node,) = ge_graphs.nodes(graph)
    with pytest.raises(AssertionError, match="GE would reject"):
        ge_graphs.inferred_shapes(node, [inputs[t.name].size() for t in node.input_desc])


def test_the_fused_op_is_fed_a_copy_of_each_cache_and_of_nothing_else():
    graph = check("npu_sparse_attention_pto", [fuse([1], [20, 5], sparse_count=8)])
    (node,) = ge_graphs.nodes(graph)
    copies = {move.name: move for move in graph.op if move.type == "TensorMove"}
    fed = dict(zip((t.name for t in node.input_desc), node.input, strict=True))
    copied = {name: source for name, source in fed.items() if source.split(":")[0] in copies}
    assert list(copied) == [output.name for output in node.output_desc[1:]]
    assert len(copied) == len(copies) == 3
    data = {x.name for x in graph.op if x.type == "Data"}
    assert all(move.input[0].split(":")[0] in data for move in copies.values())


@each_kind
def test_nodes_feed_each_other(dynamic):
    indexed = index([2, 1], [20, 5], sparse_count=4)
    attended = attend([2, 1], [20, 5])  # the same lengths, and another cache
    del attended["sparse_indices"]
    x, y, ops = split(indexed), split(attended), torch.ops.custom_pypto

    def call(tensors):
        to_index = {name: tensors[f"index.{name}"] for name in x[0]} | x[1]
        to_attend = {name: tensors[f"attend.{name}"] for name in y[0]} | y[1]
        for _ in range(2):  # layers
            indices = ops.npu_lightning_indexer_pto(**to_index)
            attention = ops.npu_sparse_flash_attention_pto(sparse_indices=indices, **to_attend)
            to_attend["query"] = ops.add_custom(attention, to_attend["query"])
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


@each_kind
def test_readers_see_what_was_written_before_them_and_in_two_caches(dynamic):
    queries, keys = (
        rows([4], []),
        update([2, 2], [40, 5], block_size=32),
    )
    read = cases.without_nan(quant_index([1, 1], [20, 5], sparse_count=4, sparse_mode=0))
    keys["scale_cache"].fill_(0.01)
    # positions 1 and 3 of each sequence, then 0 and 2
    keys["x"] = 2 * torch.randn(2, 2, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    keys["slots"] = read["block_table"][:, :1] * 32 + cases.int32([1, 3])
    fed = ("query", "key", "query_dequant_scale", "key_dequant_scale")
    tensors, constants = split({name: x for name, x in read.items() if name not in fed})
    tensors |= {"x": queries["x"].view(2, 2, 4, 128)}
    tensors |= {f"update.{name}": x for name, x in split(keys)[0].items()}
    ops = torch.ops.custom_pypto

    def call(tensors):
        tensors = dict(tensors)
        query, scale = ops.npu_quant_rows_pto(tensors.pop("x"))
        written = {n: tensors.pop(f"update.{n}") for n in ("x", "slots", "cache", "scale_cache")}
        found = []
        for _ in range(2):  # layers
            ops.npu_quant_index_update_pto(**written)
            found.append(
                ops.npu_quant_lightning_indexer_pto(
                    query=query,
                    key=written["cache"],
                    query_dequant_scale=scale,
                    key_dequant_scale=written["scale_cache"],
                    **tensors,
                    **constants,
                )
            )
            written["x"] = ops.add_custom(written["x"], written["x"])
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


@pytest.mark.parametrize("op", OPS)
def test_a_converter_is_named_after_its_op_and_tells_the_schema(op):
    function = inspect.unwrap(overload(op)._ge_converter)
    assert function.__name__ == f"convert_{op}"
    text = function.__doc__.removeprefix("NB: func: ")
    assert torch._C.parse_schema(f"custom_pypto::{text}") == overload(op)._schema


def test_registering_again_changes_nothing():
    before = [overload(op)._ge_converter for op in OPS]
    converter.register()
    assert [overload(op)._ge_converter for op in OPS] == before
    assert converter.problem() is None


def test_without_a_converter_torchair_makes_a_callback(monkeypatch):
    """Which compiles against CANN, or needs a prototype of another name. A converter that is
    registered keeps torchair from it, whether GE has a kernel or not, so importing the package does
    not register one by itself."""
    op = "npu_lightning_indexer_pto"  # for add_custom, torchair would find a prototype by its name
    monkeypatch.delattr(overload(op), "_ge_converter")
    tensors, constants = split(index([2, 2], [20, 5]))
    ours = torch.ops.custom_pypto.npu_lightning_indexer_pto
    function = ge_graphs.compiled(lambda tensors: ours(**tensors, **constants))
    rejected = "ASCEND_HOME_PATH|No AscendIR NpuLightningIndexerPto"  # the second of torch_npu 2.10
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=rejected):
        run(function, tensors)


def test_the_report_says_that_graph_mode_works():
    way = custom_pypto.env.collect()["ways"]["graph mode max-autotune, by a kernel package"]
    assert way == {"works": True, "missing": []}


UNSUPPORTED = [
    pytest.param(*row.values, id=row.id, marks=[*row.marks, *[pytest.mark.slow] * (i % 4 > 0)])
    for op in OPS
    for i, row in enumerate(cases.of(op).unsupported_on_npu())
]


@each_kind
@pytest.mark.parametrize("op, inputs, message", UNSUPPORTED)
def test_what_an_npu_does_not_support_is_rejected_as_in_eager_mode(op, inputs, message, dynamic):
    tensors, constants = split(inputs)

    def call(tensors):
        return getattr(torch.ops.custom_pypto, op)(**tensors, **constants)

    with pytest.raises(RuntimeError) as eager:
        run(call, tensors)
    assert str(eager.value).startswith(f"{op}: {message}")
    # when it is compiled: if it were run, the simulator would reject it too
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as graph:
        run(ge_graphs.compiled(call, dynamic=dynamic), tensors)
    assert str(eager.value) in str(graph.value)


def test_what_a_later_call_breaks_is_rejected_too():
    op = "npu_lightning_indexer_pto"
    tensors, constants = split(index([2, 2], [20, 5], sparse_count=4))

    def call(tensors):
        return getattr(torch.ops.custom_pypto, op)(**tensors, **constants)

    torch.compiler.reset()
    function = ge_graphs.compiled(call, dynamic=True)
    with one_graph() as graphs:
        run(function, tensors)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="at most 64 on an NPU"):
            run(function, split(index([2, 2], [20, 5], heads=65))[0])
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="must be 128 on an NPU"):
            run(function, split(index([2, 2], [20, 5], dim=64))[0])
        run(function, split(index([3, 2, 2], [20, 5, 40], heads=64, block_size=32))[0])
    assert [list(n.input_desc[0].shape.dim) for n in ge_graphs.nodes(graphs[0])] == [[-1] * 4]
