"""PyPTO's own mistakes, which the programs work around: each is found on the PyPTO that makes it.

Every one is in the generated code alone, where the interpreter cannot see it.
docs/pypto_versions.md lists them.
"""

import contextlib
import ctypes
import subprocess

import pytest
import torch
from cases.npu_checks import check_attention, check_fused, check_selection, needs_gcc
from cases.npu_kernels import affine_kernel, assert_product, product_kernel, selected_kernel
from cases.npu_programs import attention_case, fused_case, index_case
from with_pypto import pypto, simulation

from custom_pypto.kernels import index_scores, pypto_versions
from custom_pypto.kernels import npu_lightning_indexer_pto as indexer
from custom_pypto.kernels import npu_sparse_attention_pto as fused
from custom_pypto.kernels import npu_sparse_flash_attention_pto as attention
from custom_pypto.requirements import PYPTO, installed_version
from custom_pypto.simulation import compiler, loaded_calls

pytestmark = [pytest.mark.sim, needs_gcc]
PROGRAMS = [indexer, attention, fused]

INSTALLED = installed_version("pypto")
# of CANN 9.0, from the package index; the other one is of CANN 9.1 and later
OLD = INSTALLED == "0.2.0"


@pytest.fixture(autouse=True, params=PYPTO)
def release(request):
    if request.param != INSTALLED:
        pytest.skip(
            f"pypto {request.param} is not installed: bash run.sh test --pypto WHEEL "
            "(docs/pypto_versions.md)"
        )


def found_if(here: bool, error: type[Exception], match: str) -> contextlib.AbstractContextManager:
    """What runs inside fails on the PyPTO that makes the mistake, and succeeds on the other."""
    return pytest.raises(error, match=match) if here else contextlib.nullcontext()


