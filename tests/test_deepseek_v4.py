"""The memory of DeepSeek-V4: a cache that hardly grows, and rings that say what they overwrote."""

import ctypes
import math

import pytest
import torch
from model_harness import (
    assert_close,
    continued,
    interrupted,
    no_grad_and_one_thread,  # noqa: F401
    paged_cache,
    patched_model,
    upstream_and_patched,
)
from processes import in_a_process, peak_of
from tiny import PUBLISHED_V4, tiny_model, token_ids

from custom_pypto import models
from custom_pypto.models import deepseek_v4

KIND = "deepseek_v4"
PR_SET_THP_DISABLE = 41  # of prctl


def test_crop_beyond_what_the_state_holds_is_rejected_and_changes_nothing():
    upstream, patched = upstream_and_patched(KIND)
    ids, cache = token_ids(1, 90), paged_cache(patched, 1)
    patched(ids[:, :60], cache=cache)
    message = r"must be at least -16 \(.*or at most -60 \(all tokens\), got -17; reset\(\)"
    with pytest.raises(ValueError, match=rf"PagedCache.crop: tokens_to_remove {message}"):
        cache.crop(-17)
    cache.crop(-10)
    with pytest.raises(ValueError, match="must be at least -6 .*got -7"):
        cache.crop(-7)  # the rows of 17 tokens are gone, however often it is cropped
    got = continued(patched, cache, ids, 50, [1] * 10 + [30])
    assert_close(got, upstream(ids, use_cache=False).logits[:, 50:], KIND)


def test_a_short_interrupted_forward_leaves_the_cache_as_it_was_and_a_long_one_says_so():
    upstream, patched = upstream_and_patched(KIND)
    ids, cache = token_ids(1, 90), paged_cache(patched, 1)
    want = upstream(ids, use_cache=False).logits

    def interrupt(start, end):
        with interrupted(patched.model.layers[-1].mlp):
            patched(ids[:, start:end], cache=cache)

    interrupt(0, 60)  # nothing was cached: nothing to lose
    patched(ids[:, :40], cache=cache)
    interrupt(40, 56)
    got = patched(ids[:, 40:60], cache=cache).logits
    assert_close(got, want[:, 40:60], KIND)
    interrupt(60, 90)
    with pytest.raises(ValueError, match="interrupted forward of 30 tokens has overwritten .*60"):
        patched(ids[:, 60:], cache=cache)
    cache.reset()
    assert_close(patched(ids, cache=cache).logits, want, KIND)


@pytest.mark.parametrize("batch, tokens", [(1, 4096), (3, 65536)])
def test_a_cache_grows_by_a_quarter_and_a_128th_of_the_tokens(batch, tokens):
    patched = patched_model(KIND, **PUBLISHED_V4, dtype=torch.bfloat16).bfloat16()
    window = 4 * math.ceil((127 + deepseek_v4.SLICE) / 128) * 128 * 512  # all four layers
    rows = tokens // 4 * (512 + 128) * 2 + math.ceil(tokens / 128 / 128) * 128 * 512
    state = (7 + 16) * 4 * (512 + 128) * 2 + (127 + 16) * 2 * 512
    nobody = 128 * (4 * 512 + 2 * 128) + state  # block 0 of every pool
    documented = 2 * (batch * (window + rows + state) + nobody)
    assert models.PagedCache(patched, batch, tokens).nbytes == documented


@torch.no_grad()
def peak_of_prefill(tokens):
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # huge pages come where some are free
    torch.set_num_threads(1)
    patched = models.use_custom_pypto(tiny_model(KIND, index_topk=8, moe_intermediate_size=16))
    ids = token_ids(1, tokens)
    patched(ids[:, :300], logits_to_keep=1)
    return peak_of(lambda: patched(ids, logits_to_keep=1))


@pytest.mark.slow
def test_the_memory_of_a_prefill_is_linear_in_its_tokens():
    short, long = (in_a_process(peak_of_prefill, tokens) for tokens in (4096, 16384))
    # a mask [S, S / 4], in bytes, would add 50 MB; the scores of an indexer 128 times as much.
    # Ten peaks of one length differed by a tenth: 10 MB.
    assert long - 4 * short < 32e6
