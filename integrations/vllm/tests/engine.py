"""Generates by vLLM in a process of its own: engine.py ARGUMENTS.json RESULT.json."""

import json
import sys
from pathlib import Path

import numpy as np

PROMPTS = [[(7 * i + 3 * n + i * i % 11) % 500 + 5 for i in range(n)] for n in (5, 40, 130, 300)]


def main(arguments: Path, result: Path) -> None:
    from custom_pypto_vllm import selections
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = json.loads(arguments.read_text())
    rounds, tokens = options.pop("rounds"), options.pop("tokens")
    adapters, selections_file = options.pop("adapters"), options.pop("selections", None)
    experts = options.pop("experts", False)
    llm = LLM(
        max_model_len=512,
        max_num_seqs=len(PROMPTS),
        skip_tokenizer_init=True,
        disable_log_stats=False,  # else no metrics
        **options,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1, detokenize=False
    )
    loras = [path and LoRARequest(path, n, path) for n, path in enumerate(adapters, start=1)]
    # each prompt to each adapter, side by side: a step computes several adapters
    requested = [({"prompt_token_ids": ids}, lora) for ids in PROMPTS for lora in loras]
    prompts, loras = zip(*requested, strict=True)
    if selections_file:
        selections.record(llm, experts)
    for _ in range(rounds):
        requests = llm.generate(prompts, sampling, use_tqdm=False, lora_request=loras)
    if selections_file:
        taken = [chosen for request in requests for chosen in selections.take(llm, request)]
        np.savez(selections_file, *(chosen.indexer_topk for chosen in taken))
        if experts:
            np.savez("experts.npz", *(chosen.routed_experts for chosen in taken))
    config = llm.llm_engine.vllm_config
    answers = [request.outputs[0] for request in requests]
    values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    result.write_text(
        json.dumps(
            dict(
                block_size=config.cache_config.block_size,
                blocks=config.cache_config.num_gpu_blocks,
                prefix_caching=config.cache_config.enable_prefix_caching,
                chunked_prefill=config.scheduler_config.enable_chunked_prefill,
                compilation=int(config.compilation_config.mode),
                cached=[request.num_cached_tokens for request in requests],
                metrics=values,
                tokens=[list(answer.token_ids) for answer in answers],
                logprobs=[
                    [
                        step[token].logprob
                        for step, token in zip(a.logprobs, a.token_ids, strict=True)
                    ]
                    for a in answers
                ],
            )
        )
    )


if __name__ == "__main__":  # vLLM's workers import this file again
    main(*map(Path, sys.argv[1:]))
