"""What a server's record costs a request: its time with --enable-return-indexer-topk and
--enable-return-routed-experts, over its time without.

Two servers of one model answer the same requests in turn, one at a time, while the other is
stopped, whose threads would spin for a while: a prompt, prompts behind its prefix, which the prefix
cache has by then, and answers; the record of these begins behind the prefix, whose own came with
the first prompt. Each round has a new prefix. Both sides return token ids, and choose the same.
Times are those of a client on loopback, with the reply.

A model of four layers with random weights, of which DeepSeek-V3.2 has ten times as many for each
token and layer, but no larger record: there the record is a smaller part of the time.
"""

import base64
import contextlib
import io
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import torch
from bench_serving import RECORDED, traffic, vllm  # makes the next modules importable
from checkpoints import save_tiny
from measure import Benchmark, Floor, known, ratio
from train_lookup import VOCABULARY

EXPERTS = "--enable-return-routed-experts"
SIZES = dict(
    vocab_size=len(VOCABULARY),
    hidden_size=2048,
    intermediate_size=8192,
    moe_intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=16,
    n_routed_experts=16,
    num_experts_per_tok=8,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    index_topk=2048,
    index_n_heads=64,
    initializer_range=0.02,
)
PREFIX, MORE, ANSWER = 2048, 64, 32  # tokens
BEHIND = "prompt behind a cached prefix"
WHOLE = f"{BEHIND}, whole record"  # no floor: its bytes alone take a tenth of a second
# by its name, tokens of a prompt behind the prefix and of its answer; and of the record the first
# one, and whether it has the selections of tokens that attend to all that they see
REQUESTS = {
    "prompt": (0, 1, 0, True),
    BEHIND: (MORE, 1, PREFIX, True),
    "answer behind a cached prefix": (MORE, ANSWER, PREFIX, True),
    WHOLE: (MORE, 1, 0, True),
    f"{WHOLE} but for implied rows": (MORE, 1, 0, False),
}
MOST = 1.1


def checkpoint(folder: Path) -> Path:
    save_tiny(folder, "deepseek_v32", torch.bfloat16, **SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(traffic.LOOKUP / name, folder)
    return folder


@contextlib.contextmanager
def stopped(side) -> Iterator[None]:
    """Inside, the processes of a server get no CPU time."""
    server = psutil.Process(side.process.pid)
    tree = [server, *server.children(recursive=True)]
    for process in tree:
        process.suspend()
    try:
        yield
    finally:
        for process in tree:
            process.resume()


def ask(side, ids: list[int], tokens: int, **more) -> tuple[float, dict, int]:
    """Seconds, the choice, and bytes of the reply."""
    request = dict(model=traffic.LOOKUP.name, prompt=ids, max_tokens=tokens, temperature=0)
    request |= dict(return_token_ids=True, ignore_eos=True) | more
    start = time.monotonic()
    reply = httpx.post(f"{side.url}/v1/completions", json=request, timeout=3600)
    seconds = time.monotonic() - start
    reply.raise_for_status()
    return seconds, reply.json()["choices"][0], len(reply.content)


def compare(plain: dict, recorded: dict, selections: int, experts: int) -> None:
    """Both sides have chosen the same tokens, and one has a record of so many."""
    assert plain["token_ids"] == recorded["token_ids"]
    layers = SIZES["num_hidden_layers"]
    for name, tokens, count in (
        ("indexer_topk", selections, SIZES["index_topk"]),
        ("routed_experts", experts, SIZES["num_experts_per_tok"]),
    ):
        array = np.load(io.BytesIO(base64.b64decode(recorded[name])))
        assert array.shape == (tokens, layers, count) and plain.get(name) is None


def measured(rounds: int) -> Iterator[tuple[str, list[float], list[float], int]]:
    """Of each kind of request the seconds without and with a record, and bytes of a record."""
    generator = torch.Generator().manual_seed(0)

    def random(count: int) -> list[int]:
        return torch.randint(3, SIZES["vocab_size"], (count,), generator=generator).tolist()

    seconds = {name: ([], []) for name in REQUESTS}
    size = {}
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(Path(folder) / "model")
        with (
            vllm({}, checkpoint=model) as plain,
            vllm({}, RECORDED, EXPERTS, checkpoint=model) as recorded,
        ):
            for number in range(rounds + 1):  # the first one warms up
                prefix = random(PREFIX)
                for name, (more, answer, begin, implied) in REQUESTS.items():
                    ids = prefix + random(more)
                    asked = dict(record_start=begin, record_implied=implied)
                    with stopped(recorded):
                        a, one, small = ask(plain, ids, answer)
                    with stopped(plain):
                        b, other, large = ask(recorded, ids, answer, **asked)
                    tokens = len(ids) + answer - 1
                    first = begin if implied else max(begin, SIZES["index_topk"])
                    compare(one, other, tokens - first, tokens - begin)
                    size[name] = large - small
                    if number:
                        seconds[name][0].append(a)
                        seconds[name][1].append(b)
    for name, (without, with_) in seconds.items():
        yield name, without, with_, size[name]


def recording_rows(rounds: int) -> Iterator[list[str]]:
    for name, without, with_, size in measured(rounds):
        yield [
            name,
            f"{statistics.median(without):.3f}",
            f"{statistics.median(with_):.3f}",
            f"{ratio(with_, without):.2f}",
            f"{size / 1e6:.1f}",
        ]


def recording_floors(rounds: int) -> Iterator[Floor]:
    for name, without, with_, _ in measured(rounds):
        if name == WHOLE:
            continue
        yield known(f"{name}, time with a record", ratio(with_, without), MOST, at_least=False)


BENCHMARKS = {
    "recording": Benchmark(
        ["request", "s", "s with a record", "ratio", "MB of the record"],
        recording_rows,
        recording_floors,
    )
}
