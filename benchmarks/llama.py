"""ik_llama.cpp's llama-server on a checkpoint of DeepSeek-V3.2, GLM-5 or DeepSeek-V4, which is
converted to GGUF.

Names of keys and tensors are those that ik_llama.cpp 8337e4c reads of the architectures glm-dsa,
whose layers are those of DeepSeek-V3.2 too, and deepseek4. Needs the package gguf.
"""

import contextlib
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from measure import free_port
from published import V4
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.hc_head.hc_fn": "output_hc_fn",
    "model.hc_head.hc_base": "output_hc_base",
    "model.hc_head.hc_scale": "output_hc_scale",
}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    # of DeepSeek-V3.2 and GLM-5
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    # of DeepSeek-V4
    "self_attn.q_a_norm": "attn_q_a_norm",
    "self_attn.kv_proj": "attn_kv",
    "self_attn.kv_norm": "attn_kv_a_norm",
    "self_attn.o_a_proj": "attn_output_a",
    "self_attn.o_b_proj": "attn_output_b",
    "self_attn.sinks": "attn_sinks",
    "self_attn.compressor.kv_proj": "attn_compressor_kv",
    "self_attn.compressor.gate_proj": "attn_compressor_gate",
    "self_attn.compressor.position_bias": "attn_compressor_ape",
    "self_attn.compressor.kv_norm": "attn_compressor_norm",
    "self_attn.compressor.indexer.kv_proj": "indexer_compressor_kv",
    "self_attn.compressor.indexer.gate_proj": "indexer_compressor_gate",
    "self_attn.compressor.indexer.position_bias": "indexer_compressor_ape",
    "self_attn.compressor.indexer.kv_norm": "indexer_compressor_norm",
    "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
}
SQRT_SOFTPLUS = 4  # a gating function that the package gguf does not name

HOST = "127.0.0.1"
SLOTS = 1  # requests at a time; with 4 it takes nine times as long
# of the checkpoint's 16 keys its flash attention gives wrong answers, of 24 and more right ones
SPARSE = ["-dsa", "-dsatk", "32"]


@contextlib.contextmanager
def server(program: Path, model: Path, arguments: list[str]):
    """``(url, process)`` that serves a GGUF file, once it answers."""
    port = free_port()
    url = f"http://{HOST}:{port}"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        command = [program.absolute(), "-m", model.absolute(), "--port", str(port)]
        command += ["-np", str(SLOTS), "-fa", "on", *arguments]
        # weights that it repacks are in pages of 2 MiB then, as ours are
        environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        # it writes llama.log where it runs
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
        try:
            while not _answers(url):
                if process.poll() is not None:
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-1000:]
                    raise RuntimeError(f"{program} ended with {process.returncode}:\n{said}")
                time.sleep(0.5)
            yield url, process
        finally:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
        return True
    except OSError:
        return False


def convert(checkpoint: Path, target: Path, words: list[str]) -> None:
    """Writes ``checkpoint``, in bfloat16, to ``target``; its tokens are ``words``, so that answers
    come as text. Prompts go as numbers of tokens."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, trust_remote_code=False
    )
    v4 = model.config.model_type == V4
    writer = gguf.GGUFWriter(target, architecture := "deepseek4" if v4 else "glm-dsa")
    _add_sizes(writer, architecture, _sizes(model.config) | (_v4 if v4 else _v32)(model.config))
    _add_vocabulary(writer, words)
    for name, tensor in _tensors(model):
        # they multiply that of the router in float32
        if tensor.dtype == torch.float32 or tensor.dim() == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            stored = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``model`` under their names."""
    for name, tensor in model.state_dict().items():
        if not name.startswith("model.layers."):
            yield f"{TENSORS[name.removesuffix('.weight')]}.weight", tensor
            continue
        _, _, index, part = name.split(".", 3)
        layer = f"blk.{index}"
        if part.endswith("kv_b_proj.weight"):
            dims, heads = model.config.qk_nope_head_dim, model.config.num_attention_heads
            weight = tensor.unflatten(0, (heads, -1))
            # absorbed into the queries and the output, so that attention reads latents alone
            yield f"{layer}.attn_k_b.weight", weight[:, :dims].transpose(1, 2)
            yield f"{layer}.attn_v_b.weight", weight[:, dims:]
        elif part == "mlp.experts.gate_up_proj":
            for half, weight in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                yield f"{layer}.ffn_{half}_exps.weight", weight
        elif part.endswith("e_score_correction_bias"):
            yield f"{layer}.exp_probs_b.bias", tensor
        else:
            kind = "bias" if part.endswith(".bias") else "weight"
            yield f"{layer}.{LAYER_TENSORS[part.removesuffix(f'.{kind}')]}.{kind}", tensor


def _sizes(config) -> dict[str, Any]:
    """Of every model."""
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "rope.dimension_count": config.qk_rope_head_dim,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
    }


def _v32(config) -> dict[str, Any]:
    """Of DeepSeek-V3.2 and GLM-5."""
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    return {
        "feed_forward_length": config.intermediate_size,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": config.qk_nope_head_dim + rope,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": latent,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID.value,
    }


def _v4(config) -> dict[str, Any]:
    """Of DeepSeek-V4, of layers whose experts are not chosen by a table of tokens."""
    window, compressed = (config.rope_parameters[kind] for kind in ("main", "compress"))
    ratios = [config.compress_rates.get(kind, 0) for kind in config.layer_types]
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.compress_ratios": ratios,
        "attention.compress_rope_freq_base": float(compressed["rope_theta"]),
        "attention.output_group_count": config.o_groups,
        "attention.output_lora_rank": config.o_lora_rank,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "hyper_connection.epsilon": config.hc_eps,
        "rope.freq_base": float(window["rope_theta"]),
        "rope.scaling.type": compressed["rope_type"],
        "rope.scaling.factor": float(compressed["factor"]),
        "rope.scaling.original_context_length": compressed["original_max_position_embeddings"],
        "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
        "expert_gating_func": SQRT_SOFTPLUS,
    }


def _add_sizes(writer: gguf.GGUFWriter, architecture: str, sizes: dict[str, Any]) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    for key, value in sizes.items():
        add[type(value)](f"{architecture}.{key}", value)


def _add_vocabulary(writer: gguf.GGUFWriter, words: list[str]) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["\u2581" + word for word in words])
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(1)
