"""Generates with a model whose decode step is compiled by torchair, and with the same one eagerly.

    python examples/compile_torchair.py                        # max-autotune: GE graphs
    python examples/compile_torchair.py --mode npugraph_ex     # capture and replay (aclgraph)
    python examples/compile_torchair.py --cache FOLDER         # the next start compiles nothing

On a machine with an NPU and CANN it runs there. Anywhere else it starts the host simulator of CANN:
the real torch_npu and torchair, on CPU memory, with the NPU kernels in PyPTO's interpreter. That
shows what is compiled and computed; its times are not NPU times. docs/graph_mode.md lists what each
mode requires of CANN.
"""

from options import Help, at_least, check_folder, end  # first; options.py says why

# isort: split
import argparse
import contextlib
import functools
import json
import os
import secrets
import sys
import time
from pathlib import Path

from modes import MODES

# before importing torch, which would import torch_npu and fail without CANN
from custom_pypto.simulation import ascend_host

# isort: split
import torch

from custom_pypto.files import replacing
from custom_pypto.requirements import installed_version

CHECKPOINT = Path(__file__).resolve().parent / "checkpoints/lookup"
COMPILED_FROM = ("custom_pypto", "transformers", "torch", "torch_npu")  # whose code is in a graph


def start_npu():
    """Makes ``npu`` a device; whether it is an NPU."""
    try:
        return ascend_host.start_unless_npu()
    except ascend_host.AscendHostUnavailable as error:
        end(error)


def backend(mode):
    """The ``torch.compile`` backend of a torchair mode."""
    if mode == "npugraph_ex":
        return mode  # registered by name
    import torchair

    config = torchair.CompilerConfig()
    config.mode = mode
    return torchair.get_npu_backend(compiler_config=config)


def load(path, prompt_tokens, questions):
    """The model on the NPU in bfloat16, its tokenizer, a text and ``(question, value)`` pairs."""
    # after the NPU is set up, because transformers looks for one
    import transformers
    from train_lookup import lookup_prompt

    from custom_pypto import models

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    model = models.load(path, dtype=torch.bfloat16, device="npu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    return model, tokenizer, *lookup_prompt(prompt_tokens, questions=questions, seed=0)


class Step(torch.nn.Module):
    """A model's forward of new tokens on one cache. Arguments and result are tensors, which is what
    torchair and torch.export can store."""

    def __init__(self, model, cache):
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, token, position_ids):
        return self.model(token, position_ids=position_ids, cache=self.cache).logits


class CachedStep:
    """A model's forward of one token on one cache, compiled once into a folder and loaded from it
    by later processes, which trace nothing (torchair's ``cache_compile``).

    A loaded step has none of the guards of ``torch.compile``, and is bound to the memory of its
    cache. What guards would notice is therefore validated here: what the graph was compiled for
    when it is loaded, cache and shapes in every call.

    Raises:
        ValueError: the folder has a graph for another model, cache, mode or version.
    """

    def __init__(self, model, cache, mode, folder):
        self.cache, self.note = cache, folder / "compiled_for.json"
        self.facts = compiled_for(model, cache, mode)
        folder.mkdir(parents=True, exist_ok=True)
        # before the graph, which is never there without it; of several that begin the first counts
        own = folder / f".{secrets.token_hex(8)}"
        own.write_text(json.dumps({"compiled_for": self.facts}, indent=1))
        with contextlib.suppress(FileExistsError):
            os.link(own, self.note)
        own.unlink()
        note = json.loads(self.note.read_text())
        if different := differences(note["compiled_for"], self.facts):
            raise ValueError(
                f"CachedStep: the graph in {folder} must be for {'; '.join(different)}; give "
                "another folder, or delete this one"
            )
        #: of the first step, in the process that compiled it; None until then
        self.seconds = note.get("seconds")
        self.shape = (cache.batch_size, 1)
        self.pools = self.tensors()
        step = Step(model, cache)
        self.compiled = cache_compile(mode)(step.forward, dynamic=False, cache_dir=str(folder))

    def tensors(self):
        return [*self.cache.store.pools(), *self.cache.tables.values()]

    def __call__(self, token, position_ids, cache):
        """The logits, as the model's forward returns them.

        Raises:
            ValueError: another cache, one that has grown, or another shape or dtype.
        """
        if cache is not self.cache or any(
            x is not y for x, y in zip(self.pools, self.tensors(), strict=True)
        ):
            raise ValueError(
                "CachedStep: cache must be the one that the step was made for, in its memory of "
                "then, whose addresses are in the graph; reset() that one, or make another step"
            )
        for name, value in (("token", token), ("position_ids", position_ids)):
            if (*value.shape,) != self.shape or value.dtype != torch.long:
                raise ValueError(
                    f"CachedStep: {name} must be {list(self.shape)} int64, as the graph was "
                    f"compiled for, got {list(value.shape)} {value.dtype}; feed more tokens to the "
                    "model itself"
                )
        from transformers.modeling_outputs import CausalLMOutput

        begin = time.perf_counter()
        # in the strides of a tensor of its own, which are compiled in, too
        logits = self.compiled(*(x.reshape(-1).view(self.shape) for x in (token, position_ids)))
        if self.seconds is None:
            self.seconds = time.perf_counter() - begin
            note = {"compiled_for": self.facts, "seconds": self.seconds}
            with replacing(self.note) as written:
                written.write_text(json.dumps(note, indent=1))
        return CausalLMOutput(logits=logits)


