"""What requests choose, as a worker sees it step by step; and the records of cached blocks, by
which a request behind a cached prefix has one from its first token on."""

import hashlib
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

Recorded = tuple[int, Tensor]  # tokens of a request up to here, and the rows of the last of them
SPACE = "CUSTOM_PYPTO_RECORD_SPACE"
FULL = (
    f"custom_pypto_vllm: records of cached blocks take %g GiB, the most that {SPACE} allows; "
    "those used longest ago are dropped, and requests behind such a prefix have no record"
)


def space(environment: Mapping[str, str] = os.environ) -> int:
    """Bytes for the records of cached blocks, by the variable of that name in GiB.

    Raises:
        ValueError: it is no number from 0 on.
    """
    value = environment.get(SPACE) or "4"
    if not re.fullmatch(r"\d+(\.\d+)?", value):
        raise ValueError(
            f"custom_pypto_vllm: {SPACE} must be a number of GiB for the records of cached blocks, "
            f"0 for none, got {value!r}"
        )
    return int(float(value) * 2**30)


class Blocks:
    """Records of full blocks of the cache, at most ``most`` bytes: beyond, those whose prefix was
    used longest ago go first, of a prefix its end.

    A record is found by the tokens up to the block's end, whose digest is its key, and by the
    number of the block. By number alone a block that now holds other tokens would give their
    record; by digest alone one that was computed twice, and whose choices may differ where scores
    nearly tie, would give that of the other.
    """

    def __init__(self, most: int):
        self.most, self.bytes, self.full = most, 0, False
        self.kept: OrderedDict[bytes, dict[tuple[str, int], Tensor]] = OrderedDict()

    def put(self, prefix: list[bytes], layer: str, number: int, rows: Tensor | None) -> None:
        """Of a layer the record of block ``number``, whose tokens end those of ``prefix``; None: it
        was computed by a request without a record."""
        digest = prefix[-1]
        old = self.kept.get(digest, {}).pop((layer, number), None)
        self.bytes -= 0 if old is None else old.nbytes
        if rows is None:
            return
        if digest not in self.kept:
            self.kept[digest] = {}
            self._use(prefix)
        self.kept[digest][layer, number] = rows
        self.bytes += rows.nbytes
        while self.bytes > self.most:
            if not self.full:
                logging.getLogger(__name__).warning(FULL, self.most / 2**30)
                self.full = True
            _, dropped = self.kept.popitem(last=False)
            self.bytes -= sum(x.nbytes for x in dropped.values())

    def get(self, prefix: list[bytes], layer: str, numbers: list[int]) -> list[Tensor] | None:
        """Of a layer the records of the blocks of ``prefix``; None: some have none."""
        found = [
            self.kept.get(digest, {}).get((layer, number))
            for digest, number in zip(prefix, numbers, strict=True)
        ]
        self._use(prefix)
        return None if any(rows is None for rows in found) else found

    def _use(self, prefix: list[bytes]) -> None:
        for digest in reversed(prefix):
            if digest in self.kept:
                self.kept.move_to_end(digest)


def dtypes(positions: int, experts: int) -> tuple[torch.dtype, torch.dtype]:
    """Of selections, -1 among them, and of experts: the smallest that hold so many."""
    return (
        torch.int16 if positions <= 2**15 else torch.int32,
        torch.uint8 if experts <= 2**8 else torch.uint16,
    )


class Request:
    """What a request has chosen so far, by layer."""

    def __init__(self, layers):
        self.parts: dict[str, list[Recorded]] = {layer: [] for layer in layers}
        self.prefix: list[bytes] = []  # a digest of the tokens up to the end of each full block


