"""How DeepSeek-V4 compresses tokens into rows. Imports nothing of vLLM: its config needs it."""

# groups of tokens that a compressed row sums, by its tokens per row
GROUPS = {4: 2, 128: 1}


def compress_ratios(config: dict) -> list[int]:
    """Tokens per compressed row of each layer, 0 for a window alone, from a config.json as
    published or as transformers saves it."""
    if ratios := config.get("compress_ratios"):
        return ratios
    return [config["compress_rates"].get(kind, 0) for kind in config["layer_types"]]
