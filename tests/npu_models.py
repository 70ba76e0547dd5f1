"""What tests compile for NPUs: a layer of our ops, the indexer beside the projection of the query;
and the decode step of the trained lookup model. Both run eagerly, too."""

import contextlib
import functools
import sys
from pathlib import Path
from typing import NamedTuple

import ge_graphs
import torch
from cases.npu_lightning_indexer_pto import on_npu as index
from cases.npu_sparse_flash_attention_pto import on_npu as attend
from ge_graphs import watched
from npu_calls import on_npu

import custom_pypto
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


class Layer:
    """Its inputs, of ``tokens`` per sequence, and its calls."""

    def __init__(self, tokens: int = 3, seed: int = 0):
        index_inputs = on_npu(index([2, 1], [20, 5], sparse_count=4, seed=seed))
        attend_inputs = on_npu(attend([2, 1], [20, 5], seed=seed))
        del attend_inputs["sparse_indices"]
        self.index, self.index_constants = ge_graphs.split(index_inputs)
        self.attend, self.attend_constants = ge_graphs.split(attend_inputs)
        for inputs in (self.index, self.attend):
            for name in ("query", "weights", "query_rope"):
                if name in inputs:
                    repeated = inputs[name].repeat_interleave(2, 1)
                    inputs[name] = repeated[:, :tokens].contiguous()
        self.projection = 1.5 * torch.eye(self.attend["query"].size(-1)).bfloat16().npu()
        self.tensors = self.index, self.attend, self.projection

    def indices(self, inputs):
        return custom_pypto.npu_lightning_indexer_pto(**inputs, **self.index_constants)

    def attention(self, inputs, indices):
        return custom_pypto.npu_sparse_flash_attention_pto(
            **inputs, sparse_indices=indices, **self.attend_constants
        )

    def call(self, scope=contextlib.nullcontext):
        """The layer, with its indexer inside of ``scope()``."""

        def layer(index, attend, projection):
            with scope():
                indices = self.indices(index)
            query = attend["query"] @ projection
            return self.attention(attend | {"query": query}, indices)

        return layer


@functools.cache
def layer():
    made = Layer()
    return made, made.call()(*made.tensors).cpu()


def check(function, mode, settings=None, scope=contextlib.nullcontext):
    """A compiled layer gives eager's results, also in a replay; what torchair made."""
    torch.compiler.reset()
    made, expected = layer()
    call = ge_graphs.compiled(function or made.call(scope), mode=mode, settings=settings)
    with watched() as seen:
        for _ in range(1 if mode == ge_graphs.MODES[0] else 2):
            assert torch.equal(call(*made.tensors).cpu(), expected)
    return seen


class Launch(NamedTuple):
    stream: int
    cores: int  # the stream's limit of cube cores
    addresses: list[int]  # of the kernel's tensors


@contextlib.contextmanager
def launched():
    """PyPTO's launches meanwhile."""
    from custom_pypto.simulation.ascend_host import device

    found = []

    def noted(kernel, tensors, params, launch=device._launch):
        stream = torch.npu.current_stream()
        cores = torch.npu.get_stream_limit(stream)["cube_core_num"]
        found.append(Launch(stream.npu_stream, cores, [x.data_ptr() for x in tensors]))
        launch(kernel, tensors, params)

    device.replace_calls("npu", noted)
    try:
        yield found
    finally:
        device.replace_calls("npu", device._launch)
