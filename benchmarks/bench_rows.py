"""What drafts cost and give. A layer of DeepSeek-V3.2 with all of its 256 experts, for few tokens
at once: those of one sequence, as where drafts are checked, and of one step of several sequences.
And texts of the lookup checkpoints, with the drafts of their trained MTP layers.

The time of the bytes is that of the weights which the tokens need, at the rate of torch's sum in
between; what they read of the caches is less than a hundredth of it. Experts are those of a router
with random weights: uniform, so that tokens share few. Drafts pay from that acceptance on of the
first of them, if all 61 layers were such layers and the MTP layer is one more.

Texts are in float32, where none may depend on drafts. Their time is that behind the first token; a
third of the tokens are given questions, which are no drafts.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from bench_weights import bytes_of, layer
from measure import READ, Benchmark, interleaved, median_ms, ratio
from train_lookup_mtp import CHECKPOINTS, TASKS, answers
from transformers.generation.streamers import BaseStreamer

from custom_pypto import models
from custom_pypto.models.mtp.gain import Counts
from custom_pypto.models.weights.modules import round_activations

LAYERS, EXPERTS, CACHED = 61, 256, 64
DRAFTS, SEQUENCES = (1, 2, 3, 4), (8, 32)
# formats, and whether x is rounded to int8; in bfloat16 the experts alone are 22 GB
WAYS = [("int8", False), ("int4", False), ("fp4", False), ("int4", True), ("fp4", True)]
VARIETY = 4  # other tokens, and so other experts, in each round
PROMPTS, MOST_DRAFTS = (512, 4096), 3  # of texts


class Tokens:
    """Forwards of ``sequences`` sequences with ``new`` tokens each behind cached ones."""

    def __init__(self, model, sequences: int, new: int):
        self.model, self.new, self.round = model, new, 0
        self.cache = models.PagedCache(model, sequences, 2 * CACHED)
        generator = torch.Generator().manual_seed(sequences * 10 + new)

        def ids(*shape: int) -> torch.Tensor:
            return torch.randint(1, 64, shape, generator=generator)

        self.ids = ids(VARIETY, sequences, new)
        with torch.no_grad():
            model(ids(sequences, CACHED), cache=self.cache)

    @torch.no_grad()
    def __call__(self) -> None:
        self.model(self.ids[self.round % VARIETY], cache=self.cache)
        self.cache.crop(-self.new)
        self.round += 1

    def experts(self) -> float:
        """Distinct ones of a forward."""
        counts = []

        def count(experts, arguments):
            counts.append(arguments[1].unique().numel())  # hidden states, indices, weights

        handle = self.model.model.layers[0].mlp.experts.register_forward_pre_hook(count)
        for _ in range(VARIETY):
            self()
        handle.remove()
        return statistics.mean(counts)


def of_kind(kind: str, int8_x: bool, repeats: int) -> Iterator[list[str]]:
    model, floats = layer(kind, EXPERTS), torch.ones(READ // 4)
    if int8_x:
        round_activations(model)
    # else what random heads attend to, the same for all tokens, would choose their experts
    model.get_input_embeddings().weight.data.mul_(1024)
    one = sum(x.nbytes for x in model.model.layers[0].mlp.experts.parameters()) / EXPERTS
    others = bytes_of(model) - EXPERTS * one
    cases = {(1, new): Tokens(model, 1, new) for new in DRAFTS}
    cases |= {(sequences, 1): Tokens(model, sequences, 1) for sequences in SEQUENCES}
    calls: dict[object, Callable] = {"sum": floats.sum, **cases}
    seconds = interleaved(calls, max(repeats, VARIETY))
    rate = READ / statistics.median(seconds["sum"])
    first = statistics.median(seconds[1, 1])
    for (sequences, new), case in cases.items():
        experts, took = case.experts(), statistics.median(seconds[sequences, new])
        step = took / first
        pays = f"{step - 1 + 1 / LAYERS:.2f}" if (sequences, new) == (1, 2) else "-"
        yield [
            f"{kind}, x in int8" if int8_x else kind,
            f"{sequences} x {new}",
            f"{experts:.1f}",
            median_ms(seconds[sequences, new], 1),
            f"{step:.2f}",
            f"{took * rate / (others + experts * one):.2f}",
            pays,
        ]


def rows(threads: int, repeats: int) -> Iterator[list[str]]:
    torch.set_num_threads(threads)
    for kind, int8_x in WAYS:
        yield from of_kind(kind, int8_x, repeats)
        gc.collect()  # a patched model is a circle, and two do not fit


class Times(BaseStreamer):
    """When the prompt and each token of a text came."""

    def __init__(self):
        self.of_one = torch.get_num_threads() == 1
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        # as measure.interleaved() times calls
        self.times.append(time.thread_time() if self.of_one else time.monotonic())

    def end(self) -> None:
        pass


def drafts_of(name: str, prompt: int, repeats: int) -> Iterator[list[str]]:
    """Texts of a checkpoint behind ``prompt`` tokens, with each number of drafts in each round."""
    model, task = models.load(CHECKPOINTS / name, dtype=torch.float32, mtp=True), TASKS[name]
    seconds: dict[int, list[float]] = {drafts: [] for drafts in range(MOST_DRAFTS + 1)}
    outputs = {}
    for _ in range(repeats + 1):
        for drafts, taken in seconds.items():
            times, length = Times(), prompt + 3 * task.questions
            outputs[drafts] = answers(task, model, length, drafts=drafts, streamer=times)
            taken.append(times.times[-1] - times.times[1])
    for drafts, output in outputs.items():
        if not torch.equal(output.sequences, outputs[0].sequences):
            raise SystemExit(f"{name}, {prompt}: {drafts} drafts change the text; not reported")
        taken, plain = seconds[drafts][1:], seconds[0][1:]  # the first round warms up
        tokens = 3 * task.questions - 1
        counts = output.drafts if drafts else Counts(forwards=tokens)
        both = zip(counts.accepted, counts.drafted, strict=True)
        shares = [f"{accepted / made:.2f}" for accepted, made in both]
        yield [
            *(name, str(prompt), str(drafts)),
            *(shares + ["-"] * (MOST_DRAFTS - len(shares))),
            str(counts.forwards),
            f"{tokens / statistics.median(taken):.0f}",
            f"{ratio(plain, taken):.2f}",
        ]


def draft_rows(threads: int, repeats: int) -> Iterator[list[str]]:
    torch.set_num_threads(threads)
    for name in TASKS:
        for prompt in PROMPTS:
            yield from drafts_of(name, prompt, repeats)


BENCHMARKS = {
    "drafts": Benchmark(
        [
            *("checkpoint", "prompt", "drafts", "first accepted", "second", "third"),
            *("forwards", "tokens per second", "speedup"),
        ],
        draft_rows,
        cases=3,
        variant="threads: {threads}",
    ),
    "rows": Benchmark(
        [
            *("weights", "sequences x tokens", "experts", "ms", "of one token's"),
            *("of the time of its bytes", "drafts pay from"),
        ],
        rows,
        cases=2,
        variant="threads: {threads}",
    ),
}
