"""Words of config.json and of vLLM's options, and what they stand for. Imports nothing of vLLM:
``serve`` says what it will use before vLLM starts."""

import torch

# formats of custom_pypto.rows, by vLLM's words for --kv-cache-dtype
FORMATS = {"int8_per_token_head": torch.int8}
# groups of tokens that a compressed row of DeepSeek-V4 sums, by its tokens per row
GROUPS = {4: 2, 128: 1}


def compress_ratios(config: dict) -> list[int]:
    """Tokens per compressed row of each layer of DeepSeek-V4, 0 for a window alone, from a
    config.json as published or as transformers saves it."""
    if ratios := config.get("compress_ratios"):
        return ratios
    return [config["compress_rates"].get(kind, 0) for kind in config["layer_types"]]


def is_sparse(model_config) -> bool:
    """Whether a model of vLLM has latent attention with an indexer."""
    return (
        model_config is not None
        and model_config.use_mla
        and hasattr(model_config.hf_text_config, "index_topk")
    )
