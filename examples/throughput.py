"""Tokens per second of this machine with this model, next to what its memory allows: generate.py
--bench. The tokens of the prompt are random; with --backend both transformers is measured, too."""

import statistics
import time
from dataclasses import dataclass

import torch
from estimates import FIXED, SHARE, Range, seconds_of_token
from model_memory import shares_read
from session import Session, Streamer, new_cache, warm_up

from custom_pypto.models.memory import empty
from custom_pypto.models.streaming.pool import Counts

REPEATS = 5
READ = 512 << 20  # bytes, to measure the bandwidth: more than caches hold


@dataclass
class Speed:
    backend: str
    prompt_tokens_per_second: float
    tokens_per_second: float
    experts: Counts | None  # of all tokens after the prompts; None: all weights are in memory


def read_bandwidth():
    """Bytes per second that the threads of torch read, in a sum of numbers; call it before a model
    takes the memory."""
    numbers = empty((READ // 4,), torch.float32).fill_(1)
    seconds = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - begin)
    return READ / statistics.median(seconds[1:])


def bytes_of_token(model):
    """Of the weights that a token reads."""
    shares, state = shares_read(model), model.state_dict()
    forms = [layer.streamed.pool.form for layer in model.modules() if hasattr(layer, "streamed")]
    chosen = model.config.get_text_config().num_experts_per_tok
    streamed = chosen * sum(form.nbytes() for form in forms)
    return streamed + sum(tensor.nbytes * shares[name] for name, tensor in state.items())


@torch.no_grad()
def measure(model, tokenizer, backend, log, args):
    """Medians of several times the same prompt, each on a new cache.

    Args:
        log: session.Log of a model that was loaded with ``memory``, else None.
    """
    generator = torch.Generator().manual_seed(args.seed)
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (1, args.prompt_tokens + 1), generator=generator).to(model.device)
    room, read, wrote = ids.size(1) + args.max_new_tokens, [], []
    warm_up(model, backend, ids, room, args)
    before = log and log.counts
    for _ in range(REPEATS):
        streamer = Streamer(tokenizer, quiet=True)
        session = Session(model, new_cache(model, backend, 1, room, args), streamer)
        begin = time.perf_counter()
        count = session.read(ids, args.prefill_chunk)
        read.append(count / (time.perf_counter() - begin))
        tokens = args.max_new_tokens
        session.generate(ids[:, :0], tokens, min_new_tokens=tokens)
        wrote.append((tokens - 1) / streamer.seconds())
    counts = log.counts - before if log and log.counts != before else None
    return Speed(backend, statistics.median(read), statistics.median(wrote), counts)


def estimate(model, bandwidth):
    """Tokens per second by the bandwidth, and the bytes that each reads."""
    read, layers = bytes_of_token(model), model.config.get_text_config().num_hidden_layers
    return 1 / seconds_of_token(read, layers, bandwidth), read


def print_speeds(speeds, estimated, read, bandwidth, args):
    rows = {
        "tokens per second": [speed.backend for speed in speeds],
        f"prompt of {args.prompt_tokens}": [
            f"{speed.prompt_tokens_per_second:.1f}" for speed in speeds
        ],
        f"then {args.max_new_tokens}, one by one": [
            f"{speed.tokens_per_second:.1f}" for speed in speeds
        ],
    }
    for title, cells in rows.items():
        print(f"{title:<22}" + "".join(f"{cell:>16}" for cell in cells))
    print(
        f"\nMedians of {REPEATS}. Memory allows about {estimated:.1f}, one by one: a token reads "
        f"{read / 1e9:.3g} GB of weights,\ntorch reads {bandwidth / 1e9:.1f} GB/s here; estimated "
        f"as by model_memory.py --speed, at {SHARE} of that and {FIXED * 1e3} ms a layer."
    )
    for speed in speeds:
        if speed.experts:
            tokens = REPEATS * args.max_new_tokens
            allowed = Range.of(1 / estimated, speed.experts.reading / tokens)
            from_files = speed.experts.nbytes / tokens / 1e9
            print(
                f"{speed.backend}: {speed.experts}.\nA token read {from_files:.3g} GB from "
                f"files: with memory they allow about {allowed}, in turns or both at once."
            )
