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
cache while there is room (:mod:`.records`). Selections are ``[tokens, indexer layers, index_topk]``
in int16, or int32 if ``max_model_len`` is above 32,768; positions count from the first token of the
request, best first, or all in their order for a token that sees no more; -1 behind the last; of
DeepSeek-V4 they are numbers of compressed rows. Experts are ``[tokens, layers, k]`` in uint8, or
uint16 if there are more than 256, of all layers, 0 of those without routed experts: vLLM's own
format.

A token that sees no more attends to all, so its row is implied: workers send none.
"""

import asyncio
import io
import json
import math
import re
import secrets
from functools import partial
from typing import NamedTuple

import numpy as np
import pybase64  # vLLM has it, twice as fast as base64
from torch import Tensor

from .records import SPACE, Blocks, Recorded, Recorder, dtypes, space

WORKER = f"{__name__}.RecordingWorker"
PATHS = "/v1/completions", "/v1/chat/completions"
START, IMPLIED = "record_start", "record_implied"


class Chosen(NamedTuple):
    """Of an answer. None: not recorded."""

    indexer_topk: np.ndarray
    routed_experts: np.ndarray | None = None


class Sent(NamedTuple):
    """Rows of a field from token ``begin`` on, as vLLM's messages between processes carry them."""

    begin: int
    shape: tuple[int, ...]
    dtype: str
    data: bytearray


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
        model = config.model_config
        positions, routed = dtypes(model.max_model_len, model.get_num_experts())
        self.recorder = Recorder(
            self.model_runner,
            dict.fromkeys(self.indexers, positions) | dict.fromkeys(self.routers, routed),
            size,
            most,
            Blocks(space()) if keeps else None,
        )
        for layer in recorded.values():
            layer.recorder = self.recorder
        for name, router in self.routers.items():
            of_step = recorded[self.indexers[0]].recorded_with.prefix
            router.set_capture_fn(partial(_capture, self.recorder, name, of_step))

    def take_selections(self, request: str, start: int) -> tuple[int, dict] | None:
        """How many tokens a position stands for, and by the number of an answer what is
        :class:`Sent` of each field."""
        if (recorder := getattr(self, "recorder", None)) is None:
            return None
        config = self.vllm_config
        layers = config.model_config.get_total_num_hidden_layers()
        of = config.compilation_config.static_forward_context
        [ratio] = {of[name].recorded_with.spec.tokens_per_state for name in self.indexers}
        taken = {}
        for number, parts in recorder.take(request).items():
            indexers = dict(enumerate(parts[name] for name in self.indexers))
            (tokens, last), *_ = (of[-1] for of in indexers.values())
            selecting = (last.size(1) + 1) * ratio - 1  # the first token that sees more
            begin = max(start, min(selecting, tokens))
            sent = {"indexer_topk": _sent(indexers, len(indexers), begin)}
            if self.routers:
                experts = {_number(name): parts[name] for name in self.routers}
                sent["routed_experts"] = _sent(experts, layers, start)
            taken[number] = sent
        return ratio, taken


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
        recorder.add(layer, step, experts[: step.num_actual_tokens])


def _number(layer: str) -> int:
    return int(re.search(r"layers\.(\d+)\.", layer)[1])


def _sent(parts: dict[int, list[Recorded]], layers: int, begin: int) -> Sent:
    """Of an array ``[tokens, layers, K]``. Rows are copied once, since a record has tens of
    megabytes."""
    (tokens,) = {recorded[-1][0] for recorded in parts.values()}
    _, last = next(iter(parts.values()))[-1]
    shape, kind = (max(tokens - begin, 0), layers, last.size(1)), last.numpy().dtype
    data = bytearray(math.prod(shape) * kind.itemsize)
    array = np.frombuffer(data, kind).reshape(shape)
    for layer, recorded in parts.items():
        for end, rows in recorded:
            if end > begin:
                first = max(end - len(rows), begin)
                array[first - begin : end - begin, layer] = rows[first - end :].numpy()
    return Sent(begin, shape, kind.str, data)


