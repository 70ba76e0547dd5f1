"""What a model chose for each token of a request, for a trainer that repeats it: the positions to
which the token attended and, on request, the routed experts.

A worker records them per request, after :func:`record` or from the first request of a server that
has :class:`Middleware`::

    llm = vllm.LLM(model, worker_extension_cls=selections.WORKER)
    selections.record(llm)
    (request,) = llm.generate(prompt)
    (chosen,) = selections.take(llm, request)  # one of each answer
    chosen.indexer_topk, chosen.routed_experts

Both are of the prompt and of the answer without its last token, which no forward has seen. The
record of a cached prefix is that of the request that computed it: it stays with the blocks of the
cache while there is room (:mod:`.records`). Selections are int32 ``[tokens, indexer layers,
index_topk]``; positions count from the first token of the request, best first, or all in their
order for a token that sees no more; -1 behind the last; of DeepSeek-V4 they are numbers of
compressed rows. Experts are ``[tokens, layers, k]`` in uint8, or uint16 if there are more than 256,
of all layers, 0 of those without routed experts: vLLM's own format.
"""

import asyncio
import base64
import io
import json
import re
import secrets
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .records import SPACE, Blocks, Recorder, space

WORKER = f"{__name__}.RecordingWorker"
PATHS = "/v1/completions", "/v1/chat/completions"


class Chosen(NamedTuple):
    """Of an answer. None: not recorded."""

    indexer_topk: np.ndarray
    routed_experts: np.ndarray | None = None


class RecordingWorker:
    """Mixed into vLLM's worker by ``--worker-extension-cls``."""

    def record_selections(self, experts: bool = False) -> None:
        config = self.vllm_config
        parallel, compiled = config.parallel_config, bool(config.compilation_config.mode)
        several = parallel.pipeline_parallel_size > 1
        for what, setting in (
            (
                "selections are not recorded with --data-parallel-size: engines of their own share "
                "no record",
                parallel.data_parallel_size > 1,
            ),
            ("routed experts are not recorded with --pipeline-parallel-size", experts and several),
            (
                "routed experts are not recorded without --enforce-eager: a compiled model calls "
                "nothing where it chooses them",
                experts and compiled,
            ),
        ):
            if setting:
                raise ValueError(f"custom_pypto_vllm: {what}")
        if parallel.rank % parallel.tensor_parallel_size:
            return  # ranks of a tensor-parallel group choose alike
        layers = config.compilation_config.static_forward_context
        own = config.model_config.hf_text_config.num_hidden_layers
        recorded = {
            name: layer
            for name, layer in layers.items()
            if hasattr(layer, "recorder") and _number(name) < own
        }
        # of one spec, so of one size
        size = next((layer.recorded_with.block_tokens for layer in recorded.values()), 1)
        self.indexers, self.routers = list(recorded), {}
        if experts:
            self.routers = _routers(self.model_runner.model)
        most = 4 * config.scheduler_config.max_num_seqs
        # a connector fills blocks with rows of tokens that no step here has computed
        keeps = config.cache_config.enable_prefix_caching and config.kv_transfer_config is None
        self.recorder = Recorder(
            self.model_runner,
            [*self.indexers, *self.routers],
            size,
            most,
            Blocks(space()) if keeps else None,
        )
        for layer in recorded.values():
            layer.recorder = self.recorder
        for name, router in self.routers.items():
            of_step = recorded[self.indexers[0]].recorded_with.prefix
            router.set_capture_fn(partial(_capture, self.recorder, name, of_step))

    def take_selections(self, request: str) -> dict[int, dict[str, tuple]] | None:
        if (recorder := getattr(self, "recorder", None)) is None:
            return None
        model = self.vllm_config.model_config
        taken = {}
        for number, layers in recorder.take(request).items():
            indices = torch.stack([layers[name] for name in self.indexers], 1)
            taken[number] = {"indexer_topk": _sent(indices.numpy())}
            if self.routers:
                experts = [layers[name] for name in self.routers]
                shape = len(experts[0]), model.get_total_num_hidden_layers(), experts[0].size(1)
                kind = np.uint8 if model.get_num_experts() <= 256 else np.uint16
                whole = np.zeros(shape, kind)
                whole[:, list(map(_number, self.routers))] = torch.stack(experts, 1).numpy()
                taken[number]["routed_experts"] = _sent(whole)
        return taken


def _routers(model) -> dict[str, object]:
    """What chooses the experts of a model's layers, by name."""
    # churn: as vllm/model_executor/layers/fused_moe/routed_experts_capturer.py finds them
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    found = {
        f"{name}.router": module.router
        for name, module in model.named_modules()
        if isinstance(module, MoERunner)
    }
    if not found or not all(hasattr(router, "set_capture_fn") for router in found.values()):
        raise ValueError(
            "custom_pypto_vllm: routed experts are recorded of models whose layers of experts vLLM "
            "can capture, got one without; serve without --enable-return-routed-experts"
        )
    return found


