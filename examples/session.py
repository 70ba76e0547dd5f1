"""Text that grows on one cache, timed: what generate.py, its demo and --bench share."""

import logging
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import CompileConfig, DynamicCache, StaticCache, TextStreamer, set_seed

from custom_pypto import models
from custom_pypto.models import CACHE  # an argument's name in this transformers
from custom_pypto.models.mtp.gain import Counts
from custom_pypto.models.streaming import pool

BACKENDS = ["custom_pypto", "transformers"]


class Log(logging.Handler):
    """While a program runs: on standard error what models.load logs with ``memory``, and at the end
    the sum of what each ``generate`` logs."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.counts, self.logger = pool.Counts(), logging.getLogger("custom_pypto")

    def __enter__(self):
        self.before = self.logger.level
        self.logger.setLevel(min(self.before or logging.INFO, logging.INFO))
        self.logger.addHandler(self)
        return self

    def __exit__(self, kind, *_):
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)
        if kind is None and is_first_rank():
            counted = self.counts != pool.Counts()
            text = self.counts if counted else "all weights are in memory"
            print(f"generate: {text}", file=sys.stderr)

    def emit(self, record):
        if record.args and isinstance(record.args[0], pool.Counts):
            self.counts += record.args[0]
        elif is_first_rank():
            print(self.format(record), file=sys.stderr)


@dataclass
class Result:
    backend: str
    prompt_tokens: int
    new_tokens: int
    seconds_to_first_token: float  # prefill included
    tokens_per_second: float  # after the first token, all rows of the batch together
    cache_bytes: int
    answers: list[list[str]]  # of each row of the batch
    right: int | None  # None: no questions with known answers
    asked: int | None
    drafted: list[int]  # by the place of a draft in its step; empty: none
    accepted: list[int]


def before_stop(text, stops):
    """``text`` up to the first of ``stops`` in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=None)]


class Streamer(TextStreamer):
    """Prints the first row of the batch as it arrives and records the time of each token."""

    def __init__(self, tokenizer, quiet=False, stops=()):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.quiet, self.stops, self.times = quiet, stops, []
        self.waits = ""  # may be the beginning of a stop

    def put(self, value):
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value[:1])

    def on_finalized_text(self, text, stream_end=False):
        text = self.waits + text
        kept = 0 if stream_end else max(map(len, self.stops), default=1) - 1
        shown = before_stop(text, self.stops)
        if len(shown) == len(text):
            shown = text[: len(text) - kept]
        self.waits = "" if stream_end else text[len(shown) :]
        if not self.quiet:
            print(shown, end="\n" if stream_end else "", flush=True)

    def stopping(self, begin):
        """What ends a row with a stop behind its first tokens. That of transformers, for
        ``stop_strings``, raises with a tokenizer of whole words."""

        def stopped(ids, scores, **_):
            texts = self.tokenizer.batch_decode(ids[:, begin:], skip_special_tokens=True)
            found = [any(stop in text for stop in self.stops) for text in texts]
            return torch.tensor(found, device=ids.device)

        return [stopped] if self.stops else []

    def seconds(self):
        """From the first token to the last."""
        return self.times[-1] - self.times[0]


