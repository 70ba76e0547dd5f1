"""Attention layers of DeepSeek-V4 compared with upstream transformers: time and memory by context.

One attention layer of each type in the size of V4-Flash (hidden 4096, 64 heads of 512, window 128,
64 x 128 indexer, index_topk 512, ratios 4 and 128), bfloat16, one thread, user CPU time.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from measure import Benchmark, Floor, user_seconds
from model_sides import (
    HEADER,
    Subject,
    both_of,
    layer_prefill_call,
    measured,
    speedup,
)
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.masking_utils import create_sliding_window_causal_mask

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.cache.store import slots
from custom_pypto.rows.parts import write

KINDS = {
    "sliding": "sliding_attention",
    "sparse": "compressed_sparse_attention",
    "heavy": "heavily_compressed_attention",
}
DECODE_CONTEXTS = (4096, 16384, 65536)
PREFILL_CONTEXTS = (2048, 8192)
# upstream's logits [64, S, 1.25 S] take 0.7 GB per copy at 2K, 2.7 GB at 4K
UPSTREAM_PREFILL_LIMIT = 2048
ROOM = 1024  # for the tokens that are decoded
# Relative to the largest element of a row; upstream rounds weights and sums to bfloat16, and one of
# the selected rows may be another with an equal score within rounding
TOLERANCE = 2**-4
# times upstream's decode step, by layer and context; the projections take most of ours
FLOORS = {
    ("sliding", 4096): 1.0,
    ("heavy", 65536): 1.5,
    ("sparse", 4096): 2.0,
    ("sparse", 65536): 25.0,
}


def make_layer(side: str, kind: str):
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=16,
        num_hidden_layers=1,
        layer_types=[KINDS[kind]],
        mlp_layer_types=["moe"],
        n_routed_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        pad_token_id=0,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )
    model = DeepseekV4ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                parameter.normal_()
    return models.use_custom_pypto(model) if side == "custom_pypto" else model


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def fill_upstream(cache: DynamicCache, attention, tokens: int) -> None:
    """The window, the compressed rows and the last window's tokens, as :func:`fill_paged`."""
    layer, window = cache.layers[attention.layer_idx], attention.sliding_window - 1
    dim = attention.head_dim
    kept = random(1, window, dim, seed=1)[:, None]
    layer.update(kept, kept)
    layer.cumulative_length = tokens
    for name, module, seed in compressors(attention):
        rate, dim = module.compress_rate, module.head_dim
        layer.compressed_kv[name] = random(1, tokens // rate, dim, seed=seed)
        layer.entry_count[name] = tokens // rate
        if module.position_bias.size(1) > dim:  # overlapping windows
            last = random(1, rate, 4 * dim, seed=seed + 1)
            layer.overlap_kv[name] = last[..., :dim]
            gate = last[..., 2 * dim : 3 * dim].float()
            layer.overlap_gate[name] = gate + module.position_bias[:, :dim]


def fill_paged(cache: models.PagedCache, attention, tokens: int) -> None:
    layer = cache.layers[attention.layer_idx]

    def put(name: str, rows: Tensor, values: Tensor) -> None:
        space = layer.layouts[name]
        every = torch.ones_like(rows[None], dtype=torch.bool)
        write(layer.pools[name], slots(cache.tables[space], space, rows[None], every), values)

    window, ring = attention.sliding_window - 1, layer.layouts["kv"].ring
    put("kv", torch.arange(tokens - window, tokens) % ring, random(1, window, 512, seed=1))
    states = {"compressor": "overlap_state", "indexer": "index_state"}
    for name, module, seed in compressors(attention):
        rate, dim = module.compress_rate, module.head_dim
        pool = "index" if name == "indexer" else "kv"
        rows = layer.layouts[pool].ring + torch.arange(tokens // rate)
        put(pool, rows, random(1, tokens // rate, dim, seed=seed))
        if module.position_bias.size(1) > dim:
            last = torch.arange(tokens - rate, tokens) % layer.layouts[states[name]].ring
            put(states[name], last, random(1, rate, 4 * dim, seed=seed + 1))
    cache.lengths.fill_(tokens)
    for length in (cache.seen, cache.sequences.written):
        length.fill_(tokens)


def filled_cache(side: str, model, tokens: int):
    """A cache of ``tokens`` random tokens in every layer, with ROOM for more."""
    ours = side == "custom_pypto"
    make = partial(models.PagedCache, model, 1, tokens + ROOM)
    cache = make() if ours else DynamicCache(config=model.config)
    for layer in model.base_model.layers:
        (fill_paged if ours else fill_upstream)(cache, layer.self_attn, tokens)
    return cache


def compressors(attention) -> list[tuple]:
    """Name, module and seed of each."""
    if attention.compressor is None:
        return []
    found = [("compressor", attention.compressor, 2)]
    indexer = getattr(attention.compressor, "indexer", None)
    return found if indexer is None else [*found, ("indexer", indexer, 4)]


@torch.no_grad()
def attend(side: str, model, hidden: Tensor, cache, cached: int) -> Tensor:
    """The attention layer on the tokens after the ``cached`` ones."""
    attention, base = model.base_model.layers[0].self_attn, model.base_model
    positions = torch.arange(cached, cached + hidden.size(1))[None]
    rotations = {
        kind: base.rotary_emb(hidden, position_ids=positions, layer_type=kind)
        for kind in ("main", "compress")
    }
    if side == "custom_pypto":
        mask = cache.place(1, hidden.size(1), None)
        cache.finish(mask, hidden)
    elif cached:
        mask = torch.zeros(1, 1, 1, attention.sliding_window, dtype=hidden.dtype)
    else:
        mask = create_sliding_window_causal_mask(
            config=model.config,
            inputs_embeds=hidden,
            attention_mask=None,
            **{CACHE: None},
            position_ids=positions,
        )
    return attention(
        hidden_states=hidden,
        position_embeddings=rotations,
        position_ids=positions,
        attention_mask=mask,
        **{CACHE: cache},
    )[0]


def decode_call(side: str, model, context: int) -> Callable[[], Tensor]:
    """Decodes one token after another, from ``context`` cached tokens on."""
    cache, cached = filled_cache(side, model, context), context

    def step() -> Tensor:
        nonlocal cached
        hidden = random(1, 1, model.config.hidden_size, seed=cached)
        cached += 1
        return attend(side, model, hidden, cache, cached - 1)

    return step


def subject_of(kind: str) -> Subject:
    return Subject(
        partial(make_layer, kind=kind),
        {"decode": decode_call, "prefill": partial(layer_prefill_call, attend=attend)},
        {"decode": max(DECODE_CONTEXTS), "prefill": UPSTREAM_PREFILL_LIMIT},
        TOLERANCE,
        clock=user_seconds,
    )


def rows(repeats: int) -> Iterator[list[str]]:
    cases = [("decode", context, repeats) for context in DECODE_CONTEXTS]
    cases += [("prefill", context, 1) for context in PREFILL_CONTEXTS]
    for kind in KINDS:
        subject = subject_of(kind)
        both = both_of(subject)
        for case in cases:
            yield [kind, *measured(subject, both, *case).row()]


def floors(repeats: int) -> Iterator[Floor]:
    for (kind, context), least in FLOORS.items():
        subject = subject_of(kind)
        time = partial(speedup, subject, both_of(subject), "decode", context, 3)
        name = f"{kind} layer of DeepSeek-V4, decode, {context // 1024}K, times upstream"
        yield Floor(name, time, least)


BENCHMARKS = {"v4": Benchmark(["layer", *HEADER], rows, floors, cases=3)}
