"""Random models of all architectures that run in milliseconds, and inputs for which two right
implementations must agree."""

import json
import re

import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import (
    AXK2Config,
    AXK2ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Dots3NoteForCausalLM,
    Dots3NoteTextConfig,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    HYV4Config,
    HYV4ForCausalLM,
)

from custom_pypto.models.checkpoint import tensors_on_disk

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
}
CLASSES = {
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "axk2": (AXK2Config, AXK2ForCausalLM),
    "hy_v4": (HYV4Config, HYV4ForCausalLM),
    "dots3_note": (Dots3NoteTextConfig, Dots3NoteForCausalLM),
}
KINDS = list(CLASSES)
KIND_OF = {config_class.model_type: kind for kind, (config_class, _) in CLASSES.items()}
# the layer between those with an indexer: dims of its own, a window shorter than the prompts
SLIDING = {
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "head_dim": 32,
    "sliding_window": 12,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 40,
    "swa_kv_lora_rank": 80,
    "swa_head_dim": 40,
    "swa_qk_nope_head_dim": 24,
    "swa_v_head_dim": 16,
    "moe_shared_expert_intermediate_size": 32,
}
# names that differ between checkpoint and model: of A.X-K2
NAMES_ON_DISK = {"self_attn.q_gate_proj": "self_attn.q_b_proj"}
NAMES_ON_DISK |= {"layernorm.mlp.fc1": "layernorm.W_down", "layernorm.mlp.fc2": "layernorm.W_up"}
# and of Hunyuan 4, whose experts are stacked in its checkpoints
HYV4_ON_DISK = {
    ".gate_proj": ".linear_gate",
    ".sinks": ".learnable_sink_param",
    ".attn_hc.": ".hc_pre.hc_attn_layer.hc_",
    ".ffn_hc.": ".hc_pre.hc_mlp_layer.hc_",
    "model.hc_head.hc_": "model.hc_pre.hc_head.hc_head_",
}
VOCABULARY = 199


def tiny_config(kind="deepseek_v32", **changes):
    """Three layers, dense and MoE; ``index_topk`` far below the contexts of the tests."""
    config = dict(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=24,
        index_topk=8,
        index_head_dim=32,
        index_n_heads=16,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        # large weights: a wrong key or a wrong rotation moves the logits by more than rounding
        initializer_range=0.15,
    )
    if kind in ("deepseek_v32", "axk2", "hy_v4"):
        config["rope_parameters"] = YARN
    if kind in ("glm_moe_dsa", "hy_v4"):
        config["indexer_types"] = ["full", "shared", "full"]
    if kind == "dots3_note":
        config |= SLIDING
    config |= changes
    for name in ("layer_types", "indexer_types"):
        if name in config:
            config[name] = config[name][: config["num_hidden_layers"]]
    return CLASSES[kind][0](**config)


def query_projection(kind):
    """The module of the attention that projects the queries of all heads."""
    return "q_gate_proj" if kind == "axk2" else "q_b_proj"


def name_on_disk(name, kind):
    for in_model, on_disk in (HYV4_ON_DISK if kind == "hy_v4" else NAMES_ON_DISK).items():
        name = name.replace(in_model, on_disk)
    return name


def tiny_model(kind="deepseek_v32", **changes):
    torch.manual_seed(0)
    model = CLASSES[kind][1](tiny_config(kind, **changes)).eval()
    # transformers initialises these to 1 and 0, which would hide a missing one
    for name, tensor in model.state_dict().items():
        if any(part in name for part in ("norm", "correction_bias", "sinks", "hc")):
            tensor.add_(torch.randn_like(tensor), alpha=0.3)
    model.set_attn_implementation("eager")
    return model


V4_LAYERS = ["sliding_attention", "compressed_sparse_attention"]
V4_LAYERS += ["heavily_compressed_attention", "compressed_sparse_attention"]


def tiny_v4(**changes):
    """DeepSeek-V4 with a layer of each type, and windows, ratios and ``index_topk`` far below the
    contexts of the tests."""
    torch.manual_seed(0)
    config = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=64,
        partial_rotary_factor=0.25,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=V4_LAYERS,
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        compress_rates={V4_LAYERS[1]: 4, V4_LAYERS[2]: 16},
        sliding_window=16,
        index_n_heads=32,  # of fewer, many scores are exactly 0, which leaves the choice open
        index_head_dim=32,
        index_topk=5,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        initializer_range=0.3,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**config | changes)).eval()
    # transformers initialises these to 1 and 0, which would hide a missing one
    hidden = "norm", "sinks", "position_bias", "correction_bias"
    for name, tensor in model.state_dict().items():
        if any(part in name for part in hidden):
            tensor.add_(torch.randn_like(tensor), alpha=0.3 if "norm" in name else 1)
        if "tid2eid" in name:
            tensor.copy_(torch.randint(0, 4, tensor.shape))
    return model


BLOCK = 128


def in_float32(name, kind):
    """Whether the model keeps this tensor of a checkpoint in float32."""
    more = r"|k_norm\.|sink|\.hc_|lm_head|weights_proj" if kind == "hy_v4" else ""
    return re.search("correction_bias" + more, name) is not None


