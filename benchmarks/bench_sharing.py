"""What layers that share selections save: a token and a part of a prompt after many cached tokens.

Four layers of DeepSeek-V3.2 as its dense ones are published, whose MLP has as many weights as the
nine experts of a token; random weights and rows in bfloat16, index keys also in int8.
"""

import copy
import gc
import statistics
from collections.abc import Callable, Iterator

import torch
from measure import Benchmark, Floor, interleaved, median_ms, ratio
from model_sides import random_model

from custom_pypto import models
from custom_pypto.models import CACHE

SIZES = dict(vocab_size=16, num_hidden_layers=4)
CONTEXTS = (4096, 65536, 131072)
PATTERNS = {"1": "FFFF", "1/2": "FSFS", "1/4": "FSSS"}  # by the share of indexers
PART = 256  # tokens of a prompt
# Of a prompt behind 128K tokens, where scores take more than half of the time: 1.34 and 1.62 on a
# Zen 5, which multiplies scores and weights at one rate. A token is a matter of weights here.
LEAST = {"1/2": 1.2, "1/4": 1.4}


def models_of(kind: str) -> dict:
    """By the share of indexers; they share their weights."""
    plain = random_model(SIZES, torch.bfloat16)
    weights = {id(weight): weight for weight in plain.parameters()}
    index_dtype = torch.int8 if kind == "int8" else None
    return {
        share: models.use_custom_pypto(
            copy.deepcopy(plain, dict(weights)), index_topk_pattern=pattern, index_dtype=index_dtype
        )
        for share, pattern in PATTERNS.items()
    }


def cache_of(model, tokens: int) -> models.PagedCache:
    """With so many random tokens, and room for a part of a prompt."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    cache = models.PagedCache(model, 1, tokens + PART)
    step = cache.place(1, tokens, None)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=generator).to(model.dtype)

    for layer in cache.layers:
        layer.write_latents(step.slots, rows(config.kv_lora_rank), rows(1, config.qk_rope_head_dim))
        if "index" in layer.pools:
            layer.write_keys(step.slots, rows(1, config.index_head_dim))
    cache.finish(step, None)
    return cache


def call_of(model, cache: models.PagedCache, tokens: int) -> Callable:
    """A forward of so many tokens; the cache is as before afterwards."""
    ids = torch.randint(1, model.config.vocab_size, (1, tokens))

    @torch.no_grad()
    def forward():
        model(ids, **{CACHE: cache}, logits_to_keep=1)
        cache.crop(-tokens)

    return forward


def seconds_of(kinds: dict, context: int, repeats: int) -> list[dict[str, list[float]]]:
    """Of a token, and of a part of a prompt, by :func:`models_of`."""
    sides = {share: (model, cache_of(model, context)) for share, model in kinds.items()}
    return [
        interleaved({share: call_of(*side, tokens) for share, side in sides.items()}, times)
        for tokens, times in ((1, repeats), (PART, 2))
    ]


def sharing_rows(repeats: int) -> Iterator[list[str]]:
    for kind in ("bfloat16", "int8"):
        kinds = models_of(kind)
        for context in CONTEXTS:
            token, part = seconds_of(kinds, context, repeats)
            for share in PATTERNS:
                yield [
                    *(kind, f"{context // 1024}K", share),
                    median_ms(token[share], 1),
                    f"{1 / statistics.median(token[share]):.2f}",
                    f"{ratio(token['1'], token[share]):.2f}",
                    f"{PART / statistics.median(part[share]):.1f}",
                    f"{ratio(part['1'], part[share]):.2f}",
                ]
        kinds.clear()
        gc.collect()  # models are circles, of 5 GB


def sharing_floors(repeats: int) -> Iterator[Floor]:
    kinds = models_of("bfloat16")
    for share, least in LEAST.items():

        def speedup(share=share) -> float:
            _, part = seconds_of(kinds, CONTEXTS[-1], repeats)
            return ratio(part["1"], part[share])

        yield Floor(f"{share} of the indexers, a prompt at 128K, speedup", speedup, least)


BENCHMARKS = {
    "sharing": Benchmark(
        [
            *("index keys", "context", "indexers", "token, ms", "tokens per second", "speedup"),
            *("prompt tokens per second", "speedup of a prompt"),
        ],
        sharing_rows,
        sharing_floors,
        cases=3,
    )
}
