"""Generates with a checkpoint of a supported model (docs/models.md), on custom_pypto and upstream.

    python examples/generate.py                                   # the demo, DeepSeek-V3.2
    python examples/generate.py --model examples/checkpoints/lookup_v4    # the demo, DeepSeek-V4
    python examples/generate.py --model DIR --prompt "Once upon a time"
    python examples/generate.py --model deepseek-ai/DeepSeek-V3.2 --layers 4 --prompt "Once upon"
    cat text | python examples/generate.py --model DIR --prompt-file - --backend custom_pypto
    torchrun --nproc-per-node 2 examples/generate.py --tp               # two share heads and widths
    torchrun --nproc-per-node 4 examples/generate.py --ep --model DIR   # four share whole experts
    torchrun --nproc-per-node 2 examples/generate.py --cp               # two share the prompts

The demo hides 32 facts in a long text and asks for some of them, one after another on one cache.
Decoding is greedy, so that both backends do the same work.
"""

from options import Help, at_least, block_size  # first; options.py says why

# isort: split
import argparse
import json
import os
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import train_lookup
import train_lookup_v4
import transformers
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    TextStreamer,
)

from custom_pypto import hub, models
from custom_pypto.models import CACHE  # an argument's name in this transformers

BACKENDS = ["custom_pypto", "transformers"]


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


class Streamer(TextStreamer):
    """Prints the first row of the batch as it arrives and records the time of each token."""

    def __init__(self, tokenizer, quiet):
        super().__init__(tokenizer, skip_prompt=True)
        self.quiet, self.times = quiet, []

    def put(self, value):
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value[:1])

    def on_finalized_text(self, text, stream_end=False):
        if not self.quiet:
            print(text, end="\n" if stream_end else "", flush=True)


class Session:
    """A batch of texts of equal length in tokens, growing on one cache."""

    def __init__(self, model, cache, input_ids, streamer):
        self.model, self.cache, self.ids, self.streamer = model, cache, input_ids, streamer

    def prefill(self, chunk):
        """All but the last token. In chunks, since upstream transformers makes index scores of
        ``[heads, chunk, tokens so far]`` in float32."""
        prompt = self.ids[:, :-1]
        with tqdm(
            total=prompt.size(1),
            desc="prefill",
            unit=" tokens",
            leave=False,
            disable=None if is_first_rank() else True,  # None: only on a terminal
        ) as progress:
            for start in range(0, prompt.size(1), chunk):
                part = prompt[:, start : start + chunk]
                self.model(part, **{CACHE: self.cache}, logits_to_keep=1)
                progress.update(part.size(1))

    def generate(self, input_ids, max_new_tokens, **options):
        """The model's answer to ``input_ids`` ``[batch, n]``, after all earlier tokens."""
        self.ids = torch.cat([self.ids, input_ids], dim=1)
        before = self.ids.size(1)
        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            **{CACHE: self.cache},
            max_new_tokens=max_new_tokens,
            streamer=self.streamer,
            **options,
        )
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


@torch.no_grad()
def run(model, tokenizer, backend, prompts, dialogues, args):
    """Prefills ``prompts``, then generates.

    Args:
        prompts: a text per row of the batch, all of equally many tokens.
        dialogues: per row, ``(question, value)`` pairs to ask; None: only continue the prompt.
    """

    def encode(texts):
        return tokenizer(list(texts), return_tensors="pt").input_ids.to(model.device)

    def say(text):
        if not args.json:
            print(text, end="", flush=True)

    input_ids = encode(prompts)
    batch, prompt_tokens = input_ids.shape
    turns = list(zip(*dialogues, strict=True)) if dialogues else [None]
    room = prompt_tokens + len(turns) * (args.max_new_tokens + 1)

    if args.compile:
        layers = backend == "custom_pypto" and model.device.type == "cpu"  # a graph for each kind
        config = (
            CompileConfig() if layers else CompileConfig(fullgraph=True, dynamic=False, mode=None)
        )
        config._compile_all_devices = not layers  # else transformers compiles on GPUs only
        model.generation_config.compile_config = config
    begin = time.perf_counter()  # warm-up: sets up threads, and compiles with --compile
    warm_up = Session(model, new_cache(model, backend, batch, room, args), input_ids[:, :8], None)
    warm_up.generate(input_ids[:, :1], max_new_tokens=3, min_new_tokens=3)  # no early end
    if args.compile:
        say(f"{backend}: compiled in {time.perf_counter() - begin:.1f} s\n")

    streamer = Streamer(tokenizer, quiet=args.json)
    session = Session(model, new_cache(model, backend, batch, room, args), input_ids, streamer)
    answers, right, new_tokens = [[] for _ in prompts], 0, 0
    say(f"{backend}:\n")
    begin = time.perf_counter()
    session.prefill(args.prefill_chunk)
    for turn in turns:
        if turn is None:
            asked = input_ids[:, :0]
        else:
            asked = encode(question for question, _ in turn)
            say(f"  {turn[0][0]} ")
        said = session.generate(asked, args.max_new_tokens)
        new_tokens += said.numel()
        for row, text in enumerate(tokenizer.batch_decode(said, skip_special_tokens=True)):
            answers[row].append(text)
            if turn is not None:
                right += text.strip() == turn[row][1]
    seconds = streamer.times[-1] - streamer.times[0]
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
    )


