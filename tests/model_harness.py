"""What tests of patched models share: the same tokens through upstream and patched model."""

import pytest
import torch
from tiny import clear_case, token_ids
from transformers import DynamicCache

from custom_pypto import models

# what a wrong formula moves at least, two orders above the tolerances
WRONG = 5e-3
PADS = [0, 9, 22]


@pytest.fixture(autouse=True)
def no_grad_and_one_thread():
    torch.set_num_threads(1)  # tensors this small only wait for a second one
    with torch.no_grad():
        yield


def paged_cache(model, batch, tokens=96):
    """A cache whose blocks lie in no order and hold garbage."""
    cache = models.PagedCache(model, batch, tokens, block_size=16)
    for table in cache.tables.values():
        shuffled = torch.randperm(table.numel(), generator=torch.Generator().manual_seed(3))
        table.copy_(table.flatten()[shuffled].view_as(table))
    for pool in cache.store.pools():
        pool.fill_(float("nan") if pool.is_floating_point() else -1)
    return cache


def left_padded(pads, tokens, seed=1):
    """Ids, mask and positions of a batch whose rows start with so many pads."""
    ids = token_ids(len(pads), tokens, seed)
    mask = torch.ones(len(pads), tokens, dtype=torch.int64)
    for row, n in enumerate(pads):
        ids[row, :n], mask[row, :n] = 0, 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp_min(0)


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
                past_key_values=cache,
            ).logits
        )
        start = end
    return torch.cat(logits, 1)


def both(upstream, patched, pads, chunks):
    """The logits that upstream and patched model give the same tokens, pads left out."""

    def run(seed):
        cache = DynamicCache(config=upstream.config)
        return feed(upstream, cache, *left_padded(pads, sum(chunks), seed), chunks)

    seed, want = clear_case(run)
    ids, mask, positions = left_padded(pads, sum(chunks), seed)
    got = feed(patched, paged_cache(patched, len(pads)), ids, mask, positions, chunks)
    return want[mask.bool()], got[mask.bool()]


def furthest(upstream, patched):
    want, got = both(upstream, patched, [0, 9], [46, 1, 1])
    return (got - want).abs().max()


def prompt(seed=1, pads=PADS, tokens=40):
    ids, mask, _ = left_padded(pads, tokens, seed)
    return {"input_ids": ids, "attention_mask": mask}


def alone(model, ids, pads):
    """Upstream's logits of the real tokens, each sequence without its padding."""
    rows = [row[None, n:] for row, n in zip(ids, pads, strict=True)]
    return torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows])


def continued(model, cache, ids, start, sizes):
    """The logits of ``ids`` from position ``start`` on."""
    logits = []
    for size in sizes:
        logits.append(model(ids[:, start : start + size], past_key_values=cache).logits)
        start += size
    return torch.cat(logits, 1)


def after_a_change(upstream, patched, change, rows, *, fed=50, steps=(4, 4, 4)):
    """The logits that upstream and patched model give tokens behind those of a changed cache.

    Args:
        change: of a cache with ``fed`` tokens of three sequences; may return another one.
        rows: the sequences that are in it then.
    """
    ids, cache = token_ids(3, fed), paged_cache(patched, 3)
    patched(input_ids=ids, past_key_values=cache)
    cache = change(cache) or cache
    left = int(cache.get_seq_length())
    # other tokens than those that were cropped
    whole = torch.cat([ids[rows, :left], token_ids(len(rows), sum(steps), 7)], 1)
    want = upstream(input_ids=whole, use_cache=False).logits[:, left:]
    return want, continued(patched, cache, whole, left, steps)


def trace(model):
    """Everything a patch could leave behind: classes, attributes, hooks, config."""
    modules = {name: (type(m), sorted(vars(m))) for name, m in model.named_modules()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return modules, hooks, model.config.to_dict(), model.config._attn_implementation
