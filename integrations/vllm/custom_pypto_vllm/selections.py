"""The positions that each token of a request attended to, for a trainer that replays them.

A worker records them per request, after :func:`record` or from the first request of a server that
has :class:`Middleware`::

    llm = vllm.LLM(model, worker_extension_cls=selections.WORKER, enable_prefix_caching=False)
    selections.record(llm)
    (request,) = llm.generate(prompt)
    (indices,) = selections.take(llm, request)  # one array per answer

An array is int32 ``[tokens, indexer layers, index_topk]``: of the prompt and of the answer without
its last token, which no forward has seen. Positions count from the first token of the request, best
first, -1 behind the last; of DeepSeek-V4 they are numbers of compressed rows.
"""

import asyncio
import base64
import io
import json
import re
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

WORKER = f"{__name__}.RecordingWorker"
Recorded = tuple[int, Tensor]  # tokens of a request up to here, and the rows of the last of them
PATHS = "/v1/completions", "/v1/chat/completions"


class Recorder:
    """The selections of a worker's requests, from their first token on.

    Args:
        runner: the worker's model runner, whose batch names the requests of a step.
        most: requests that are kept; each new one beyond drops the oldest that is not running.
    """

    def __init__(self, runner, layers: list[str], most: int):
        self.runner, self.layers, self.most = runner, layers, most
        self.requests: OrderedDict[str, dict[str, list[Recorded]]] = OrderedDict()

    def add(self, layer: str, metadata, indices: Tensor) -> None:
        """Records a layer's ``indices [tokens, K]`` of a step."""
        # churn: the order of the batch is that of the step's metadata
        running = self.runner.input_batch.req_ids
        ends, lengths = metadata.query_ends.tolist(), metadata.seq_lens.tolist()
        for request, start, end, length in zip(
            running, [0, *ends[:-1]], ends, lengths, strict=True
        ):
            parts = self._of(request, running)[layer]
            if _cut(parts, length - (end - start)):
                parts.append((length, indices[start:end].clone()))

    def _of(self, request: str, running: list[str]) -> dict[str, list[Recorded]]:
        if request not in self.requests:
            for old in [name for name in self.requests if name not in running]:
                if len(self.requests) < self.most:
                    break
                del self.requests[old]
            self.requests[request] = {layer: [] for layer in self.layers}
        return self.requests[request]

    def take(self, name: str) -> dict[int, Tensor]:
        """``[tokens, layers, K]`` by the number of an answer, of the request that vLLM's user knows
        as ``name``; they are forgotten.
        """
        # churn: vLLM's own name of a request, and of each of several answers
        own = re.compile(rf"(?:(\d+)_)?{re.escape(name)}-[0-9a-f]{{8}}")
        found = {request: own.fullmatch(request) for request in self.requests}
        taken = {
            int(match[1] or 0): list(self.requests.pop(request).values())
            for request, match in found.items()
            if match
        }
        return {
            number: torch.stack([torch.cat([rows for _, rows in parts]) for parts in layers], dim=1)
            for number, layers in taken.items()
            if all(layers)
        }


def _cut(parts: list[Recorded], length: int) -> bool:
    """Shortens ``parts`` to ``length`` rows: those behind are computed again, after a preemption or
    a rejected draft. False, and nothing is left, if there are fewer: the record lacks the beginning
    of a request.
    """
    if length > (parts[-1][0] if parts else 0):
        parts.clear()
        return False
    while parts and parts[-1][0] > length:
        end, rows = parts.pop()
        if (kept := length - (end - len(rows))) > 0:
            parts.append((length, rows[:kept]))
    return True


class RecordingWorker:
    """Mixed into vLLM's worker by ``--worker-extension-cls``."""

    def record_selections(self) -> None:
        parallel, cache = self.vllm_config.parallel_config, self.vllm_config.cache_config
        for name, setting in (
            ("--data-parallel-size", parallel.data_parallel_size > 1),
            ("--enable-prefix-caching", cache.enable_prefix_caching),
        ):
            if setting:
                raise ValueError(
                    f"custom_pypto_vllm: selections are not recorded with {name}; a cached prefix "
                    "has none, and engines of their own share no record"
                )
        if parallel.rank % parallel.tensor_parallel_size:
            return  # ranks of a tensor-parallel group select alike
        layers = self.vllm_config.compilation_config.static_forward_context
        own = self.vllm_config.model_config.hf_text_config.num_hidden_layers
        caches = {
            name: layer
            for name, layer in layers.items()
            if hasattr(layer, "recorder") and _number(name) < own
        }
        most = 4 * self.vllm_config.scheduler_config.max_num_seqs
        self.recorder = Recorder(self.model_runner, list(caches), most)
        for cache in caches.values():
            cache.recorder = self.recorder

    def take_selections(self, request: str) -> dict[int, bytes] | None:
        recorder = getattr(self, "recorder", None)
        if recorder is None:
            return None
        return {number: _npy(x.numpy()) for number, x in recorder.take(request).items()}


