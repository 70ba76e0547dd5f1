"""Methods of vLLM's workers on CPUs: sampling of seeded requests, and new weights."""

import functools

import numpy as np
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

from ..checks import reject_reload
from ..config import is_sparse


def keep_generators(sample):
    """``sample_tokens``, which does not see the generators of requests whose token is thrown away.

    Behind a chunk that does not end a prompt, vLLM samples and then rewinds the request's generator
    by an offset, which generators of CPUs do not have: the engine dies. Hidden, they need no
    rewinding.
    """

    @functools.wraps(sample)
    def sample_tokens(self, *args, **options):
        generators = self.input_batch.generators
        thrown_away = self.discard_request_mask.np[: self.input_batch.num_reqs]
        hidden = {
            row: generators.pop(row)
            for row in np.flatnonzero(thrown_away).tolist()
            if row in generators
        }
        try:
            return sample(self, *args, **options)
        finally:
            generators.update(hidden)

    return sample_tokens


def checked(reload):
    """``reload_weights``, rejected where vLLM keeps copies of old weights and would answer with a
    mixture: of experts that are not quantized, which its kernel packs, and of Hy4's sinks, which
    its loader writes past the reload."""

    @functools.wraps(reload)
    def reload_weights(self, *args, **options):
        if is_sparse(self.model_config):
            reject_reload(self.model_runner.get_model(), UnquantizedFusedMoEMethod)
        return reload(self, *args, **options)

    return reload_weights