def _capture(recorder: Recorder, layer: str, of_step: str, experts: Tensor) -> None:
    from vllm.forward_context import get_forward_context

    steps = get_forward_context().attn_metadata
    if isinstance(steps, dict):  # else vLLM's profile run
        step = steps[of_step]
        recorder.add(layer, step, experts[: step.num_actual_tokens].int())


def _number(layer: str) -> int:
    return int(re.search(r"layers\.(\d+)\.", layer)[1])


def _sent(array: np.ndarray) -> tuple:
    """What vLLM's messages between processes carry without a copy in another form."""
    return array.shape, array.dtype.str, array.tobytes()


def _npy(array: np.ndarray) -> memoryview:
    file = io.BytesIO()
    np.save(file, array)
    return file.getbuffer()


def _joined(replies: list) -> dict[int, Chosen]:
    """By the number of an answer, the layers of all ranks of a pipeline."""
    ranks = [
        {
            number: {
                name: np.frombuffer(data, dtype).reshape(shape)
                for name, (shape, dtype, data) in of.items()
            }
            for number, of in reply.items()
        }
        for reply in replies
        if reply
    ]
    if len(ranks) == 1:
        return {number: Chosen(**of) for number, of in ranks[0].items()}
    return {
        number: Chosen(
            **{name: np.concatenate([rank[number][name] for rank in ranks], axis=1) for name in of}
        )
        for number, of in (ranks[0] if ranks else {}).items()
    }


def _of_answer(chosen: Chosen, tokens: int) -> Chosen:
    """Without tokens behind the answer: those that a stop, or a rejected draft, has cut."""
    return Chosen(*(x if x is None else x[:tokens] for x in chosen))


def record(llm, experts: bool = False) -> None:
    """Records the selections of all requests from now on, and their routed ``experts``.

    Raises:
        ValueError: ``llm`` has another worker or several engines; or, with experts, a pipeline, a
            compiled model, or layers of experts that vLLM cannot capture.
    """
    if llm.llm_engine.vllm_config.parallel_config.worker_extension_cls != WORKER:
        raise ValueError(
            "custom_pypto_vllm: selections are recorded by workers of their own; construct the LLM "
            f"with worker_extension_cls={WORKER!r}"
        )
    llm.collective_rpc("record_selections", args=(experts,))


def take(llm, request) -> list[Chosen]:
    """What a finished ``request`` chose, one for each of its answers.

    Raises:
        KeyError: they were taken before, dropped for later ones, or never recorded, as of requests
            behind a cached prefix that has no record.
    """
    found = _joined(llm.collective_rpc("take_selections", args=(request.request_id,)))
    if sorted(found) != list(range(len(request.outputs))):
        raise KeyError(
            f"custom_pypto_vllm: no selections of request {request.request_id}: taken before, too "
            "old, or behind a cached prefix without a record; in that case generate again with "
            f"another cache_salt, and allow more by {SPACE}"
        )
    prompt = len(request.prompt_token_ids)
    outputs = enumerate(request.outputs)
    taken = (_of_answer(found[n], prompt + len(o.token_ids) - 1) for n, o in outputs)
    # of messages, which are not written to
    return [Chosen(*(x if x is None else x.copy() for x in chosen)) for chosen in taken]


class Middleware:
    """Adds ``indexer_topk`` to each choice of a reply with token ids, ``return_token_ids``: base64
    of a .npy file, or null for a choice without a record. Streams are left alone.
    """

    experts = False

    def __init__(self, app):
        self.app, self.starting, self.recording = app, asyncio.Lock(), False

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] not in PATHS:
            return await self.app(scope, receive, send)
        engine = scope["app"].state.engine_client
        async with self.starting:
            if not self.recording:
                try:
                    await engine.collective_rpc("record_selections", args=(self.experts,))
                except Exception as error:  # of whatever class, with the worker's message
                    return await _refuse(send, str(error))
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


class MiddlewareWithExperts(Middleware):
    """Also adds ``routed_experts``."""

    experts = True


async def _refuse(send, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "ValueError", "code": 500}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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
    records: dict[str, dict[int, Chosen]] = {}
    # the arrays stay out of JSON's hands, which would read each of their many characters
    mark, arrays = secrets.token_hex(), []
    for choice in reply["choices"]:
        prompt, answer = divmod(choice["index"], answers)
        # churn: the names that vLLM's server gives to the prompts of a request
        name = reply["id"] if chat else f"{reply['id']}-{prompt}"
        if name not in records:
            replies = await engine.collective_rpc("take_selections", args=(name,))
            records[name] = _joined(replies)
        choice["indexer_topk"] = None
        if (chosen := records[name].get(answer)) is not None:
            ids = (reply if chat else choice)["prompt_token_ids"]
            chosen = _of_answer(chosen, len(ids) + len(choice["token_ids"]) - 1)
            for field, array in chosen._asdict().items():
                if array is not None:
                    choice[field] = f"{mark}{len(arrays)}"
                    arrays.append(base64.b64encode(_npy(array)))
    parts = re.split(rf"{mark}(\d+)".encode(), json.dumps(reply).encode())
    parts[1::2] = [arrays[int(number)] for number in parts[1::2]]
    return b"".join(parts)
