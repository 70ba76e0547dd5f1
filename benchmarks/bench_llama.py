"""Layers of the sizes of DeepSeek-V3.2, GLM-5 and DeepSeek-V4-Flash compared with ik_llama.cpp and
transformers.

One random checkpoint in bfloat16 is written down, loaded by ``models.load`` and by transformers,
and converted to GGUF, which their llama-quantize quantizes; one in the published format is ours
alone, next to their types of as many bits. Whole models are timed: embedding, norms, one layer and
a head of 256 tokens; of DeepSeek-V4 two layers, since theirs needs one with an indexer and one
without. Nothing is timed before the logits of a prompt agree. Times are of the clock: run it on a
machine that does nothing else.

``llama``: the folder of ik_llama.cpp's programs, llama-server and llama-quantize. They run with the
options that its users set: weights repacked at run time, flash attention, fused experts, pages of
2 MiB. Those of latent attention are for tokens selection of keys (``-mla 1 -dsa``), for prompts
attention to every key (``-mla 3``), faster there; DeepSeek-V4 always selects.
"""

import json
import math
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from bench_v4 import KINDS
from floors import LLAMA, here
from llama import convert, server
from measure import READ, Benchmark, Floor, interleaved, known, no_floor
from model_sides import prefill_call, prompt_ids
from published import V4, write_published
from tiny import randomise
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    DeepseekV4Config,
    DeepseekV32Config,
    DynamicCache,
    GlmMoeDsaConfig,
)

from custom_pypto import models
from custom_pypto.models import CACHE

VOCABULARY = 256
CONTEXT, PROMPTS = 4096, (512, 2048)
STEPS = 8  # tokens of a repeat
CHUNK = 512  # tokens of the context at once
# a format of ours, and theirs of as many bits; stored: bfloat16; fp8: as published; fp4: as
# published of DeepSeek-V4, the experts alone, fp8 and Q8_0 elsewhere
LLAMA_FORMATS = {"stored": "BF16", "fp8": "Q8_0", "fp4": "MXFP4", "int8": "Q8_0", "int4": "Q4_K"}
# ours with x in int8, too, as theirs always has it with weights of 8 and 4 bits
ROUNDED = ("fp4", "int8", "int4")
PUBLISHED = {"deepseek_v32": "fp8", "glm_moe_dsa": "fp8", V4: "fp4"}
FEW = 4  # tokens at once, as of a draft or of some sequences
EXPERTS = 32  # of 256: a token reads 8 of either, 6 of DeepSeek-V4
ALL = dict(vocab_size=VOCABULARY, n_routed_experts=EXPERTS)
# the file that they read names no groups
LATENT = ALL | dict(num_hidden_layers=1, n_group=1, topk_group=1)
# as published
YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
YARN |= {"beta_fast": 32, "beta_slow": 1}
PARTS = {
    "attention": DeepseekV32Config(**LATENT, first_k_dense_replace=1, intermediate_size=256),
    "with experts": DeepseekV32Config(**LATENT, first_k_dense_replace=0),
    "GLM-5, with experts": GlmMoeDsaConfig(**LATENT, first_k_dense_replace=0),
    "DeepSeek-V4-Flash, two layers": DeepseekV4Config(
        **ALL,
        num_hidden_layers=2,
        layer_types=[KINDS["sparse"], KINDS["heavy"]],
        mlp_layer_types=["moe", "moe"],
        rope_scaling=YARN,
    ),
}
TOKEN = ["-c", str(CONTEXT + 64), "-ub", str(CHUNK)]
# the tokens that followed where a token was before
DRAFT = ["--spec-type", f"ngram-simple:n_max={FEW - 1},ngram_size_n=1,ngram_size_m={FEW - 1}"]
PROMPT = ["-c", str(max(PROMPTS) + 64), "-b", str(max(PROMPTS))]
# for an answer it computes the experts of its last layer for the last token alone, for an
# embedding it computes them for all tokens
PROMPT += ["-ub", str(max(PROMPTS)), "--embedding", "--pooling", "last"]
# of tokens and of prompts, with latents in the cache
LATENTS = ["-mla", "1", "-dsa"], ["-mla", "3"]
CHECKED = 256  # tokens: more than a window of DeepSeek-V4, and two heavily compressed rows
# one has to agree: where experts of a random model score alike, rounding decides between them, and
# moves the logits of a token by 0.05 to 0.3
PROMPTS_CHECKED = 8
# of logits, in their length: rounding of bfloat16 differs in each of some twenty products in a row
# of a layer; squares of errors of several layers add
APART = 0.03
OURS = ("custom_pypto", "compiled")
SIDES = (*OURS, "ik_llama.cpp", "transformers")
NOT_TIMED = "–"


