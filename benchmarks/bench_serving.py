"""Requests per second of vLLM on the ops, beside the same engine on plain torch and generate().

    bash run.sh bench serving [--rounds 3] [--write]

200 questions about 8 texts of 96 to 1600 tokens, 32 at a time, 32 new tokens each, to the
checkpoint examples/checkpoints/lookup in bfloat16, by the client openai on loopback. Cold is the
first round of a server, with a prefix cache that fills as it goes; warm is the median of the next
rounds, which take turns between the servers. Answers are checked before a time counts. Needs the
environment that `bash run.sh serve` makes; generate() runs in the environment of the models.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import psutil
from custom_pypto_vllm import serve
from measure import machine, table, write_section
from soak_serving import SMALL_CACHE, soak

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "integrations" / "vllm" / "tests"))

import traffic  # noqa: E402

AT_A_TIME, TOKENS = 32, 32
RIGHT = 0.97  # of the checkpoint's answers at these lengths: 0.99
THREADS = ["OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"]  # unset: as vLLM sets them
INT8, RECORDED = "--kv-cache-dtype=int8_per_token_head", "--enable-return-indexer-topk"
TWO_THREADS = dict(zip(THREADS, ["2", "nobind"], strict=True))


@contextlib.contextmanager
def server(variables: dict, *arguments: str):
    """The URL of a server with these variables and arguments, and its process."""
    with socket.socket() as listener:
        listener.bind((serve.HOST, 0))
        port = listener.getsockname()[1]
    url = f"http://{serve.HOST}:{port}"
    old = dict(os.environ)
    for name in THREADS:
        os.environ.pop(name, None)
    os.environ |= serve.ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "WARNING", **variables}
    options = ["--max-model-len", "4096", "--max-num-seqs", str(AT_A_TIME)]
    options += ["--disable-uvicorn-access-log", *arguments]
    try:
        process = serve.start(traffic.LOOKUP, traffic.LOOKUP.name, port, options)
    finally:
        os.environ.clear()
        os.environ |= old
    try:
        if not serve.wait_until_ready(process, url):
            raise RuntimeError(f"the server ended with {process.returncode}, see above")
        yield url, process
    finally:
        serve.stop(process)


@contextlib.contextmanager
def standin():
    """The variables with which vLLM finds the plugin serving_standin."""
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "serving_standin-0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text("Name: serving_standin\nVersion: 0\n")
        (described / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nserving_standin = serving_standin:register\n"
        )
        path = os.pathsep.join([folder, str(Path(__file__).parent)])
        yield {"PYTHONPATH": path}


def one_round(url: str, asked: list) -> dict:
    start = time.monotonic()
    replies = traffic.send(url, asked, at_a_time=AT_A_TIME, tokens=TOKENS)
    seconds = time.monotonic() - start
    right = sum(reply.right for reply in replies)
    assert right >= RIGHT * len(asked), f"{right} of {len(asked)} answers are right"
    return dict(
        seconds=seconds,
        right=right,
        first=statistics.quantiles([reply.first for reply in replies], n=20),
        latency=statistics.quantiles([reply.seconds for reply in replies], n=20),
    )


def row(name: str, rounds: list[dict], count: int) -> list[str]:
    middle = sorted(rounds, key=lambda one: one["seconds"])[len(rounds) // 2]
    cells = [name, f"{middle['seconds']:.1f}", f"{count / middle['seconds']:.1f}"]
    cells.append(f"{count * TOKENS / middle['seconds']:.0f}")
    for key in ("first", "latency"):  # 20-quantiles: the 10th is the median, the 19th 95 %
        share = middle.get(key)
        cells.append(f"{share[9]:.2f} / {share[18]:.2f}" if share else "")
    return [*cells, f"{middle['right']} of {count}"]


def measure(rounds: int, generate_python: str) -> list[list[str]]:
    asked = traffic.questions()
    with contextlib.ExitStack() as stack:
        sides = {
            "ops": stack.enter_context(server({}))[0],
            "ops, caches in int8": stack.enter_context(server({}, INT8))[0],
            "ops, selections recorded": stack.enter_context(server({}, RECORDED))[0],
            "ops, 2 threads in every process": stack.enter_context(server(TWO_THREADS))[0],
            "plain torch": stack.enter_context(server(stack.enter_context(standin())))[0],
        }
        cold = {name: one_round(url, asked) for name, url in sides.items()}
        warm = {name: [] for name in sides}
        for _ in range(rounds):
            for name, url in sides.items():
                warm[name].append(one_round(url, asked))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "questions.json"
        file.write_text(json.dumps([asdict(question) for question in asked]))
        command = [generate_python, Path(__file__).with_name("serving_generate.py"), file]
        command += [traffic.LOOKUP, str(AT_A_TIME), str(TOKENS)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        generated = json.loads(run.stdout.splitlines()[-1])
    return [
        *(row(f"vLLM, {name}, cold", [one], len(asked)) for name, one in cold.items()),
        *(row(f"vLLM, {name}, warm", several, len(asked)) for name, several in warm.items()),
        row("generate(), batches of 32", [generated], len(asked)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="warm rounds of each server")
    parser.add_argument("--generate-python", default=sys.executable, help="python of the models")
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="mixed traffic instead (soak_serving.py)"
    )
    parser.add_argument("--write", action="store_true", help="writes the section of RESULTS.md")
    options = parser.parse_args()
    if options.soak:
        with server({}, SMALL_CACHE) as (url, process):
            return soak(
                psutil.Process(process.pid),
                url,
                options.soak,
                options.generate_python,
                options.write,
            )
    header = ["", "s", "requests/s", "new tokens/s", "first token, s, median / 95 %"]
    header += ["reply, s, median / 95 %", "right"]
    text = table(header, measure(options.rounds, options.generate_python))
    print(f"{machine()}\n\n{text}")
    if options.write:
        note = "Other work of the machine shows in all rows; compare rows, not runs."
        command = f"bash run.sh bench serving --rounds {options.rounds} --write"
        write_section("Serving, 200 requests, 32 at a time", command, f"{text}\n\n{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