class Session:
    """A batch of texts of equal length in tokens, growing on one cache."""

    def __init__(self, model, cache, streamer):
        self.model, self.cache, self.streamer = model, cache, streamer
        self.ids, self.cached = None, 0  # the texts, and how much of them the cache has
        self.drafts = Counts()

    def read(self, ids, chunk):
        """Caches the texts ``ids`` ``[batch, n]`` up to their last token; what the cache has of
        them already stays.

        Args:
            chunk: tokens at a time, since upstream makes index scores of ``[heads, chunk, tokens
                so far]`` in float32.
        Returns:
            the number of new tokens in the cache.
        """
        if self.cached:
            self.forget_what_differs(ids)
        begin, self.ids = self.cached, ids
        new = ids[:, begin:-1]
        with tqdm(
            total=new.size(1),
            desc="prefill",
            unit=" tokens",
            leave=False,
            disable=None if is_first_rank() else True,  # None: only on a terminal
        ) as progress:
            for start in range(0, new.size(1), chunk):
                part = new[:, start : start + chunk]
                self.model(part, **{CACHE: self.cache}, logits_to_keep=1)
                self.cached += part.size(1)
                progress.update(part.size(1))
        return new.size(1)

    def forget_what_differs(self, ids):
        """Templates write earlier turns as they like, without the thoughts in them perhaps."""
        length = min(self.cached, ids.size(1) - 1)
        equal = (self.ids[:, :length] == ids[:, :length]).all(0)
        same = int(equal.long().cumprod(0).sum())
        if same < self.cached:
            try:
                self.cache.crop(same - self.cached)
            except ValueError:  # a ring has overwritten what was before
                self.cache.reset()
                same = 0
        self.cached = same

    def generate(self, input_ids, max_new_tokens, **options):
        """The model's answer to ``input_ids`` ``[batch, n]``, after all earlier tokens."""
        self.ids = torch.cat([self.ids, input_ids], dim=1)
        before = self.ids.size(1)
        output = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            **{CACHE: self.cache},
            max_new_tokens=max_new_tokens,
            streamer=self.streamer,
            stopping_criteria=self.streamer and self.streamer.stopping(before),
            return_dict_in_generate=True,
            **options,
        )
        self.ids = output.sequences
        if "drafts" in output:
            self.drafts += output.drafts
        self.cached = self.ids.size(1) - 1
        return self.ids[:, before:]