def fp8_weight(rows, columns):
    """A random weight in the published format, and its scales, different for every block."""
    grid = -(-rows // BLOCK), -(-columns // BLOCK)
    return torch.randn(rows, columns).to(torch.float8_e4m3fn), 0.02 + 0.1 * torch.rand(grid)


def write_published(path, config, save=save_file):
    """A random checkpoint in the format of DeepSeek and GLM, made shard by shard.

    Linear weights in fp8 with ``weight_scale_inv``, experts one by one, a layer for multi-token
    prediction after the last one, ``config.json`` with the published keys. A shard
    for the embedding, one for each layer, one for the head and one for that layer, in this order.
    """
    model_class = CLASSES[KIND_OF[config.model_type]][1]
    with torch.device("meta"):
        shapes = tensors_on_disk(model_class(config))
    shards = {"embedding": {}, **{f"{i}": {} for i in range(config.num_hidden_layers)}, "head": {}}
    for name, shape in shapes.items():
        place = "embedding" if "embed_tokens" in name else "head"
        shards[name.split(".")[2] if ".layers." in name else place][name] = shape
    last, mtp = config.num_hidden_layers - 1, config.num_hidden_layers
    shards[f"{mtp}"] = {
        name.replace(f".{last}.", f".{mtp}."): shape for name, shape in shards[f"{last}"].items()
    }
    hidden = config.hidden_size
    shards[f"{mtp}"][f"model.layers.{mtp}.eh_proj.weight"] = [hidden, 2 * hidden]
    shards[f"{mtp}"][f"model.layers.{mtp}.enorm.weight"] = [hidden]

    path.mkdir(exist_ok=True)
    weight_map, size = {}, 0
    for i, shard in enumerate(shards.values(), 1):
        tensors = {}
        for name, shape in shard.items():
            if re.search(r"(?<!weights)_proj(_with_mqa)?\.weight|\.(wq_b|wk)\.weight", name):
                tensors[name], tensors[f"{name}_scale_inv"] = fp8_weight(*shape)
            elif in_float32(name, KIND_OF[config.model_type]):
                tensors[name] = 0.3 * torch.randn(shape)
            else:
                spread, centre = (0.3, 1) if "norm.weight" in name else (0.15, 0)
                tensors[name] = (centre + spread * torch.randn(shape)).bfloat16()
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))

    published = config.to_dict() | {
        "architectures": [model_class.__name__],
        "torch_dtype": "bfloat16",
        "num_nextn_predict_layers": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }
    own_keys = ["dtype", "mlp_layer_types", "transformers_version"]
    if config.model_type == "dots3_note_text":  # the text model's keys in a multimodal config
        published |= SLIDING | {"model_type": "dots3_note", "use_dsa": True}
        published["layer_types"] = [
            kind.replace("indexed", "full") for kind in published["layer_types"]
        ]
        adapter = {"adapter_out_dim": config.hidden_size}
        published |= {"vision_config": adapter, "audio_config": adapter}
        own_keys += ["per_layer_config", "rope_parameters"]
    else:
        own_keys += ["layer_types", "head_dim"]
    for name in own_keys:
        published.pop(name, None)
    if config.model_type == "deepseek_v32":
        rope = published.pop("rope_parameters")
        published["rope_theta"] = rope.pop("rope_theta")
        published["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
    (path / "config.json").write_text(json.dumps(published, indent=2))


def published(path, kind="deepseek_v32", kv_lora_rank=512, **changes):
    """More than one block in every direction, the last ones partial: 160 columns, 576 rows."""
    sizes = dict(hidden_size=160, qk_rope_head_dim=64, index_head_dim=128, index_topk=8)
    write_published(path, tiny_config(kind, **sizes | dict(kv_lora_rank=kv_lora_rank) | changes))
    return path


def true_weights(path, dtype):
    """Every tensor, dequantised by the definition: block times scale in float32, then ``dtype``."""
    stored = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
    weights = {}
    for name, weight in stored.items():
        if weight.dtype == torch.float8_e4m3fn:
            weight = weight.float()
            for i, row in enumerate(stored[f"{name}_scale_inv"]):
                for j, scale in enumerate(row):
                    rows, columns = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, None)
                    weight[rows, columns][:, :BLOCK] *= scale
        weights[name] = weight.to(dtype)
    return weights


def save_sparse(tensors, file, metadata):
    """A sparse safetensors file of full size: only its header takes disk space."""
    header, end = {"__metadata__": metadata}, 0
    names = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}
    for name, tensor in tensors.items():
        offsets, end = [end, end + tensor.nbytes], end + tensor.nbytes
        dtype, shape = names[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def token_ids(batch, tokens, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, tokens), generator=generator)


class ClosestCall(TorchFunctionMode):
    """The smallest margin of the top-k and argmax calls inside: the distance between the last
    selected candidate and the next, relative to the spread of all.

    Selection, routing and decoding are discontinuous: if the margin is within rounding, two right
    implementations may select differently, and all later results differ.
    """

    gap = float("inf")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        choices = torch.topk, torch.Tensor.topk, torch.argmax, torch.Tensor.argmax
        if func in choices and args[0].is_floating_point():  # others choose among masks
            values = args[0].float()
            k = 1 if "argmax" in func.__name__ else kwargs["k"] if "k" in kwargs else args[1]
            if k < values.size(-1):
                best = values.topk(k + 1).values[..., -2:]
                spread = values.where(values > -1e8, best[..., :1]).std(-1)
                gaps = (best[..., 0] - best[..., 1]) / spread.clamp_min(1e-20)
                # fewer than k + 1 candidates (beam search marks the others by -1e9): no choice
                gaps = gaps[best[..., 1] > -1e8]
                self.gap = min(self.gap, gaps.min().item() if gaps.numel() else self.gap)
        return func(*args, **kwargs)


def clear_case(run):
    """The first ``seed`` for which all margins of ``run(seed)`` exceed rounding, and its result."""
    for seed in range(100):
        with ClosestCall() as calls:
            result = run(seed)
        if calls.gap > 3e-5:  # ten times the change of a score by reordered float32 sums
            return seed, result
    raise AssertionError("every seed has a close call")
