"""A swapped model beside stock transformers: time and memory of decode and prefill by context.

    python benchmarks/bench_model.py [--dtype float32] [--repeats 7] [--write]

Two dense layers of DeepSeek-V3.2 (hidden 1024, 16 heads, latent 512, RoPE 64, 64 x 128 indexer,
index_topk 2048), random weights. Both sides get the same weights and the same cached tokens, and
their logits are compared before anything is timed. Peak memory is what a side needs on top of
weights and cache, measured in a process of its own.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, DynamicCache

# last, so that an installed custom_pypto comes first
sys.path.append(str(Path(__file__).parents[1]))
from measure import interleaved, machine, ratio, table, write_section

import models

CONTEXTS = (1024, 4096, 16384)
SIDES = ("custom_pypto", "transformers")
# stock materialises float32 index scores [64, S, S]: 64 GiB at 16K
STOCK_PREFILL_LIMIT = 4096


def make_model(side: str, dtype: torch.dtype):
    torch.manual_seed(0)
    config = DeepseekV32Config(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=768,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        pad_token_id=0,
        eos_token_id=None,
        dtype=dtype,
    )
    model = DeepseekV32ForCausalLM._from_config(config, dtype=dtype).eval()
    return models.use_custom_pypto(model) if side == "custom_pypto" else model


def filled_cache(side: str, model, tokens: int):
    """A cache that holds the same ``tokens`` random tokens on both sides, with room for one."""
    config = model.config
    generator = torch.Generator().manual_seed(1)
    paged = models.PagedCache(model, 1, tokens + 1) if side == "custom_pypto" else None
    cache = paged or DynamicCache(config=config)
    slots = paged.append(1, tokens, None) if paged else None
    for i in range(config.num_hidden_layers):
        latent, rope, index = (
            torch.randn(1, tokens, width, generator=generator).to(model.dtype)
            for width in (config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim)
        )
        if paged:
            layer = paged.layers[i]
            for pool, rows in ((layer.latent, latent), (layer.rope, rope), (layer.index, index)):
                pool.view(-1, pool.size(-1))[slots] = rows[0]
        else:
            cache.update(latent[:, None], rope[:, None], i)
            cache.update_indexer(index, i)
    return cache


def decode_call(side: str, model, context: int):
    """One decode step at ``context`` cached tokens; the cache is as before afterwards."""
    cache, ids = filled_cache(side, model, context - 1), torch.tensor([[7]])

    @torch.no_grad()
    def step():
        logits = model(ids, past_key_values=cache, use_cache=True).logits
        cache.crop(-1)
        return logits

    return step


def prefill_call(side: str, model, context: int):
    ids = torch.randint(1, 1024, (1, context), generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def prefill():
        cache = models.PagedCache(model, 1, context) if side == "custom_pypto" else None
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    return prefill


CALLS = {"decode": decode_call, "prefill": prefill_call}


def peak_bytes(side: str, phase: str, context: int, dtype: str) -> int:
    """Peak resident memory of one call, over what was resident before it, in a new process."""
    command = [sys.executable, __file__, "--dtype", dtype, "--peak", side, phase, str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def print_peak(side: str, phase: str, context: int, dtype: torch.dtype) -> None:
    def status(key: str) -> int:
        return 1024 * int(
            re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]
        )

    model = make_model(side, dtype)
    call = CALLS[phase](side, model, context)
    CALLS[phase](side, model, 64)()  # threads and libraries start outside what is measured
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    call()
    print(status("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="into benchmarks/RESULTS.md")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)  # the process that measures
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype = getattr(torch, args.dtype)
    if args.peak:
        side, phase, context = args.peak
        return print_peak(side, phase, int(context), dtype)

    print(machine())
    both = {side: make_model(side, dtype) for side in SIDES}
    rows = []
    for phase, context in [(p, c) for p in ("decode", "prefill") for c in CONTEXTS]:
        sides = SIDES if phase == "decode" or context <= STOCK_PREFILL_LIMIT else SIDES[:1]
        calls = {side: CALLS[phase](side, both[side], context) for side in sides}
        if len(sides) == 2 and dtype == torch.float32:
            ours, stock = (calls[side]() for side in SIDES)
            error = (ours - stock).abs().max().item()
            if error > 1e-3:
                raise SystemExit(f"{phase} at {context}: logits differ by {error:.1e}: not timed")
        repeats = args.repeats if phase == "decode" else 1 if context > 1024 else 3
        times = interleaved(calls, repeats)
        peaks = {side: peak_bytes(side, phase, context, args.dtype) for side in sides}
        ms = {side: f"{statistics.median(times[side]) * 1e3:.1f}" for side in sides}
        # below 1 MiB it is pages of the allocator, not the call
        mib = {
            side: f"{peaks[side] / 2**20:.0f}" if peaks[side] >= 2**20 else "<1" for side in sides
        }
        quotient = {"time": "-", "memory": "-"}
        if len(sides) == 2:
            quotient["time"] = f"{ratio(times['transformers'], times['custom_pypto']):.1f}"
            at_least = ">" if peaks["custom_pypto"] < 2**20 else ""
            memory = peaks["transformers"] / max(peaks["custom_pypto"], 2**20)
            quotient["memory"] = f"{at_least}{memory:.1f}"
        rows.append(
            [phase, f"{context // 1024}K"]
            + [ms.get(side, "not run") for side in SIDES]
            + [quotient["time"]]
            + [mib.get(side, "not run") for side in SIDES]
            + [quotient["memory"], str(repeats)]
        )
        print(*rows[-1], sep="  ", flush=True)
    if args.write:
        header = ["phase", "context", "ms", "ms stock", "ratio", "peak MiB", "peak MiB stock"]
        text = table([*header, "ratio", "repeats"], rows)
        text += (
            "\n\nms: of one decoded token, or of the whole prompt; medians of interleaved repeats. "
            "Peak: on top of weights and cache. Not run: stock prefill at 16K, whose float32 index "
            "scores alone are 64 x 16384 x 16384 x 4 bytes = 64 GiB."
        )
        command = f"python benchmarks/bench_model.py --dtype {args.dtype} --write"
        write_section(f"Model, {args.dtype}", command, text)


if __name__ == "__main__":
    main()
