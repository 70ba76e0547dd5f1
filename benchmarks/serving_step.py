"""What a step of vLLM on the ops spends its time on: ops, projections, and the rest.

    bash run.sh bench serving --step [--write]

Two dense layers of DeepSeek-V3.2's widths with random weights in bfloat16, 8 requests of 1000
tokens: their prefill in one step, then 32 steps that give each a token. Times are those of the
worker's main thread by torch.profiler, in the environment that `bash run.sh serve` makes.
"""

import json
import os
import re
import tempfile
import time
from pathlib import Path

from measure import machine, table, write_section

LAYERS, REQUESTS, LENGTH, STEPS = 2, 8, 1000, 32
CONFIG = dict(
    architectures=["DeepseekV32ForCausalLM"],
    model_type="deepseek_v32",
    dtype="bfloat16",
    vocab_size=1024,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=LAYERS,
    first_k_dense_replace=LAYERS,
    num_attention_heads=128,
    num_key_value_heads=128,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=8,
    topk_group=4,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    index_topk=2048,
    index_head_dim=128,
    index_n_heads=64,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    max_position_embeddings=4096,
    rope_theta=10000.0,
    hidden_act="silu",
    rms_norm_eps=1e-6,
)
KINDS = {
    "the ops": re.compile(r"custom_pypto::"),
    "projections": re.compile(r"linear|mm($|_)|matmul|gemm"),
    "other ops of torch and vLLM": re.compile(""),
}


class Profiled:
    """Mixed into vLLM's worker by ``--worker-extension-cls``."""

    def start_profiling(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.profiler = profile(activities=[ProfilerActivity.CPU])
        self.profiler.start()

    def stop_profiling(self) -> dict[str, float]:
        """Seconds by the name of an op, without those of the ops inside it."""
        self.profiler.stop()
        return {e.key: e.self_cpu_time_total / 1e6 for e in self.profiler.key_averages()}


def shares(llm, prompts: list, tokens: int) -> list[str]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.collective_rpc("start_profiling")
    start = time.monotonic()
    llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.monotonic() - start
    (of_ops,) = llm.collective_rpc("stop_profiling")
    spent = dict.fromkeys(KINDS, 0.0)
    for name, own in of_ops.items():
        spent[next(kind for kind, pattern in KINDS.items() if pattern.search(name))] += own
    spent["outside of ops: Python, engine, waiting"] = seconds - sum(spent.values())
    return [f"{seconds:.2f}", *(f"{value / seconds:.0%}" for value in spent.values())]


def main(write: bool) -> int:
    from vllm import LLM

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # of the worker
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=REQUESTS * LENGTH,
            worker_extension_cls="serving_step.Profiled",
        )
        prompts = [
            {"prompt_token_ids": [(i * i + n) % 1000 for i in range(LENGTH)]}
            for n in range(REQUESTS)
        ]
        rows = [
            [f"prefill of {REQUESTS} x {LENGTH} tokens", *shares(llm, prompts, 1)],
            # of the prompts all but a block is in the prefix cache now
            [f"{STEPS} steps of {REQUESTS} tokens", *shares(llm, prompts, STEPS)],
        ]
    header = ["", "s", *KINDS, "outside of ops: Python, engine, waiting"]
    text = table(header, rows)
    print(f"{machine()}\n\n{text}")
    if write:
        command = "bash run.sh bench serving --step --write"
        write_section("Serving: where a step's time goes", command, text)
    return 0
