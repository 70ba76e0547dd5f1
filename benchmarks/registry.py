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


BENCHMARKS = {
    "ops": Entry("bench_ops", "the ops compared with torch.mm", dict(threads=1, repeats=15)),
    "parts": Entry("bench_ops", "what short calls spend outside of arithmetic", dict(repeats=15)),
    "int8_ops": Entry("bench_ops", "int8 rows, compared with the bfloat16 op", dict(repeats=15)),
    "gradients": Entry(
        "bench_gradients", "gradients, compared with the forward or torch.mm", dict(repeats=5)
    ),
    "weights": Entry(
        "bench_weights", "linear layers of stored weights, compared with torch's", dict(repeats=7)
    ),
    "layer_weights": Entry(
        "bench_weights",
        "a layer of DeepSeek-V3.2 in each format of weights",
        dict(repeats=7, tokens=2048),
    ),
    "training": Entry(
        "bench_training",
        "a training step of an attention layer, compared with upstream's",
        dict(tokens=32768, plot=False),
    ),
    "peers": Entry(
        "bench_peers", "the ops compared with eager and compiled torch", dict(repeats=15)
    ),
    "llama": Entry(
        "bench_llama",
        "a layer compared with ik_llama.cpp and transformers",
        dict(llama="", threads=1, repeats=5),
        "llama",
    ),
    "model": Entry(
        "bench_model",
        "a small model compared with upstream transformers",
        dict(threads=CORES, repeats=7, dtype="float32"),
    ),
    "layer": Entry(
        "bench_model",
        "an attention layer of DeepSeek-V3.2 compared with upstream",
        dict(repeats=7, plot=False),
    ),
    "step": Entry("bench_step", "Python's part of a decoded token", dict(repeats=100)),
    "fixed": Entry("bench_step", "what a small decoder layer costs", dict(repeats=40)),
    "v4": Entry(
        "bench_v4", "attention layers of DeepSeek-V4 compared with upstream", dict(repeats=5)
    ),
    "loading": Entry(
        "bench_loading", "models.load, compared with safetensors", dict(threads=2, repeats=3)
    ),
    "ranks": Entry("bench_ranks", "a prompt over ranks", dict(ranks=2, tokens=16384, repeats=3)),
    "npu": Entry(
        "bench_npu",
        "the NPU kernels in PyPTO's cost model",
        dict(trace="", plot=False),
        "sim",
    ),
    "launch": Entry(
        "bench_launch", "host time of eager calls up to a launch", dict(repeats=15), "torch_npu"
    ),
    "serving": Entry(
        "bench_serving",
        "requests per second of vLLM on the ops",
        dict(rounds=3, llama_server="", python=""),
        "serving",
    ),
}
