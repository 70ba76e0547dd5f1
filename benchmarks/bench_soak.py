"""Minutes of mixed traffic to vLLM on the ops: answers, processes and memory.

32 clients at a time ask the questions of bench_serving.py; of every ten requests, one is left in
the middle of its answer and one must be rejected. /metrics is read every five seconds.
Afterwards the engine is killed: the server must end by itself and leave no process. Fails if an
answer of the checkpoint is right too rarely, if a bad request gets anything but status 400, or if
memory grows after the first third by more than GROWTH.
"""

import asyncio
import itertools
import json
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import psutil
from bench_serving import traffic, vllm
from measure import Benchmark

CLIENTS, TOKENS = 32, 32
RIGHT, GROWTH = 0.97, 0.03
# blocks of 64 tokens: all of them are written, and so resident, long before a third of the time
SMALL_CACHE = "--num-gpu-blocks-override=1024"
PLOT = Path(__file__).with_name("plots") / "serving_soak.png"
BAD = (
    dict(max_tokens=-1),
    dict(temperature="hot"),
    dict(prompt=[5, 99_999]),
    dict(prompt=""),
    dict(logit_bias={"99999": 5}),
    dict(structured_outputs={"regex": "("}),
)
KINDS = ["question"] * 8 + ["bad request", "cancelled"]


@dataclass
class Counts:
    right: int = 0
    wrong: int = 0
    left: int = 0  # clients that went away
    rejected: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass
class Sample:
    minute: float
    mib: float  # resident, of all processes of the server
    running: float


async def client(url: str, asked: list, until: float, counts: Counts, number: int) -> None:
    choose, bad = random.Random(number), itertools.cycle(BAD)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        while time.monotonic() < until:
            question, kind = choose.choice(asked), choose.choice(KINDS)
            request = dict(model=traffic.LOOKUP.name, prompt=question.prompt, max_tokens=TOKENS)
            request |= dict(temperature=0, ignore_eos=True)
            try:
                if kind == "cancelled":
                    stream = request | dict(stream=True, max_tokens=2000)
                    async with http.stream("POST", "/v1/completions", json=stream) as reply:
                        reply.raise_for_status()
                        async for _ in first(reply.aiter_lines(), 4):
                            pass
                    counts.left += 1
                elif kind == "bad request":
                    reply = await http.post("/v1/completions", json=request | next(bad))
                    if reply.status_code == 400:
                        counts.rejected += 1
                    else:
                        counts.faults.append(f"a bad request got {reply.status_code}")
                else:
                    reply = await http.post("/v1/completions", json=request)
                    text = reply.json()["choices"][0]["text"]
                    if text.split()[:1] == [question.answer]:
                        counts.right += 1
                    else:
                        counts.wrong += 1
            except (httpx.HTTPError, KeyError) as error:
                counts.faults.append(f"{kind}: {error!r}")


async def first(lines, count: int):
    """The first ``count`` of ``lines``."""
    async for line in lines:
        yield line
        count -= 1
        if not count:
            return


def watch(server: psutil.Process, url: str, stop: threading.Event, samples: list[Sample]) -> None:
    start = time.monotonic()
    while not stop.wait(5):
        processes = [server, *server.children(recursive=True)]
        mib = sum(process.memory_info().rss for process in processes) / 2**20
        running = traffic.metric(url, "vllm:num_requests_running")
        samples.append(Sample((time.monotonic() - start) / 60, mib, running))


def killed(server: psutil.Process) -> tuple[float, int]:
    """Seconds until the server ends after its engine was killed, and processes that are left."""
    started = server.children(recursive=True)
    engine = next(process for process in started if "EngineCore" in process.name())
    engine.send_signal(signal.SIGKILL)
    start = time.monotonic()
    server.wait(120)
    seconds = time.monotonic() - start
    _, alive = psutil.wait_procs(started, timeout=30)
    return seconds, len(alive)


def rows(minutes: float, python: str) -> Iterator[list[str]]:
    """``python``: has matplotlib, which the environment of vLLM lacks."""
    with vllm({}, SMALL_CACHE) as side:
        yield from soak(psutil.Process(side.process.pid), side.url, minutes, python)


def soak(server: psutil.Process, url: str, minutes: float, plot_python: str) -> Iterator[list[str]]:
    """Drives a server that is ready, then kills its engine.

    Raises:
        SystemExit: something is not as it must be.
    """
    counts, samples, stop = Counts(), [], threading.Event()
    watcher = threading.Thread(target=watch, args=(server, url, stop, samples))
    watcher.start()
    asked, until = traffic.questions(), time.monotonic() + 60 * minutes

    async def everyone():
        await asyncio.gather(*(client(url, asked, until, counts, n) for n in range(CLIENTS)))

    asyncio.run(everyone())
    stop.set()
    watcher.join()
    plot = [plot_python, Path(__file__).with_name("soak_plot.py"), PLOT]
    lines = json.dumps([asdict(sample) for sample in samples])
    subprocess.run(plot, input=lines, text=True, check=True)
    seconds, alive = killed(server)
    third = [s.mib for s in samples if s.minute > minutes / 3]
    early, late = third[0], max(third)
    answered = counts.right + counts.wrong
    faults = list(dict.fromkeys(counts.faults))
    if counts.right < RIGHT * answered:
        faults.append(f"{counts.right} of {answered} answers are right")
    if late > (1 + GROWTH) * early:
        faults.append(f"memory grew from {early:.0f} to {late:.0f} MiB")
    if alive:
        faults.append(f"{alive} processes are left")
    yield from (
        ["minutes, clients at a time", f"{minutes:g}, {CLIENTS}"],
        ["answers, right", f"{answered}, {counts.right}"],
        ["requests of clients that went away", f"{counts.left}"],
        ["bad requests, all rejected", f"{counts.rejected}"],
        ["memory after a third, most afterwards, MiB", f"{early:.0f}, {late:.0f}"],
        ["the server ends after its engine was killed, s", f"{seconds:.1f}"],
        ["processes left", f"{alive}"],
    )
    if faults:
        raise SystemExit("\n".join(faults))


BENCHMARKS = {
    "soak": Benchmark(
        "Serving under mixed load",
        ["", ""],
        rows,
        "Memory is resident, of all processes. Picture: plots/serving_soak.png.",
        of_kernels=False,
    )
}
