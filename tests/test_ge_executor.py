"""The executor of GE graphs behind the host simulator of CANN: what it rejects, where it writes."""

from pathlib import Path

import pytest
import torch

from custom_pypto.graph import prototypes

pytestmark = pytest.mark.ascend_host

DEVICE, HOST = 1, 0


def node(kind, name, sources=(), inputs=(), outputs=("y",), **attributes):
    from torchair._ge_concrete_graph.ge_ir_pb2 import OpDef

    made = OpDef(type=kind, name=name, input=sources)
    for tensor in inputs:
        made.input_desc.add(name=tensor)
    for tensor in outputs:
        made.output_desc.add(name=tensor)
    for attribute, value in attributes.items():
        held = value.encode() if isinstance(value, str) else value
        # protobuf's field for an int is i, for a float f, ...
        setattr(made.attr[attribute], type(value).__name__[0], held)
    return made


def data(i):
    return node("Data", f"data{i}", inputs=["x"], index=i)


def executed(nodes, inputs, results, *, placements=None, assigned=(), inputs_too=True):
    """What the graph of ``nodes`` returns, of which ``results`` are the outputs."""
    from torchair._ge_concrete_graph.ge_ir_pb2 import GraphDef

    from custom_pypto.simulation.ascend_host.ge_executor import Graph

    definition = GraphDef(name="test")
    nodes = [*(map(data, range(len(inputs))) if inputs_too else ()), *nodes]
    definition.op.extend([*nodes, node("NetOutput", "end", results, results, ())])
    definition.attr["_input_placements"].list.i.extend(placements or [DEVICE] * len(inputs))
    graph = Graph("test")
    graph.load(definition)
    graph.compile()
    return graph.run(inputs, assigned)


def add(*sources, name="add"):
    return node("Add", name, sources, ["x1", "x2"])


def rejected(match, *args, **kwargs):
    from custom_pypto.simulation.ascend_host import AscendHostError

    with pytest.raises(AscendHostError, match=match):
        executed(*args, **kwargs)


def npu(*values):
    return torch.tensor(values).npu()


def test_an_unknown_type_is_rejected_before_anything_runs():
    unknown = node("Unheard", "far", ["data0:0"], ["x"])
    rejected(r"Unheard node far .*OPERATORS in .*ge_operators\.py", [unknown], [npu(1)], ["far:0"])


@pytest.mark.parametrize(
    "change, match",
    [
        pytest.param(dict(inputs=["x", "axes"]), "missing a required argument", id="input"),
        pytest.param(dict(exclusive=True), "must have exclusive=False", id="value-not-served"),
        pytest.param(dict(forward=True), "unexpected keyword argument 'forward'", id="attribute"),
    ],
)
def test_a_node_that_does_not_fit_its_function_is_rejected(change, match):
    arguments = dict(inputs=["x", "axis"], exclusive=False, reverse=False) | change
    cumsum = node("Cumsum", "sum", ["data0:0", "data1:0"], **arguments)
    rejected(rf"Cumsum node sum .*{match}", [cumsum], [npu(1, 2), npu(0)], ["sum:0"])


def indexer(**changes):
    """A node of ``LightningIndexerPto``, as its prototype says except for the changes."""
    (prototype,) = (p for p in prototypes.prototypes() if p.type == "LightningIndexerPto")
    names = [tensor.name for tensor in prototype.inputs]
    attributes = {attribute.name: attribute.default for attribute in prototype.attributes}
    outputs = [tensor.name for tensor in prototype.outputs]
    arguments = dict(inputs=names, outputs=outputs, **attributes) | changes
    arguments = {name: value for name, value in arguments.items() if value is not None}
    sources = ["data0:0", *[""] * (len(arguments["inputs"]) - 1)]
    return node("LightningIndexerPto", "index", sources, **arguments)


@pytest.mark.parametrize(
    "changes, match",
    [
        pytest.param(dict(sparse_mode=None), "attributes of its prototype", id="dropped"),
        pytest.param(dict(sparse_mode=3.0), "attributes of its prototype", id="kind"),
        pytest.param(dict(sparse_modes=3), "attributes of its prototype", id="unknown"),
        pytest.param(dict(inputs=["key", "query"]), "inputs of its prototype", id="inputs"),
        pytest.param(dict(outputs=["indices"]), "outputs of its prototype", id="outputs"),
        pytest.param({}, "must be fed its required input key", id="not-fed"),
    ],
)
def test_a_node_of_ours_is_rejected_unless_it_is_as_its_prototype_says(changes, match):
    rejected(
        rf"LightningIndexerPto node index .*{match}", [indexer(**changes)], [npu(1)], ["index:0"]
    )


def test_the_data_of_a_reference_is_written_in_place():
    pool, rows = torch.zeros(4, 2).npu(), torch.ones(1, 2).npu()
    write = node(
        "ScatterNdUpdate",
        "write",
        ["data0:0", "data1:0", "data2:0"],
        ["var", "indices", "updates"],
        ["var"],
        use_locking=False,
    )
    nodes = [node("RefData", "data0", inputs=["x"], index=0), data(1), data(2), write]
    executed(nodes, [pool, torch.tensor([[3]]).npu(), rows], ["write:0"], inputs_too=False)
    assert pool.sum() == 2 and pool[3].tolist() == [1, 1]


