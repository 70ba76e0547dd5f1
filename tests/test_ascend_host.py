"""The host simulator of CANN: torch_npu's device in host memory, capture and replay, rejections."""

import contextlib
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from cases import inputs_of, prefix_sums
from cases.npu_lightning_indexer_pto import inputs as indexer_inputs
from npu_calls import CALLS, assert_replays_follow, call, changed, on_npu, same
from torch.utils._pytree import tree_leaves

import custom_pypto
from custom_pypto import layer_ops
from custom_pypto.descriptions import LAYER_KERNELS
from custom_pypto.reference import MODULES
from custom_pypto.requirements import minor

pytestmark = pytest.mark.ascend_host

# ---- what the device computes --------------------------------------------------------------------


def scatter(x, rows, values):
    """torch_npu's op, into a copy and in place; the CPU has no such op."""
    if x.device.type == "cpu":
        written = x.index_copy(0, rows, values)
        return written, x.copy_(written)
    to = (x, rows[:, None], values)
    return torch.ops.npu.npu_scatter_nd_update(*to), torch.ops.npu.npu_scatter_nd_update_(*to)


COMPUTE = {
    "arithmetic": lambda x, y, i, b: (x + 2 * y, x / y, -x, x.pow(2).mean(-1, keepdim=True)),
    "matmul": lambda x, y, i, b: (x @ y.t(), x.expand(2, 3, 4) @ y.t(), F.linear(x, y)),
    "einsum": lambda x, y, i, b: torch.einsum("ab,cb->ac", x, y),
    "select": lambda x, y, i, b: (x[i], x[b], x[1:, ::2] + 1, x.gather(0, i[None]), b.nonzero()),
    "where": lambda x, y, i, b: (torch.where(b, x, 0.0), x.masked_fill(b, 3)),
    "order": lambda x, y, i, b: (x.topk(2), x.argsort(-1), x.cumsum(1), i.repeat_interleave(3)),
    "layout": lambda x, y, i, b: (x.t().contiguous(), torch.cat([x, y]), x.t().clone()),
    "dtype": lambda x, y, i, b: (x.to(torch.bfloat16).float(), i.int(), x.t().to(torch.float16)),
    "create": lambda x, y, i, b: (
        torch.arange(4, device=x.device) + i[0],
        torch.full((2, 2), 3.5, device=x.device),
        torch.tensor([1.0, 2.0], device=x.device),
        torch.zeros_like(x.t()),
    ),
    "in place": lambda x, y, i, b: (x.t().add_(1), x, y.clone().index_put_((i,), x[:2])),
    "view in place": lambda x, y, i, b: (x[1:, 2:].mul_(2), x),
    "out": lambda x, y, i, b: torch.add(x, y, out=torch.empty(0, device=x.device)),
    "network": lambda x, y, i, b: (F.silu(x), F.layer_norm(x, (4,)), F.embedding(i, x)),
    "softmax": lambda x, y, i, b: x.softmax(-1),
    "scatter": lambda x, y, i, b: scatter(x, i, y[:2]),
    "value": lambda x, y, i, b: torch.tensor([x[0, 0].item(), torch.equal(x, y)]),
}


@pytest.mark.parametrize("name", COMPUTE)
def test_an_npu_tensor_computes_what_a_cpu_tensor_does(name):
    given = {
        "x": torch.randn(3, 4),
        "y": torch.randn(3, 4),
        "i": torch.tensor([2, 0]),
        "b": torch.rand(3, 4) > 0.5,
    }
    on_npu = {name: tensor.npu() for name, tensor in given.items()}
    got, expected = COMPUTE[name](**on_npu), COMPUTE[name](**given)
    for a, b in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert a.device.type == ("cpu" if name == "value" else "npu")
        assert a.dtype == b.dtype and a.stride() == b.stride()
        assert torch.equal(a.cpu(), b)


def test_copies_between_devices_keep_values_strides_and_dtype():
    for x in (torch.randn(3, 4).t(), torch.randn(5)[::2], torch.randn(0, 3), torch.tensor(2.5)):
        assert torch.equal(x.npu().cpu(), x)
        back = torch.empty_strided(x.size(), x.stride()).copy_(x.npu())
        assert torch.equal(back, x)
    part = torch.zeros(4, 4, device="npu")
    part[:, 1] = torch.arange(4.0)
    assert torch.equal(part.cpu()[:, 1], torch.arange(4.0)) and part.sum().item() == 6


def test_a_tensor_like_one_on_the_npu_may_be_on_another_device():
    x = torch.randn(3, 4).npu()
    for made in (torch.ones_like(x, device="cpu"), torch.full_like(x, 1, device="cpu")):
        assert made.device.type == "cpu" and torch.equal(made, torch.ones(3, 4))
    assert torch.zeros_like(x, device="meta").device.type == "meta"


def test_what_only_an_npu_does_fails_with_the_name_of_the_function():
    with pytest.raises(RuntimeError, match="aclopCompileAndExecute|aclnn|libopapi"):
        F.one_hot(torch.tensor([1, 0], device="npu"), 3)  # torch_npu has an operator of its own


