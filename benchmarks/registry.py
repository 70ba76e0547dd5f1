"""Every benchmark by name. Imports the standard library only: the runner lists names with it."""

import os
from dataclasses import dataclass, field

CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Entry:
    module: str  # whose BENCHMARKS has it under its name
    about: str
    options: dict = field(default_factory=dict)  # and their defaults
    # "models", "sim" (PyPTO), "torch_npu" (the host simulator of CANN), "llama" (gguf), "serving"
    # (vLLM's environment); without names, run.sh runs those of "models"
    needs: str = "models"
    # of its section in RESULTS.md: the figures that are shown, of several runs side by side; the
    # part of a case whose values are columns; what readers must know
    shown: tuple[str, ...] = ()
    across: str = ""
    note: str = ""


# of upstream's prompts
SCORES = "Not run: upstream's prompts of which the scores in float32 do not fit into memory."
BENCHMARKS = {
    "ops": Entry(
        "bench_ops",
        "the ops compared with torch's time for their operations and bytes",
        dict(threads=1, repeats=15),
        shown=("ms", "limit / time"),
        note="Right after a matmul, with cold caches. The limit: that matmul's time for as many "
        "operations, and torch's for reading the keys or the selected rows.",
    ),
    "parts": Entry("bench_ops", "what short calls spend outside of arithmetic", dict(repeats=15)),
    "int8_ops": Entry(
        "bench_ops",
        "int8 rows, compared with the bfloat16 op",
        dict(repeats=15),
        shown=("ms in int8", "speedup"),
    ),
    "contexts": Entry(
        "bench_contexts",
        "the indexer of one token, compared with reading its keys",
        dict(threads=1, repeats=9),
        shown=("ms", "ms of a sum", "ratio"),
        note="64 heads of 128 dims, K 2048. The sum reads as many bytes of floats.",
    ),
    "gradients": Entry(
        "bench_gradients",
        "gradients, compared with the forward or torch",
        dict(repeats=5),
        shown=("ms", "ratio", "compared with"),
    ),
    "weights": Entry(
        "bench_weights",
        "linear layers of stored weights, compared with torch's",
        dict(repeats=7),
        shown=(
            "1 tokens, ms",
            "16 tokens, ms",
            "2048 tokens, ms",
            "of the read bandwidth, 1 token",
            "error, 1 token, %",
        ),
        across="format",
        note="A weight of [4096, 7168]. Errors are of products of normal random numbers, without "
        "those of the format.",
    ),
    "layer_weights": Entry(
        "bench_weights",
        "a layer of DeepSeek-V3.2 in each format of weights",
        dict(repeats=7, tokens=2048),
        shown=("GB", "token with experts, ms", "attention, 4K, ms", "attention, prompt, s"),
        across="weights",
        note="With 8 experts. Plain: torch's in bfloat16.",
    ),
    "rows": Entry(
        "bench_rows",
        "a layer of DeepSeek-V3.2 with 256 experts, for few tokens at once",
        dict(threads=1, repeats=9),
        note="Tokens of one sequence, as where drafts are checked, or of several. Experts of a "
        "router with random weights. Drafts pay from that acceptance of the first one on, with an "
        "MTP layer as large as one of 61.",
    ),
    "drafts": Entry(
        "bench_rows",
        "texts of the lookup checkpoints with the drafts of their MTP layers, compared with none",
        dict(threads=1, repeats=5),
        note="In float32, the same texts with each number of drafts. Accepted: of the drafts made "
        "at a place of a step. Forwards, time and tokens: behind the first token. A third of the "
        "tokens are given questions, which no draft foresees. A large model gains otherwise. "
        "[Page](../docs/drafts.md).",
    ),
    "training": Entry(
        "bench_training",
        "a training step of an attention layer, compared with upstream's",
        dict(tokens=32768, plot=False),
        note="16 heads. [Picture](plots/training.png).",
    ),
    "peers": Entry(
        "bench_peers",
        "the ops compared with eager and compiled torch",
        dict(repeats=15),
        shown=("ms", "eager / ours", "inductor / ours"),
    ),
    "llama": Entry(
        "bench_llama",
        "a layer compared with ik_llama.cpp and transformers",
        dict(llama="", threads=1, repeats=5),
        "llama",
        shown=("custom_pypto", "ik_llama.cpp", "transformers", "GB/s"),
        across="ms of",
        note="A model of one layer with random weights, embedding and head of 256 tokens; of "
        "DeepSeek-V4-Flash two, each with 6 of 32 experts, the others with 8 of 32. Weights: ours, "
        "theirs. Caches in bfloat16 (theirs: F16). By the clock; 4 at once: a token and its draft. "
        "GB/s: that a sum reads, in between. "
        "The logits of both sides agreed before.",
    ),
    "model": Entry(
        "bench_model",
        "a small model compared with upstream transformers",
        dict(threads=CORES, repeats=7, dtype="float32"),
        shown=("ms", "ms upstream", "peak MiB", "peak MiB upstream"),
        across="context",
        note=f"A decoded token, or a whole prompt. {SCORES}",
    ),
    "layer": Entry(
        "bench_model",
        "an attention layer of DeepSeek-V3.2 compared with upstream",
        dict(repeats=7, plot=False),
        shown=("ms", "ms upstream", "peak MiB", "peak MiB upstream"),
        across="context",
        note=f"bfloat16, 1 thread. {SCORES} User CPU time: [page_faults.md](page_faults.md).",
    ),
    "step": Entry("bench_step", "Python's part of a decoded token", dict(repeats=100)),
    "fixed": Entry(
        "bench_step",
        "what a small decoder layer costs",
        dict(repeats=40),
        shown=("median µs", "least µs", "dispatcher calls"),
        across="model",
        note="CPU time of a decode step of DeepSeek-V3.2 with hidden size 64, 16 layers and 128 "
        "cached tokens in bfloat16, divided by its layers.",
    ),
    "sharing": Entry(
        "bench_sharing",
        "layers that share selections, compared with an indexer in each",
        dict(repeats=7),
        shown=("token, ms", "speedup", "prompt tokens per second", "speedup of a prompt"),
        across="indexers",
        note="Four dense layers of DeepSeek-V3.2, without a head of full size; of a prompt 256 "
        "tokens, behind as many as the context has. [Page](../docs/shared_selections.md).",
    ),
    "v4": Entry(
        "bench_v4",
        "attention layers of DeepSeek-V4 compared with upstream",
        dict(repeats=5),
        shown=("ms", "ms upstream", "peak MiB", "peak MiB upstream"),
        across="context",
        note=f"DeepSeek-V4-Flash in bfloat16, user CPU time. {SCORES}",
    ),
    "loading": Entry(
        "bench_loading", "models.load, compared with safetensors", dict(threads=2, repeats=3)
    ),
    "streaming": Entry(
        "bench_streaming",
        "a model whose experts stay in its files, compared with disk and memory",
        dict(threads=1, repeats=5),
        needs="disk",
        note="DeepSeek-V3.2's widths in fp8, five layers of 40 experts, 9 GB of random files.",
    ),
    "ranks": Entry(
        "bench_ranks",
        "a prompt over ranks",
        dict(ranks=2, tokens=16384, repeats=3),
        note="Two layers, a thread for each rank.",
    ),
    "npu": Entry(
        "bench_npu",
        "the NPU kernels in PyPTO's cost model",
        dict(trace="", plot=False),
        "sim",
        shown=("estimate µs", "bytes µs", "FLOP µs"),
        note="Estimates for a simulated Atlas A2/A3, no device times: no NPU has run the kernels. "
        "bfloat16, 128 heads where none are named, K 2048. The model counts gathers and top-k near "
        "zero, gives every core its own memory bandwidth, and a task its full tile. Sinks, "
        "cmp_ratio: layers of DeepSeek-V4. bytes µs: what must move, over 1.42 TB/s; FLOP µs: what "
        "must be computed, over 364 TFLOP/s. "
        "[Picture](plots/npu_model.png).",
    ),
    "launch": Entry(
        "bench_launch",
        "host time of eager calls up to a launch",
        dict(repeats=15),
        "torch_npu",
        note="On the host simulator of CANN.",
    ),
    "serving": Entry(
        "bench_serving",
        "requests per second of vLLM on the ops",
        dict(rounds=3, llama_server="", python=""),
        "serving",
        note="200 requests, 32 at a time.",
    ),
    "recording": Entry(
        "bench_recording",
        "requests to vLLM whose replies have a record, compared with those without",
        dict(rounds=7),
        "serving",
        shown=("s", "s with a record", "ratio", "MB of the record"),
        note="Four layers with random weights, prompts of 2048 tokens, 64 more behind a cached "
        "prefix, answers of 32. [Page](../docs/serving.md#selections-for-a-trainer).",
    ),
    "experts": Entry(
        "bench_experts",
        "a layer of experts, compared with SGLang's kernels in vLLM's wheel",
        dict(repeats=7),
        "serving",
        shown=("ms", "SGLang, ms", "ratio", "error", "SGLang's error"),
        note="One thread. SGLang's rows of x are rounded to int8 where the weight is.",
    ),
    "kt": Entry(
        "bench_kt",
        "a layer of experts, compared with kt-kernel's kernels",
        dict(repeats=3),
        shown=("ms", "kt-kernel, ms", "ratio", "error", "kt-kernel's error"),
        note="One thread. kt-kernel's rows of x are rounded to int8 where the weight is.",
    ),
}
