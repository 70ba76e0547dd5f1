"""torchair's options, scopes, streams and switches over our ops and over a model's decode step, on
the host simulator of CANN: what reaches the graph, and the results of eager."""

import contextlib
import functools
from typing import NamedTuple

import ge_graphs
import pytest
import torch
from cases.npu_sparse_flash_attention_pto import on_npu as attend
from ge_graphs import ONE_GRAPH, watched
from npu_calls import on_npu
from npu_models import (
    FIRST,
    LOOKUP,
    Layer,
    after_the_text,
    check,
    decode,
    eager,
    launched,
    layer,
    lookup_model,
)

import custom_pypto

pytestmark = [pytest.mark.ascend_host, pytest.mark.usefixtures("for_compiled_models")]
GE, OLDER, CAPTURE = ge_graphs.MODES
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# the types of the layer's nodes, by what makes them
NODES = {
    "converter": ["LightningIndexerPto", "SparseFlashAttentionPto"],
    "callback": [
        "custom_pypto__npu_lightning_indexer_pto_return_value",
        "custom_pypto__npu_sparse_flash_attention_pto_softmax_lse",
    ],
}


@pytest.fixture(params=list(NODES))
def made_by(request, monkeypatch):
    if request.param == "callback":
        ge_graphs.use_callbacks(
            monkeypatch, "npu_lightning_indexer_pto", "npu_sparse_flash_attention_pto"
        )
    return request.param


def nodes(graph, made_by):
    """Those of indexer and attention."""
    found = [node for node in graph.op if node.type in NODES[made_by]]
    assert [node.type for node in found] == NODES[made_by]
    return found


# ---- options -------------------------------------------------------------------------------------

EXPERIMENTAL = "experimental_config."
TOPOLOGY = EXPERIMENTAL + "topology_sorting_strategy"
# the setting, and what GE gets
GE_OPTIONS = {
    "frozen_parameter": ({EXPERIMENTAL + "frozen_parameter": True}, {"frozen_parameter": "1"}),
    "tiling_schedule_optimize": (
        {EXPERIMENTAL + "tiling_schedule_optimize": True},
        {"ge.tiling_schedule_optimize": "1"},
    ),
    "topology BFS": ({TOPOLOGY: "BFS"}, {"ge.topoSortingMode": "0"}),
    "topology RDFS": ({TOPOLOGY: "RDFS"}, {"ge.topoSortingMode": "2"}),
    "topology StableRDFS": ({TOPOLOGY: "StableRDFS"}, {"ge.topoSortingMode": "3"}),
}


def ids(options, default):
    return [name if name == default else slow(name) for name in options]


@pytest.mark.parametrize("option", ids(GE_OPTIONS, "tiling_schedule_optimize"))
def test_ge_gets_an_option_with_the_graph(option, made_by):
    settings, given = GE_OPTIONS[option]
    seen = check(None, GE, settings)
    nodes(*seen.ge, made_by)
    (options,) = seen.options
    assert options | given == options


@pytest.mark.slow
def test_run_eagerly_gives_ge_no_graph(made_by):
    seen = check(None, GE, {"debug.run_eagerly": True})
    nodes(*seen.ge, made_by)
    assert seen.options == []


class Captured(NamedTuple):
    """Of two calls, and a third one whose parameter is elsewhere and has other values."""

    captures: int
    new_values: bool  # the third result has them
    kept: bool  # the second result, after the third call
    in_place: bool  # our kernels read the caller's memory, no copy


# the setting, and what it changes
CAPTURE_OPTIONS = {
    "no option": ({}, Captured(2, True, False, False)),
    "frozen_parameter": ({"frozen_parameter": True}, Captured(1, False, True, False)),
    "force_eager": ({"force_eager": True}, Captured(0, True, True, True)),
    "force_recapture": ({"force_recapture": True}, Captured(3, True, False, False)),
    "no reuse_graph_pool": (
        {"reuse_graph_pool_in_same_fx": False},
        Captured(2, True, True, False),
    ),
    "no clone_input": ({"clone_input": False}, Captured(2, True, False, True)),
}


@pytest.mark.parametrize("option", ids(CAPTURE_OPTIONS, "force_recapture"))
def test_a_capture_with_an_option(option):
    """Each differs from a capture without it, so that an option that is ignored fails."""
    settings, expected = CAPTURE_OPTIONS[option]
    made, before = layer()
    index, attend, projection = made.tensors
    after = made.call()(index, attend, 2 * projection).cpu()
    weight = torch.nn.Parameter(projection.clone(), requires_grad=False)
    torch.compiler.reset()
    call = ge_graphs.compiled(made.call(), mode=CAPTURE, settings=settings)
    with watched() as seen, launched() as launches:
        call(index, attend, weight)
        result = call(index, attend, weight)
        assert torch.equal(result.cpu(), before)
        weight.data = 2 * projection
        last = call(index, attend, weight)
    new_values, kept = torch.equal(last.cpu(), after), torch.equal(result.cpu(), before)
    in_place = any(attend["key"].data_ptr() in launch.addresses for launch in launches)
    assert Captured(seen.captures, new_values, kept, in_place) == expected
    assert new_values or torch.equal(last.cpu(), before)