# ---- the ops -------------------------------------------------------------------------------------

HALF = dict(dtype=torch.bfloat16)


@pytest.mark.parametrize("op", CALLS)
def test_an_op_on_npu_tensors_runs_its_npu_program(op):
    from custom_pypto import simulation

    x = CALLS[op]()
    got = call(op, on_npu(x))
    assert all(tensor.device.type == "npu" for tensor in got)
    with simulation.on_cpu():
        expected = call(op, x)
    assert all(map(same, got, expected))


# ---- capture and replay --------------------------------------------------------------------------


def test_captured_work_is_done_at_every_replay_and_not_before():
    x, y = torch.ones(3, device="npu"), torch.zeros(3, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        z = (x * 2).cumsum(0)
        y += 1
    assert y.tolist() == [0, 0, 0]
    x.fill_(5)
    for replays in (1, 2):
        graph.replay()
        assert z.tolist() == [10, 20, 30] and y.tolist() == [replays] * 3


def test_a_captured_copy_has_the_strides_it_was_asked_for():
    x = torch.arange(6.0).reshape(2, 3).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        copies = x.t().contiguous(), x.t().clone(), x.t().half()
    x.mul_(2)
    graph.replay()
    assert [copy.stride() for copy in copies] == [(2, 1), (1, 3), (1, 3)]
    assert all(copy.tolist() == [[0, 6], [2, 8], [4, 10]] for copy in copies)


def test_a_scalar_on_the_cpu_is_captured_by_its_value():
    x, factor = torch.ones(2).npu(), torch.tensor(2.0)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x * factor
    factor.fill_(5)
    graph.replay()
    assert y.tolist() == [2, 2]


def test_work_on_another_stream_is_captured_once_that_waits_for_the_captured_one():
    x, apart, joined = (torch.ones(2).npu() for _ in range(3))
    side = torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        with torch.npu.stream(side):
            apart += x  # at once
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            joined += x
        torch.npu.current_stream().wait_stream(side)
        y = joined + apart
    assert (apart.tolist(), joined.tolist()) == ([2, 2], [1, 1])
    with torch.npu.stream(side):
        x += 4  # after the capture it is a stream as any
    graph.replay()
    assert (apart.tolist(), joined.tolist(), y.tolist()) == ([2, 2], [6, 6], [8, 8])


def test_a_stream_that_is_not_joined_breaks_a_capture():
    x, side = torch.ones(2, device="npu"), torch.npu.Stream()
    with broken_capture(torch.npu.NPUGraph(), "stream that was not joined"):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x += 1
            event = torch.npu.Event()
            event.record()
            x += 1
        event.wait()  # not after all of its work


def test_a_host_function_is_called_at_its_place_in_the_stream_and_in_replays(capsys):
    x, graph = torch.zeros(1).npu(), torch.npu.NPUGraph()

    def printed():
        torch.npu.synchronize()
        return re.findall(r"x=tensor\(\[(.)\.\]\)", capsys.readouterr().out)

    note = functools.partial(torch.ops.npu.print_npugraph_tensor, x, tensor_name="x")
    note()
    assert printed() == ["0"]
    with torch.npu.graph(graph):
        x += 1
        note()
        x += 1
    assert printed() == []
    graph.replay()
    graph.replay()
    assert printed() == ["1", "3"]


def test_a_stream_has_limits_of_cores_that_a_capture_can_set():
    stream = torch.npu.Stream()
    limit = functools.partial(torch.npu.get_stream_limit, stream)
    assert limit() == {"cube_core_num": 24, "vector_core_num": 48}
    torch.npu.set_stream_limit(stream, 4, 8)
    assert limit() == {"cube_core_num": 4, "vector_core_num": 8}
    with pytest.raises(RuntimeError, match="1 to 24 cube cores or 1 to 48 vector cores, got 49"):
        torch.npu.set_stream_limit(stream, 4, 49)
    torch.npu.reset_stream_limit(stream)
    assert limit() == {"cube_core_num": 24, "vector_core_num": 48}


@contextlib.contextmanager
def broken_capture(graph, match: str, replayable: bool = False):
    """A capture that must fail, after which there must be nothing to replay."""
    import torch_npu

    if minor(torch_npu.__version__) == "2.10" and not replayable:
        pytest.skip("torch_npu 2.10 counts a capture that failed as under way in later tests, too")
    with (
        # torch_npu leaves the capture's stream the current one where that fails
        torch.npu.stream(torch.npu.current_stream()),
        pytest.raises(RuntimeError, match=match),
        torch.npu.graph(graph),
    ):
        yield
    if replayable:
        return graph.replay()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught"])
@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda x: x.sum().item(), id="item"),
        pytest.param(lambda x: x.cpu(), id="cpu"),
        pytest.param(lambda x: torch.zeros(3).copy_(x), id="copy"),
        pytest.param(lambda x: x.nonzero(), id="shape"),
        pytest.param(lambda x: torch.npu.synchronize(), id="device"),
        pytest.param(lambda x: torch.npu.current_stream().synchronize(), id="stream"),
        pytest.param(lambda x: bool((x > 0).all()), id="branch"),
        pytest.param(lambda x: str(x), id="print"),
    ],
)
def test_waiting_for_the_device_breaks_a_capture(wait, caught):
    x = torch.ones(3, device="npu")
    wait(x)  # outside of a capture it may
    with (
        broken_capture(torch.npu.NPUGraph(), "the capture was broken by .* the device"),
        contextlib.suppress(RuntimeError) if caught else contextlib.nullcontext(),
    ):
        wait(x)
    assert (x + 1).tolist() == [2, 2, 2]  # and the stream is as it was


