"""Needle-in-a-haystack accuracy and cost, by depth of the fact and length of the text.

    python examples/needle.py                               # two minutes; writes needle.png, .json
    python examples/needle.py --tokens 2048 65536 --texts 4 --output long.png
    python examples/needle.py --index-dtype int8 --kv-dtype int8     # and with a cache in int8
    python examples/needle.py --weights int8 int4                   # and with quantized weights

It compares two ways to run the lookup checkpoint (examples/checkpoints/lookup):

- ``sparse``: on custom_pypto; the indexer selects ``index_topk`` (16) keys of each layer and token;
- ``dense``: upstream transformers (sdpa) without the indexers: every token attends to all earlier
  tokens. The model was trained this way, and the indexer learnt from it. Upstream with
  ``index_topk`` beyond the length attends to the same keys, but also computes all index scores.

With ``--index-dtype`` or ``--kv-dtype`` a third, ``int8``: as ``sparse``, with index keys or
latents in int8. With ``--weights`` one more for each format: as ``sparse``, loaded with these
weights.

Every text has all 32 facts. It is read in chunks; then the questions follow one token at a time, as
in decoding, each after the right answers to the earlier ones. Chance is 1 of 8.

Every measurement runs in its own process. Its peak memory (Linux only) is the memory for reading
and answering one text, beyond model and libraries, including the cache. One thread is timed by its
own CPU time, which other processes do not affect; several threads by the clock.

The costs are those of this small model. Its indexer has DeepSeek-V3.2's size, 64 heads of 128; its
attention has 4 heads of 96 instead of 128 of 192, so attending to all keys is cheap here.
"""

from options import Help, at_least, check_folder, one_line_errors  # first; options.py says why

# isort: split
import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from train_lookup import FIRST_PAIR, FIRST_QUESTION, FIRST_VALUE, KEYS, VALUES, lookup_batch
from train_lookup import dense_attention as without_indexers
from transformers import DeepseekV32ForCausalLM, DynamicCache

from custom_pypto import hub, models
from custom_pypto.models import CACHE
from custom_pypto.weight_formats import rounded_formats

PLOTS = (".png", ".svg", ".pdf")
INK = {False: "white", True: "black"}  # on the dark ends of the colours, and between them
QUESTION_TOKENS = 3 * len(KEYS)  # question, value, "."


@dataclass
class Result:
    attention: str
    tokens: int  # of the text
    asked: list[int]  # questions by the depth of their fact, from the first part of the text on
    right: list[int]
    seconds_to_read: float  # a text
    seconds_per_question_token: float
    peak_bytes: int | None  # None: not on Linux


def sides(args):
    """The ways to run the model, each with what it changes on the ops; None: not on the ops."""
    found = {"sparse": {}, "dense": None}
    if args.index_dtype or args.kv_dtype:
        found["int8"] = dict(index_dtype=args.index_dtype, kv_dtype=args.kv_dtype)
    return found | {f"{weights} weights": dict(weights=weights) for weights in args.weights}


def load(changes, args):
    """The model, the factory of its cache, and the context in which it runs."""
    dtype = getattr(torch, args.dtype)
    if changes is not None:
        model = models.load(
            args.model, dtype=dtype, weights=changes.get("weights"), revision=args.revision
        )
        dtypes = {name: changes.get(name) for name in ("index_dtype", "kv_dtype")}
        if any(dtypes.values()):
            models.use_custom_pypto(model, **{k: v and torch.int8 for k, v in dtypes.items()})
        return model, lambda tokens: models.PagedCache(model, 1, tokens), nullcontext()
    model = DeepseekV32ForCausalLM.from_pretrained(
        args.model, revision=args.revision, dtype=dtype, attn_implementation="sdpa"
    )
    return model, lambda _: DynamicCache(config=model.config), without_indexers(model)


def read(model, cache, text, chunk, title):
    with tqdm(total=text.size(1), desc=title, unit=" tokens", leave=False, disable=None) as bar:
        for part in text.split(chunk, 1):
            model(part, **{CACHE: cache}, logits_to_keep=1)
            bar.update(part.size(1))


