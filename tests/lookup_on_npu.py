"""The decode step of the trained lookup model on an NPU: eager, and by any compiled forward."""

import functools
import sys
from pathlib import Path

import torch

from custom_pypto import models

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from train_lookup import lookup_batch

CHECKPOINT = Path(__file__).parents[1] / "examples/checkpoints/lookup"
BLOCK = 16


def decode(forward, cache, ids, first, last):
    """The logits of the tokens at positions ``first`` to ``last``, one forward each."""
    logits = []
    for i in range(first, last):
        position = torch.tensor([[i]]).npu()
        token = ids[:, i : i + 1].clone()
        output = forward(token, position_ids=position, cache=cache, use_cache=True)
        logits.append(output.logits.clone())  # a captured graph writes the next ones there
    return torch.cat(logits, 1)


# a text of 78 tokens, then questions with their answers: decoding begins with the first one, and
# the second one is in another block
LOOKUP = functools.partial(lookup_batch, 1, 96, questions=6, seed=3)
FIRST, LAST = 78, 82


@functools.cache
def lookup_model():
    return models.load(CHECKPOINT, dtype=torch.bfloat16, device="npu")


def pools(cache):
    return [pool for layer in cache.layers for pool in layer.pools.values()]


def new_cache(max_cache_len=96):
    return models.PagedCache(lookup_model(), 1, max_cache_len, block_size=BLOCK)


@functools.cache
def read_text():
    cache = new_cache()
    lookup_model()(LOOKUP()[0][:, :FIRST].npu(), cache=cache)
    return cache


def after_the_text():
    cache, read = new_cache(), read_text()
    for pool, other in zip(pools(cache), pools(read), strict=True):
        pool.copy_(other)
    cache.lengths.copy_(read.lengths)
    cache.seen.copy_(read.seen)
    return cache


@functools.cache
def eager():
    """Logits and cache."""
    cache = after_the_text()
    return decode(lookup_model(), cache, LOOKUP()[0].npu(), FIRST, LAST), cache