class Theirs:
    """One process of llama-server."""

    def __init__(self, url: str):
        self.url = url

    def ask(self, path: str, **body) -> dict | list:
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    def continued(self, prompt: list[int], count: int, **options) -> dict:
        """The answer to ``prompt``, of ``count`` tokens."""
        body = dict(prompt=prompt, n_predict=count, temperature=0, ignore_eos=True)
        return self.ask("completion", cache_prompt=True, **body | options)

    def log_probabilities(self, prompt: list[int]) -> torch.Tensor:
        """Of the token after ``prompt``; NaN of those that it leaves out."""
        found = torch.full((VOCABULARY,), torch.nan)
        (first,) = self.continued(prompt, 1, n_probs=VOCABULARY)["completion_probabilities"]
        for entry in first["probs"]:
            if entry["prob"]:
                found[int(entry["tok_str"].strip().removeprefix("w"))] = math.log(entry["prob"])
        return found

    def token_seconds(self, prompt: list[int]) -> float:
        """Of one token after ``prompt``, which the server has cached."""
        timings = self.continued(prompt, STEPS + 1)["timings"]
        return timings["predicted_ms"] / STEPS / 1e3  # the first token comes with the prompt

    def few_seconds(self, prompt: list[int]) -> float:
        """Of a token and its draft, FEW at once, after ``prompt``, which the server has cached.
        Experts of the last tokens of a prompt would not do: it computes those of one of them."""
        # random tokens: of one that it repeats it drafts fewer; 0 is in no prompt
        options = dict(temperature=100, logit_bias=[[0, False]])
        timings = self.continued(prompt, 2 * STEPS * FEW, **options)["timings"]
        steps = timings["predicted_n"] - 1 - timings["draft_n_accepted"]
        if (drafted := timings["draft_n"]) < 0.9 * steps * (FEW - 1):
            raise SystemExit(f"{drafted} tokens were drafted in {steps} steps; not timed")
        return timings["predicted_ms"] / steps / 1e3

    def prompt_seconds(self, prompt: list[int]) -> float:
        self.ask("embedding", content=prompt)
        start = time.monotonic()
        self.ask("embedding", content=prompt)
        return time.monotonic() - start


def check(model, theirs: Theirs) -> None:
    """Compares the logits after prompts, of the unquantized weights."""
    aparts = []
    for prompt in prompt_ids(VOCABULARY, PROMPTS_CHECKED * CHECKED).split(CHECKED, 1):
        with torch.no_grad():
            logits = model(prompt).logits[0, -1]
        ours, other = logits.float().log_softmax(-1), theirs.log_probabilities(prompt[0].tolist())
        known = ~other.isnan()
        ours, other = (x[known] - x[known].mean() for x in (ours, other))
        aparts.append(((ours - other).norm() / other.norm()).item())
    limit = APART * math.sqrt(model.config.num_hidden_layers)
    if (apart := min(aparts)) > limit:
        raise SystemExit(f"the logits of both sides differ by {apart:.1e}; not timed")


@torch.no_grad()
def prompted_cache(side: str, model, room: int):
    """With the prompt that theirs continues, and room for as many tokens after it: which experts
    several tokens share depends on what is cached."""
    if side == "custom_pypto":
        cache = models.PagedCache(model, 1, CONTEXT + room)
    else:
        cache = DynamicCache(config=model.config)
    for ids in prompt_ids(VOCABULARY, CONTEXT).split(CHUNK, 1):
        model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    return cache


def decode_call(model, cache, tokens: int) -> Callable[[], torch.Tensor]:
    """Random tokens, one step after another."""
    generator = torch.Generator().manual_seed(4)

    @torch.no_grad()
    def step() -> torch.Tensor:
        ids = torch.randint(1, VOCABULARY, (1, tokens), generator=generator)
        return model(ids, **{CACHE: cache}, use_cache=True).logits

    return step


