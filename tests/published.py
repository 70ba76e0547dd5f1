"""Random checkpoints in the published formats, and what they hold by the definition of these."""

import json
import math
import re

import torch
from safetensors.torch import load_file, save_file
from tiny import CLASSES, KIND_OF, KINDS, SLIDING, V4_LAYERS, tiny_config, tiny_v4
from transformers import DeepseekV4ForCausalLM

from custom_pypto.files import NAMES

V4 = "deepseek_v4"
BLOCK = 128  # values of fp8, in both directions, that share a scale
FP4_BLOCK = 32  # values of fp4, along a row
# names in the model -> on disk, each applied to the result of those before it
NAMES_ON_DISK = {
    "axk2": {
        "self_attn.q_gate_proj": "self_attn.q_b_proj",
        "layernorm.mlp.fc1": "layernorm.W_down",
        "layernorm.mlp.fc2": "layernorm.W_up",
    },
    "hy_v4": {
        ".gate_proj": ".linear_gate",
        ".sinks": ".learnable_sink_param",
        ".attn_hc.": ".hc_pre.hc_attn_layer.hc_",
        ".ffn_hc.": ".hc_pre.hc_mlp_layer.hc_",
        "model.hc_head.hc_": "model.hc_pre.hc_head.hc_head_",
    },
    V4: {
        "lm_head": "head",
        "model.hc_head.": "hc_head_",
        "hc_head_hc_": "hc_head_",
        "model.embed_tokens": "embed",
        "model.": "",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "attn_hc.": "hc_attn_",
        "ffn_hc.": "hc_ffn_",
        "self_attn": "attn",
        "mlp": "ffn",
        "compressor.indexer.scorer": "indexer",
        "compressor.indexer.q_b_proj": "indexer.wq_b",
        "compressor.indexer": "indexer.compressor",
        "compressor.kv_norm": "compressor.norm",
        "compressor.gate_proj": "compressor.wgate",
        "kv_proj": "wkv",
        "position_bias": "ape",
        "sinks": "attn_sink",
        "q_a_norm": "q_norm",
        "q_a_proj": "wq_a",
        "q_b_proj": "wq_b",
        "o_a_proj": "wo_a",
        "o_b_proj": "wo_b",
        "e_score_correction_bias": "bias",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
        "mtp.0.hc_head.hc_": "mtp.0.hc_head_",
        "mtp.0.kv_norm": "mtp.0.norm",
    },
}
# the same of a layer for multi-token prediction
MTP_ON_DISK = {
    "hy_v4": {"shared_head.norm": "mtp_layers.0.final_layernorm", "": "mtp_layers.0."},
    "dots3_note": {"embed_tokens": "mtp.embed_tokens"},
}
LINEAR = re.compile(r"(?<!weights)_proj(_with_mqa)?\.weight|\.(wq_b|wk)\.weight")
V4_LINEAR = re.compile(
    r"(attn|indexer)\.w(q_a|q_b|kv|o_a|o_b)\.|shared_experts\.|mtp\.\d+\.[eh]_proj\."
)
# names on disk of what is in float32
FLOAT32 = dict.fromkeys(KINDS, "correction_bias")
FLOAT32["hy_v4"] = r"correction_bias|k_norm\.|sink|\.hc_|lm_head|weights_proj"
FLOAT32[V4] = r"hc_|attn_sink|\.ape|gate\.bias"


def kind_of(config):
    return KIND_OF.get(config.model_type, V4)


def weights_on_disk(model):
    """The tensors of ``model``, of any device, under the names of a published checkpoint."""
    kind, weights = kind_of(model.config), {}
    layer = f"layers.{model.config.num_hidden_layers}."
    mtp = {layer + in_model: on_disk for in_model, on_disk in MTP_ON_DISK.get(kind, {}).items()}
    names = NAMES_ON_DISK.get(kind, {}) | mtp
    for name, tensor in model.state_dict().items():
        prefix, fused, projection = name.partition(".experts.")
        fused = fused and kind != "hy_v4"  # whose experts are stacked on disk, too
        parts = [name]
        for i, expert in enumerate(tensor if fused else [tensor]):
            if fused:
                parts = [projection] if projection == "down_proj" else ["gate_proj", "up_proj"]
                parts = [f"{prefix}.experts.{i}.{part}.weight" for part in parts]
            for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                for in_model, on_disk in names.items():
                    part = part.replace(in_model, on_disk)
                weights[part] = weight
    return weights


def powers_of_two(*shape):
    return torch.randint(-5, 0, shape).float().exp2().to(torch.float8_e8m0fnu)


def fp8_weight(rows, columns):
    """A random weight in the published format, and its scales, different for every block."""
    grid = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
    return torch.randn(rows, columns).to(torch.float8_e4m3fn), 0.02 + 0.1 * torch.rand(grid)


def fp4_weight(rows, columns):
    bytes_ = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
    return bytes_, powers_of_two(rows, math.ceil(columns / FP4_BLOCK))


