"""config.json of DeepSeek-V4 as transformers 5 saves it, in the words that vLLM reads."""

from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config

HASH = "hash_moe"


class SavedConfig(DeepseekV4Config):
    def __init__(self, layer_types=None, mlp_layer_types=None, compress_rates=None, **keys):
        if layer_types is not None:
            keys.setdefault("compress_ratios", [compress_rates.get(t, 0) for t in layer_types])
        if mlp_layer_types is not None:
            keys.setdefault("num_hash_layers", mlp_layer_types.count(HASH))
        keys.setdefault("topk_method", "noaux_tc")  # the only one of this model
        super().__init__(**keys)
