"""Generates text with a checkpoint of a supported model (docs/models.md), on the ops.

    python examples/generate.py                                   # the demo, DeepSeek-V3.2
    python examples/generate.py --model examples/checkpoints/lookup_v4    # the demo, DeepSeek-V4
    python examples/generate.py --model DIR --prompt "Once upon a time"
    python examples/generate.py --model DIR --weights int4 --chat         # or "stored", "int8"
    python examples/generate.py --model DIR --weights int4 --bench        # tokens per second
    python examples/generate.py --model DIR --drafts 2 --chat   # drafts by the model's MTP layer
    python examples/generate.py --model DIR --memory 64GB --chat          # larger than memory
    python examples/generate.py --model deepseek-ai/DeepSeek-V3.2 --layers 4 --prompt "Once upon"
    cat text | python examples/generate.py --model DIR --prompt-file -
    torchrun --nproc-per-node 2 examples/generate.py --tp               # two share heads and widths
    torchrun --nproc-per-node 4 examples/generate.py --ep --model DIR   # four share whole experts
    torchrun --nproc-per-node 2 examples/generate.py --cp               # two share the prompts

The text goes to standard output as it arrives, its speed to standard error. Without a temperature
the likeliest token is taken. The demo hides 32 facts in a long text and asks for some of them, on
custom_pypto and on transformers.
"""

from options import OF_LOAD, Help, at_least, block_size, end, one_line_errors  # first; see there

# isort: split
import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import demo
import jinja2
import throughput
import torch
import torch.distributed as dist
import transformers
from session import (
    BACKENDS,
    Log,
    Session,
    Streamer,
    before_stop,
    is_first_rank,
    print_results,
    print_speed,
    run,
    sampling,
)
from transformers import AutoTokenizer, GenerationConfig, set_seed

from custom_pypto import hub, models
from custom_pypto.weight_formats import rounded_formats

#: what the program does
DEMO, PROMPT, CHAT, BENCH = "the demo", "--prompt", "--chat", "--bench"
#: options for some of these alone, and their defaults there
OPTIONS = {
    "max_new_tokens": {DEMO: 4, PROMPT: 64, CHAT: 512, BENCH: 64},
    "temperature": {PROMPT: 0.0, CHAT: 0.0},
    "top_p": {PROMPT: None, CHAT: None},
    "top_k": {PROMPT: None, CHAT: None},
    "stop": {PROMPT: None, CHAT: None},
    "chat_template": {CHAT: None},
    "backend": {DEMO: "both", PROMPT: BACKENDS[0], BENCH: BACKENDS[0]},
    "compile": {DEMO: False, PROMPT: False, BENCH: False},
    "batch": {DEMO: 1, PROMPT: 1},
    "json": {DEMO: False, PROMPT: False, BENCH: False},
    "prompt_tokens": {DEMO: 4096, BENCH: 512},
    "questions": {DEMO: 16},
    "drafts": {DEMO: None, PROMPT: None, CHAT: None},
    "tp": {DEMO: False, PROMPT: False},
    "ep": {DEMO: False, PROMPT: False},
    "cp": {DEMO: False, PROMPT: False},
}