def stored(name, shape, kind):
    """A tensor of any model but DeepSeek-V4 on disk, and its scales."""
    if LINEAR.search(name):
        weight, scales = fp8_weight(*shape)
        return {name: weight, f"{name}_scale_inv": scales}
    if re.search(FLOAT32[kind], name):
        return {name: 0.3 * torch.randn(shape)}
    return {name: unquantized(name, shape).bfloat16()}


def stored_v4(name, shape, config, experts):
    scale = name.removesuffix("weight") + "scale"
    fp4 = experts == "fp4"
    if fp4 and ".experts." in name:
        weight, scales = fp4_weight(*shape)
    elif V4_LINEAR.search(name) or ".experts." in name:
        weight, scales = fp8_weight(*shape)
        scales = powers_of_two(*scales.shape) if fp4 else scales
    elif "tid2eid" in name:
        return {name: torch.randint(config.n_routed_experts, shape)}
    elif re.search(FLOAT32[V4], name):
        return {name: 0.3 * torch.randn(shape)}
    else:
        return {name: unquantized(name, shape).bfloat16()}
    return {name: weight, scale: scales}


def unquantized(name, shape):
    spread, centre = (0.3, 1) if "norm" in name else (0.15, 0)
    return centre + spread * torch.randn(shape)


def shards_of(model):
    """Names and shapes in each shard: the embedding, every layer, the head, and a layer for
    multi-token prediction."""
    config = model.config
    shards = {"embedding": {}, **{f"{i}": {} for i in range(config.num_hidden_layers)}, "head": {}}
    for name, tensor in weights_on_disk(model).items():
        place = "embedding" if "embed" in name else "head"
        if layer := re.search(r"layers\.(\d+)\.", name):
            place = layer[1]
        shards[place][name] = list(tensor.shape)
    shards["mtp"] = mtp_shard(config, shards)
    return shards.values()


# of a layer for multi-token prediction what it lacks of the layer before it: V4's drafts from a
# window alone, Hy4's has no streams, Dots 3 Note's no experts
LACKS = {V4: r"compressor|attn\.indexer", "hy_v4": r"\.hc_", "dots3_note_text": r"\.mlp\."}


def mtp_shard(config, shards):
    """Names and shapes of a layer for multi-token prediction."""
    kind, last, hidden = config.model_type, config.num_hidden_layers - 1, config.hidden_size
    old, prefix, parts = f"{last}", f"model.layers.{last + 1}.", {}
    extra = {"eh_proj.weight": [hidden, 2 * hidden], "shared_head.norm.weight": [hidden]}
    if kind == V4:
        prefix = "mtp.0."
        extra = {"e_proj.weight": [hidden, hidden], "h_proj.weight": [hidden, hidden]}
        extra |= {name: shape for name, shape in shards["head"].items() if "hc_head" in name}
        extra |= {"norm.weight": [hidden]}
    elif kind == "hy_v4":
        prefix = "model.mtp_layers.0."
        extra["final_layernorm.weight"] = extra.pop("shared_head.norm.weight")
    elif kind == "dots3_note_text":
        old = "1"  # of a window
        parts = {name: shape for name, shape in shards["0"].items() if ".mlp." in name}
    parts |= {
        name: shape
        for name, shape in shards[old].items()
        if not (kind in LACKS and re.search(LACKS[kind], name))
    }
    mtp = {re.sub(r".*?layers\.\d+\.", prefix, name): shape for name, shape in parts.items()}
    extra |= {"enorm.weight": [hidden], "hnorm.weight": [hidden]}
    mtp |= {f"{prefix}{name}": shape for name, shape in extra.items()}
    if kind == "dots3_note_text":
        mtp["model.mtp.embed_tokens.weight"] = [config.vocab_size, hidden]
    return mtp


def write_published(path, config, save=save_file, experts="fp4"):
    """A random checkpoint in the format of DeepSeek and GLM, made shard by shard.

    Linear weights in fp8 with their scales, experts one by one, a layer for multi-token prediction
    after the last one, ``config.json`` with the published keys. A shard for the embedding, one for
    each layer, one for the head and one for that layer, in this order.

    Args:
        experts: of DeepSeek-V4: "fp4", as in V4-Flash, where all scales are powers of two, or
            "fp8", as in V4-Flash-Base.
    """
    kind = kind_of(config)
    v4 = kind == V4
    model_class = DeepseekV4ForCausalLM if v4 else CLASSES[kind][1]
    with torch.device("meta"):
        shards = shards_of(model_class(config))
    path.mkdir(exist_ok=True)
    weight_map, size = {}, 0
    for i, shard in enumerate(shards, 1):
        tensors = {}
        for name, shape in shard.items():
            tensors |= stored_v4(name, shape, config, experts) if v4 else stored(name, shape, kind)
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    keys = config.to_dict() | {
        "architectures": [model_class.__name__],
        "torch_dtype": "bfloat16",
        "num_nextn_predict_layers": 1,
        "topk_method": "noaux_tc",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }
    keys = keys_of_v4(keys, experts) if v4 else keys_of_others(keys)
    for name in ("dtype", "mlp_layer_types", "transformers_version"):
        keys.pop(name, None)
    (path / "config.json").write_text(json.dumps(keys, indent=2))


