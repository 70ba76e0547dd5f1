"""vLLM's CPU platform without the limits of its own, unused kernel of latent attention."""

from vllm.platforms import cpu_platform_plugin
from vllm.utils.import_utils import resolve_obj_by_qualname

from ..checks import check_block_size, check_sharing, check_weights
from ..config import is_sparse

BLOCK_SIZE = 64
V4_BLOCK_SIZE = 256  # the smallest with whole compressed rows in a block, and 64 that the ops read

CpuPlatform = resolve_obj_by_qualname(cpu_platform_plugin())


class SparseAttentionCpuPlatform(CpuPlatform):
    # churn: what vllm/platforms/cpu.py sets for latent attention without AMX
    @classmethod
    def check_and_update_config(cls, vllm_config):
        if not is_sparse(vllm_config.model_config):
            return super().check_and_update_config(vllm_config)
        check_weights(vllm_config.model_config)
        check_sharing(vllm_config)
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        block_size = cache.block_size if cache.user_specified_block_size else BLOCK_SIZE
        if vllm_config.model_config.hf_config.model_type == "deepseek_v4":
            block_size = V4_BLOCK_SIZE
        check_block_size(block_size)
        prefix_caching = cache.enable_prefix_caching
        chunked, tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        super().check_and_update_config(vllm_config)
        cache.block_size, cache.enable_prefix_caching = block_size, prefix_caching
        scheduler.enable_chunked_prefill = chunked
        scheduler.max_num_batched_tokens = tokens