def load_tokenizer(args):
    hub.find("--model", args.model, args.revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            args.model, revision=args.revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{args.model} has no readable tokenizer: {error}") from error
    if args.does == CHAT:
        if args.chat_template:
            tokenizer.chat_template = args.chat_template.read()
        if not tokenizer.chat_template:
            raise ValueError(
                f"--chat needs a chat template, the tokenizer of {args.model} has none; pass a "
                "file of Jinja with --chat-template, or --prompt with a text in the model's own "
                "format"
            )
        try:  # before the model is loaded
            rendered(tokenizer, [{"role": "user", "content": "?"}])
        except jinja2.TemplateError as error:
            raise ValueError(f"--chat-template is not one of Jinja: {error}") from error
    return tokenizer


def load(tokenizer, args):
    if not sys.stderr.isatty() or not is_first_rank():
        transformers.utils.logging.disable_progress_bar()
    # validates every shard, and names a damaged one
    model = models.load(
        args.model,
        dtype=args.dtype,
        num_hidden_layers=args.layers,
        tensor_parallel=bool(args.tp),
        expert_parallel=bool(args.ep),
        weights=args.weights,
        memory=args.memory,
        mtp=bool(args.drafts),
        activations=args.activations,
        revision=args.revision,
    )
    if args.cp:
        models.use_custom_pypto(model, context_parallel=True)
    defaults = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=defaults.eos_token_id,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    return model


def on_each(model, args):
    """The backends, with the model on each in turn."""
    for backend in BACKENDS if args.backend == "both" else [args.backend]:
        if backend == "transformers":
            models.use_transformers(model)
        yield backend


def write(model, tokenizer, prompts, dialogues, args):
    """The demo, or the continuation of a prompt."""
    alone = dialogues is None and args.backend != "both"
    if dialogues and not args.json:
        demo.print_prompt(prompts[0], dialogues[0])
    results = [
        run(model, tokenizer, backend, prompts, dialogues, args, alone)
        for backend in on_each(model, args)
    ]
    if args.json:
        print(json.dumps(conditions(model, args) | {"results": [asdict(one) for one in results]}))
    elif alone:
        if is_first_rank():
            print_speed(results[0])
    else:
        print_results(results)
        print(" | ".join(f"{name} {value}" for name, value in conditions(model, args).items()))


def rendered(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@torch.no_grad()
def chat(model, tokenizer, args):
    """Answers lines until there are no more; the cache keeps what was said."""
    set_seed(args.seed)
    stops = args.stop or []
    cache = models.PagedCache(model, 1, args.max_new_tokens, block_size=args.block_size)
    session = Session(model, cache, Streamer(tokenizer, stops=stops))
    messages, read, wrote, seconds = [], 0, 0, 0.0
    for line in lines():
        messages.append({"role": "user", "content": line})
        # the template has the special tokens
        encoded = tokenizer(
            rendered(tokenizer, messages), add_special_tokens=False, return_tensors="pt"
        )
        ids = encoded.input_ids.to(model.device)
        cache.reserve(ids.size(1) + args.max_new_tokens)
        read += session.read(ids, args.prefill_chunk)
        session.streamer.times.clear()
        said = session.generate(ids[:, :0], args.max_new_tokens, **sampling(args))
        wrote, seconds = wrote + said.size(1) - 1, seconds + session.streamer.seconds()
        text = before_stop(tokenizer.decode(said[0], skip_special_tokens=True), stops)
        messages.append({"role": "assistant", "content": text})
    speed = f", {wrote / seconds:.1f} tokens/s" if seconds else ""
    print(f"{len(messages) // 2} answers, {read} tokens read{speed}", file=sys.stderr)


def lines():
    """What the user says."""
    with contextlib.suppress(EOFError):
        while True:
            if line := input("> " if sys.stdin.isatty() else "").strip():
                yield line


def bench(model, tokenizer, bandwidth, log, args):
    estimated, read = throughput.estimate(model, bandwidth)  # of the formats of custom_pypto
    speeds = [
        throughput.measure(model, tokenizer, backend, log, args) for backend in on_each(model, args)
    ]
    if not args.json:
        throughput.print_speeds(speeds, estimated, read, bandwidth, args)
        print(" | ".join(f"{name} {value}" for name, value in conditions(model, args).items()))
        return
    facts = dict(
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.max_new_tokens,
        bytes_of_token=read,
        bytes_per_second=bandwidth,
        estimated_tokens_per_second=estimated,
        results=[asdict(speed) for speed in speeds],
    )
    print(json.dumps(conditions(model, args) | facts))


def conditions(model, args):
    dtype = str(model.dtype).removeprefix("torch.")
    kinds = {module.kind for module in model.modules() if getattr(module, "kind", None)}
    return {
        "model": args.model,
        "index_topk": model.config.index_topk,
        "dtype": dtype,
        "weights": ", ".join(sorted(kinds)) or dtype,
        "batch": args.batch or 1,
        "compile": args.compile,
        "threads": torch.get_num_threads(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }


def parser_of_options():
    here = Path(__file__).resolve().parent
    usage = "%(prog)s [--prompt TEXT | --prompt-file FILE | --chat | --bench] [options]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, formatter_class=Help)
    text_file = argparse.FileType(encoding="utf-8")
    does = parser.add_argument_group("what to do; without one of these the demo")
    add = does.add_mutually_exclusive_group().add_argument
    add("--prompt", metavar="TEXT", help="continue a text")
    add("--prompt-file", type=text_file, metavar="FILE", help="that of a file, - for stdin")
    add("--chat", action="store_true", help="answer lines of stdin, by the tokenizer's template")
    add("--bench", action="store_true", help="measure tokens per second, and what memory allows")

    add = parser.add_argument_group("the model").add_argument
    add(
        "--model",
        default=os.path.relpath(here / "checkpoints/lookup"),
        help="a checkpoint directory, or the name of a repository on the Hugging Face Hub",
    )
    add("--revision", help="branch, tag or commit of the repository")
    add("--layers", type=at_least(1), metavar="N", help="the first N layers only")
    add("--weights", choices=["stored", *rounded_formats()], help="format of the weights")
    add("--activations", choices=["int8"], help="of layers in int8 or 4 bits (W8A8, W4A8)")
    add("--memory", metavar="SIZE", help="of weights, such as 64GB; other experts stay in files")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")

    add = parser.add_argument_group("the text").add_argument
    count = dict(type=at_least(1), metavar="N")
    add("--max-new-tokens", **count, help="default: 64; 512 an answer of --chat, 4 of the demo")
    add("--temperature", type=within(0, 100), metavar="T", help="default: 0, the likeliest token")
    add("--top-p", type=within(0, 1), metavar="P", help="sample from the likeliest tokens of sum P")
    add("--top-k", **count, help="sample from the N likeliest tokens")
    add("--seed", type=int, default=0, help="of samples, and of the text of demo and --bench")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--chat-template", type=text_file, metavar="FILE", help="of Jinja, for --chat")

    add = parser.add_argument_group("how, and how much").add_argument
    add("--backend", choices=[*BACKENDS, "both"], help="default: custom_pypto; the demo: both")
    add("--compile", action="store_true", help="torch.compile the decode steps")
    add("--drafts", **count, help="draft N tokens a step by the MTP layer (docs/drafts.md)")
    add("--batch", **count, help="default: 1 (only the first text is shown)")
    add("--block-size", type=block_size, default=128, help="tokens per block of the paged cache")
    add("--prefill-chunk", **count, default=512, help="tokens per forward pass")
    add("--prompt-tokens", **count, help="of the demo's text, default: 4096; of --bench 512")
    add("--questions", type=at_least(1, 32), metavar="N", help="of the demo, 1 to 32, default: 16")
    add("--json", action="store_true", help="print one JSON object and nothing else")

    add = parser.add_argument_group("the ranks of torchrun share").add_argument
    add("--tp", action="store_true", help="attention heads, and the widths of the other layers")
    add("--ep", action="store_true", help="experts, whole ones")
    add("--cp", action="store_true", help="the tokens of prompts")
    return parser


def within(lowest: float, highest: float):
    """The type of an option."""

    def number(text: str) -> float:
        value = float(text)
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(f"must be {lowest} to {highest}, got {value}")
        return value

    return number


def parse_args():
    parser = parser_of_options()
    args = parser.parse_args()
    args.does = CHAT if args.chat else BENCH if args.bench else DEMO
    if args.prompt is not None or args.prompt_file:
        args.does = PROMPT
    for name, defaults in OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        if (given := getattr(args, name)) is None or given is False:
            setattr(args, name, defaults.get(args.does))
        elif args.does not in defaults:
            parser.error(f"{option} is for {' and '.join(defaults)}, got it with {args.does}")
    if args.drafts and args.backend == "both":
        args.backend = BACKENDS[0]
    if args.drafts and args.backend == BACKENDS[1]:
        parser.error(f"--drafts needs --backend {BACKENDS[0]}, got {BACKENDS[1]}")
    for name in ("top_p", "top_k"):
        if getattr(args, name) is not None and not args.temperature:
            parser.error(f"--{name.replace('_', '-')} needs --temperature, else nothing is sampled")
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
            with contextlib.redirect_stdout(sys.stdout if is_first_rank() else nowhere):
                generate(args)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):  # gloo's have none
            raise
        end("a rank that this one waits for has ended or hangs; its own error says why")
    finally:
        dist.destroy_process_group()


def generate(args):
    if hasattr(sys.stdout, "reconfigure"):  # a model may write what a terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    log = Log() if args.memory else contextlib.nullcontext()
    with one_line_errors(*OF_LOAD.values()), log as log:
        tokenizer = load_tokenizer(args)
        if args.does == BENCH:
            bandwidth = throughput.read_bandwidth()
            bench(load(tokenizer, args), tokenizer, bandwidth, log, args)
        elif args.does == CHAT:
            chat(load(tokenizer, args), tokenizer, args)
        else:
            prompts, dialogues = texts(tokenizer, args)
            write(load(tokenizer, args), tokenizer, prompts, dialogues, args)


def texts(tokenizer, args):
    """The prompts of the batch, and the questions for each of the demo's."""
    if args.does == DEMO:
        return demo.prompts_and_questions(tokenizer, args)
    prompt = args.prompt_file.read() if args.prompt_file else args.prompt
    if not tokenizer(prompt).input_ids:
        raise ValueError("the prompt must not be empty")
    return [prompt] * args.batch, None


if __name__ == "__main__":
    main()