def _encoded(array: np.ndarray) -> list[bytes]:
    """Parts of the base64 of a .npy file."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    data = array.reshape(-1).view(np.uint8)
    header = file.getvalue()
    begun = -len(header) % 3  # base64 takes three bytes at a time
    return [pybase64.b64encode(header + data[:begun].tobytes()), pybase64.b64encode(data[begun:])]


def _chosen(replies: list, answer: int, tokens: int, start: int, implied: bool) -> Chosen | None:
    """Of an answer the record of the tokens from ``start`` up to ``tokens``: those behind are of a
    stop, or of a rejected draft. ``replies``: of the ranks of a pipeline, each with its layers."""
    ranks, fields = [reply for reply in replies if reply], {}
    if not ranks or answer not in ranks[0][1]:
        return None
    for name in ranks[0][1][answer]:
        sent = [Sent(*of[answer][name]) for _, of in ranks]
        arrays = [np.frombuffer(one.data, one.dtype).reshape(one.shape) for one in sent]
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)
        begin = sent[0].begin
        fields[name] = array = array[: max(tokens - begin, 0)]
        if implied and (left_out := min(begin, tokens) - start) > 0:
            fields[name] = _with_implied(array, start, left_out, ranks[0][0])
    return Chosen(**fields)


def _with_implied(array: np.ndarray, start: int, count: int, ratio: int) -> np.ndarray:
    """``array`` behind rows of ``count`` tokens from ``start`` on that attend to all they see."""
    rows, layers, width = array.shape
    whole = np.empty((count + rows, layers, width), array.dtype)
    position = np.arange(width, dtype=array.dtype)
    seen = (np.arange(start, start + count) + 1) // ratio
    whole[:count] = np.where(position < seen[:, None], position, array.dtype.type(-1))[:, None]
    whole[count:] = array
    return whole


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


def take(llm, request, start: int = 0, implied: bool = True) -> list[Chosen]:
    """What a finished ``request`` chose, one for each of its answers, from token ``start`` on.

    Args:
        implied: False: without the selections of the first tokens, which attend to all that they
            see: as many as are missing.

    Raises:
        ValueError: ``start`` is no number of tokens, or ``implied`` no bool.
        KeyError: they were taken before, dropped for later ones, or never recorded, as of requests
            behind a cached prefix that has no record.
    """
    _check_asked(("start", "implied"), start, implied)
    replies = llm.collective_rpc("take_selections", args=(request.request_id, start))
    prompt = len(request.prompt_token_ids)
    taken = [
        _chosen(replies, number, prompt + len(output.token_ids) - 1, start, implied)
        for number, output in enumerate(request.outputs)
    ]
    if None in taken:
        raise KeyError(
            f"custom_pypto_vllm: no selections of request {request.request_id}: taken before, too "
            "old, or behind a cached prefix without a record; in that case generate again with "
            f"another cache_salt, and allow more by {SPACE}"
        )
    # of messages, which are not written to
    return [Chosen(*(x if x is None else x.copy() for x in chosen)) for chosen in taken]


class Middleware:
    """Adds ``indexer_topk`` to each choice of a reply with token ids, ``return_token_ids``: base64
    of a .npy file, or null for a choice without a record. Without the first ``record_start`` tokens
    of a request that has this field, and without the selections of tokens that attend to all that
    they see, if its ``record_implied`` is false. Streams are left alone.
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
        own = {START, IMPLIED} & asked.keys()  # vLLM has no such fields
        start, implied = asked.pop(START, 0), asked.pop(IMPLIED, True)
        if own:
            messages = [{"type": "http.request", "body": json.dumps(asked).encode()}]
        try:
            _check_asked((START, IMPLIED), start, implied)
        except ValueError as error:
            return await _refuse(send, str(error), 400)
        if not asked.get("return_token_ids") or asked.get("stream"):
            return await self.app(scope, _replay(messages, receive), send)

        head, content = None, b""

        async def collect(message):
            nonlocal head, content
            if message["type"] == "http.response.start":
                head = message
                return
            content += message.get("body", b"")
            if not message.get("more_body"):
                parts = [content]
                if head["status"] == 200:
                    answers = asked.get("n") or 1
                    parts = await _with_selections(engine, content, answers, start, implied)
                lengths = [h for h in head["headers"] if h[0].lower() != b"content-length"]
                length = (b"content-length", str(sum(map(len, parts))).encode())
                await send(head | {"headers": [*lengths, length]})
                for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body"})

        await self.app(scope, _replay(messages, receive), collect)


class MiddlewareWithExperts(Middleware):
    """Also adds ``routed_experts``."""

    experts = True


async def _refuse(send, message: str, status: int = 500) -> None:
    error = {"message": message, "type": "ValueError", "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _asked(body: bytes) -> dict:
    try:
        asked = json.loads(body)
    except ValueError:
        return {}  # vLLM's own error
    return asked if isinstance(asked, dict) else {}


def _check_asked(names: tuple[str, str], start, implied) -> None:
    problem = None
    if type(start) is not int or start < 0:
        problem = f"{names[0]} must be a number of tokens from 0 on, got {start!r}"
    elif type(implied) is not bool:
        problem = f"{names[1]} must be true or false, got {implied!r}"
    if problem:
        raise ValueError(f"custom_pypto_vllm: {problem}")


def _replay(messages: list, receive):
    """``receive`` that begins with ``messages``."""
    waiting = iter(messages)

    async def again():
        return next(waiting, None) or await receive()

    return again


async def _with_selections(
    engine, content: bytes, answers: int, start: int, implied: bool
) -> list[bytes]:
    """The parts of a reply."""
    reply = json.loads(content)
    chat = reply["object"].startswith("chat")
    records: dict[str, list] = {}
    # the arrays stay out of JSON's hands, which would read each of their many characters
    mark, arrays = secrets.token_hex(), []
    for choice in reply["choices"]:
        prompt, answer = divmod(choice["index"], answers)
        # churn: the names that vLLM's server gives to the prompts of a request
        name = reply["id"] if chat else f"{reply['id']}-{prompt}"
        if name not in records:
            records[name] = await engine.collective_rpc("take_selections", args=(name, start))
        choice["indexer_topk"] = None
        ids = (reply if chat else choice)["prompt_token_ids"]
        tokens = len(ids) + len(choice["token_ids"]) - 1
        if (chosen := _chosen(records[name], answer, tokens, start, implied)) is not None:
            for field, array in chosen._asdict().items():
                if array is not None:
                    choice[field] = f"{mark}{len(arrays)}"
                    arrays.append(_encoded(array))
    parts = re.split(rf"{mark}(\d+)".encode(), json.dumps(reply).encode())
    # text, then in turn the number of an array and text
    return [
        part for i, text in enumerate(parts) for part in (arrays[int(text)] if i % 2 else [text])
    ]
