"""The way to an NPU kernel: limits, tensors by name, task graphs, work on the host."""

from functools import partial

import cases
import pytest
import torch
from cases import on_meta, without_nan
from cases.npu_programs import (
    attention_case,
    dense_loss_case,
    fused_case,
    gradient_case,
    index_case,
    index_gradient_case,
    index_loss_case,
    statistics_case,
)
from cases.npu_sparse_attention_pto import CACHES
from torch.utils._python_dispatch import TorchDispatchMode
from with_pypto import simulation

import custom_pypto
from custom_pypto import npu
from custom_pypto.descriptions import LAYER_KERNELS, OPS
from custom_pypto.schemas import bound, overload

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module", autouse=True)
def npu_programs():
    with simulation.on_cpu():
        yield


@pytest.mark.parametrize(
    "op, inputs, message", [row for op in OPS for row in cases.of(op).unsupported_on_npu()]
)
def test_what_the_programs_do_not_support_is_rejected_with_the_remedy(op, inputs, message):
    with pytest.raises(RuntimeError) as rejected:
        getattr(custom_pypto, op)(**inputs)
    assert str(rejected.value).startswith(f"{op}: {message}")


def test_the_contract_holds_for_npu_tensors():
    with pytest.raises(RuntimeError, match="^npu_lightning_indexer_pto: sparse_mode must be"):
        custom_pypto.npu_lightning_indexer_pto(**index_case([1], [40]) | dict(sparse_mode=7))


def test_npu_tensors_reach_the_wrappers():
    for op in (*custom_pypto.__all__, *LAYER_KERNELS):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(overload(op).name(), "PrivateUse1")


SIZES = dict(lengths_query=[2, 1], lengths_key=[300, 40])


def scores_case(**arguments):
    return index_case(**arguments) | dict(return_value=True)


CALLS = {
    "npu_lightning_indexer_pto": partial(index_case, **SIZES),
    "npu_sparse_flash_attention_pto": partial(attention_case, **SIZES),
    "npu_sparse_flash_attention_pto-statistics": partial(
        attention_case, **SIZES, sinks=(-9, 9), statistics=True
    ),
    "npu_sparse_flash_attention_grad_pto": partial(
        gradient_case, **SIZES, sparse_count=64, sinks=(-9, 9)
    ),
    "npu_lightning_indexer_pto-scores": partial(scores_case, **SIZES),
    "npu_lightning_indexer_grad_pto": partial(index_gradient_case, **SIZES, sparse_count=64),
    "npu_sparse_lightning_indexer_grad_kl_loss_pto": partial(
        index_loss_case, **SIZES, sparse_count=64
    ),
    "npu_dense_lightning_indexer_softmax_lse_pto": partial(statistics_case, **SIZES),
    "npu_dense_lightning_indexer_grad_kl_loss_pto": partial(dense_loss_case, **SIZES),
    "npu_sparse_attention_pto": partial(fused_case, [300, 40], 2),
}


def run(launch, id: str, arguments: dict) -> None:
    npu.implementations(launch)[id.partition("-")[0]](**arguments)


ON_HOST = ("loss_pto", "lse_pto")  # whose lengths are integers of the host


def arguments_of(op: str, layout: str) -> dict:
    if op == "npu_sparse_attention_pto":
        return CALLS[op]()
    return CALLS[op](**{"layout" if op.endswith(ON_HOST) else "layout_query": layout})


X = torch.ones(3)


def strided(x: dict) -> dict:
    """The same values, every argument but the caches in memory that is not contiguous."""
    caches = {"key", "value", "key_rope", "key_index", *CACHES}
    return {
        name: torch.stack([t, t], -1)[..., 0]
        if isinstance(t, torch.Tensor) and name not in caches
        else t
        for name, t in x.items()
    }