@pytest.mark.slow
def test_graphs_of_one_pool_take_turns_and_cloned_outputs_outlive_a_replay():
    layers, pool = (Layer(), Layer(seed=1)), torch.npu.graph_pool_handle()
    settings = {"use_graph_pool": pool, "clone_output": True}
    torch.compiler.reset()
    with pytest.warns(UserWarning, match="use_graph_pool"):
        calls = [ge_graphs.compiled(x.call(), mode=CAPTURE, settings=settings) for x in layers]
        results = [
            call(*x.tensors) for _ in range(2) for call, x in zip(calls, layers, strict=True)
        ]
    expected = [x.call()(*x.tensors) for x in layers]
    assert all(map(torch.equal, results, 2 * expected))


def test_a_dump_has_what_our_ops_compute_in_the_replays(tmp_path):
    made, expected = layer()
    check(None, CAPTURE, {"dump_tensor_data": True, "data_dump_dir": str(tmp_path)})
    torch.npu.synchronize()
    # of an op with several results, the dump has those that are used: getitem, getitem_2
    indices, attention = sorted(tmp_path.glob("**/getitem*.pt"), key=lambda path: len(path.name))
    assert torch.equal(torch.load(indices), made.indices(made.index).cpu())
    assert torch.equal(torch.load(attention), expected)


# ---- sizes ---------------------------------------------------------------------------------------


def in_gears(tokens, gears):
    """A layer of so many tokens per sequence, which may be one of the ``gears``; None: any."""
    import torchair

    made = Layer(tokens)
    for inputs in made.tensors[:2]:
        for name in ("query", "weights", "query_rope"):
            if gears and name in inputs:
                torchair.inference.set_dim_gears(inputs[name], {1: gears})
    return made


@pytest.mark.slow
def test_gears_are_one_graph_for_their_sizes_and_reject_others(made_by):
    """The tokens of a decode step with drafts; a single token is a graph of its own."""
    torch.compiler.reset()
    call = ge_graphs.compiled(
        Layer().call(),
        settings={"inference_config.dynamic_gears_merge_policy": "zip"},
        dynamic=True,
    )

    def run(tokens, gears):
        made = in_gears(tokens, gears)
        assert torch.equal(call(*made.tensors), made.call()(*made.tensors))

    with watched() as seen:
        for tokens in (2, 4, 2, 1):
            run(tokens, [2, 4] if tokens > 1 else None)
        assert seen.options[0]["ge.dynamicDims"] == "2,2,2,2;4,4,4,4"
        assert [len(nodes(graph, made_by)) for graph in seen.ge] == [2, 2]
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="3 .* not within"):
            run(3, [2, 4])


@pytest.mark.slow
def test_gears_do_not_bind_a_capture():
    """They are GE's. One graph of FX is for all sizes, and each is recorded."""
    torch.compiler.reset()
    call = ge_graphs.compiled(Layer().call(), mode=CAPTURE, dynamic=True)
    with watched() as seen:
        for tokens, captures in (2, 1), (4, 2), (2, 2), (3, 3):
            made = in_gears(tokens, [2, 4])
            assert torch.equal(call(*made.tensors), made.call()(*made.tensors))
            assert seen.counts() == (0, 1, captures)


# ---- scopes --------------------------------------------------------------------------------------


# torchair's scope, its arguments, and the attributes of the nodes inside
SCOPES = {
    "super_kernel": (
        ("layer", "stream-fusion=1"),
        {"_super_kernel_scope": b"layer", "_super_kernel_options": b"stream-fusion=1"},
    ),
    "limit_core_num": ((4, 8), {"_op_aicore_num": b"4", "_op_vectorcore_num": b"8"}),
    "npu_stream_switch": (("indexer",), {"_user_stream_label": b"indexer"}),
    "op_never_timeout": ((True,), {"_op_exec_never_timeout": True}),
}


@pytest.mark.parametrize("name", ids(SCOPES, "super_kernel"))
def test_the_attributes_of_a_scope_reach_our_nodes_inside(name, made_by):
    import torchair

    arguments, attributes = SCOPES[name]
    scope = functools.partial(getattr(torchair.scope, name), *arguments)
    (graph,) = check(None, GE, scope=scope).ge
    assert ge_graphs.differences_from_prototype(graph) == []
    inside, outside = nodes(graph, made_by)
    for attribute, value in attributes.items():
        found = inside.attr[attribute]
        assert getattr(found, found.WhichOneof("value")) == value
        assert attribute not in outside.attr


@pytest.mark.slow
def test_an_indexer_waits_for_a_tensor_by_a_control_edge(made_by):
    import torchair

    made, _ = layer()

    def after_the_projection(index, attend, projection):
        query = attend["query"] @ projection
        with torchair.scope.npu_stream_switch("indexer"):
            waiting = torchair.scope.npu_wait_tensor(index["query"], query)
            indices = made.indices(index | {"query": waiting})
        return made.attention(attend | {"query": query}, indices)

    (graph,) = check(after_the_projection, GE).ge
    indexer, _ = nodes(graph, made_by)
    by_name = {node.name: node for node in graph.op}
    waiting = by_name[indexer.input[0].partition(":")[0]]
    (control,) = [source for source in waiting.input if source.endswith(":-1")]
    assert by_name[control.partition(":")[0]].type == "BatchMatMul"


