"""A decode step that torchair compiled into a folder, loaded by another start of the program."""

import json
import sys
from pathlib import Path

import ge_graphs
import pytest
import torch
from tiny import tiny_model, token_ids

from custom_pypto import models
from custom_pypto.rows import INDEX_FORMATS, LATENT_FORMATS

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from compile_torchair import CachedStep
from modes import MODES

pytestmark = [pytest.mark.ascend_host, pytest.mark.usefixtures("for_compiled_models")]
FORMATS = [("index_dtype", x) for x in INDEX_FORMATS] + [("kv_dtype", x) for x in LATENT_FORMATS]
# npugraph_ex, whose graphs are the fastest to make, without --all
EACH_MODE = [pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[:2]] + MODES[2:]


def model_and_cache(size=32, **changes):
    model = tiny_model("deepseek_v32", num_hidden_layers=1, index_head_dim=128, **changes)
    model = models.use_custom_pypto(model.to("npu", torch.bfloat16), block_size=16)
    return model, models.PagedCache(model, 1, size, block_size=16)


def start():
    """A model, a cache that holds a prompt, and the prompt's last token."""
    torch.compiler.reset()  # as in a new process
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, cache = model_and_cache()
    ids = token_ids(1, 13).npu()
    model(ids[:, :-1], cache=cache)
    return model, cache, ids[:, -1:]


def decoded(step, cache, token):
    """The logits of a token and of the next one."""
    logits = []
    for _ in range(2):
        output = step(token, position_ids=cache.seen.clone().view(1, 1), cache=cache)
        logits.append(output.logits.clone())
        token = logits[-1].argmax(-1)
    return torch.cat(logits)


def traced():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("mode", EACH_MODE)
def test_the_second_start_traces_nothing_and_answers_alike(mode, tmp_path):
    model, cache, token = start()
    expected = decoded(model, cache, token)
    for graphs in (1, 0):
        model, cache, token = start()
        step = CachedStep(model, cache, mode, tmp_path)
        assert (step.seconds is None) == (graphs == 1)
        torch.testing.assert_close(decoded(step, cache, token), expected, rtol=0, atol=2**-6)
        assert traced() == graphs and cache.seen.item() == 14


def test_what_a_loaded_graph_does_not_guard_is_rejected_by_name(tmp_path):
    model, cache = model_and_cache()
    step = CachedStep(model, cache, "npugraph_ex", tmp_path)
    token = position = torch.tensor([[12]]).npu()
    other = models.PagedCache(model, 1, 32, block_size=16)
    with pytest.raises(ValueError, match="cache must be the one that the step was made for"):
        step(token, position_ids=position, cache=other)
    for wrong in (token.expand(1, 2), token.int()):
        with pytest.raises(ValueError, match=r"token must be \[1, 1\] int64.*, got \[1, "):
            step(wrong, position_ids=position, cache=cache)
    cache.batch_repeat_interleave(1)  # new tables and new pools
    with pytest.raises(ValueError, match="in its memory of then"):
        step(token, position_ids=position, cache=cache)

    for mode, changes, message in (
        ("npugraph_ex", dict(index_topk=4), r"model\.index_topk=8, got 4; give another folder"),
        ("npugraph_ex", dict(size=48), r"cache\.max_cache_len=32, got 48;"),
        ("max-autotune", {}, r"mode=npugraph_ex, got max-autotune;"),
    ):
        model, cache = model_and_cache(**changes)
        with pytest.raises(ValueError, match=message):
            CachedStep(model, cache, mode, tmp_path)
    note = json.loads(step.note.read_text())
    note["compiled_for"]["versions"]["torch"] = "2.0"
    step.note.write_text(json.dumps(note))
    model, cache = model_and_cache()
    with pytest.raises(ValueError, match=r"versions\.torch=2\.0, got 2"):
        CachedStep(model, cache, "npugraph_ex", tmp_path)


@pytest.mark.parametrize("argument, dtype", FORMATS)
def test_a_cache_in_another_format_is_rejected_when_the_step_is_made(argument, dtype, tmp_path):
    """In either direction; the call would fail in the graph, by a message that names no cache."""
    model, plain = model_and_cache(kv_lora_rank=128)  # what rows in int8 take
    other = models.PagedCache(model, 1, 32, block_size=16, **{argument: dtype})
    for made, got in ((plain, other), (other, plain)):
        folder = tmp_path / str(made.dtypes[argument])
        CachedStep(model, made, "npugraph_ex", folder)
        names = rf"cache\.{argument}={made.dtypes[argument]}, got {got.dtypes[argument]}; give "
        with pytest.raises(ValueError, match=names):
            CachedStep(model, got, "npugraph_ex", folder)


@pytest.mark.slow
def test_a_loaded_graph_has_no_callbacks(tmp_path):
    """torchair registers their operators while it compiles: a later start needs converters."""
    with pytest.MonkeyPatch.context() as without:
        ge_graphs.use_callbacks(
            without, "npu_lightning_indexer_pto", "npu_sparse_flash_attention_pto"
        )
        model, cache, token = start()
        decoded(CachedStep(model, cache, "max-autotune", tmp_path), cache, token)
        assert traced() == 1
    model, cache, token = start()
    step = CachedStep(model, cache, "max-autotune", tmp_path)
    with pytest.raises(Exception, match=r"custom_pypto__npu_\w+ node \S+ is of a type that is not"):
        decoded(step, cache, token)
