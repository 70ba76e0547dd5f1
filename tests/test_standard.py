"""Calls written for torch_npu's standard ops: every keyword of those is taken or rejected.

tests/test_rejections.py has the words of the rejections.
"""

import inspect
import operator
import re

import pytest
import torch
from cases import inputs_of, on_meta
from torch.utils._pytree import tree_leaves

import custom_pypto
from custom_pypto.descriptions import ALL_OPS
from custom_pypto.schemas import overload
from custom_pypto.standard import KEYWORDS

INPUTS = {op: inputs_of(op, (3, 2), (40, 33)) for op in KEYWORDS}
LEGAL = {op: {name: k.legal for name, k in table.items()} for op, table in KEYWORDS.items()}
# the keywords of torch_npu 2.13.0 and their defaults
STANDARD = {
    "npu_lightning_indexer_pto": """
        Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
        Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND",
        int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807,
        int next_tokens=9223372036854775807, bool return_value=False
    """,
    "npu_quant_lightning_indexer_pto": """
        Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
        Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND",
        int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807,
        int next_tokens=9223372036854775807, int? query_dtype=None, int? key_dtype=None
    """,
    "npu_kv_quant_sparse_flash_attention_pto": """
        Tensor? key_dequant_scale=None, Tensor? value_dequant_scale=None,
        Tensor? block_table=None, Tensor? actual_seq_lengths_query=None,
        Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query="BSND",
        str layout_kv="BSND", int sparse_mode=3, int pre_tokens=9223372036854775807,
        int next_tokens=9223372036854775807, int attention_mode=0, int quant_scale_repo_mode=1,
        int tile_size=128, int rope_head_dim=64, int? key_dtype=None, int? value_dtype=None
    """,
    "npu_sparse_flash_attention_grad_pto": """
        Tensor? query_rope=None, Tensor? key_rope=None, Tensor? actual_seq_qlen=None,
        Tensor? actual_seq_kvlen=None, str? layout="BSND", int? sparse_mode=3,
        int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807,
        int attention_mode=0
    """,
    "npu_lightning_indexer_grad_pto": """
        Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None,
        str? layout="BSND", int? sparse_mode=3, int pre_tokens=9223372036854775807,
        int next_tokens=9223372036854775807
    """,
    "npu_sparse_lightning_indexer_grad_kl_loss_pto": """
        Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None,
        SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3,
        int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807,
        Tensor? sinks=None
    """,
    "npu_dense_lightning_indexer_softmax_lse_pto": """
        SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout="BSND",
        int? sparse_mode=3, int? pre_tokens=9223372036854775807,
        int? next_tokens=9223372036854775807
    """,
    "npu_dense_lightning_indexer_grad_kl_loss_pto": """
        Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None,
        SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3,
        int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807
    """,
    "npu_sparse_flash_attention_pto": """
        Tensor? block_table=None, Tensor? actual_seq_lengths_query=None,
        Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None,
        int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3,
        int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807,
        int attention_mode=0, bool return_softmax_lse=False, Tensor? sinks=None
    """,
}
# torch_npu supports attention_mode 2, which is not its default
OTHER_DEFAULTS = {"attention_mode": "0"}


@pytest.mark.parametrize("op", STANDARD)
def test_every_keyword_of_the_standard_op_is_known(op):
    ours = {argument.name for argument in overload(op)._schema.arguments}
    theirs = dict(re.findall(r"(\w+)=([^,\s]+)", STANDARD[op]))
    assert theirs.keys() - ours == KEYWORDS[op].keys()
    for name, legal in LEGAL[op].items():
        assert theirs[name] == OTHER_DEFAULTS.get(name, str(legal))


def same(got, expected) -> bool:
    return all(map(torch.equal, tree_leaves(got), tree_leaves(expected)))


@pytest.mark.parametrize("op", KEYWORDS)
def test_legal_keywords_change_nothing(op):
    run = getattr(custom_pypto, op)
    expected = run(**INPUTS[op])
    assert same(run(**INPUTS[op], **LEGAL[op]), expected)
    meta = run(**on_meta(INPUTS[op]), **LEGAL[op])
    assert [x.shape for x in tree_leaves(meta)] == [x.shape for x in tree_leaves(expected)]
    for name, value in LEGAL[op].items():
        assert same(run(**INPUTS[op], **{name: value}), expected)


@pytest.mark.parametrize("given", ["none", "legal"])
@pytest.mark.parametrize("op", KEYWORDS)
def test_keywords_leave_no_trace_in_a_compiled_graph(op, given):
    run, keywords = getattr(custom_pypto, op), LEGAL[op] if given == "legal" else {}
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda **inputs: run(**inputs), backend=backend, fullgraph=True)
    assert same(compiled(**INPUTS[op], **keywords), run(**INPUTS[op]))
    [graph] = graphs
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    [call] = [node for node in calls if node.target is not operator.getitem]  # of a tuple
    assert call.target is getattr(torch.ops.custom_pypto, op).default
    assert not KEYWORDS[op].keys() & call.kwargs.keys()


@pytest.mark.parametrize(
    "op, keyword, value, got",
    [
        ("npu_lightning_indexer_pto", "pre_tokens", 7, "7"),
        ("npu_quant_lightning_indexer_pto", "key_dtype", 290, "290"),
        ("npu_sparse_flash_attention_pto", "attention_mode", 0, "0"),
    ],
)
def test_compilation_is_rejected_in_the_same_words(op, keyword, value, got):
    torch._dynamo.reset()
    compiled = torch.compile(getattr(custom_pypto, op), backend="eager", fullgraph=True)
    compiled(**INPUTS[op], **{keyword: LEGAL[op][keyword]})  # whose value may become dynamic now
    with pytest.raises(RuntimeError, match=rf"{op}: {keyword} must be .*, got {got}; "):
        compiled(**INPUTS[op], **{keyword: value})


@pytest.mark.parametrize("op", KEYWORDS)
def test_other_keywords_raise_what_python_raises(op):
    def plain(**inputs):
        return inner(**inputs)

    def inner(query=None):
        return query

    for keyword in ("sink", "softmax_scale", "dequant_scale"):
        with pytest.raises(TypeError) as rejected:
            getattr(custom_pypto, op)(**INPUTS[op], **{keyword: 1})
        with pytest.raises(TypeError) as python:
            plain(**{keyword: 1})
        words = str(python.value)
        assert str(rejected.value) == op + words[words.index("()") :]


@pytest.mark.parametrize("op", ALL_OPS)
def test_a_public_function_has_the_arguments_of_its_op(op):
    parameters = inspect.signature(getattr(custom_pypto, op)).parameters.values()
    empty = inspect.Parameter.empty
    assert [
        (p.name, p.kind is p.KEYWORD_ONLY, p.default)
        for p in parameters
        if p.kind is not p.VAR_KEYWORD
    ] == [
        (a.name, a.kwarg_only, a.default_value if a.has_default_value() else empty)
        for a in overload(op)._schema.arguments
    ]