def answer(model, cache, questions):
    """For each question, whether the model ranks its answer first."""
    right = []
    for i in range(questions.size(1) - 2):  # no question follows the last answer
        guess = model(questions[:, i : i + 1], **{CACHE: cache}).logits.argmax()
        if i % 3 == 0:
            right.append(guess.item() == questions[0, i + 1].item())
    return right


def depths(text, questions):
    """For each question, the depth of its fact in the text, from 0 to 1."""
    key, value = questions[0, 0::3] - FIRST_QUESTION, questions[0, 1::3] - FIRST_VALUE
    facts = FIRST_PAIR + key * len(VALUES) + value
    return [(text[0] == fact).nonzero().item() / text.size(1) for fact in facts]


def peak_memory():
    """Peak bytes of this process; a process starts with its program's memory."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])


@torch.no_grad()
def measure(attention, changes, tokens, args):
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    transformers.utils.logging.disable_progress_bar()
    model, new_cache, context = load(changes, args)
    result = Result(attention, tokens, [0] * args.depths, [0] * args.depths, 0.0, 0.0, None)
    with context:
        ids, _ = lookup_batch(1, 512, seed=args.seed)  # warm-up
        cache = new_cache(ids.size(1))
        read(model, cache, ids[:, :-1], 128, "warm up")
        model(ids[:, -1:], **{CACHE: cache})
        before = peak_memory()
        for i in range(args.texts):
            ids, _ = lookup_batch(1, tokens + QUESTION_TOKENS, seed=args.seed + i)
            text, questions = ids.split([tokens, QUESTION_TOKENS], 1)
            cache = new_cache(ids.size(1))
            start = clock()
            read(model, cache, text, args.prefill_chunk, f"{attention}, text {i + 1}")
            middle = clock()
            right = answer(model, cache, questions)
            end = clock()
            result.seconds_to_read += (middle - start) / args.texts
            result.seconds_per_question_token += (end - middle) / (QUESTION_TOKENS - 2) / args.texts
            for depth, is_right in zip(depths(text, questions), right, strict=True):
                result.asked[int(depth * args.depths)] += 1
                result.right[int(depth * args.depths)] += is_right
            if i == 0 and before is not None:  # later texts would include memory not yet freed
                result.peak_bytes = peak_memory() - before
    return result


def table(results):
    def row(*cells):
        return "".join(f"{cell:>15}" for cell in cells)

    lines = [row("attention", "tokens", "right", "s to read", "ms per token", "peak MB")]
    for result in results:
        peak = "" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:.0f}"
        lines.append(
            row(
                result.attention,
                result.tokens,
                f"{sum(result.right)} of {sum(result.asked)}",
                f"{result.seconds_to_read:.2f}",
                f"{1000 * result.seconds_per_question_token:.1f}",
                peak,
            )
        )
    return "\n".join(lines)


def plot(results, conditions, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(result.attention for result in results))
    maps = len(names)
    figure, axes = plt.subplots(1, 3 + maps, figsize=(11 + 3 * maps, 4), layout="constrained")
    costs = {
        "seconds to read the text": lambda r: r.seconds_to_read,
        "ms per token of the questions": lambda r: 1000 * r.seconds_per_question_token,
        "peak memory, MB": lambda r: r.peak_bytes and r.peak_bytes / 1e6,
    }
    for axis, attention in zip(axes, names, strict=False):
        image = plot_accuracy(axis, [r for r in results if r.attention == attention])
    figure.colorbar(
        image, ax=axes[maps - 1], label=f"right answers, % (chance: {100 / len(VALUES):g})"
    )
    for axis, (title, cost) in zip(axes[maps:], costs.items(), strict=True):
        for attention in names:
            points = [r for r in results if r.attention == attention and cost(r)]
            axis.plot([r.tokens for r in points], list(map(cost, points)), "o-", label=attention)
        # a short text may need no more memory than the warm-up
        scale = "log" if any(map(cost, results)) else "linear"
        axis.set(title=title, xlabel="tokens", xscale="log", yscale=scale)
        tokens = sorted({r.tokens for r in results})
        axis.set_xticks(tokens, tokens, rotation=45)
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(" | ".join(f"{name} {value}" for name, value in conditions.items()), fontsize=8)
    figure.savefig(path, dpi=90)


def plot_accuracy(axis, results):
    """A column for each length, a row for each depth."""
    shares = [
        [
            100 * right / asked if asked else float("nan")
            for right, asked in zip(*parts, strict=True)
        ]
        for parts in ((result.right, result.asked) for result in results)
    ]
    for x, column in enumerate(shares):
        for y, share in enumerate(column):
            if not math.isnan(share):  # else no fact was at this depth
                axis.text(
                    x, y, f"{share:.0f}", ha="center", va="center", color=INK[20 < share < 80]
                )
    parts = len(shares[0])
    edges = range(parts + 1)
    axis.set_yticks([edge - 0.5 for edge in edges], [f"{100 * edge / parts:.0f}" for edge in edges])
    axis.set_xticks(range(len(results)), [result.tokens for result in results], rotation=45)
    axis.set(title=results[0].attention, xlabel="tokens", ylabel="depth of the fact, %")
    return axis.imshow(torch.tensor(shares).T, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    here = Path(__file__).resolve().parent
    add(
        "--model",
        default=os.path.relpath(here / "checkpoints/lookup"),
        help="made by train_lookup.py: a directory, or the name of a repository on the Hub",
    )
    add("--revision", help="branch, tag or commit of the repository")
    lengths = [1024, 2048, 4096, 8192]
    add("--tokens", type=at_least(len(KEYS)), nargs="+", default=lengths, help="text lengths")
    add("--texts", type=at_least(1), default=2, help="texts per length, with 32 questions each")
    add("--depths", type=at_least(1), default=10, help="number of depth buckets in the plot")
    add("--prefill-chunk", type=at_least(1), default=512, help="tokens per forward pass")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    add("--index-dtype", choices=["int8"], help="measures a cache with such index keys too")
    add("--kv-dtype", choices=["int8"], help="measures a cache with such latents too")
    weights = ["stored", *rounded_formats()]
    add("--weights", nargs="+", default=[], choices=weights, help="measures such weights too")
    add("--threads", type=at_least(1), default=torch.get_num_threads())
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("needle.png"), help="plot file, with .json beside it")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the plot needs matplotlib: pip install matplotlib")
    if args.output.suffix not in PLOTS or args.output.is_dir():
        parser.error(f"--output must be a file ending in {', '.join(PLOTS)}, got {args.output}")
    check_folder(parser, "--output", args.output.parent)
    return args


def main():
    args = parse_args()
    with one_line_errors("--weights", "--revision", "--dtype"):
        hub.find("--model", args.model, args.revision)
        run(args)


def result_of(processes: ProcessPoolExecutor, function: Callable, *arguments) -> Any:
    """Of the function, in a process that Ctrl-C ends without a word: it may not have begun."""
    caught: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    # what a thread blocks, the processes that it starts block, too
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    future = processes.submit(function, *arguments)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        signal.signal(signal.SIGINT, handler)
        if caught:
            raise KeyboardInterrupt
        return future.result()
    except KeyboardInterrupt:
        for child in multiprocessing.active_children():
            child.terminate()
        raise


def run(args):
    conditions = {
        "dtype": args.dtype,
        "texts": args.texts,
        "prefill_chunk": args.prefill_chunk,
        "threads": args.threads,
        "seed": args.seed,
    }
    if args.index_dtype or args.kv_dtype:
        conditions |= {"index_dtype": args.index_dtype, "kv_dtype": args.kv_dtype}
    results = []
    # a new process per measurement: memory kept by one would hide the next one's
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        work = [(*side, tokens) for tokens in sorted(args.tokens) for side in sides(args).items()]
        for i, (attention, changes, tokens) in enumerate(work, 1):
            print(f"{i} of {len(work)}: {attention}, {tokens} tokens", file=sys.stderr, flush=True)
            results.append(result_of(processes, measure, attention, changes, tokens, args))
    print(table(results))
    print(" | ".join(f"{name} {value}" for name, value in conditions.items()))
    report = conditions | {"results": [asdict(result) for result in results]}
    args.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    plot(results, conditions, args.output)
    print(f"written: {args.output}, {args.output.with_suffix('.json')}")


if __name__ == "__main__":
    main()