@pytest.mark.parametrize("change", [dict, strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("op", CALLS)
def test_wrappers_read_no_value_on_the_host(op, layout, change):
    """On meta tensors there is no value to read: what waits for the device fails here."""
    launched = []

    def launch(kernel, tensors):
        launched.append([(tuple(t.shape), t.dtype, t.is_contiguous()) for t in tensors.values()])

    x = change(arguments_of(op, layout))
    for arguments in (x, on_meta(x)):
        run(launch, op, arguments)
    real, meta = launched
    assert real == meta and all(contiguous for *_, contiguous in real)


class Computes(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"a check calls {function}")


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("op", CALLS)
def test_a_check_reads_sizes_strides_and_dtypes_only(op, layout):
    name = op.partition("-")[0]
    arguments = bound(name, (), arguments_of(op, layout))
    with Computes():
        npu.check(name, arguments)


@pytest.mark.parametrize(
    "tensors, message",
    [
        pytest.param(["x", "z"], "the kernel's tensor y is missing", id="missing"),
        pytest.param(["x", "y", "z", "more"], "the kernel has no tensor more", id="unknown"),
    ],
)
def test_a_tensor_that_the_kernel_lacks_or_has_not_is_named(tensors, message):
    facts = npu.common.program("add_custom").Facts(dtype="float32")
    call = npu.common.KernelCall(facts, dict.fromkeys(tensors, X))
    with pytest.raises(TypeError, match=f"^add_custom: {message}$"):
        npu.common.prepared("add_custom", call)


def test_tensors_are_passed_in_the_order_of_the_kernel():
    facts = npu.common.program("add_custom").Facts(dtype="float32")
    call = npu.common.KernelCall(facts, {"z": X, "y": X, "x": None})
    _, tensors = npu.common.prepared("add_custom", call)
    assert list(tensors) == ["x", "y", "z"]
    assert tensors["x"].shape == (1, 1) and tensors["x"].dtype == torch.float32


def test_calls_of_a_class_of_sizes_share_a_kernel():
    kernels = []

    def launch(kernel, tensors):
        kernels.append(kernel)

    attend = npu.implementations(launch)["npu_sparse_flash_attention_pto"]
    for tokens, heads in (5, 16), (6, 16), (12, 16), (6, 32):
        attend(**attention_case([tokens], [300], heads=heads))
    first, same, *others = kernels
    assert first is same and first not in others


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[] if op == "npu_sparse_flash_attention_pto" else [pytest.mark.slow])
        for op in CALLS
        if not op.endswith(ON_HOST)
    ],
)
def test_lengths_and_block_tables_can_be_declared_ready_on_the_host(op, monkeypatch):
    """PyPTO rejects a name that is not an argument; the estimate stays what it was."""
    found = []

    def launch(kernel, tensors):
        names = kernel._runtime_options.get("ready_on_host_tensors", [])
        found.append((names, simulation.estimate(kernel, *tensors.values()).latency_us))

    for value in ("0", "1"):
        monkeypatch.setenv("CUSTOM_PYPTO_READY_ON_HOST", value)
        run(launch, op, arguments_of(op, "BSND"))
    (without, before), (declared, after) = found
    assert not without and declared and before == after


@pytest.mark.parametrize("op", ["npu_lightning_indexer_pto", "npu_sparse_flash_attention_pto"])
def test_prefix_sums_are_never_declared_ready_on_the_host(op, monkeypatch):
    """The wrapper makes them non-decreasing, on the device."""
    found = []

    def launch(kernel, tensors):
        found.extend(kernel._runtime_options["ready_on_host_tensors"])

    monkeypatch.setenv("CUSTOM_PYPTO_READY_ON_HOST", "1")
    run(launch, op, arguments_of(op, "TND"))
    assert "key_lengths" in found and "query_lengths" not in found


def estimated(op: str, arguments: dict) -> simulation.Estimate:
    found = []

    def launch(kernel, tensors):
        found.append(simulation.estimate(kernel, *tensors.values()))

    run(launch, op, arguments)
    return found[0]


@pytest.mark.parametrize("tokens", [2, 5, pytest.param(40, marks=pytest.mark.slow)])
def test_the_task_graph_orders_cache_writes_before_reads(tokens):
    """The batch of tasks that reads the caches follows the one that writes them."""
    estimate = estimated("npu_sparse_attention_pto", fused_case([300] * tokens, 1, sparse_count=64))
    writes = {t.node[0] for t in estimate.timeline if t.name.startswith("PROLOG_CACHE")}
    reads = {t.node[0] for t in estimate.timeline if t.name.startswith(("LI_", "DSA_"))}
    assert writes and reads and max(writes) < min(reads)


@pytest.mark.parametrize("S1", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("length", [300, pytest.param(9000, marks=pytest.mark.slow)])
def test_every_attention_waits_for_its_own_selection(length, S1):
    """An edge that is missing would be a race, which the interpreter does not have."""
    estimate = estimated("npu_sparse_attention_pto", fused_case([length] * 2, S1, sparse_count=64))
    last_sort = "LI_CHUNK1" if length <= 8192 else "LI_MERGE"
    attentions = {t.node for t in estimate.timeline if "DSA" in t.name and "MUL_B" in t.name}
    waiting = []
    for task in estimate.timeline:
        if task.name.startswith(last_sort) and "SORT" in task.name:
            seen, stack = set(), [task.node]
            while stack:
                new = set(estimate.successors.get(stack.pop(), ())) - seen
                seen |= new
                stack += new
            waiting.append(seen & attentions)
    assert len(waiting) == 2 * S1
    assert set.union(*waiting) == attentions
    assert sum(map(len, waiting)) == len(attentions)


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=pytest.mark.slow if i % 3 else []) for i, op in enumerate(CALLS)]
)
def test_after_the_last_pass_the_tiles_compute_the_same(op):
    """PyPTO's own check, on the graph that code is generated from."""
    found = []

    def launch(kernel, tensors):
        found.append(simulation.verify_passes(kernel, *tensors.values()))

    run(launch, op, without_nan(arguments_of(op, "BSND")))
    (counts,) = found
    agree, differ = counts["CodegenPreproc"]
    assert agree > 0
    assert differ == 0


def test_another_pypto_leaves_the_cpu_and_says_what_the_npu_needs(monkeypatch):
    monkeypatch.setattr(custom_pypto.requirements, "PYPTO", ("9.9.8", "9.9.9"))
    npu.common.program.cache_clear()
    with pytest.raises(
        RuntimeError,
        match=r"add_custom: an NPU needs pypto 9.9.8 or 9.9.9, found 0.2.\d.* in /.*pypto; "
        r"pip install 'pypto>=9.9.8' 'cmake",
    ):
        custom_pypto.add_custom(torch.ones(3), torch.ones(3))
