"""Weights that are reloaded into a running engine, by vLLM's ``reload_weights``."""

import functools


def reject_stale_copies() -> None:
    """Rejects ``reload_weights`` where vLLM keeps copies of old weights, and would answer with a
    mixture: of experts that are not quantized, which its kernel packs, and of Hy4's sinks, which
    its loader writes past the reload."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    # churn: a worker's method of that name, and the runner that has the model
    original = CPUWorker.reload_weights

    @functools.wraps(original)
    def reload_weights(self, *args, **options):
        from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

        from .checks import reject_reload
        from .platform import is_sparse

        if is_sparse(self.model_config):
            reject_reload(self.model_runner.get_model(), UnquantizedFusedMoEMethod)
        return original(self, *args, **options)

    CPUWorker.reload_weights = reload_weights
