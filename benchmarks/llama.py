"""ik_llama.cpp's llama-server on a checkpoint of DeepSeek-V3.2, which is converted to GGUF.

Names of keys and tensors are those that ik_llama.cpp 8337e4c reads of the architecture glm-dsa,
whose layers are those of DeepSeek-V3.2. Needs the package gguf.
"""

import contextlib
import json
import re
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import gguf
import torch
from measure import free_port
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURE = "glm-dsa"
TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
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
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}

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
        # it writes llama.log where it runs
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
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
    """Writes ``checkpoint``, a DeepSeek-V3.2 in bfloat16, to ``target``; its tokens are ``words``,
    so that answers come as text. Prompts go as numbers of tokens."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(target, ARCHITECTURE)
    _add_sizes(writer, config)
    _add_vocabulary(writer, words)
    experts: dict[str, dict[int, Tensor]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            layer = f"blk.{name.split('.')[2]}." if name.startswith("model.layers.") else ""
            if name.endswith("kv_b_proj.weight"):
                dims = config["qk_nope_head_dim"]
                heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
                # absorbed into the queries and the output, so that attention reads latents alone
                _add(writer, f"{layer}attn_k_b.weight", heads[:, :dims].transpose(1, 2))
                _add(writer, f"{layer}attn_v_b.weight", heads[:, dims:])
            elif match := re.search(r"\.experts\.(\d+)\.(gate|up|down)_proj", name):
                experts.setdefault(f"{layer}ffn_{match[2]}_exps.weight", {})[int(match[1])] = tensor
            elif name.endswith("e_score_correction_bias"):
                _add(writer, f"{layer}exp_probs_b.bias", tensor)
            elif name.endswith("mlp.gate.weight"):  # they multiply it in float32
                writer.add_tensor(f"{layer}ffn_gate_inp.weight", tensor.float().numpy())
            else:
                _add(writer, TENSORS.get(name) or layer + _name(name), tensor)
    for name, tensors in experts.items():
        _add(writer, name, torch.stack([tensors[i] for i in range(len(tensors))]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    part, _, kind = name.split(".", 3)[3].rpartition(".")
    return f"{LAYER_TENSORS[part]}.{kind}"


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    if tensor.dim() == 1:  # norms are float32 there
        writer.add_tensor(name, tensor.float().numpy())
    else:
        stored = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _add_sizes(writer: gguf.GGUFWriter, config: dict) -> None:
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_float32(f"{ARCHITECTURE}.expert_weights_scale", config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    for key, value in {
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "rope.dimension_count": rope,
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID.value,
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
    }.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", value)


def _add_vocabulary(writer: gguf.GGUFWriter, words: list[str]) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["\u2581" + word for word in words])
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(1)