def selected_case() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Arguments of :func:`selected_kernel` and its result."""
    weights, rows = torch.randn(16, 64).bfloat16(), torch.randn(128, 256).bfloat16()
    index, table = torch.randperm(128)[None, :64].int(), torch.randperm(8)[None].int()
    places = table[0].long()[index[0] // 16] * 16 + index[0] % 16
    expected = weights.float() @ rows[places].float()
    return [weights, rows, index, table, torch.zeros(16, 256)], expected


def test_a_gather_reads_its_start_column_as_0_since_cann_9_1():
    arguments, expected = selected_case()
    assert torch.equal(simulation.interpret(selected_kernel(), *arguments)[4], expected)
    got = simulation.execute(selected_kernel(), *arguments)[4]
    assert torch.equal(got[:, :128], expected[:, :128])
    assert torch.equal(got[:, 128:], expected[:, 128:] if OLD else expected[:, :128])


def test_values_gathered_by_columns_are_wrong_since_cann_9_1(monkeypatch, fresh_kernels, generated):
    """What sparse attention did before its rows were gathered in parts."""
    splits = attention.AttentionTiling.splits

    def whole_rows(*arguments):
        return [(size, 1) for size, _ in splits(*arguments)]

    monkeypatch.setattr(attention.AttentionTiling, "splits", whole_rows)
    x = attention_case([1], [300], sparse_count=64)
    with found_if(not OLD, AssertionError, "elements differ by more than"):
        check_attention(x)


def test_several_gathers_by_parts_of_a_tensor_read_the_first_in_0_2_0(
    monkeypatch, fresh_kernels, generated
):
    def views(index, size, parts):
        index = pypto.cast(index, pypto.DT_INT32)
        found = []
        for part in range(parts):
            of_part = index if parts == 1 else pypto.add(pypto.mul(index, parts), part)
            starts = range(0, index.shape[1], size)
            found.append([pypto.view(of_part, [1, size], [0, start]) for start in starts])
        return found

    monkeypatch.setattr(attention, "pieces", views)
    x = attention_case([1], [3000], sparse_count=2048)
    with found_if(OLD, AssertionError, "elements differ by more than"):
        check_attention(x)


def test_fewer_than_64_indices_are_no_valid_code_in_0_2_0(monkeypatch, fresh_kernels, generated):
    monkeypatch.setattr(pypto_versions, "LEAST_INDICES", 16)
    x = attention_case([2, 1], [300, 40], sparse_count=32)
    with found_if(OLD, simulation.SimulationError, "does not compile for the host"):
        check_attention(x)


def test_a_row_sorted_in_the_task_that_made_it_loses_its_valid_shape_in_0_2_0(
    monkeypatch, fresh_kernels
):
    """A token then selects keys that it does not see."""
    for module, functions in (
        (index_scores, ("begin_task", "end_task")),
        (indexer, ("begin_sort", "end_task")),
    ):
        for function in functions:
            monkeypatch.setattr(module, function, lambda *scope: None)
    x = index_case([2], [700], sparse_count=1024, heads=32)
    with simulation.on_cpu():
        check_selection(x)
    indexer.kernel.cache_clear()
    with simulation.on_cpu(generated=True), found_if(OLD, AssertionError, "but sees 69"):
        check_selection(x)


def test_operands_of_a_product_are_loaded_in_whole_tiles_in_0_2_0():
    a, b = torch.randn(4, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    message = r"PRODUCT path 0 aic 0\), TLOAD: reads 128 bytes at byte 512 of argument 0, which has"
    with found_if(OLD, simulation.SimulationError, message):
        got = simulation.execute(product_kernel(), a, b, torch.zeros(4, 64))[2]
        assert_product(got, a, b)
    assert_product(simulation.interpret(product_kernel(), a, b, torch.zeros(4, 64))[2], a, b)


def test_a_reader_of_a_dynamic_argument_waits_for_its_last_writer_only_in_0_2_0():
    """The race is found with both tasks. One program without a race is no proof: the programs keep
    ``submit_before_loop``."""
    x, out = torch.randn(19, 64), torch.zeros(19, 64)
    tasks = r"task \d+ \(ROWS path 0 aiv 0, T\w+\) \w+ and task \d+ \(IN_PLACE path 0 aiv 0, T"
    with found_if(OLD, simulation.SimulationError, f"race: {tasks}"):
        new_x = simulation.execute(affine_kernel(barrier=False), x, out)[0]
        torch.testing.assert_close(new_x, 2 * (3 * x + 1))
    new_x, _ = simulation.interpret(affine_kernel(barrier=False), x, out)
    torch.testing.assert_close(new_x, 2 * (3 * x + 1))


LATE_THREAD = """
#include <pthread.h>
#include <unistd.h>
#include <cstring>
extern "C" int named(pthread_t thread, const char* name) {
  if (!std::strcmp(name, "aicput0")) sleep(1);
  return pthread_setname_np(thread, name);
}
"""


def test_schedulers_wait_for_a_control_flow_that_starts_late(monkeypatch, tmp_path):
    """Those of CANN 9.1 end the process after 50 ms, unless their clock stands still."""
    (tmp_path / "late.cpp").write_text(LATE_THREAD)
    command = ["g++", "-shared", "-fPIC", "-o", "late.so", "late.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    named = loaded_calls.address(ctypes.CDLL(str(tmp_path / "late.so")).named)
    start_kernel = compiler._child

    def with_late_thread(*arguments):
        loaded_calls.replace_in(compiler.PACKAGE, "pthread_setname_np", named)
        start_kernel(*arguments)

    monkeypatch.setattr(compiler, "_child", with_late_thread)
    x, out = torch.randn(19, 64), torch.zeros(19, 64)
    torch.testing.assert_close(simulation.execute(affine_kernel(), x, out)[0], 2 * (3 * x + 1))
    assert simulation.estimate(affine_kernel(), x, out).tasks == 6


@pytest.mark.slow
def test_a_missing_barrier_of_the_fused_op_is_found(monkeypatch, fresh_kernels, generated):
    """Without ``submit_before_loop`` a token may read caches before they are written."""
    monkeypatch.setattr(fused, "after_all", lambda name: fused.loop(name, 1))
    x = fused_case([200] * 16, 1, heads=16, sparse_count=256)
    with found_if(OLD, RuntimeError, "(?s)race: task.*does not order them"):
        check_fused(x)


def test_a_difference_from_the_largest_of_three_loses_one_in_cann_9_2():
    """What the end of a run of tokens in ``pool_groups`` would be."""
    x, y, z = (pypto.SymbolicScalar(name) for name in "xyz")
    difference, product = x - x.max(y).max(z), x - (x.max(y) * (y > 0)).max(z)
    assert "z" in str(difference)
    if hasattr(difference, "simplify"):  # of CANN 9.2; its compiler calls it
        assert "z" not in str(difference.simplify()) and "z" in str(product.simplify())
