"""Mistakes in converters and graphs: the tests of graph mode find them."""

import contextlib
import itertools
from collections import Counter

import ge_graphs
import pytest
from cases import not_default
from ge_graphs import check, split

from custom_pypto.descriptions import OPS, ge_type
from custom_pypto.graph import prototypes
from custom_pypto.schemas import overload

pytestmark = pytest.mark.ascend_host


def attributes_of(op: str) -> dict[str, prototypes.Attribute]:
    return {a.name: a for a in prototypes.prototype(overload(op)._schema, OPS[op]).attributes}


# their default is the only value that an NPU takes, or that a call with every input has
ONE_VALUE = {
    *("layout_key", "layout_kv", "sparse_block_size"),
    *("attention_mode", "quant_scale_repo_mode", "tile_size", "rope_head_dim"),
    ("npu_lightning_indexer_prolog_pto", "layout_query"),
}
ATTRIBUTES = [
    (op, attribute)
    for op in OPS
    for attribute in attributes_of(op)
    if not {attribute, (op, attribute)} & ONE_VALUE
]
PAIRS = [
    (op, *pair)
    for op in OPS
    if op != "add_custom"  # a sum of two
    for inputs in [not_default(op)]
    for pair in itertools.combinations(split(inputs)[0], 2)
    if len({(inputs[name].size(), inputs[name].dtype) for name in pair}) == 1
]


def few(mistakes: list) -> list:
    """Of the mistakes, a fifth for a run without --all."""
    return [
        pytest.param(*row, marks=[] if i % 5 == 0 else pytest.mark.slow)
        for i, row in enumerate(mistakes)
    ]


@contextlib.contextmanager
def found(op: str):
    """By the values, or when the simulator runs the node: it has another shape, or is rejected."""
    wrong = f"^{op}: |^ge_executor: {ge_type(op)} node"
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


@pytest.mark.parametrize("op, attribute", few(ATTRIBUTES))
def test_an_attribute_that_a_converter_drops_is_found(op, attribute, monkeypatch):
    from custom_pypto.converter import convert  # with torchair

    described = attributes_of(op)[attribute]

    def wrong(op, arguments):
        value, other = arguments[attribute], described.default
        if described.required:
            other = False if isinstance(value, bool) else type(value)(1)
        return prototypes.node(op, arguments | {attribute: other})

    monkeypatch.setattr(convert, "node", wrong)
    with found(op):
        check(op, [not_default(op)])


@pytest.mark.parametrize("op, one, other", few(PAIRS))
def test_inputs_that_a_converter_swaps_are_found(op, one, other, monkeypatch):
    from custom_pypto.converter import convert

    def wrong(op, arguments):
        swapped = {one: arguments[other], other: arguments[one]}
        return prototypes.node(op, arguments | swapped)

    monkeypatch.setattr(convert, "node", wrong)
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
    node.attr["causal"].b = True


def drop_attribute(node):
    del node.attr["sparse_count"]


def change_kind(node):
    node.attr["sparse_mode"].f = 3.0


def test_a_node_that_is_not_as_its_prototype_is_found():
    op = "npu_lightning_indexer_pto"
    right = check(op, [not_default(op)])
    for change, difference in {
        rename_input: "inputs ['query', 'key', 'weight', ",
        rename_output: "outputs ['indices', 'sparse_values']",
        exchange_inputs: "inputs ['key', 'query', ",
        unfeed: "query is required and not fed",
        cut: "5 edges",
        add_attribute: "attribute causal is b, not None",
        drop_attribute: "attribute sparse_count is None, not i",
        change_kind: "attribute sparse_mode is f, not i",
    }.items():
        graph = type(right)()
        graph.CopyFrom(right)
        (node,) = ge_graphs.nodes(graph)
        change(node)
        (found,) = ge_graphs.differences_from_prototype(graph)
        assert found.startswith(f"LightningIndexerPto: {difference}")