def test_squeeze_without_axes_removes_every_size_of_one():
    squeeze = node("Squeeze", "squeeze", ["data0:0"], ["x"])
    squeeze.attr["axis"].list.val_type = 2  # of an empty list of integers
    (result,) = executed([squeeze], [torch.zeros(1, 3, 1).npu()], ["squeeze:0"])
    assert list(result.shape) == [3]


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_gather_takes_rows_of_any_axis(axis):
    x, indices = torch.arange(24.0).reshape(4, 6), torch.tensor([[2, 0, 1]])
    names = ["x", "indices", "axis"]
    gather = node(
        "GatherV2",
        "gather",
        ["data0:0", "data1:0", "data2:0"],
        names,
        is_preprocessed=False,
        negative_index_support=False,
        batch_dims=0,
    )
    (got,) = executed([gather], [x.npu(), indices.npu(), npu(axis)], ["gather:0"])
    expected = x[indices] if axis in (0, -2) else x[:, indices]
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize(
    "axes, noop, expected",
    [
        pytest.param([], True, [[1, 3]], id="none-of-none"),
        pytest.param([], False, [[2]], id="all-of-none"),
        pytest.param([-1], True, [[2]], id="one"),
    ],
)
def test_a_mean_over_no_axes_is_what_the_node_says(axes, noop, expected):
    mean = node(
        "ReduceMean",
        "mean",
        ["data0:0", "data1:0"],
        ["x", "axes"],
        keep_dims=True,
        noop_with_empty_axes=noop,
    )
    (got,) = executed([mean], [npu([1.0, 3.0]), torch.tensor(axes).long().npu()], ["mean:0"])
    assert got.tolist() == expected


def test_mixed_dtypes_are_rejected_as_in_ge():
    pack = node("Pack", "pack", ["data0:0", "data1:0"], ["x0", "x1"], axis=0, N=2)
    rejected("pack must be fed inputs of one dtype", [pack], [npu(1), npu(1).int()], ["pack:0"])


def test_an_input_on_the_wrong_device_is_rejected():
    rejected("input 1 of graph test must be on the NPU", [], [npu(1), torch.ones(1)], ["data0:0"])
    rejected(
        "input 0 of graph test must be on the host", [], [npu(1)], ["data0:0"], placements=[HOST]
    )


@pytest.mark.parametrize("source", ["second:0", "second:-1"], ids=["data", "control"])
def test_a_node_before_what_it_waits_for_is_rejected(source):
    first = node("Neg", "first", ["data0:0", source][source.endswith(":0") :], ["x"])
    second = node("Neg", "second", ["data0:0"], ["x"])
    rejected(f"first stands before its input {source}", [first, second], [npu(1)], ["first:0"])


def test_a_result_that_is_not_what_torchair_noted_is_rejected():
    wrong = add("data0:0", "data0:0")
    wrong.output_desc[0].attr["_meta"].s = b"Tensor(dtype=torch.int64, shape=torch.Size([3])"
    rejected("add computed y as torch.int64 .2., torchair expects", [wrong], [npu(1, 2)], ["add:0"])


def test_values_from_the_host_meet_those_of_the_device():
    (result,) = executed(
        [add("data0:0", "data1:0")],
        [npu(1, 2), torch.tensor([3])],
        ["add:0"],
        placements=[DEVICE, HOST],
    )
    assert result.device.type == "npu" and result.tolist() == [4, 5]


def test_outputs_are_new_tensors_unless_one_is_assigned():
    given, target = npu(1, 2), npu(0, 0)
    kept, written = executed(
        [add("data0:0", "data0:0")], [given, target], ["data0:0", "add:0"], assigned=[None, target]
    )
    assert written is target and target.tolist() == [2, 4]
    given.zero_()
    assert kept.tolist() == [1, 2]


def test_outputs_are_all_computed_before_one_is_written():
    one, other = npu(1), npu(2)
    executed([], [one, other], ["data1:0", "data0:0"], assigned=[one, other])
    assert (one.item(), other.item()) == (2, 1)


def test_an_output_that_is_an_input_is_written_in_place():
    rows = torch.zeros(3, 2).npu()
    scatter = node(
        "ScatterNdUpdate",
        "scatter",
        ["data0:0", "data1:0", "data2:0"],
        ["var", "indices", "updates"],
        ["var"],
        use_locking=False,
    )
    executed([scatter], [rows, npu([1]), torch.ones(1, 2).npu()], ["scatter:0"], assigned=[rows])
    assert rows.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_a_graph_without_nodes_or_outputs_has_a_picture(monkeypatch):
    from torchair._ge_concrete_graph.ge_ir_pb2 import GraphDef

    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    from export_graph import picture

    assert "<rect" in picture(GraphDef(op=[data(0)]))
    checked = picture(GraphDef(op=[add("data0:0", "data0:0"), node("Assert", "check", outputs=())]))
    assert "Assert" in checked and "Add" in checked
