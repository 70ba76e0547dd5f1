"""config.json as transformers 5 saves it, in the words that vLLM and its transformers read."""

from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config

from ..config import compress_ratios


class SavedConfig(DeepseekV4Config):
    def __init__(self, **keys):
        if "layer_types" in keys:
            keys.setdefault("compress_ratios", compress_ratios(keys))
        if types := keys.pop("mlp_layer_types", None):
            keys.setdefault("num_hash_layers", types.count("hash_moe"))
        # these words are transformers' alone, but for the names of rotations
        for name in ("layer_types", "compress_rates"):
            keys.pop(name, None)
        keys.setdefault("topk_method", "noaux_tc")  # the only one of this model
        super().__init__(**keys)


def with_saved_v4(classes: dict) -> dict:
    """The table of classes by model_type."""
    classes["deepseek_v4"] = SavedConfig
    return classes


def with_indexed_attention(allowed: tuple) -> tuple:
    return (*dict.fromkeys((*allowed, "indexed_attention")),)
