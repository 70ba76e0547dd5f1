"""Words of config.json and of vLLM's options, and what they stand for. Imports nothing of vLLM:
``serve`` says what it will use before vLLM starts."""

from collections.abc import Mapping
from types import SimpleNamespace

import torch

# formats of custom_pypto.rows, by vLLM's words for --kv-cache-dtype
FORMATS = {"int8_per_token_head": torch.int8}
# groups of tokens that a compressed row of DeepSeek-V4 sums, by its tokens per row
GROUPS = {4: 2, 128: 1}


def check_environment(environment: Mapping[str, str]) -> None:
    """Rejects what vLLM's variables ask for and its products on CPUs cannot give.

    Raises:
        ValueError: names the variable and the remedy.
    """
    value = environment.get("VLLM_BATCH_INVARIANT", "")
    if value.strip() not in ("", "0"):
        raise ValueError(
            "custom_pypto_vllm: VLLM_BATCH_INVARIANT must be unset or 0 (the bits of vLLM's "
            f"products on CPUs depend on the batch), got {value}; unset it, or generate with "
            "custom_pypto.models.use_custom_pypto(model, batch_invariant=True)"
        )


def compress_ratios(config: dict) -> list[int]:
    """Tokens per compressed row of each layer of DeepSeek-V4, 0 for a window alone, from a
    config.json as published or as transformers saves it."""
    if ratios := config.get("compress_ratios"):
        return ratios
    return [config["compress_rates"].get(kind, 0) for kind in config["layer_types"]]


def sharing(config: dict) -> dict[int, int]:
    """By layers that share a selection (IndexCache, arXiv:2603.12201), the layer whose it is: by
    ``index_topk_freq`` or ``index_topk_pattern`` of a config.json, else by its ``indexer_types``.

    Raises:
        TypeError, ValueError: names the key, what it must be and what it is.
    """
    # not above: without custom_pypto, register() says what to install
    from custom_pypto.index_sharing import Asked, sources_of

    layers, types = config["num_hidden_layers"], config.get("indexer_types") or ()
    sparse = list(range(layers))
    if config["model_type"] == "deepseek_v4":
        sparse = [i for i, ratio in enumerate(compress_ratios(config)[:layers]) if ratio == 4]
    lacking = [i for i in sparse if i < len(types) and types[i] == "shared"]
    by_types = "".join("S" if i in lacking else "F" for i in sparse)
    asked = Asked.by_config(SimpleNamespace(**config))
    letters = asked.letters("custom_pypto_vllm", sparse, layers, lacking) or by_types
    return sources_of(letters, sparse)


def is_sparse(model_config) -> bool:
    """Whether a model of vLLM has latent attention with an indexer."""
    return (
        model_config is not None
        and model_config.use_mla
        and hasattr(model_config.hf_text_config, "index_topk")
    )
