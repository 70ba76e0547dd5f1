"""Passes that put our ops in place of torch_npu's standard ones in a compiled graph, and back."""

import ge_graphs
import pytest
import torch
from cases.npu_lightning_indexer_pto import on_npu as index
from cases.npu_sparse_flash_attention_pto import on_npu as attend
from npu_models import FIRST, LOOKUP, after_the_text, decode, eager, lookup_model
from torch.fx.experimental.proxy_tensor import make_fx

import custom_pypto
from custom_pypto.schemas import overload

pytestmark = [pytest.mark.ascend_host, pytest.mark.usefixtures("for_compiled_models")]

INDEX, ATTEND = "npu_lightning_indexer", "npu_sparse_flash_attention"
INPUTS = {INDEX: index([2, 1], [20, 5], sparse_count=4), ATTEND: attend([2, 1], [20, 5])}
# what ours always is, and torch_npu's not by default
ABSORBED = {INDEX: {}, ATTEND: {"attention_mode": 2}}
FLAGS = {INDEX: "return_value", ATTEND: "return_softmax_lse"}


def ours(op, tensors, **more):
    return getattr(custom_pypto, f"{op}_pto")(**tensors, **more)


def standard(op, tensors, **more):
    named = {name: x for name, x in tensors.items() if name != "cmp_ratio"}
    if op == ATTEND and named["value"] is None:
        named["value"] = named["key"]
    return getattr(torch.ops.npu, op)(**{**ABSORBED[op], **named, **more})


def swapped(function, op, way, **changes):
    """The targets of the ops in the graph of ``function`` after the pass, and its results."""
    from custom_pypto.converter import swap

    tensors, constants = ge_graphs.split(INPUTS[op])

    def call(tensors):
        return function(op, {**tensors, **constants, **changes})

    graph = make_fx(call, tracing_mode="fake")(tensors)
    getattr(swap, way)(graph)
    graph.recompile()
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    results = graph(tensors)
    results = results if isinstance(results, tuple) else (results,)
    return {t for t in targets if isinstance(t, torch._ops.OpOverload)}, results


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("op", [INDEX, ATTEND])
def test_an_op_of_torch_npu_becomes_ours_and_back(op, asked):
    flag = {FLAGS[op]: True} if asked else {}
    mine, theirs = overload(f"{op}_pto"), getattr(torch.ops.npu, op).default
    expected = ours(op, INPUTS[op], **flag)
    expected = expected if isinstance(expected, tuple) else (expected,)

    for function, way, target in (
        (standard, "use_custom_pypto", mine),
        (ours, "use_torch_npu", theirs),
    ):
        targets, results = swapped(function, op, way, **flag)
        assert target in targets and not targets & {mine, theirs} - {target}
        for result, right in zip(results, expected, strict=asked or function is ours):
            torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)


def test_arguments_that_the_other_op_lacks_are_rejected():
    rejected = "use_custom_pypto: attention_mode of npu::.* must be 2 .*, got 0; pass that"
    with pytest.raises(RuntimeError, match=rejected):
        swapped(standard, ATTEND, "use_custom_pypto", attention_mode=0)
    with pytest.raises(RuntimeError, match="use_torch_npu: cmp_ratio of .* must be 1, got 4"):
        swapped(ours, INDEX, "use_torch_npu", cmp_ratio=4)


def pass_of(way, mode):
    from custom_pypto.converter import swap

    return {"mode": mode, "settings": {"post_grad_custom_pre_pass": getattr(swap, way)}}


GE, *OF_CAPTURES = ge_graphs.MODES
MODES = [GE, *(pytest.param(mode, marks=pytest.mark.slow) for mode in OF_CAPTURES)]


@pytest.mark.parametrize("mode", MODES)
def test_torchair_compiles_a_model_of_torch_npus_ops_to_ours(mode):
    first, rest = ge_graphs.split(INPUTS[INDEX])
    second, others = ge_graphs.split(INPUTS[ATTEND])
    tensors = [{n: x.npu() for n, x in each.items()} for each in (first, second)]

    def layer(ops):
        def call(index_inputs, attend_inputs):
            indices = ops(INDEX, index_inputs | rest)
            indices = indices[0] if isinstance(indices, tuple) else indices
            result = ops(ATTEND, attend_inputs | others | {"sparse_indices": indices})
            return result[0] if isinstance(result, tuple) else result

        return call

    torch.compiler.reset()
    call = ge_graphs.compiled(layer(standard), **pass_of("use_custom_pypto", mode))
    with ge_graphs.watched() as seen:
        result = call(*tensors)
    assert torch.equal(result, layer(ours)(*tensors))
    if mode == GE:
        types = [node.type for node in ge_graphs.nodes(seen.ge[0])]
        assert types == ["LightningIndexerPto", "SparseFlashAttentionPto"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ge_graphs.MODES)
def test_a_decode_step_runs_torch_npus_ops(mode):
    tokens = LOOKUP()[0].npu()
    torch.compiler.reset()
    step = ge_graphs.compiled(lookup_model().forward, **pass_of("use_torch_npu", mode))
    with ge_graphs.watched() as seen:
        logits = decode(step, after_the_text(), tokens, FIRST, FIRST + 2)
    expected = eager()[0][:, :2]  # by the NPU kernels, which round elsewhere than the CPU kernels
    torch.testing.assert_close(logits, expected, rtol=0, atol=2**-6 * expected.abs().max())
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    if mode == GE:
        (graph,) = seen.ge
        types = [node.type for node in graph.op]
        assert ge_graphs.nodes(graph) == []
        assert types.count("LightningIndexer") == types.count("SparseFlashAttention") == 2
    else:
        (graph,) = seen.fx
        targets = [node.target for node in graph.nodes]
        assert targets.count(torch.ops.npu.npu_lightning_indexer.default) == 2
