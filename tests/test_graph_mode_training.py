"""Training in graphs, on the host simulator of CANN."""

import ge_graphs
import pytest
import torch
from cases.npu_sparse_flash_attention_pto import on_npu as attend
from cases.npu_sparse_lightning_indexer_grad_kl_loss_pto import on_npu as loss_inputs
from npu_calls import on_npu, same

import custom_pypto

pytestmark = pytest.mark.ascend_host

LEAVES = ("query", "key", "query_rope", "key_rope")


def call(layout: str, seed: int = 0) -> dict:
    return on_npu(attend([2, 3], [20, 9], layout_query="TND", layout_kv=layout, seed=seed))


def step(x: dict) -> tuple[torch.Tensor, ...]:
    """The loss, ``[1]``, and its gradients."""
    x = x | {name: x[name].detach().requires_grad_() for name in LEAVES}
    loss = custom_pypto.npu_sparse_flash_attention_pto(**x).float().square().sum()
    return loss.detach().view(1), *torch.autograd.grad(loss, [x[name] for name in LEAVES])


@pytest.mark.parametrize("layout", ["PA_BSND", "TND"])
def test_a_captured_step_follows_new_values(layout):
    static, other = call(layout), call(layout, seed=1)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = step(static)
    for values in (other, call(layout)):
        expected = step(values)
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        graph.replay()
        assert all(map(same, captured, expected))


def test_torchair_compiles_a_step_with_its_backward():
    x = call("TND")
    leaves = [x[name].requires_grad_() for name in LEAVES]

    def loss_of(*leaves):
        arguments = x | dict(zip(LEAVES, leaves, strict=True))
        return custom_pypto.npu_sparse_flash_attention_pto(**arguments).float().square().sum()

    with ge_graphs.converted() as graphs:
        loss = ge_graphs.compiled(loss_of)(*leaves)
        got = torch.autograd.grad(loss, leaves)
    types = [node.type for graph in graphs for node in ge_graphs.nodes(graph)]
    assert types == ["SparseFlashAttentionPto", "SparseFlashAttentionGradPto"]
    assert all(map(same, (loss.detach().view(1), *got), step(x)))


def test_other_lengths_of_the_host_are_compiled_anew():
    """They are attributes of the node, which hold no symbols."""
    calls = [on_npu(loss_inputs(lengths, [20, 9])) for lengths in ([2, 3], [4, 1])]

    def loss_of(x, qlen):
        arguments = x | dict(actual_seq_qlen=qlen)
        return custom_pypto.npu_sparse_lightning_indexer_grad_kl_loss_pto(**arguments)

    with ge_graphs.converted() as graphs:
        compiled = ge_graphs.compiled(loss_of, dynamic=True)
        for x in calls:
            qlen = x.pop("actual_seq_qlen")
            assert all(map(same, compiled(x, qlen), loss_of(x, qlen)))
    assert len(graphs) == 2
