"""Both sides of ``bench_model.py``: upstream's DeepSeek-V3.2 and the same model, patched."""

import torch
from torch import Tensor
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, DynamicCache

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.architectures import attention_classes
from custom_pypto.models.cache import write

SIDES = ("custom_pypto", "transformers")
MODEL = dict(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=2,
    num_attention_heads=16,
    q_lora_rank=768,
)
# DeepSeek-V3.2 as published; only its first attention layer is used
LAYER = dict(
    vocab_size=16,
    hidden_size=7168,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=128,
    q_lora_rank=1536,
)


def make_model(side: str, sizes: dict, dtype: torch.dtype):
    torch.manual_seed(0)
    config = DeepseekV32Config(
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        first_k_dense_replace=sizes["num_hidden_layers"],
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=2048,
        max_position_embeddings=163840,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        pad_token_id=0,
        eos_token_id=None,
        dtype=dtype,
    )
    model = DeepseekV32ForCausalLM._from_config(config, dtype=dtype).eval()
    return models.use_custom_pypto(model) if side == "custom_pypto" else model


def filled_cache(side: str, model, tokens: int):
    """A cache that holds the same ``tokens`` random tokens on both sides, with room for one."""
    config, pools = model.config, attention_classes("filled_cache", model)[1].pools
    generator = torch.Generator().manual_seed(1)
    paged = models.PagedCache(model, 1, tokens + 1) if side == "custom_pypto" else None
    cache = paged or DynamicCache(config=config)
    step = paged.place(1, tokens, None) if paged else None
    for i in range(config.num_hidden_layers):
        rows = {}
        for name, pool in pools.items():
            if (row := pool.row(config, i, model.dtype)) is not None:
                values = torch.randn(1, tokens, row.width, generator=generator)
                rows[name] = values.to(row.dtype)
        if paged:
            for name, pool in paged.layers[i].pools().items():
                write(pool, step.slots, rows[name])
        else:
            cache.update(rows["latent"][:, None], rows["rope"][:, None], i)
            cache.update_indexer(rows["index"], i)
    if paged:
        step.commit()
    return cache


def decode_call(side: str, model, context: int):
    """One decode step at ``context`` cached tokens; the cache is as before afterwards."""
    cache, ids = filled_cache(side, model, context - 1), torch.tensor([[7]])

    @torch.no_grad()
    def step():
        logits = model(ids, **{CACHE: cache}, use_cache=True).logits
        cache.crop(-1)
        return logits

    return step


def prefill_call(side: str, model, context: int):
    ids = torch.randint(1, 1024, (1, context), generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def prefill():
        cache = models.PagedCache(model, 1, context) if side == "custom_pypto" else None
        return model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits

    return prefill


@torch.no_grad()
def attend(side: str, model, hidden: Tensor, cache, cached: int) -> Tensor:
    """The first attention layer of ``model`` on the tokens after the ``cached`` ones."""
    attention, tokens = model.base_model.layers[0].self_attn, hidden.size(1)
    positions = torch.arange(cached, cached + tokens)
    rotation = model.base_model.rotary_emb(hidden, position_ids=positions[None])
    if side == "custom_pypto":
        step = cache.place(1, tokens, None)
        step.commit()
        return attention(hidden, rotation, step)[0]
    causal = torch.arange(cached + tokens) <= positions[:, None]
    return attention(hidden, rotation, causal[None, None], **{CACHE: cache})[0]


def hidden_states(model, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(1, tokens, model.config.hidden_size, generator=generator).to(model.dtype)


def layer_decode_call(side: str, model, context: int):
    """As decode_call, of the attention layer alone."""
    cache, hidden = filled_cache(side, model, context - 1), hidden_states(model, 1)

    def step():
        output = attend(side, model, hidden, cache, context - 1)
        cache.crop(-1)
        return output

    return step


def layer_prefill_call(side: str, model, context: int):
    hidden = hidden_states(model, context)

    def prefill():
        ours = side == "custom_pypto"
        cache = models.PagedCache(model, 1, context) if ours else DynamicCache(config=model.config)
        return attend(side, model, hidden, cache, 0)

    return prefill


CALLS = {
    "decode": decode_call,
    "prefill": prefill_call,
    "layer decode": layer_decode_call,
    "layer prefill": layer_prefill_call,
}
