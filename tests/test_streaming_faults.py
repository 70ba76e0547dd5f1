"""Models whose experts stay in their files, when something goes wrong: errors name it, the next
call is right, and no place in memory is lost."""

import errno
import itertools
import os
import shutil
import threading
import time

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from processes import in_a_process
from safetensors.torch import load_file, save_file
from streaming_harness import (
    assert_at_rest,
    assert_same,
    folders,  # noqa: F401
    generated,
    in_memory,
    no_gradients,  # noqa: F401
    pool_of,
    streamed,
)
from streaming_trace import CHOSEN, EXPERTS, FILE, LAYERS, TOKENS
from tiny import token_ids

from custom_pypto.models.streaming import files
from custom_pypto.models.streaming.slots import Expert, Slots, State

SLOTS = 5


@pytest.fixture(name="copied")
def copied_folder(folder, tmp_path):
    """A checkpoint that a test may spoil, its model in memory, and the one that is streamed."""
    path = tmp_path / "copied"
    shutil.copytree(folder(), path)
    whole = in_memory(path)
    return path, whole, streamed(path, SLOTS, whole)


def shard_with_experts(path):
    return next(
        file
        for file in sorted(path.glob("*.safetensors"))
        if any(".experts." in n for n in load_file(file))
    )


# ---- files --------------------------------------------------------------------------------------


def test_every_read_that_fails(folder, monkeypatch):
    path, ids = folder(), token_ids(1, 8)
    whole = in_memory(path)
    want, fill = generated(whole, ids, 3), files.StreamedFile._fill
    reads = 0

    def failing(self, *args):
        nonlocal reads
        reads += 1
        if reads == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fill(self, *args)

    model, broken = streamed(path, SLOTS, whole), 0
    monkeypatch.setattr(files.StreamedFile, "_fill", failing)
    seen = 0
    for broken in range(1, 1000):
        reads = 0
        try:
            got = generated(model, ids, 3)
        except OSError as error:
            seen += 1
            assert error.errno == errno.EIO and error.filename.endswith(".safetensors")
            assert "for expert " in str(error) and "of layer " in str(error)
            assert_at_rest(pool_of(model))
            broken = 0
            got = generated(model, ids, 3)
        assert_same(got, want)
        assert_at_rest(pool_of(model))
        if reads < broken:  # the run had fewer
            break
    assert seen > 10


@pytest.mark.parametrize("spoil", ["cut", "written"])
def test_a_file_that_changes(copied, spoil):
    path, whole, model = copied
    file = shard_with_experts(path)
    if spoil == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        time.sleep(0.02)  # the clock of a file system may be coarse
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"\0")
    message = (
        rf"{file.name}, with expert \d+ of layer \d, was written or cut since .* load it again"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            generated(model, token_ids(1, 8))
        assert_at_rest(pool_of(model))


def test_a_file_that_is_renamed_or_deleted_stays(copied):
    path, whole, model = copied
    for file in path.glob("*.safetensors"):
        (path / "other").write_bytes(b"another file")
        os.replace(path / "other", file)
    ids = token_ids(2, 20)
    assert_same(generated(model, ids), generated(whole, ids))


@pytest.mark.parametrize("what", ["weight", "scales"])
def test_numbers_that_are_none(folder, tmp_path, what):
    path = tmp_path / "damaged"
    shutil.copytree(folder(), path)
    file = shard_with_experts(path)
    tensors = load_file(file)
    end = ".experts.7.down_proj.weight" + ("_scale_inv" if what == "scales" else "")
    name = next(name for name in tensors if name.endswith(end))
    tensors[name].view(torch.uint8).view(-1)[:4] = 0x7F if what == "weight" else 0xFF
    save_file(tensors, file, metadata={"format": "pt"})
    good = in_memory(folder())
    model = streamed(path, SLOTS, good)
    ids = token_ids(1, 200)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{name}, of expert 7 of layer \d, must be finite"):
            model(ids)
        assert_at_rest(pool_of(model))


# ---- processes and threads ----------------------------------------------------------------------


def forked(path):
    torch.set_num_threads(1)  # a fork has none of OpenMP's
    model = streamed(path, SLOTS)
    generated(model, token_ids(1, 8))
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    try:
        generated(model, token_ids(1, 8))
    except RuntimeError as error:
        os._exit(7 if "fork of it; load the model in this process" in str(error) else 8)
    os._exit(9)


def test_a_fork_is_told(folder):
    assert in_a_process(forked, folder()) == 7


def test_an_interruption_while_it_waits(folder, monkeypatch):
    path, ids = folder(), token_ids(1, 8)
    whole = in_memory(path)
    model, after = streamed(path, SLOTS, whole), 0
    pool, want = pool_of(model), generated(whole, ids)
    wait = type(pool).wait

    def interrupted(self):
        nonlocal after
        after -= 1
        if after == 0:
            raise KeyboardInterrupt
        wait(self)

    monkeypatch.setattr(type(pool), "wait", interrupted)
    for after in (1, 2, 5):
        with pytest.raises(KeyboardInterrupt):
            for _ in range(9):
                generated(model, ids)
        assert_at_rest(pool)
        after = 0
        assert_same(generated(model, ids), want)


def test_a_need_ends_with_its_call():
    slots = Slots(1)

    class Call: ...

    call = Call()
    slots.pin(Expert(0, 0), call).state = State.READY
    assert slots.pin(Expert(0, 1), Call) is None
    del call
    assert slots.pin(Expert(0, 1), Call).index == 0


# ---- which experts are in memory ----------------------------------------------------------------


@hypothesis.given(
    st.integers(1, 6), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=80)
)
def test_the_least_recently_used_makes_room(count, asked):
    """Compared with a list of experts in the order of their use."""
    slots, order = Slots(count), []
    for expert in itertools.starmap(Expert, asked):
        known = expert in slots.taken
        slot = slots.pin(expert, slots)
        assert known == (expert in order)
        slot.state = State.READY
        slots.unpin(slot, slots, last=True)
        order = [*(one for one in order if one != expert), expert][-count:]
        assert list(slots.taken) == order
        assert len({one.index for one in slots.taken.values()}) == len(order)


