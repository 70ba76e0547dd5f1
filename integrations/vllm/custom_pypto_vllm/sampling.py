"""Seeded requests in chunks of a prompt, on CPUs."""

import functools

import numpy as np


def keep_generators() -> None:
    """Hides the generators of requests whose sampled token vLLM throws away.

    Behind a chunk that does not end a prompt, vLLM samples and then rewinds the request's generator
    by an offset, which generators of CPUs do not have: the engine dies. Hidden, they need no
    rewinding.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    # churn: the names of what sample_tokens reads of a runner
    original = CPUModelRunner.sample_tokens

    @functools.wraps(original)
    def sample_tokens(self, *args, **options):
        generators = self.input_batch.generators
        thrown_away = self.discard_request_mask.np[: self.input_batch.num_reqs]
        hidden = {
            row: generators.pop(row)
            for row in np.flatnonzero(thrown_away).tolist()
            if row in generators
        }
        try:
            return original(self, *args, **options)
        finally:
            generators.update(hidden)

    CPUModelRunner.sample_tokens = sample_tokens