def _number(layer: str) -> int:
    return int(re.search(r"layers\.(\d+)\.", layer)[1])


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _joined(replies: list) -> dict[int, np.ndarray]:
    """By the number of an answer, the layers of all ranks of a pipeline."""
    ranks = [reply for reply in replies if reply]
    return {
        number: np.concatenate([np.load(io.BytesIO(rank[number])) for rank in ranks], axis=1)
        for number in (ranks[0] if ranks else ())
    }


def record(llm) -> None:
    """Records the selections of all requests from now on.

    Raises:
        ValueError: ``llm`` has another worker, a prefix cache, or several engines.
    """
    if llm.llm_engine.vllm_config.parallel_config.worker_extension_cls != WORKER:
        raise ValueError(
            "custom_pypto_vllm: selections are recorded by workers of their own; construct the LLM "
            f"with worker_extension_cls={WORKER!r}"
        )
    llm.collective_rpc("record_selections")


def take(llm, request) -> list[np.ndarray]:
    """The selections of a finished ``request``, one array for each of its answers.

    Raises:
        KeyError: they were taken before, dropped for later ones, or never recorded.
    """
    found = _joined(llm.collective_rpc("take_selections", args=(request.request_id,)))
    if sorted(found) != list(range(len(request.outputs))):
        raise KeyError(f"custom_pypto_vllm: no selections of request {request.request_id}")
    prompt = len(request.prompt_token_ids)
    return [found[n][: prompt + len(o.token_ids) - 1] for n, o in enumerate(request.outputs)]


class Middleware:
    """Adds ``indexer_topk`` to each choice of a reply with token ids, ``return_token_ids``: base64
    of a .npy file, or null for a choice without a record. Streams are left alone.
    """

    def __init__(self, app):
        self.app, self.starting, self.recording = app, asyncio.Lock(), False

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] not in PATHS:
            return await self.app(scope, receive, send)
        engine = scope["app"].state.engine_client
        async with self.starting:
            if not self.recording:
                await engine.collective_rpc("record_selections")
                self.recording = True
        body, messages = b"", []
        while True:
            messages.append(await receive())
            body += messages[-1].get("body", b"")
            if not messages[-1].get("more_body"):
                break
        asked = _asked(body)
        if not asked.get("return_token_ids") or asked.get("stream"):
            return await self.app(scope, _replay(messages, receive), send)

        start, content = None, b""

        async def collect(message):
            nonlocal start, content
            if message["type"] == "http.response.start":
                start = message
                return
            content += message.get("body", b"")
            if not message.get("more_body"):
                if start["status"] == 200:
                    content = await _with_selections(engine, content, asked.get("n") or 1)
                lengths = [h for h in start["headers"] if h[0].lower() != b"content-length"]
                length = (b"content-length", str(len(content)).encode())
                await send(start | {"headers": [*lengths, length]})
                await send({"type": "http.response.body", "body": content})

        await self.app(scope, _replay(messages, receive), collect)


def _asked(body: bytes) -> dict:
    try:
        asked = json.loads(body)
    except ValueError:
        return {}  # vLLM's own error
    return asked if isinstance(asked, dict) else {}


def _replay(messages: list, receive):
    """``receive`` that begins with ``messages``."""
    waiting = iter(messages)

    async def again():
        return next(waiting, None) or await receive()

    return again


async def _with_selections(engine, content: bytes, answers: int) -> bytes:
    reply = json.loads(content)
    chat = reply["object"].startswith("chat")
    records: dict[str, dict[int, np.ndarray]] = {}
    for choice in reply["choices"]:
        prompt, answer = divmod(choice["index"], answers)
        # churn: the names that vLLM's server gives to the prompts of a request
        name = reply["id"] if chat else f"{reply['id']}-{prompt}"
        if name not in records:
            replies = await engine.collective_rpc("take_selections", args=(name,))
            records[name] = _joined(replies)
        indices = records[name].get(answer)
        if indices is not None:
            ids = (reply if chat else choice)["prompt_token_ids"]
            indices = indices[: len(ids) + len(choice["token_ids"]) - 1]
            indices = base64.b64encode(_npy(indices)).decode()
        choice["indexer_topk"] = indices
    return json.dumps(reply).encode()