# ---- streams and cores of captures ---------------------------------------------------------------


def test_an_indexer_beside_the_projection_in_a_stream_of_its_own():
    """A capture whose streams do not join in its end fails, as on a device."""
    made, _ = layer()

    def two_streams(index, attend, projection):
        side, begin, end = torch.npu.Stream(), torch.npu.Event(), torch.npu.Event()
        begin.record()
        with torch.npu.stream(side):
            begin.wait(side)
            indices = made.indices(index)
            end.record()
        query = attend["query"] @ projection
        end.wait(torch.npu.current_stream())
        return made.attention(attend | {"query": query}, indices)

    with launched() as launches:
        assert check(two_streams, CAPTURE).captures == 1
    assert len({x.stream for x in launches}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("waits", [False, True])
def test_streams_of_the_older_mode(waits):
    import torchair

    made, _ = layer()

    def recorded(index, attend, projection):
        with torchair.scope.npu_stream_switch("indexer"):
            indices = made.indices(index)
            record = torchair.ops.record()
        query = attend["query"] @ projection
        torchair.ops.wait([record])
        return made.attention(attend | {"query": query}, indices)

    scope = functools.partial(torchair.scope.npu_stream_switch, "indexer")
    with launched() as launches:
        assert check(recorded if waits else None, OLDER, scope=scope).captures == 1
    assert len({x.stream for x in launches}) == 2


@pytest.mark.slow
def test_limit_core_num_holds_on_the_stream_while_our_op_is_captured():
    import npugraph_ex

    scope = functools.partial(npugraph_ex.scope.limit_core_num, 4, 8)
    with launched() as launches:
        check(None, CAPTURE, scope=scope)
    assert [x.cores for x in launches] == [4, 24]


# ---- callables -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_graphed_callable_has_the_gradients_of_eager():
    leaves = ("query", "key", "query_rope", "key_rope")
    tensors, constants = ge_graphs.split(
        on_npu(attend([2, 3], [20, 9], layout_query="TND", layout_kv="TND"))
    )

    def arguments(scale):
        return [
            (x * scale).detach().requires_grad_() if name in leaves else x.clone()
            for name, x in tensors.items()
        ]

    def attention(*values):
        named = dict(zip(tensors, values, strict=True))
        return custom_pypto.npu_sparse_flash_attention_pto(**named, **constants)

    def step(function):
        values = arguments(2)
        result = function(*values)
        written = [x for x in values if x.requires_grad]
        return result, *torch.autograd.grad(result.float().square().sum(), written)

    with torch.enable_grad():
        graphed = torch.npu.make_graphed_callables(attention, tuple(arguments(1)))
        assert all(map(torch.equal, step(graphed), step(attention)))


# ---- a decode step -------------------------------------------------------------------------------

STEPS = {f"{GE} {name}": (GE, settings, None) for name, (settings, _) in GE_OPTIONS.items()}
STEPS |= {f"{GE} {name}": (GE, None, name) for name in SCOPES}
STEPS |= {
    f"{CAPTURE} {n}": (CAPTURE, settings, None)
    for n, (settings, _) in CAPTURE_OPTIONS.items()
    if settings
}
STEPS |= {f"{CAPTURE} limit_core_num": (CAPTURE, None, "limit_core_num")}


@pytest.mark.slow
@pytest.mark.parametrize("mode, settings, name", STEPS.values(), ids=STEPS)
def test_a_decode_step_with_an_option_or_in_a_scope(mode, settings, name):
    import npugraph_ex
    import torchair

    scope = contextlib.nullcontext
    if name:
        scopes = torchair.scope if mode == GE else npugraph_ex.scope
        scope = functools.partial(getattr(scopes, name), *SCOPES[name][0])
    model, tokens = lookup_model(), LOOKUP()[0].npu()

    def forward(token, **arguments):
        with scope():
            return model(token, **arguments)

    torch.compiler.reset()
    step = ge_graphs.compiled(forward, mode=mode, settings=settings)
    with watched() as seen:
        logits = decode(step, after_the_text(), tokens, FIRST, FIRST + 2)
    torch.testing.assert_close(logits, eager()[0][:, :2], rtol=0, atol=2**-6)
    graphs, captured, captures = ONE_GRAPH[mode]
    repeated = {"force_eager": 0, "force_recapture": 2}
    captures = next((repeated[s] for s in settings or () if s in repeated), captures)
    assert seen.counts() == (graphs, captured, captures)
    if name and mode == GE:
        ours = ge_graphs.nodes(seen.ge[0])
        assert ours and all(node.attr.keys() >= SCOPES[name][1].keys() for node in ours)
    if mode == GE and settings and EXPERIMENTAL + "frozen_parameter" in settings:
        assert "1" in seen.options[0]["frozenInput"]
