"""Atomic stores of PyPTO's generated code, and what the host finds about sums that tasks share."""

import pytest
import torch
from cases import INT_MAX
from cases.npu_checks import needs_gcc
from cases.npu_kernels import scatter_kernel
from with_pypto import simulation

pytestmark = [pytest.mark.sim, needs_gcc]
SLOW = pytest.mark.slow
UNORDERED = r"race: task \d+ \(ADD .*, TSTORE\) adds to and task \d+ \(ADD .*sum's last bit is not"


def arguments(index: list[int]) -> list[torch.Tensor]:
    x = torch.randn(len(index), 64) * torch.logspace(-3, 3, len(index))[:, None]
    return [x, torch.tensor(index, dtype=torch.int32), torch.randn(32, 64), torch.zeros(32, 64)]


def expected(x, index, sums, out) -> list[torch.Tensor]:
    """Row after row, as the additions of a destination are ordered."""
    sums = sums.clone()
    for row, place in zip(x, index.tolist(), strict=True):
        sums[place] += row
    return [x, index, sums, 2 * sums]


def assert_sums(got: list[torch.Tensor], x: list[torch.Tensor]) -> None:
    """Sums of at most n rows in any order, each addition with 2^-24 of the magnitudes."""
    magnitudes = expected(*(part.abs() for part in x))
    for mine, exact, magnitude in zip(got, expected(*x), magnitudes, strict=True):
        assert ((mine - exact).abs() <= 2 * len(x[0]) * 2**-24 * magnitude).all()


@pytest.mark.parametrize(
    "index",
    [
        pytest.param([*range(31, 15, -1), *range(8, 24)], id="of-two-iterations"),
        # the store of a row is waited for before the next one
        pytest.param([3] * 8 + [5] * 8, marks=SLOW, id="duplicates-of-a-task"),
    ],
)
def test_sums_whose_order_the_graph_fixes_are_exact(index):
    x = arguments(index)
    assert all(map(torch.equal, simulation.execute(scatter_kernel(), *x), expected(*x)))
    assert_sums(simulation.interpret(scatter_kernel(), *x), x)


def test_a_sum_whose_order_the_graph_leaves_open_is_found():
    x = arguments([*range(8), *range(8)])
    with pytest.raises(simulation.SimulationError, match=UNORDERED):
        simulation.execute(scatter_kernel(), *x)
    got = simulation.execute(scatter_kernel(), *x, unordered_adds=True)
    assert_sums(got, x)


@SLOW
def test_a_reader_waits_for_all_that_add_to_a_static_destination():
    """So the graph orders it without a barrier, too."""
    x = arguments([*range(16), *range(16)])
    assert all(
        map(torch.equal, simulation.execute(scatter_kernel(barrier=False), *x), expected(*x))
    )


@pytest.mark.parametrize("place", [-1, *(pytest.param(n, marks=SLOW) for n in (32, INT_MAX))])
def test_a_missing_clamp_is_found(place):
    x = arguments([*range(15), place])
    with pytest.raises(simulation.SimulationError, match="TSTORE: adds to 256 bytes (at|in front)"):
        simulation.execute(scatter_kernel(), *x)