def milliseconds(
    calls: dict[str, Callable], theirs: Callable[[], float], repeats: int, steps: int
) -> list[str]:
    """Medians of the sides in this process and of theirs, ours by theirs, and the GB/s that a sum
    reads. Sides take turns, each for ``steps`` calls after one that is not timed: threads of the
    other still spin for a while, and layers compile. transformers has one turn."""
    numbers, reads = torch.ones(READ // 4), []
    taken: dict[str, list[float]] = {side: [] for side in (*calls, "ik_llama.cpp")}
    for _ in range(repeats):
        reads += interleaved({"read": numbers.sum}, 3, time.monotonic)["read"]
        for side, call in calls.items():
            if side == "transformers" and taken[side]:
                continue  # a second a token: once is enough
            call()
            start = time.monotonic()
            for _ in range(steps):
                call()
            taken[side].append((time.monotonic() - start) / steps)
        taken["ik_llama.cpp"].append(theirs())
    medians = {side: statistics.median(x) * 1e3 for side, x in taken.items()}
    other = medians["ik_llama.cpp"]
    return [
        *(f"{medians[side]:.1f}" if side in medians else NOT_TIMED for side in SIDES),
        *(f"{medians[side] / other:.2f}" if side in medians else NOT_TIMED for side in OURS),
        f"{READ / statistics.median(reads) / 1e9:.1f}",
    ]


def measured(
    folder: Path, programs: Path, kind: str, repeats: int, activations: str | None = None
) -> Iterator[list[str]]:
    """Of one format of weights: what, and :func:`milliseconds`."""
    published = kind in PUBLISHED.values()
    ours = models.load(
        folder / kind if published else folder,
        weights="stored" if published else kind,
        activations=activations,
    )
    rounded = f", x in {activations}" if activations else ""
    v4 = ours.config.model_type == V4
    sides = {"custom_pypto": ours}
    ways = dict(zip(OURS, (ours, ours.get_compiled_call(CompileConfig())), strict=True))
    if kind == "stored":  # the format of the checkpoint
        upstream = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, trust_remote_code=False
        )
        sides["transformers"] = upstream.eval()
    arguments = ["-t", str(torch.get_num_threads()), "-rtr"]
    tokens, prompts = (
        [*arguments, *options, *latents]
        for options, latents in zip((TOKEN, PROMPT), ([], []) if v4 else LATENTS, strict=True)
    )
    program, file = programs / "llama-server", folder / f"{kind}.gguf"
    prompt = prompt_ids(VOCABULARY, CONTEXT)[0].tolist()
    with server(program, file, tokens) as (url, _):
        theirs = Theirs(url)
        if "transformers" in sides:
            check(ours, theirs)
        room = repeats * (STEPS + 1) * (1 + FEW) * len(OURS)
        caches = {side: prompted_cache(side, model, room) for side, model in sides.items()}
        cache = caches["custom_pypto"]
        calls = {side: decode_call(model, caches[side], 1) for side, model in sides.items()}
        calls |= {way: decode_call(call, cache, 1) for way, call in ways.items()}
        token = partial(theirs.token_seconds, prompt)
        name = f"token, {CONTEXT // 1024}K{rounded}"
        yield [name, *milliseconds(calls, token, repeats, STEPS)]
    with server(program, file, [*tokens, *DRAFT]) as (url, _):
        theirs = Theirs(url)
        calls = {way: decode_call(call, cache, FEW) for way, call in ways.items()}
        token = partial(theirs.few_seconds, prompt)
        yield [f"{FEW} tokens at once{rounded}", *milliseconds(calls, token, repeats, STEPS)]
    with server(program, file, prompts) as (url, _):
        theirs = Theirs(url)
        for count in PROMPTS:
            calls = {side: prefill_call(side, model, count) for side, model in sides.items()}
            whole = partial(theirs.prompt_seconds, prompt_ids(VOCABULARY, count)[0].tolist())
            yield [f"prompt of {count}{rounded}", *milliseconds(calls, whole, 1, 1)]


def quantize(program: Path, plain: Path, target: Path, theirs: str) -> None:
    """Writes ``plain`` in the type ``theirs``, MXFP4 for experts alone. What DeepSeek-V4 publishes
    in float32 stays so."""
    rest = "Q8_0" if theirs == "MXFP4" else theirs
    # their names of types have small letters but for the K
    rules = [
        f"{names}={kind.lower().replace('_k', '_K')}"
        for names, kind in (("hc_|_ape", "F32"), ("_exps", theirs), (".*", rest))
    ]
    command = [program, "--custom-q", ",".join(rules), plain, target, rest]
    subprocess.run(command, check=True, capture_output=True, cwd=target.parent)


def rows(llama: str, threads: int, repeats: int) -> Iterator[list[str]]:
    programs = Path(llama).absolute()
    if not (programs / "llama-quantize").exists():
        raise SystemExit(f"llama: --llama must be a folder with llama-quantize, got {llama!r}")
    for part, config in PARTS.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            # of DeepSeek-V4; transformers makes them 0, which would hide a missing one
            randomise(model, sinks=3, position_bias=1, base=1)
            model.save_pretrained(folder)
            del model
            plain = folder / "stored.gguf"
            convert(folder, plain, [f"w{i}" for i in range(VOCABULARY)])
            published = PUBLISHED[config.model_type]
            write_published(folder / published, config)
            for kind, theirs in LLAMA_FORMATS.items():
                if kind in PUBLISHED.values() and kind != published:
                    continue
                target = folder / f"{kind}.gguf"
                if target != plain:
                    quantize(programs / "llama-quantize", plain, target, theirs)
                for activations in (None, "int8") if kind in ROUNDED else (None,):
                    found = measured(folder, programs, kind, repeats, activations)
                    for what, *cells in found:
                        yield [part, f"{kind}, {theirs}", what, *cells]
                if target != plain:
                    target.unlink()


def floors(llama: str, threads: int, repeats: int) -> Iterator[Floor]:
    """Of the faster of both ways. A row is not measured again: there are dozens, of minutes."""
    limits = here(LLAMA)
    if None in limits.values():
        yield no_floor("ik_llama.cpp's time")
        return
    for part, weights, what, *cells in rows(llama, threads, repeats):
        least = min(float(x) for x in cells[len(SIDES) : -1] if x != NOT_TIMED)
        most = limits["prompts" if what.startswith("prompt") else "tokens"]
        name = f"{part}, {weights}, {what}, of ik_llama.cpp's time"
        yield known(name, least, most, at_least=False)


BENCHMARKS = {
    "llama": Benchmark(
        ["layer", "weights", "ms of", *SIDES, *(f"{side} / ik" for side in OURS), "GB/s"],
        rows,
        floors,
        cases=3,
        variant="threads: {threads}",
    )
}
