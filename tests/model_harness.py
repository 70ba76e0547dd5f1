"""What tests of patched models share: the same tokens through upstream and patched model."""

import copy
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from tiny import clear_case, tiny_model, token_ids
from transformers import CompileConfig, DynamicCache

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.latent_attention import LatentAttention

# Of logits up to about 10, in float32. Those of upstream and ours are up to 3.6e-5 from the same in
# float64, with groups of tokens 1.3e-4, by any instruction set (generic, AVX2, AVX-512) and number
# of threads (1, 4); two of them are up to twice as far apart, and other CPUs get twice that.
TOLERANCES = defaultdict(lambda: 1.5e-4, {"glm5_next": 5e-4, "deepseek_v4": 5e-4})
# what a wrong formula moves at least
WRONG = 5e-3
PADS = [0, 9, 22]
# upstream counts left padding as tokens of their windows and groups: a padded sequence is compared
# with the sequence alone
COUNT_PADDING = ("deepseek_v4", "glm5_next")
CHUNKS = {
    "prefill": [70],
    "decode": [47] + [1] * 20,
    "several-tokens-a-step": [40, 3, 3, 1, 3, 5, 7],
    "chunked-prefill": [17] * 4,
}


@pytest.fixture(autouse=True)
def no_grad_and_one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one
    with torch.no_grad():
        yield


# ---- models ---------------------------------------------------------------------------------


def patched_model(kind="deepseek_v32", **changes):
    return models.use_custom_pypto(tiny_model(kind, **changes), block_size=16)


def upstream_and_patched(kind="deepseek_v32", **changes):
    return tiny_model(kind, **changes), patched_model(kind, **changes)


def trace(model):
    """Everything a patch could leave behind: classes, attributes, hooks, config."""
    modules = {name: (type(m), sorted(vars(m))) for name, m in model.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return modules, hooks, model.config.to_dict(), model.config._attn_implementation


def round_latents(monkeypatch, rounded):
    """Rounds the latents of all attentions before they are cached."""
    compress = LatentAttention.compress_key

    def and_round(self, hidden_states):
        latent, rope = compress(self, hidden_states)
        return rounded(latent), rope

    monkeypatch.setattr(LatentAttention, "compress_key", and_round)


def whole_graph(backend):
    """Options of ``generate()`` that compile its decode step."""
    compiled = CompileConfig(backend=backend, fullgraph=True, dynamic=False, mode=None)
    compiled._compile_all_devices = True  # transformers compiles on CPU only when told so
    return compiled


@contextmanager
def interrupted(module, error=KeyboardInterrupt, after=0):
    """The block calls ``module`` so many times, and is interrupted in the next call."""
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) > after:
            raise error("out of luck")  # as SIGINT does, which a shell's background job ignores

    hook = module.register_forward_hook(fail)
    with pytest.raises(error, match="out of luck"):
        yield
    hook.remove()


# ---- tokens and logits ------------------------------------------------------------------------


def left_padded(pads, tokens, seed=1):
    """Ids, mask and positions of a batch whose rows start with so many pads."""
    ids = token_ids(len(pads), tokens, seed)
    mask = torch.ones(len(pads), tokens, dtype=torch.int64)
    for row, n in enumerate(pads):
        ids[row, :n], mask[row, :n] = 0, 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp_min(0)


def prompt(seed=1, pads=PADS, tokens=40):
    ids, mask, _ = left_padded(pads, tokens, seed)
    return {"input_ids": ids, "attention_mask": mask}


def feed(model, cache, ids, mask, positions, chunks):
    """The logits of every token, fed in chunks."""
    logits, start = [], 0
    for size in chunks:
        end = start + size
        logits.append(
            model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                **{CACHE: cache},
            ).logits
        )
        start = end
    return torch.cat(logits, 1)


def alone(model, ids, pads):
    """Upstream's logits of the real tokens, each sequence without its padding."""
    rows = [row[None, n:] for row, n in zip(ids, pads, strict=True)]
    return torch.cat([model(row, use_cache=False).logits[0] for row in rows])


def continued(model, cache, ids, start, sizes):
    """The logits of ``ids`` from position ``start`` on."""
    logits = []
    for size in sizes:
        logits.append(model(ids[:, start : start + size], **{CACHE: cache}).logits)
        start += size
    return torch.cat(logits, 1)


def in_steps(model, ids, prefill):
    """The logits of a prefill, and of a decode step for each token after it."""
    output = model(ids[:, :prefill], use_cache=True)
    steps = continued(model, output[CACHE], ids, prefill, [1] * (ids.size(1) - prefill))
    return torch.cat([output.logits, steps], 1)


# ---- comparisons ------------------------------------------------------------------------------


def assert_close(got, want, kind="deepseek_v32"):
    """Equal but for rounding; integers and booleans to the bit."""
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[kind])


def assert_same(upstream, patched, run):
    """``run(model, seed)`` gives the same tensors of both models."""
    seed, want = clear_case(lambda seed: run(upstream, seed))
    assert_close(run(patched, seed), want, upstream.config.model_type)


def reference(upstream, pads, chunks):
    """The seed of tokens, and upstream's logits of them, pads left out."""

    def run(seed):
        ids, mask, positions = left_padded(pads, sum(chunks), seed)
        if upstream.config.model_type in COUNT_PADDING:
            return alone(upstream, ids, pads)
        cache = DynamicCache(config=upstream.config)
        return feed(upstream, cache, ids, mask, positions, chunks)[mask.bool()]

    return clear_case(run)


def fed(patched, seed, pads, chunks):
    """The logits of the same tokens."""
    ids, mask, positions = left_padded(pads, sum(chunks), seed)
    cache = paged_cache(patched, len(pads), sum(chunks))
    return feed(patched, cache, ids, mask, positions, chunks)[mask.bool()]


def both(upstream, patched, pads, chunks):
    seed, want = reference(upstream, pads, chunks)
    return want, fed(patched, seed, pads, chunks)


def furthest(upstream, patched, chunks=(46, 1, 5)):
    want, got = both(upstream, patched, [0, 9], chunks)
    return (got - want).abs().max()


def gradients(model):
    """Those of every parameter that has one, without a cache to return."""
    ids = token_ids(2, 40)
    with torch.enable_grad():
        model(ids, labels=ids, use_cache=False).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(*of_two):
    want, got = (gradients(model.train()) for model in of_two)
    assert want and want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


# ---- caches -----------------------------------------------------------------------------------

# changes of a cache with three sequences, and which of them are in it then
CHANGES = {
    "crop-nothing": (lambda c: c.crop(0), [0, 1, 2]),
    "reorder": (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "repeat": (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "select": (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "reset": (lambda c: c.reset(), [0, 1, 2]),
    "deepcopy": (copy.deepcopy, [0, 1, 2]),
}


def paged_cache(model, batch, tokens=96):
    """A cache whose blocks lie in no order and hold garbage."""
    cache = models.PagedCache(model, batch, tokens, block_size=16)
    for table in cache.tables.values():
        shuffled = torch.randperm(table.numel(), generator=torch.Generator().manual_seed(3))
        table.copy_(table.flatten()[shuffled].view_as(table))
    for pool in cache.store.pools():
        pool.fill_(float("nan") if pool.is_floating_point() else -1)
    return cache


@contextmanager
def unchanged(cache):
    """The block leaves the tokens of ``cache``, and its pools to the bit."""
    before = copy.deepcopy(cache)
    yield
    assert torch.equal(cache.lengths, before.lengths) and cache.seen == before.seen
    for now, then in zip(cache.store.pools(), before.store.pools(), strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