def load(args):
    if not sys.stderr.isatty() or not is_first_rank():
        transformers.utils.logging.disable_progress_bar()
    hub.find("--model", args.model, args.revision)
    # validates every shard, and names a damaged one
    model = models.load(
        args.model,
        dtype=args.dtype,
        num_hidden_layers=args.layers,
        tensor_parallel=args.tp,
        expert_parallel=args.ep,
        revision=args.revision,
    )
    if args.cp:
        models.use_custom_pypto(model, context_parallel=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            args.model, revision=args.revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{args.model} has no readable tokenizer: {error}") from error
    defaults = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=defaults.eos_token_id,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    return model, tokenizer


def make_prompts(tokenizer, args):
    """The prompts of the batch, and for the demo the questions for each."""
    prompt = args.prompt_file.read() if args.prompt_file else args.prompt
    if prompt is not None:
        if not tokenizer(prompt).input_ids:
            raise ValueError("the prompt must not be empty")
        return [prompt] * args.batch, None
    tasks = [train_lookup, train_lookup_v4]
    task = next((task for task in tasks if task.TOKEN_ID == tokenizer.get_vocab()), None)
    if task is None:
        raise ValueError(f"{args.model} is not the demo's model; pass --prompt or --prompt-file")
    try:
        demo = [
            task.lookup_prompt(args.prompt_tokens, questions=args.questions, seed=args.seed + row)
            for row in range(args.batch)
        ]
    except ValueError as error:
        raise ValueError(
            f"--prompt-tokens {args.prompt_tokens} is too short for --questions {args.questions}"
        ) from error
    return [prompt for prompt, _ in demo], [dialogue for _, dialogue in demo]


def print_prompt(prompt, dialogue):
    words = prompt.split()
    if len(words) > 60:
        words = [*words[:30], "...", *words[-30:]]
    print(" ".join(words) + "\n")
    if dialogue:
        question, value = dialogue[0]
        print(
            f"Somewhere in it: {question.removesuffix('?')}={value}, and others to be asked for.\n"
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


def parse_args():
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add(
        "--model",
        default=os.path.relpath(here / "checkpoints/lookup"),
        help="a checkpoint directory, or the name of a repository on the Hugging Face Hub",
    )
    add("--revision", help="branch, tag or commit of the repository")
    add("--layers", type=at_least(1), metavar="N", help="the first N layers only")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text to continue; default: the demo")
    prompt.add_argument(
        "--prompt-file", type=argparse.FileType(encoding="utf-8"), help="a file, - for stdin"
    )
    add("--max-new-tokens", type=at_least(1), help="default: 64, or 4 per question of the demo")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    add("--backend", choices=BACKENDS, help="default: both, side by side")
    add("--compile", action="store_true", help="torch.compile the decode steps")
    add("--tp", action="store_true", help="share heads and widths among the ranks of torchrun")
    add("--ep", action="store_true", help="share experts, whole ones, among the ranks of torchrun")
    add("--cp", action="store_true", help="share the tokens of prompts among the ranks of torchrun")
    add("--batch", type=at_least(1), default=1, help="batch size (only the first row is shown)")
    add("--block-size", type=block_size, default=128, help="tokens per block of the paged cache")
    add("--prefill-chunk", type=at_least(1), default=512, help="tokens per forward pass")
    add("--prompt-tokens", type=at_least(1), default=4096, help="length of the demo's text")
    add(
        "--questions",
        type=at_least(1, 32),
        metavar="N",
        default=16,
        help="number of questions of the demo, 1 to 32",
    )
    add("--seed", type=int, default=0, help="seed of the demo's text and questions")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    if args.cp and (args.tp or args.ep):
        parser.error("--cp needs the whole model on each rank, got --tp or --ep, too")
    if way := "--tp" if args.tp else "--ep" if args.ep else "--cp" if args.cp else None:
        if "RANK" not in os.environ:
            parser.error(f"{way} needs torchrun: torchrun --nproc-per-node 2 {sys.argv[0]} {way}")
        if args.compile:
            parser.error(f"--compile is unsupported with {way}")
        if args.prompt_file is sys.stdin:
            parser.error(f"--prompt-file must be a file with {way}, got -; every rank reads it")
    return args


def main():
    args = parse_args()
    if not (args.tp or args.ep or args.cp):
        return generate(args)
    # gloo on CPU, HCCL on NPUs; a rank that waits longer for another treats it as dead
    dist.init_process_group(timeout=timedelta(minutes=10))
    try:
        with open(os.devnull, "w") as nowhere:
            with redirect_stdout(sys.stdout if is_first_rank() else nowhere):
                generate(args)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):  # gloo's have none
            raise
        stop("a rank that this one waits for has ended or hangs; its own error says why")
    finally:
        dist.destroy_process_group()


def stop(error):
    rank = f" (rank {dist.get_rank()})" if dist.is_initialized() else ""
    sys.exit(f"generate.py: {error}{rank}")


def generate(args):
    try:
        model, tokenizer = load(args)
        prompts, dialogues = make_prompts(tokenizer, args)
    except (MemoryError, OSError, TypeError, ValueError) as error:
        stop(error)
    if args.max_new_tokens is None:
        args.max_new_tokens = 4 if dialogues else 64
    conditions = {
        "model": args.model,
        "index_topk": model.config.index_topk,
        "dtype": str(model.dtype).removeprefix("torch."),
        "batch": args.batch,
        "compile": args.compile,
        "threads": torch.get_num_threads(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }
    if not args.json:
        print_prompt(prompts[0], dialogues and dialogues[0])
    results = []
    for backend in [args.backend] if args.backend else BACKENDS:
        if backend == "transformers":
            models.use_transformers(model)
        try:
            results.append(run(model, tokenizer, backend, prompts, dialogues, args))
        except (MemoryError, ValueError) as error:
            stop(error)
    if args.json:
        print(json.dumps(conditions | {"results": [asdict(result) for result in results]}))
    else:
        print_results(results)
        print(" | ".join(f"{name} {value}" for name, value in conditions.items()))


if __name__ == "__main__":
    main()