class Recorder:
    """What a worker's requests choose, from their first token on.

    Args:
        runner: the worker's model runner, whose batch names the requests of a step.
        layers: that are recorded, and the dtype of their records.
        size: tokens in a block of the caches by whose metadata they are.
        most: requests that are kept; each new one beyond drops the oldest that is not running.
        blocks: the records of cached blocks; None: no block keeps what its tokens chose.
    """

    def __init__(
        self, runner, layers: dict[str, torch.dtype], size: int, most: int, blocks: Blocks | None
    ):
        self.runner, self.layers, self.size = runner, layers, size
        self.most, self.blocks = most, blocks
        self.requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, layer: str, metadata, chosen: Tensor) -> None:
        """Records what a layer chose in a step, ``[tokens, K]``."""
        # churn: the order of the batch is that of the step's metadata
        running, size = self.runner.input_batch.req_ids, self.size
        ends, lengths = metadata.query_ends.tolist(), metadata.seq_lens.tolist()
        for row, (name, start, end, length, table) in enumerate(
            zip(running, [0, *ends[:-1]], ends, lengths, metadata.block_table, strict=True)
        ):
            request, before = self._of(name, running), length - (end - start)
            parts, full = request.parts[layer], range(before // size, length // size)
            is_cached = before > (parts[-1][0] if parts else 0)
            if self.blocks is not None and (is_cached or full):
                self._read_tokens(request.prefix, row, full)
            if is_cached:
                parts[:] = self._cached(layer, request.prefix, table, before)
            if _cut(parts, before):
                parts.append((length, chosen[start:end].to(self.layers[layer], copy=True)))
            for block in full if self.blocks is not None else ():
                rows = _between(parts, block * size, (block + 1) * size) if parts else None
                self.blocks.put(request.prefix[: block + 1], layer, int(table[block]), rows)

    def _read_tokens(self, prefix: list[bytes], row: int, full: range) -> None:
        """Digests up to the blocks ``full``, which a step of this row of the batch fills. Tokens of
        the blocks before it are final, as those of rejected drafts are behind."""
        # churn: the tokens of each row of the batch, and the number of its adapter
        batch, size = self.runner.input_batch, self.size
        del prefix[full.start :]
        for block in range(len(prefix), full.stop):
            tokens = batch.token_ids_cpu[row, block * size : (block + 1) * size]
            last = prefix[-1] if prefix else int(batch.request_lora_mapping[row]).to_bytes(8)
            prefix.append(hashlib.blake2b(last + tokens.tobytes()).digest())

    def _cached(self, layer: str, prefix: list[bytes], table: Tensor, before: int):
        full, rest = divmod(before, self.size)
        if self.blocks is None or rest:  # the record of a block is that of all of its tokens
            return []
        found = self.blocks.get(prefix[:full], layer, table[:full].tolist())
        return [((i + 1) * self.size, rows) for i, rows in enumerate(found or [])]

    def _of(self, name: str, running: list[str]) -> Request:
        if name not in self.requests:
            for old in [request for request in self.requests if request not in running]:
                if len(self.requests) < self.most:
                    break
                del self.requests[old]
            self.requests[name] = Request(self.layers)
        return self.requests[name]

    def take(self, name: str) -> dict[int, dict[str, list[Recorded]]]:
        """By layer and by the number of an answer, of the request that vLLM's user knows as
        ``name``; they are forgotten.
        """
        # churn: vLLM's own name of a request, and of each of several answers
        own = re.compile(rf"(?:(\d+)_)?{re.escape(name)}-[0-9a-f]{{8}}")
        found = {request: own.fullmatch(request) for request in self.requests}
        taken = {
            int(match[1] or 0): self.requests.pop(request).parts
            for request, match in found.items()
            if match
        }
        return {number: layers for number, layers in taken.items() if all(layers.values())}


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


def _between(parts: list[Recorded], first: int, last: int) -> Tensor:
    """A copy of the rows of these tokens."""
    found = []
    for end, rows in reversed(parts):
        if end <= first:
            break
        start = end - len(rows)
        found.append(rows[max(first - start, 0) : max(last - start, 0)])
    return torch.cat(found[::-1])
