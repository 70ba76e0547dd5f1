"""Requests per second of vLLM on the ops, of the same engine on plain torch, and of generate().

200 questions about 8 texts of 96 to 1600 tokens, 32 at a time, 32 new tokens each, to the
checkpoint examples/checkpoints/lookup in bfloat16, by the client openai on loopback. Cold is the
first round of a server, with a prefix cache that fills as it goes; warm is the median of the next
rounds, which take turns between the servers. Answers are checked before a time counts. Memory is
that of all processes of a server after its last round (PSS). generate() runs
in the environment of the models. ``llama_server``: a file, ik_llama.cpp's llama-server, which needs
the package gguf in the same environment (llama.py).
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from custom_pypto_vllm import serve
from measure import Benchmark, free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "integrations" / "vllm" / "tests"))

import traffic  # noqa: E402

AT_A_TIME, TOKENS, CONTEXT = 32, 32, 4096
RIGHT = 0.97  # of the checkpoint's answers at these lengths: 0.99
THREADS = ["OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"]  # unset: as vLLM sets them
INT8, RECORDED = "--kv-cache-dtype=int8_per_token_head", "--enable-return-indexer-topk"
TWO_THREADS = dict(zip(THREADS, ["2", "nobind"], strict=True))


@dataclass
class Side:
    """A server, and what it is asked."""

    url: str
    process: subprocess.Popen
    asked: list
    retries: int = 0

    def mib(self) -> float:
        parent = psutil.Process(self.process.pid)
        processes = [parent, *parent.children(recursive=True)]
        return sum(process.memory_full_info().pss for process in processes) / 2**20


@contextlib.contextmanager
def vllm(variables: dict, *arguments: str, checkpoint: Path = traffic.LOOKUP):
    """vLLM with these variables and arguments; the model's name is always the same."""
    port = free_port()
    url = f"http://{serve.HOST}:{port}"
    old = dict(os.environ)
    for name in THREADS:
        os.environ.pop(name, None)
    os.environ |= serve.ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", **variables}
    options = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(AT_A_TIME)]
    options += ["--disable-uvicorn-access-log", *arguments]
    try:
        process = serve.start(checkpoint, traffic.LOOKUP.name, port, options)
    finally:
        os.environ.clear()
        os.environ |= old
    try:
        if not serve.wait_until_ready(process, url):
            raise RuntimeError(f"the server ended with {process.returncode}, see above")
        yield Side(url, process, traffic.questions())
    finally:
        serve.stop(process)


@contextlib.contextmanager
def served_llama(program: Path, arguments: list[str]):
    """ik_llama.cpp's server, which gets prompts as numbers of tokens."""
    import llama
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(traffic.LOOKUP / "tokenizer.json"))
    words = [own.id_to_token(number) for number in range(own.get_vocab_size())]
    asked = [replace(q, prompt=own.encode(q.prompt).ids) for q in traffic.questions()]
    options = ["-c", str(llama.SLOTS * CONTEXT), "-mla", "1", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        llama.convert(traffic.LOOKUP, model, words)
        with llama.server(program, model, options) as (url, process):
            # it closes connections that a client is about to use again
            yield Side(url, process, asked, retries=5)


@contextlib.contextmanager
def plain_torch():
    """The variables with which vLLM finds the plugin serving_torch."""
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "serving_torch-0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text("Name: serving_torch\nVersion: 0\n")
        (described / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nserving_torch = serving_torch:register\n"
        )
        path = os.pathsep.join([folder, str(Path(__file__).parent)])
        yield {"PYTHONPATH": path}


def one_round(side: Side) -> dict:
    start = time.monotonic()
    replies = traffic.send(
        side.url, side.asked, at_a_time=AT_A_TIME, tokens=TOKENS, retries=side.retries
    )
    seconds = time.monotonic() - start
    right = sum(reply.right for reply in replies)
    assert right >= RIGHT * len(replies), f"{right} of {len(replies)} answers are right"
    return dict(
        seconds=seconds,
        right=right,
        first=statistics.quantiles([reply.first for reply in replies], n=20),
        latency=statistics.quantiles([reply.seconds for reply in replies], n=20),
    )


def row(name: str, rounds: list[dict], count: int, mib: float | None = None) -> list[str]:
    middle = sorted(rounds, key=lambda one: one["seconds"])[len(rounds) // 2]
    cells = [name, f"{middle['seconds']:.1f}", f"{count / middle['seconds']:.1f}"]
    cells.append(f"{count * TOKENS / middle['seconds']:.0f}")
    for key in ("first", "latency"):  # 20-quantiles: the 10th is the median, the 19th 95 %
        share = middle.get(key)
        cells += [f"{share[n]:.2f}" if share else "" for n in (9, 18)]
    cells.append("" if mib is None else f"{mib:.0f}")
    return [*cells, str(middle["right"])]


def rows(rounds: int, llama_server: str, python: str) -> Iterator[list[str]]:
    """``python``: of the models."""
    asked = traffic.questions()
    with contextlib.ExitStack() as stack:
        sides = {
            "vLLM, ops": vllm({}),
            "vLLM, ops, caches in int8": vllm({}, INT8),
            "vLLM, ops, no prefix cache": vllm({}, "--no-enable-prefix-caching"),
            "vLLM, ops, selections recorded": vllm({}, RECORDED),
            "vLLM, ops, 2 threads in every process": vllm(TWO_THREADS),
            "vLLM, plain torch": vllm(stack.enter_context(plain_torch())),
        }
        if llama_server:
            from llama import SPARSE

            sides["ik_llama.cpp, 32 keys"] = served_llama(Path(llama_server), SPARSE)
            sides["ik_llama.cpp, every key"] = served_llama(Path(llama_server), [])
        sides = {name: stack.enter_context(side) for name, side in sides.items()}
        cold = {name: one_round(side) for name, side in sides.items()}
        warm = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                warm[name].append(one_round(side))
        memory = {name: side.mib() for name, side in sides.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "questions.json"
        file.write_text(json.dumps([asdict(question) for question in asked]))
        command = [python, Path(__file__).with_name("serving_generate.py"), file]
        command += [traffic.LOOKUP, str(AT_A_TIME), str(TOKENS)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        generated = json.loads(run.stdout.splitlines()[-1])
    for name, one in cold.items():
        yield row(f"{name}, cold", [one], len(asked))
    for name, some in warm.items():
        yield row(f"{name}, warm", some, len(asked), memory[name])
    yield row("generate(), batches of 32", [generated], len(asked))


BENCHMARKS = {
    "serving": Benchmark(
        [
            *("side", "s", "requests/s", "new tokens/s"),
            *("first token, s, median", "first token, s, 95 %", "reply, s, median"),
            *("reply, s, 95 %", "MiB", "right of 200"),
        ],
        rows,
    )
}
