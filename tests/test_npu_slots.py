"""Where the ops that write caches in place write, and where not."""

import pytest
import torch
from cases import INT_MAX, INT_MIN, copied, inputs_of, of
from torch import Tensor
from torch.utils._pytree import tree_leaves

import custom_pypto
from custom_pypto.descriptions import OPS

CACHES = {op: of(op).CACHES for op in OPS if hasattr(of(op), "CACHES")}
SLOTS = {
    op: next(name for name in inputs_of(op) if name == "slots" or name.endswith("cache_index"))
    for op in CACHES
}
each_op = pytest.mark.parametrize("op", CACHES)


def results(op: str, x: dict) -> list[Tensor]:
    """The caches after a call on copies, and what it returns."""
    x = copied(x)
    returned = tree_leaves(getattr(custom_pypto, op)(**x))
    return [x[name] for name in CACHES[op]] + [y for y in returned if y is not None]


def equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@each_op
def test_nothing_but_the_slots_is_written(op):
    x = inputs_of(op, [2, 3], [20, 30])
    slots = x[SLOTS[op]].flatten()
    assert (slots >= 0).any()
    for name, after in zip(CACHES[op], results(op, x), strict=False):
        before, after = (cache.flatten(0, 1).clone() for cache in (x[name], after))
        assert not equal(before, after)
        before[slots[slots >= 0]] = after[slots[slots >= 0]] = 0
        assert equal(before, after)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
@each_op
def test_slots_outside_the_cache_are_not_written(op, slot_dtype):
    x = inputs_of(op, [8], [20])
    caches = [x[name] for name in CACHES[op]]
    last = caches[0].size(0) * caches[0].size(1)
    outside = torch.tensor([-1, INT_MIN, INT_MAX, last, last + 1, -last, -16, 2 * last])
    if slot_dtype == torch.int64:
        outside[4:] = torch.tensor([-(2**63), 2**63 - 1, 2**32, 2**62])
    x[SLOTS[op]] = outside.to(slot_dtype).view_as(x[SLOTS[op]])
    assert all(map(equal, results(op, x), caches))
    x[SLOTS[op]].view(-1)[0] = last - 1
    assert not any(map(equal, results(op, x), caches))


@each_op
def test_of_two_tokens_with_one_slot_the_later_one_stays(op):
    x = inputs_of(op, [3], [20])
    both, later = (
        x | {SLOTS[op]: torch.tensor(slots).view_as(x[SLOTS[op]])}
        for slots in ([5, 7, 5], [-1, 7, 5])
    )
    assert all(map(equal, results(op, both), results(op, later)))
