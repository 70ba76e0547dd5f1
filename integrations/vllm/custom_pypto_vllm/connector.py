"""A KV connector over a folder that engines share: one computes prompts, another continues on them.

    --kv-transfer-config '{"kv_connector": "FolderConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "custom_pypto_vllm.connector",
      "kv_connector_extra_config": {"path": "/shared/folder"}}'

A file of safetensors has one block of tokens: the rows of every layer's caches, in the format in
which the engine has them. Its name is a hash of the tokens up to its end and of what engines must
share to read it. A producer writes the whole blocks of prompts, a consumer reads those that it
lacks; ``kv_both`` does both. Engines with other weights must have another folder. Nothing deletes
files but what a killed engine had begun, when another one starts.
"""

import hashlib
import json
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from custom_pypto.files import remove_remains, replacing, write_tensors

# of a config, where it came from
OF_FILES = ("_name_or_path", "transformers_version")
logger = init_logger(f"vllm.{__name__}")

Blocks = list[tuple[str, int]]  # names of files, and the blocks of the caches


@dataclass
class Transfers(KVConnectorMetadata):
    """What the workers do in a step."""

    loads: Blocks = field(default_factory=list)
    stores: Blocks = field(default_factory=list)


@dataclass
class Prompt:
    """A request that is being computed."""

    names: list[str]  # of the whole blocks of its prompt
    cached: int  # of them, blocks that this engine has
    blocks: list[int] = field(default_factory=list)  # of the caches
    done: int = 0  # blocks that are stored, or need not be


# churn: every method overrides one of vLLM, in the scheduler's process or in the workers'
class FolderConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        settings = vllm_config.kv_transfer_config
        path = settings.get_from_extra_config("path", None)
        if path is None:
            raise ValueError(
                'custom_pypto_vllm: kv_connector_extra_config must have a "path", a folder that '
                f"the engines share, got {settings.kv_connector_extra_config}"
            )
        model, groups = vllm_config.model_config.hf_config, kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(
                f"custom_pypto_vllm: kv_connector must be unset for {model.model_type}, whose "
                f"caches have blocks of {len(groups)} kinds; FolderConnector takes DeepSeek-V3.2, "
                "GLM-5 and Hy4"
            )
        self.folder = Path(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_remains(self.folder)  # once: there may be too many blocks to look at each time
        self.size = vllm_config.cache_config.block_size
        self.reads, self.writes = settings.is_kv_consumer, settings.is_kv_producer
        formats = vllm_config.cache_config.cache_dtype, str(vllm_config.model_config.dtype)
        config = {x: y for x, y in model.to_diff_dict().items() if x not in OF_FILES}
        self.first = digest(b"", json.dumps([self.size, *formats, config], default=str))
        self.prompts: dict[str, Prompt] = {}
        self.waiting: Blocks = []
        self.caches: dict[str, torch.Tensor] = {}
        self.failed: set[int] = set()

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    # ---- in the scheduler -------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens behind the computed ones that files have; the last token is always computed."""
        tokens, lora = request.prompt_token_ids, request.lora_request
        whole = range(self.size, len(tokens), self.size)
        start = digest(self.first, f"{lora and lora.lora_path} {request.cache_salt}")
        parts = (json.dumps(tokens[end - self.size : end]) for end in whole)
        names = [x.hex() for x in accumulate(parts, digest, initial=start)][1:]
        self.prompts[request.request_id] = Prompt(names, num_computed_tokens // self.size)
        if not self.reads:
            return 0, False
        found = 0
        while found < len(names) and self.file(names[found]).exists():
            found += 1
        return max(0, found * self.size - num_computed_tokens), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            prompt, ids = self.prompts[request.request_id], blocks.get_block_ids()[0]
            # the request does not count its cached tokens yet
            found = slice(prompt.cached, prompt.cached + num_external_tokens // self.size)
            self.waiting += zip(prompt.names[found], ids[found], strict=True)

    def build_connector_meta(self, scheduler_output) -> Transfers:
        found, self.waiting = Transfers(loads=self.waiting), []
        for new in scheduler_output.scheduled_new_reqs:
            self.prompts[new.req_id].blocks = list(new.block_ids[0])
            self.add_stores(found, scheduler_output, new.req_id, new.num_computed_tokens)
        old = scheduler_output.scheduled_cached_reqs
        for i, request in enumerate(old.req_ids):
            prompt, more = self.prompts[request], old.new_block_ids[i]
            if request in old.resumed_req_ids:
                prompt.blocks = []
            prompt.blocks += more[0] if more else []
            self.add_stores(found, scheduler_output, request, old.num_computed_tokens[i])
        return found

    def add_stores(self, found: Transfers, scheduler_output, request: str, computed: int) -> None:
        """Blocks of the prompt that are whole after this step, and have no file yet."""
        prompt = self.prompts[request]
        whole = (computed + scheduler_output.num_scheduled_tokens[request]) // self.size
        for i in range(prompt.done, min(whole, len(prompt.names))):
            if self.writes and not self.file(prompt.names[i]).exists():
                found.stores.append((prompt.names[i], prompt.blocks[i]))
            prompt.done = i + 1

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, None]:
        self.prompts.pop(request.request_id, None)
        return False, None  # its blocks may be used again: everything is stored

    # ---- in the workers ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context, **kwargs) -> None:
        for name, block in self._get_connector_metadata().loads:
            try:
                rows = load_file(self.file(name))
                for layer, cache in self.caches.items():
                    cache[block].copy_(rows[layer])
            except (OSError, KeyError, RuntimeError, SafetensorError) as error:
                logger.warning(
                    "FolderConnector: cannot read %s: %s; delete it", self.file(name), error
                )
                self.failed.add(block)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def wait_for_save(self) -> None:
        if get_tensor_model_parallel_rank():
            return  # all ranks have the same rows
        for name, block in self._get_connector_metadata().stores:
            file = self.file(name)
            with replacing(file, tidy=False) as partial:
                write_tensors(partial, {x: cache[block] for x, cache in self.caches.items()}, {})

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers are loaded before the first."""

    def save_kv_layer(self, layer_name: str, kv_layer, attn_metadata, **kwargs) -> None:
        """Nothing: all layers are saved behind the last."""


def digest(before: bytes, text: str) -> bytes:
    return hashlib.sha256(before + text.encode()).digest()