def test_a_replay_breaks_a_capture():
    import torch_npu

    x = torch.ones(3, device="npu")
    inner = torch.npu.NPUGraph()
    with torch.npu.graph(inner):
        x += 1
    # torch_npu 2.10 and 2.11 reject it by themselves, and the capture ends well, of nothing
    by_itself = minor(torch_npu.__version__) in ("2.10", "2.11")
    rejected = (
        "Cannot prepare for replay during capturing stage"
        if by_itself
        else "must not be replayed while another is captured"
    )
    with broken_capture(torch.npu.NPUGraph(), rejected, replayable=by_itself):
        inner.replay()
    assert x.tolist() == [1, 1, 1]
    inner.replay()
    assert x.tolist() == [2, 2, 2]


def test_a_cpu_argument_of_a_captured_function_is_rejected():
    import torchair

    from custom_pypto.simulation.ascend_host import AscendHostError

    config = torchair.CompilerConfig()
    config.mode = "reduce-overhead"
    backend = torchair.get_npu_backend(compiler_config=config)
    function = torch.compile(lambda x, y: x + y.sum(), backend=backend, fullgraph=True)
    with pytest.raises(AscendHostError, match=r"a tensor \[\] .* give the function NPU tensors"):
        function(torch.ones(2).npu(), torch.tensor(2.0))


def test_a_replay_that_fails_raises():
    rows = torch.zeros(1, dtype=torch.int64, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch.ones(2, 2, device="npu").index_select(0, rows)
    graph.replay()
    rows.fill_(7)
    with pytest.raises(RuntimeError, match="replay: IndexError"):
        graph.replay()


@pytest.mark.parametrize("op", CALLS)
def test_a_captured_op_follows_new_lengths_and_block_tables(op):
    first = CALLS[op]()
    second = changed(op)
    assert {n: t.shape for n, t in first.items() if isinstance(t, torch.Tensor)} == {
        n: t.shape for n, t in second.items() if isinstance(t, torch.Tensor)
    }
    static = on_npu(first)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):  # a wrapper that read a value would fail here
        captured = call(op, static)
    assert_replays_follow(graph, functools.partial(call, op), static, captured, [second])


def test_backward_on_an_npu_runs_the_program_of_the_gradient():
    from custom_pypto import simulation

    def gradients(x: dict) -> list[torch.Tensor]:
        leaves = [x[name].requires_grad_() for name in ("query", "key", "query_rope", "key_rope")]
        custom_pypto.npu_sparse_flash_attention_pto(**x).sum().backward()
        return [leaf.grad for leaf in leaves]

    call = CALLS["npu_sparse_flash_attention_pto"]
    got = gradients(on_npu(call()))
    assert all(x.device.type == "npu" for x in got)
    with simulation.on_cpu():
        expected = gradients(call())
    assert all(map(same, got, expected))


@pytest.mark.parametrize("op", LAYER_KERNELS)
def test_layer_ops_on_an_npu_run_their_programs(op):
    from custom_pypto import simulation

    for _, _, x in MODULES[op].checks([torch.bfloat16]):
        got = getattr(layer_ops, op)(**on_npu(x))
        assert all(y.device.type == "npu" for y in got)
        with simulation.on_cpu():
            expected = getattr(layer_ops, op)(**x)
        assert all(map(same, got, expected))


def test_a_stored_weight_on_an_npu_is_rejected_with_the_remedy():
    with pytest.raises(RuntimeError) as rejected:
        custom_pypto.weight_only_linear(**on_npu(inputs_of("weight_only_linear")))
    assert str(rejected.value) == (
        "weight_only_linear: x.device must be cpu (an NPU has "
        "torch_npu.npu_weight_quant_batchmatmul), got npu:0; load the model with weights=None"
    )


def test_a_captured_op_follows_new_prefix_sums():
    x = indexer_inputs([2, 1], [30, 17], dim=128, layout_query="TND", **HALF)
    static = on_npu(x)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = custom_pypto.npu_lightning_indexer_pto(**static)
    for lengths in ([1, 2], [3, 0], [2, 1]):
        static["actual_seq_lengths_query"].copy_(prefix_sums(lengths))
        graph.replay()
        expected = custom_pypto.npu_lightning_indexer_pto(**static)
        assert torch.equal(captured.cpu(), expected.cpu())