def compiled_for(model, cache, mode):
    """Everything besides the calls that a graph depends on, as JSON."""
    import torch_npu

    versions = {name: installed_version(name) for name in COMPILED_FROM}
    versions["CANN"] = torch_npu.npu.utils.get_cann_version()
    made_for = {name: getattr(cache, name) for name in ("batch_size", "max_cache_len")}
    made_for |= {"block_size": cache.block_size} | cache.dtypes | cache.made_for
    config = model.config.to_dict() | {"_name_or_path": None}  # the same model elsewhere
    facts = {"mode": mode, "versions": versions, "model": config}
    return json.loads(json.dumps(facts | {"cache": made_for}, default=str))


def differences(one, other, name=""):
    """``name=value, got value`` of each entry in which two values of JSON differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = sorted(one.keys() | other.keys())
        return [
            text for n in names for text in differences(one.get(n), other.get(n), f"{name}.{n}")
        ]
    return [] if one == other else [f"{name.lstrip('.')}={one}, got {other}"]


def cache_compile(mode):
    """torchair's ``cache_compile`` of a mode; CANN keeps what it compiles in the folder, too."""
    import torchair

    if mode == "npugraph_ex":
        import npugraph_ex

        return npugraph_ex.inference.cache_compile
    config = torchair.CompilerConfig()
    config.mode = mode
    ge = {"ge_cache": True} if mode == "max-autotune" else {}
    return functools.partial(torchair.inference.cache_compile, config=config, **ge)


class Decoder:
    """Text on a cache, one token at a time by ``step``, the model's forward."""

    def __init__(self, model, step, cache):
        self.model, self.step, self.cache, self.position = model, step, cache, 0

    def prefill(self, input_ids):
        self.model(input_ids, cache=self.cache, logits_to_keep=1)
        self.position += input_ids.size(1)

    def next_token(self, token):
        """The token after ``token`` ``[1, 1]``."""
        position_ids = torch.tensor([[self.position]], device=token.device)
        self.position += 1
        logits = self.step(token, position_ids=position_ids, cache=self.cache).logits
        return logits[:, -1:].argmax(-1)


@torch.no_grad()
def answers(decoder, prompt_ids, questions):
    """The token after each question, and the seconds of each."""
    decoder.prefill(prompt_ids)
    said, seconds = [], []
    for question in questions:
        begin = time.perf_counter()
        said.append(decoder.next_token(question).item())
        seconds.append(time.perf_counter() - begin)
        decoder.next_token(torch.tensor([[said[-1]]], device=question.device))
    return said, seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--cache", type=Path, help="folder for the compiled step, for later starts")
    parser.add_argument(
        "--prompt-tokens", type=at_least(32), default=96, help="length of the demo's text"
    )
    parser.add_argument("--questions", type=at_least(1, 32), default=3, help="of the demo, 1 to 32")
    args = parser.parse_args()
    if args.cache:
        check_folder(parser, "--cache", args.cache)
    real = start_npu()

    model, tokenizer, prompt, dialogue = load(CHECKPOINT, args.prompt_tokens, args.questions)
    from custom_pypto import models

    def encode(text):
        return tokenizer(text, return_tensors="pt").input_ids.npu()

    prompt_ids, questions = encode(prompt), [encode(question) for question, _ in dialogue]
    length = prompt_ids.size(1) + 2 * len(questions)
    caches = [models.PagedCache(model, batch_size=1, max_cache_len=length) for _ in range(2)]
    loaded = None
    if args.cache:
        step = CachedStep(model, caches[1], args.mode, args.cache)
        loaded = step.seconds
    else:
        step = torch.compile(
            model.forward, backend=backend(args.mode), fullgraph=True, dynamic=False
        )
    eager, eager_seconds = answers(Decoder(model, model, caches[0]), prompt_ids, questions)
    said, seconds = answers(Decoder(model, step, caches[1]), prompt_ids, questions)

    for (question, value), token in zip(dialogue, said, strict=True):
        answer = tokenizer.decode(token).strip()
        print(f"  {question} {answer}" + ("" if answer == value else f"  (wrong: {value})"))
    traced = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    first = f"{'compiled' if traced else 'loaded'} in the first step of {seconds[0]:.1f} s"
    if loaded is not None:
        first += f", which took {loaded:.1f} s when it was compiled"
    print(
        f"mode {args.mode}: {traced} graph{'s' * (traced != 1)} traced, {first}; "
        f"answers {'equal' if said == eager else 'DIFFER FROM'} eager's"
    )
    if real and len(seconds) > 2:
        compiled, plain = (sorted(s[1:])[len(s) // 2] for s in (seconds, eager_seconds))
        print(f"then {compiled * 1e3:.2f} ms a token, eager {plain * 1e3:.2f} ms")
    return said != eager


if __name__ == "__main__":
    sys.exit(main())
