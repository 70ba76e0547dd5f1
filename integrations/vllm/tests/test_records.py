"""The records of requests, and of the blocks of a cached prefix."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import save_tiny
from custom_pypto_vllm.records import SPACE, Blocks, Recorder, dtypes, space
from custom_pypto_vllm.selections import WORKER
from test_engines import V32, generate, run

LAYERS = dict.fromkeys(["layer 0", "layer 1"], torch.int16)
SIZE, WIDTH = 4, 3  # tokens of a block, positions of a token
OF_A_BLOCK = len(LAYERS) * SIZE * WIDTH * 2  # bytes


def recorder_of(most=2**20):
    return Recorder(SimpleNamespace(), LAYERS, SIZE, most=9, blocks=Blocks(most))


def recorded(recorder, request, tokens, count, rows, numbers, adapter=0):
    """What the recorder has of a request after a step that computes the last ``count`` of its
    ``tokens``; each layer chooses ``rows``, plus its own number."""
    ids = np.array([[ord(token) for token in tokens]], np.int32)
    recorder.runner.input_batch = SimpleNamespace(
        req_ids=[request], token_ids_cpu=ids, request_lora_mapping=np.array([adapter])
    )
    step = SimpleNamespace(
        query_ends=torch.tensor([count]),
        seq_lens=torch.tensor([len(tokens)]),
        block_table=torch.tensor([numbers]),
    )
    for number, layer in enumerate(LAYERS):
        recorder.add(layer, step, rows.int() + number)
    found = [
        torch.cat([x for _, x in of] or [rows[:0]])
        for of in recorder.requests[request].parts.values()
    ]
    assert found[1].equal(found[0] + 1)
    return found[0] if len(found[0]) else None


ROWS = torch.arange(60, dtype=torch.int16).view(20, WIDTH)


def test_blocks_keep_the_record_of_the_tokens_that_they_have():
    recorder = recorder_of()
    assert recorded(recorder, "a", "abcdef", 6, ROWS[:6], [1, 2, 7]).equal(ROWS[:6])  # in chunks
    assert recorded(recorder, "a", "abcdefghij", 4, ROWS[6:10], [1, 2, 7]).equal(ROWS[:10])
    whole = torch.cat([ROWS[:8], ROWS[10:14]])
    assert recorded(recorder, "b", "abcdefghklmn", 4, ROWS[10:14], [1, 2, 3]).equal(whole)
    # two of the tokens were a rejected draft, and others are in their place
    whole = torch.cat([whole[:10], ROWS[15:17]])
    assert recorded(recorder, "b", "abcdefghklop", 2, ROWS[15:17], [1, 2, 3]).equal(whole)
    whole = torch.cat([whole, ROWS[:1]])
    assert recorded(recorder, "c", "abcdefghklopq", 1, ROWS[:1], [1, 2, 3, 4]).equal(whole)


@pytest.mark.parametrize(
    "tokens, numbers, adapter",
    [
        pytest.param("abcdefghi", [9, 2, 3], 0, id="computed before recording began"),
        pytest.param("abcdzzzzi", [1, 2, 3], 0, id="of other tokens"),
        pytest.param("zbcdefghi", [1, 2, 3], 0, id="behind other tokens"),
        pytest.param("abcdefghi", [1, 2, 3], 1, id="of another adapter"),
        pytest.param("abcdefghi", [2, 1, 3], 0, id="in other blocks"),
        pytest.param("abcdefg", [1, 2, 3], 0, id="of a block in part"),
    ],
)
def test_a_block_is_never_read_as_another(tokens, numbers, adapter):
    recorder = recorder_of()
    recorded(recorder, "a", "abcdefgh", 8, ROWS[:8], [1, 2])
    assert recorded(recorder, "b", tokens, 1, ROWS[:1], numbers, adapter) is None
    assert recorded(recorder, "c", "abcdefghi", 1, ROWS[8:9], [1, 2, 3]).equal(ROWS[:9])


def test_a_block_that_a_request_without_a_record_computes_has_none():
    recorder = recorder_of()
    recorded(recorder, "a", "abcdefgh", 8, ROWS[:8], [1, 2])
    # the first block is another one by now, and the second was computed again
    assert recorded(recorder, "b", "abcdefgh", 4, ROWS[8:12], [5, 2]) is None
    assert recorded(recorder, "c", "abcdefghi", 1, ROWS[:1], [1, 2, 3]) is None


def test_prompts_that_are_computed_side_by_side_have_a_record_each():
    recorder = recorder_of()
    recorded(recorder, "a", "abcd", 4, ROWS[:4], [1])
    recorded(recorder, "b", "abcd", 4, ROWS[4:8], [2])
    for request, number, first in (("c", 1, 0), ("d", 2, 4)):
        got = recorded(recorder, request, "abcde", 1, ROWS[8:9], [number, 3])
        assert got.equal(torch.cat([ROWS[first : first + 4], ROWS[8:9]]))


def test_beyond_the_limit_the_ends_of_the_prefixes_that_were_used_longest_ago_go():
    recorder = recorder_of(most=4 * OF_A_BLOCK)

    def behind(tokens, numbers):
        """Whether a request behind these cached tokens has a record."""
        request = f"{tokens} {len(recorder.requests)}"
        return recorded(recorder, request, tokens + "?", 1, ROWS[:1], numbers) is not None

    recorded(recorder, "a", "abcdefgh", 8, ROWS[:8], [1, 2])
    recorded(recorder, "b", "ABCDEFGH", 8, ROWS[:8], [3, 4])
    assert behind("abcd", [1, 9]) and behind("ABCDEFGH", [3, 4, 9])
    recorded(recorder, "c", "0123", 4, ROWS[:4], [5])
    assert recorder.blocks.bytes <= recorder.blocks.most
    assert behind("0123", [5, 9]) and behind("ABCDEFGH", [3, 4, 9]) and behind("abcd", [1, 9])
    assert not behind("abcdefgh", [1, 2, 9])
    # of a prompt that is larger than the limit the beginning stays
    recorded(
        recorder, "d", "klmnopqrstuvwxyzKLMNOPQR", 24, torch.cat([ROWS, ROWS[:4]]), range_of(6)
    )
    assert behind("klmn", [10, 9]) and not behind("klmnopqrstuvwxyzKLMNOPQR", [*range_of(6), 9])
    assert not behind("0123", [5, 9]) and recorder.blocks.bytes <= recorder.blocks.most


@pytest.mark.parametrize(
    "positions, experts, want",
    [
        (2**15, 2**8, (torch.int16, torch.uint8)),
        (2**15 + 1, 2**8 + 1, (torch.int32, torch.uint16)),
    ],
)
def test_a_record_holds_the_last_position_and_the_last_expert(positions, experts, want):
    assert dtypes(positions, experts) == want
    last = torch.tensor([positions, experts]) - 1
    assert last.tolist() == [x.to(dtype).item() for x, dtype in zip(last, want, strict=True)]


def range_of(count):
    return list(range(10, 10 + count))


@pytest.mark.parametrize("value, want", [(None, 4), ("", 4), ("0", 0), ("0.5", 0.5), ("16", 16)])
def test_space_is_in_gib(value, want):
    assert space({} if value is None else {SPACE: value}) == want * 2**30


@pytest.mark.parametrize("value", ["-1", "4GB", "nan", "1e3"])
def test_other_spaces_are_rejected(value):
    with pytest.raises(ValueError, match=f"{SPACE} must be a number of GiB .* got {value!r}"):
        space({SPACE: value})


def test_a_server_names_a_space_that_is_none_before_it_starts(tmp_path):
    command = [sys.executable, "-m", "custom_pypto_vllm.vllm_serve", str(tmp_path)]
    done = subprocess.run(
        [*command, "--enable-return-indexer-topk"],
        env=os.environ | {SPACE: "4GB"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert f"{SPACE} must be a number of GiB" in done.stderr.splitlines()[-1]


def test_a_request_behind_a_dropped_record_says_so(tmp_path):
    """The engine goes on, and repeats nothing: vLLM's own answer comes from its cache."""
    checkpoint = save_tiny(tmp_path / V32, V32, first_k_dense_replace=9)
    options = dict(enable_prefix_caching=True, max_num_batched_tokens=64, rounds=2)
    options |= dict(worker_extension_cls=WORKER, selections="selections.npz")
    engine = run(checkpoint, tmp_path, {SPACE: "0"}, **options)
    assert engine.returncode == 1
    assert "KeyError" in engine.stderr and "another cache_salt" in engine.stderr
    assert f"the most that {SPACE} allows" in engine.stdout + engine.stderr
    result = generate(checkpoint, tmp_path, {SPACE: "0.01"}, **options)
    assert max(result["cached"]) >= 128
    assert len(np.load(tmp_path / "selections.npz")["arr_3"]) == 315
