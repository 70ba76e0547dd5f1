"""What a step of vLLM on the ops spends its time on: the ops, projections, the rest.

Two dense layers of DeepSeek-V3.2's widths with random weights, and the checkpoint
examples/checkpoints/lookup, both in bfloat16 on one thread. A step with a prompt, then steps that
give each of several requests a token; their prompts are in the prefix cache. Seconds are of runs
without a profiler, shares are the time of an op's own in runs with torch.profiler; engine,
scheduler and model runner are in the same process, and are what no op spends.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measure import Benchmark, in_own_process
from transformers import DeepseekV32Config

LOOKUP = Path(__file__).resolve().parents[1] / "examples" / "checkpoints" / "lookup"
STEPS = 32
# all other sizes are those of DeepSeek-V3.2, transformers' own defaults
WIDE = DeepseekV32Config(
    architectures=["DeepseekV32ForCausalLM"],
    dtype="bfloat16",
    vocab_size=1024,
    num_hidden_layers=2,
    first_k_dense_replace=2,
    max_position_embeddings=8192,
)
# name of a row: a config or the checkpoint, tokens of a prompt, requests
MODELS = {"two layers of DeepSeek-V3.2": (WIDE, 4096, 8), "lookup": (None, 1600, 32)}
KINDS = {
    "the ops": re.compile("custom_pypto::"),
    "projections": re.compile("linear|mm($|_)|matmul|gemm"),
    "other ops of torch and vLLM": re.compile(""),
}
REST = "outside of ops: vLLM's Python"


def measure(name: str) -> list[list[str]]:
    """The rows of a model, in a process of its own."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in this process
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM

    config, length, requests = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        if config:
            config.save_pretrained(folder)
        llm = LLM(
            model=folder if config else str(LOOKUP),
            load_format="dummy" if config else "auto",
            skip_tokenizer_init=True,
            max_model_len=2 * length,
            max_num_seqs=requests,
            max_num_batched_tokens=length,
        )
    vocabulary = llm.model_config.get_vocab_size()
    first, second = ([(i * i + n) % (vocabulary - 10) + 5 for i in range(length)] for n in range(2))
    generate(llm, [first[:64]] * requests, 4)  # warm up
    rows = [row(f"{name}: a prompt of {length}", llm, [first], [second], 1)]
    prompts = [[*first, 5 + n] for n in range(requests)]
    generate(llm, prompts, 1)  # into the prefix cache
    title = f"{name}: {STEPS} steps of {requests} requests"
    return [*rows, row(title, llm, prompts, prompts, STEPS)]


def generate(llm, prompts: list[list[int]], tokens: int) -> float:
    """Seconds."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.monotonic()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return time.monotonic() - start


def row(title: str, llm, prompts: list, profiled_prompts: list, tokens: int) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    seconds = generate(llm, prompts, tokens)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        generate(llm, profiled_prompts, tokens)
    spent = dict.fromkeys(KINDS, 0.0)
    for event in profiler.key_averages():
        kind = next(kind for kind, pattern in KINDS.items() if pattern.search(event.key))
        spent[kind] += event.self_cpu_time_total / 1e6
    rest = seconds - sum(spent.values())
    return [title, f"{seconds:.2f}", *(f"{x / seconds:.0%}" for x in (*spent.values(), rest))]


def rows() -> Iterator[list[str]]:
    for name in MODELS:
        yield from in_own_process(measure, name)


BENCHMARKS = {
    "serving_step": Benchmark(
        "Serving: where a step's time goes", ["", "s", *KINDS, REST], rows, of_kernels=False
    )
}