def keys_of_others(keys):
    keys["scoring_func"] = "sigmoid"
    if keys["model_type"] == "dots3_note_text":  # the text model's keys in a multimodal config
        for name in ("per_layer_config", "rope_parameters"):
            del keys[name]
        types = [kind.replace("indexed", "full") for kind in keys["layer_types"]]
        adapter = {"adapter_out_dim": keys["hidden_size"]}
        own = {"model_type": "dots3_note", "use_dsa": True, "layer_types": types}
        return keys | SLIDING | own | {"vision_config": adapter, "audio_config": adapter}
    for name in ("layer_types", "head_dim"):
        keys.pop(name, None)
    if keys["model_type"] == "deepseek_v32":
        rope = keys.pop("rope_parameters")
        keys["rope_theta"] = rope.pop("rope_theta")
        keys["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
    return keys


def keys_of_v4(keys, experts):
    layer_types = keys.pop("layer_types")
    for name in ("compress_rates", "partial_rotary_factor"):
        del keys[name]
    yarn = keys.pop("rope_parameters")["compress"]
    names = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
    ratios = {"sliding": 0, "compressed": 4, "heavily": 128}
    return keys | {
        "rope_scaling": {"type": "yarn"} | {name: yarn[name] for name in names},
        # the last one is of multi-token prediction
        "compress_ratios": [ratios[kind.partition("_")[0]] for kind in layer_types] + [0],
        "num_hash_layers": keys["mlp_layer_types"].count("hash_moe"),
        "expert_dtype": experts,
    }


def published(path, kind="deepseek_v32", kv_lora_rank=512, experts="fp4", **changes):
    """More than one block in every direction, the last ones partial: 160 columns, 576 rows."""
    torch.manual_seed(0)
    if kind == V4:
        yarn = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1}
        sizes = dict(hidden_size=160, moe_intermediate_size=48, head_dim=192, q_lora_rank=144)
        sizes |= dict(partial_rotary_factor=1 / 12, compress_rates=None, initializer_range=0.02)
        sizes |= dict(rope_scaling=yarn | {"original_max_position_embeddings": 1024})
        sizes |= dict(num_hidden_layers=3, mlp_layer_types=["hash_moe", "moe", "moe"])
        sizes |= dict(layer_types=V4_LAYERS[:3], n_routed_experts=8)
        config = tiny_v4(**sizes | changes).config
    else:
        sizes = dict(hidden_size=160, qk_rope_head_dim=64, index_head_dim=128, index_topk=8)
        config = tiny_config(kind, **sizes | dict(kv_lora_rank=kv_lora_rank) | changes)
    write_published(path, config, experts=experts)
    return path


def e2m1(bits):
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    return (-1) ** sign * (2 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)


def dequantized(weight, scales):
    """By the definition: the value times the scale of its block, in float32."""
    height, width = BLOCK, BLOCK
    if weight.dtype == torch.int8:
        height, width = 1, FP4_BLOCK
        values = torch.tensor([e2m1(bits) for bits in range(16)])
        byte = weight.view(torch.uint8).int()
        weight = torch.stack([values[byte & 15], values[byte >> 4]], -1).flatten(1)
    if scales.dtype == torch.float8_e8m0fnu:
        scales = torch.exp2(scales.view(torch.uint8).float() - 127)
    weight = weight.float()
    for i, row in enumerate(scales):
        for j, scale in enumerate(row):
            weight[i * height : (i + 1) * height, j * width : (j + 1) * width] *= scale
    return weight


def true_weights(path, dtype):
    """Every tensor, dequantized in float32, then rounded to ``dtype``; tables of integers as they
    are."""
    files = {}
    for file in path.glob("*.safetensors"):
        files |= load_file(file)
    weights = {}
    for name, weight in files.items():
        scales = files.get(f"{name}_scale_inv", files.get(name.removesuffix("weight") + "scale"))
        if weight.dtype in (torch.float8_e4m3fn, torch.int8):
            weight = dequantized(weight, scales)
        weights[name] = weight.to(dtype) if weight.is_floating_point() else weight
    return weights


def header_of(tensors, metadata, multiple=1):
    """What a safetensors file of these tensors, in this order, begins with: so many bytes, or the
    next multiple of them."""
    header, end = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        offsets, end = [end, end + tensor.nbytes], end + tensor.nbytes
        dtype, shape = NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % multiple)
    return len(text).to_bytes(8, "little") + text


def save_sparse(tensors, file, metadata):
    """A sparse safetensors file of full size: only its header takes disk space."""
    header = header_of(tensors, metadata)
    with file.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + sum(tensor.nbytes for tensor in tensors.values()))