def is_first_rank():
    """Whether this process is the one that prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def new_cache(model, backend, batch, length, args):
    if backend == "custom_pypto":
        return models.PagedCache(model, batch, length, block_size=args.block_size)
    if args.compile:
        return StaticCache(config=model.config, max_cache_len=length)
    return DynamicCache(config=model.config)


def cache_bytes(cache):
    if isinstance(cache, models.PagedCache):
        return cache.nbytes
    # leaves: DeepSeek-V4's layers keep the states of their compressors in dictionaries
    values = tree_leaves([vars(layer) for layer in cache.layers])
    return sum(tensor.nbytes for tensor in values if isinstance(tensor, torch.Tensor))


def warm_up(model, backend, input_ids, length, args):
    """Sets up threads, and compiles with --compile; the seconds that it takes."""
    if args.compile:
        layers = backend == "custom_pypto" and model.device.type == "cpu"  # a graph for each kind
        config = (
            CompileConfig() if layers else CompileConfig(fullgraph=True, dynamic=False, mode=None)
        )
        config._compile_all_devices = not layers  # else transformers compiles on GPUs only
        model.generation_config.compile_config = config
    begin = time.perf_counter()
    cache = new_cache(model, backend, input_ids.size(0), length, args)
    session = Session(model, cache, None)
    session.read(input_ids[:, :9], args.prefill_chunk)
    session.generate(input_ids[:, :0], max_new_tokens=3, min_new_tokens=3)  # no early end
    return time.perf_counter() - begin


def sampling(args):
    """What ``model.generate`` is told; without a temperature it takes the likeliest token."""
    drafts = {}
    if args.drafts:
        drafts = dict(use_mtp=True, num_assistant_tokens=args.drafts)
        drafts["num_assistant_tokens_schedule"] = "heuristic"  # none while they do not pay
    if not args.temperature:
        return drafts
    return drafts | dict(
        do_sample=True,
        temperature=args.temperature,
        top_p=1.0 if args.top_p is None else args.top_p,
        top_k=args.top_k or 0,  # 0: all of them
    )


@torch.no_grad()
def run(model, tokenizer, backend, prompts, dialogues, args, alone):
    """Reads ``prompts``, then generates.

    Args:
        prompts: a text per row of the batch, all of equally many tokens.
        dialogues: per row, ``(question, value)`` pairs to ask; None: only continue the prompt.
        alone: only the text is wanted, not the time of several backends.
    """

    def encode(texts):
        return tokenizer(list(texts), return_tensors="pt").input_ids.to(model.device)

    def say(text):
        if not args.json and not alone:
            print(text, end="", flush=True)

    input_ids = encode(prompts)
    batch, prompt_tokens = input_ids.shape
    turns = list(zip(*dialogues, strict=True)) if dialogues else [None]
    room = prompt_tokens + len(turns) * (args.max_new_tokens + 1)
    if args.compile or not alone:
        seconds = warm_up(model, backend, input_ids, room, args)
        if args.compile:
            say(f"{backend}: compiled in {seconds:.1f} s\n")

    set_seed(args.seed)
    stops = args.stop or []
    streamer = Streamer(tokenizer, args.json, stops)
    session = Session(model, new_cache(model, backend, batch, room, args), streamer)
    answers, right, new_tokens = [[] for _ in prompts], 0, 0
    say(f"{backend}:\n")
    begin = time.perf_counter()
    session.read(input_ids, args.prefill_chunk)
    for turn in turns:
        if turn is None:
            asked = input_ids[:, :0]
        else:
            asked = encode(question for question, _ in turn)
            say(f"  {turn[0][0]} ")
        said = session.generate(asked, args.max_new_tokens, **sampling(args))
        new_tokens += said.numel()
        for row, text in enumerate(tokenizer.batch_decode(said, skip_special_tokens=True)):
            answers[row].append(before_stop(text, stops))
            if turn is not None:
                right += text.strip() == turn[row][1]
    seconds = streamer.seconds()
    return Result(
        backend=backend,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        seconds_to_first_token=streamer.times[0] - begin,
        tokens_per_second=batch * (len(streamer.times) - 1) / seconds if seconds else float("nan"),
        cache_bytes=cache_bytes(session.cache),
        answers=answers,
        right=right if dialogues else None,
        asked=len(turns) * batch if dialogues else None,
        drafted=session.drafts.drafted,
        accepted=session.drafts.accepted,
    )


def print_results(results):
    """One column per backend, and the ratio in favour of custom_pypto."""
    rows = {
        "": "{backend}",
        "right answers": "{right} of {asked}",
        "prompt tokens": "{prompt_tokens}",
        "new tokens": "{new_tokens}",
        "time to first token": "{seconds_to_first_token:.2f} s",
        "tokens per second": "{tokens_per_second:.1f}",
        "cache": "{megabytes:.1f} MB",
    }
    if results[0].drafted:
        rows["drafts accepted"] = accepted(results[0])
    if results[0].asked is None:
        del rows["right answers"]
    ratios = {  # by title: of which field, and whether more or less of it is better
        "time to first token": ("seconds_to_first_token", -1),
        "tokens per second": ("tokens_per_second", 1),
        "cache": ("cache_bytes", -1),
    }
    print()
    for title, text in rows.items():
        cells = [text.format(**vars(r), megabytes=r.cache_bytes / 1e6) for r in results]
        if len(results) == 2 and title in ratios:
            field, better = ratios[title]
            ours, upstream = (getattr(result, field) for result in results)
            cells.append(f"{(ours / upstream) ** better:.1f}x")
        print(f"{title:<22}" + "".join(f"{cell:>16}" for cell in cells))


def accepted(result):
    """Of the drafts of each place in a step."""
    pairs = zip(result.accepted, result.drafted, strict=True)
    return ", ".join(f"{right} of {drafted}" for right, drafted in pairs)


def print_speed(result):
    """On standard error: standard output has the text."""
    speed = "" if result.new_tokens < 2 else f", {result.tokens_per_second:.1f} tokens/s"
    print(
        f"{result.prompt_tokens} tokens read, first token after "
        f"{result.seconds_to_first_token:.2f} s; {result.new_tokens} tokens written{speed}"
        + (f", drafts accepted: {accepted(result)}" if result.drafted else ""),
        file=sys.stderr,
    )
