"""Requests to the lookup checkpoint, and a client that sends many at a time."""

import asyncio
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import AsyncOpenAI

ROOT = Path(__file__).parents[3]
LOOKUP = ROOT / "examples" / "checkpoints" / "lookup"
sys.path.append(str(ROOT / "examples"))

from train_lookup import lookup_prompt  # noqa: E402

LENGTHS = 96, 200, 320, 480, 640, 900, 1200, 1600  # tokens of the texts
QUESTIONS = 25  # to each text: a prefix that they share


@dataclass
class Question:
    prompt: str
    answer: str


@dataclass
class Reply:
    right: bool
    tokens: int
    first: float  # seconds to the first token
    seconds: float


def questions() -> list[Question]:
    """200, shuffled."""
    asked = []
    for seed, length in enumerate(LENGTHS, start=1000):
        text, pairs = lookup_prompt(length, questions=QUESTIONS, seed=seed)
        asked += [Question(f"{text} {question}", answer) for question, answer in pairs]
    random.Random(1).shuffle(asked)
    return asked


async def ask(client: AsyncOpenAI, question: Question, tokens: int) -> Reply:
    """Asks for exactly ``tokens`` tokens, of which the first is the answer."""
    start, first, text, usage = time.monotonic(), None, "", None
    stream = await client.completions.create(
        model=LOOKUP.name,
        prompt=question.prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for part in stream:
        if part.choices:
            first = first or time.monotonic() - start
            text += part.choices[0].text
        usage = part.usage or usage
    right = text.split()[:1] == [question.answer]
    return Reply(right, usage.completion_tokens, first, time.monotonic() - start)


def send(
    url: str, asked: list[Question], *, at_a_time: int = 32, tokens: int = 32, retries: int = 0
) -> list[Reply]:
    """Sends all questions, ``at_a_time`` of them in flight.

    Raises:
        openai.APIError: of the first request without a reply.
    """

    async def send_all():
        free = asyncio.Semaphore(at_a_time)
        async with AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=retries
        ) as client:

            async def one(question):
                async with free:
                    return await ask(client, question, tokens)

            return await asyncio.gather(*map(one, asked))

    return asyncio.run(send_all())


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a Prometheus metric of the server over its other labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    own = [line for line in lines if line.startswith((name + "{", name + " "))]
    own = [line for line in own if all(f'{k}="{v}"' in line for k, v in labels.items())]
    values = [float(line.split()[-1]) for line in own]
    assert values, f"the server has no metric {name}"
    return sum(values)
