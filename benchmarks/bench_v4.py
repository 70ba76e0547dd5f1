"""Attention layers of DeepSeek-V4 beside upstream transformers: time and memory by context.

    python benchmarks/bench_v4.py [--repeats 5] [--write]
    python benchmarks/bench_v4.py --check    # against the floors

One attention layer of each type in the size of V4-Flash (hidden 4096, 64 heads of 512, window 128,
64 x 128 indexer, index_topk 512, ratios 4 and 128), bfloat16, one thread. Both sides get the same
random weights and the same cached rows; no time is reported unless their results match. Times are
user CPU time, as in bench_model.py. Peak memory is that of one side beyond weights and cache, in
its own process.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from measure import (
    check,
    interleaved,
    machine,
    of_kernels,
    peak_over,
    ratio,
    table,
    user_seconds,
    write_section,
)
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.masking_utils import create_sliding_window_causal_mask

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.cache import write

SIDES = ("custom_pypto", "transformers")
KINDS = {
    "sliding": "sliding_attention",
    "sparse": "compressed_sparse_attention",
    "heavy": "heavily_compressed_attention",
}
DECODE_CONTEXTS = (4096, 16384, 65536)
PREFILL_CONTEXTS = (2048, 8192)
# upstream's logits [64, S, 1.25 S] take 0.7 GB per copy at 2K, 2.7 GB at 4K
UPSTREAM_PREFILL_LIMIT = 2048
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


def make_model(side: str, kind: str):
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
    layer, window, dim = cache.layers[0], attention.sliding_window - 1, attention.head_dim
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
    layer = cache.layers[0]

    def put(name: str, rows: Tensor, values: Tensor) -> None:
        space = layer.layouts[name]
        slots = cache.store.slots(space, rows[None], torch.ones_like(rows[None], dtype=torch.bool))
        write(getattr(layer, name), slots, values)

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
        mask.commit()
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
    attention, cached = model.base_model.layers[0].self_attn, context
    if side == "custom_pypto":
        cache = models.PagedCache(model, 1, context + 128)
        fill_paged(cache, attention, context)
    else:
        cache = DynamicCache(config=model.config)
        fill_upstream(cache, attention, context)

    def step() -> Tensor:
        nonlocal cached
        hidden = random(1, 1, model.config.hidden_size, seed=cached)
        cached += 1
        return attend(side, model, hidden, cache, cached - 1)

    return step


def prefill_call(side: str, model, context: int) -> Callable[[], Tensor]:
    hidden = random(1, context, model.config.hidden_size, seed=3)

    def prefill() -> Tensor:
        ours = side == "custom_pypto"
        cache = models.PagedCache(model, 1, context) if ours else DynamicCache(config=model.config)
        return attend(side, model, hidden, cache, 0)

    return prefill


CALLS = {"decode": decode_call, "prefill": prefill_call}


def sides_of(phase: str, context: int) -> tuple[str, ...]:
    fits = phase == "decode" or context <= UPSTREAM_PREFILL_LIMIT
    return SIDES if fits else SIDES[:1]


def times(kind: str, phase: str, context: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each side, after the results of every round were compared."""
    outputs = {side: [] for side in SIDES}

    def kept(side: str) -> Callable[[], None]:
        call = CALLS[phase](side, make_model(side, kind), context)
        return lambda: outputs[side].append(call().float())

    sides = sides_of(phase, context)
    seconds = interleaved({side: kept(side) for side in sides}, repeats, user_seconds)
    if len(sides) == 2:
        for ours, theirs in zip(*outputs.values(), strict=True):
            error = ((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max()
            if not error <= TOLERANCE:
                raise SystemExit(f"{kind} {phase}: the sides differ by {error:.1e}; not reported")
    return seconds


def peak_bytes(side: str, kind: str, phase: str, context: int) -> int:
    """Peak resident memory of one call, beyond the memory resident before it, in a new process."""
    command = [sys.executable, __file__, "--peak", side, kind, phase, str(context)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(side: str, kind: str, phase: str, context: int) -> None:
    model = make_model(side, kind)
    call = CALLS[phase](side, model, context)
    CALLS[phase](side, model, 256)()  # threads and libraries start before the measurement
    print(peak_over(call))


def row(kind: str, phase: str, context: int, repeats: int) -> list[str]:
    seconds = times(kind, phase, context, repeats)
    ms = {side: f"{statistics.median(x) * 1e3:.1f}" for side, x in seconds.items()}
    mib = {side: peak_bytes(side, kind, phase, context) / 2**20 for side in seconds}
    cells = [kind, phase, f"{context // 1024}K", *(ms.get(side, "not run") for side in SIDES)]
    cells.append(f"{ratio(*(seconds[side] for side in SIDES[::-1])):.1f}" if len(ms) == 2 else "-")
    # below 1 MiB the allocator's pages dominate, not the call
    cells += [(f"{mib[s]:.0f}" if mib[s] >= 1 else "<1") if s in mib else "not run" for s in SIDES]
    print(*cells, sep="  ", flush=True)
    return cells


def times_upstream(kind: str, context: int) -> float:
    seconds = times(kind, "decode", context, 3)
    return ratio(seconds["transformers"], seconds["custom_pypto"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/RESULTS.md")
    parser.add_argument("--check", action="store_true", help="compare with the floors")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)  # the process that measures
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        *case, context = args.peak
        print_peak(*case, int(context))
        return 0
    print(machine())
    if args.check:
        return check(
            [
                (
                    f"{kind} layer of DeepSeek-V4, decode, {context // 1024}K, times upstream",
                    partial(times_upstream, kind, context),
                    least,
                )
                for (kind, context), least in FLOORS.items()
            ]
        )
    rows = [row(kind, "decode", c, args.repeats) for kind in KINDS for c in DECODE_CONTEXTS]
    rows += [row(kind, "prefill", c, 1) for kind in KINDS for c in PREFILL_CONTEXTS]
    if args.write:
        header = ["layer", "phase", "context", "ms", "ms upstream", "ratio", "peak MiB"]
        note = (
            "\n\nms: user CPU time of one decoded token, or of the whole prompt; medians of "
            "interleaved repeats. Peak: on top of weights and cache. Not run: upstream prefill "
            "that does not fit; its logits take 64 x S x 1.25 S elements per copy."
        )
        write_section(
            of_kernels("Attention layers of DeepSeek-V4-Flash, bfloat16, 1 thread"),
            "python benchmarks/bench_v4.py --write",
            table([*header, "peak MiB upstream"], rows) + note,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