def asked() -> list[list[Expert]]:
    """The experts of each layer of each token of a small trained model."""
    tokens = load_file(FILE)["experts"].tolist()
    return [
        [Expert(layer, number) for number in sorted(chosen)]
        for token in tokens
        for layer, chosen in enumerate(token)
    ]


def hits_of_a_list(count: int, moves: bool) -> int:
    """Those of a list in the order of the last use; without moves, of the first."""
    order: list[Expert] = []
    hits = 0
    for experts in asked():
        for expert in sorted(experts, key=lambda expert: expert not in order):
            hits += expert in order
            if expert in order and moves:
                order.remove(expert)
            elif expert not in order and len(order) == count:
                order.remove(next(one for one in order if one not in experts))
            order += [expert] * (expert not in order)
    return hits


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_hits_of_a_trained_model(share):
    """Whose experts are not random: the least recently used keeps more than its share, and more
    than the first that came."""
    count, hits = int(share * LAYERS * EXPERTS), 0
    slots = Slots(count)
    for experts in asked():
        taken = []
        for expert in sorted(experts, key=lambda expert: expert not in slots.taken):
            hits += expert in slots.taken
            taken.append(slots.pin(expert, slots))
            taken[-1].state = State.READY
        for slot in taken:
            slots.unpin(slot, slots, last=True)
    assert hits == hits_of_a_list(count, moves=True) > hits_of_a_list(count, moves=False)
    assert hits > 1.4 * share * TOKENS * LAYERS * CHOSEN


def test_a_sweep_makes_room_before_what_was_there():
    """A prompt that asks for most experts of a layer pushes out no more than it must."""
    slots = Slots(4)
    for number in range(3):
        slot = slots.pin(Expert(0, number), slots)
        slot.state = State.READY
        slots.unpin(slot, slots, last=True)
    for number in range(8):
        slot = slots.pin(Expert(1, number), slots)
        slot.state = State.READY
        slots.unpin(slot, slots, last=False)
    assert {expert for expert in slots.taken if expert.layer == 0} == {
        Expert(0, number) for number in range(3)
    }


def test_a_guess_pushes_out_the_cold_half_alone_and_gives_way():
    slots = Slots(4)
    for number in range(4):
        slots.pin(Expert(0, number), slots).state = State.READY
    for slot in list(slots.taken.values()):
        slots.unpin(slot, slots, last=True)
    assert slots.guess(Expert(0, 3)) is None  # is there
    guesses = [slots.guess(Expert(1, number)) for number in range(2)]
    assert [guess.index for guess in guesses] == [0, 1]
    assert slots.guess(Expert(1, 2)) is None  # the rest was used lately
    needed = [slots.pin(Expert(2, number), slots) for number in range(4)]
    assert all(needed) and slots.wasted == 2
    assert slots.pin(Expert(2, 4), slots) is None


def test_demand_is_read_before_guesses(folder, monkeypatch):
    path = folder()
    model = streamed(path, 12)
    pool, order, go = pool_of(model), [], threading.Event()
    pool.read_with(1)
    while pool.threads > 1:
        time.sleep(0.001)

    def read(expert, slot):
        go.wait()
        order.append(expert)

    monkeypatch.setattr(pool, "_read", read)
    with pool.changed:
        for slot in list(pool.slots.taken.values()):
            pool.slots.lose(slot)
        experts = list(pool.places)[:8]
        pool.guess(experts[:6])
        pool.pin(experts[7], pool)
        pool.pin(experts[4], pool)  # was guessed
    go.set()
    while len(order) < 7:
        time.sleep(0.001)
    with pool.changed:
        for slot in list(pool.slots.taken.values()):
            pool.slots.unpin(slot, pool, last=True)
    assert order[:2] == [experts[7], experts[4]] and sorted(order[2:]) == sorted(
        experts[:4] + [experts[5]]
    )
