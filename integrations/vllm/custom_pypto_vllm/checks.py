"""What the layer does not support, rejected when the model is built: later it would fail in the
middle of a request, or give wrong text without an error."""

from .config import FORMATS, compress_ratios, sharing

MAX_BLOCK_SIZE = 1024  # of the ops


def _reject(what: str) -> None:
    raise ValueError(f"custom_pypto_vllm: {what}")


def check(vllm_config, modules, non_causal: bool) -> None:
    """Rejects configurations and layers that are not those of DeepSeek-V3.2 or GLM-5.

    Raises:
        ValueError: with the setting, what is supported, and what came.
    """
    # not above: the platform imports this module before vLLM can import its models
    from vllm.model_executor.models.deepseek_v2 import Indexer

    check_weights(vllm_config.model_config)
    check_sharing(vllm_config)
    _check_quantized_linears(vllm_config.quant_config, modules)
    if vllm_config.model_config.quantization and vllm_config.compilation_config.mode:
        # Inductor fuses what chooses experts with what precedes the router, whose logits vLLM's
        # op writes into an argument: experts are chosen by memory that is not yet written
        _reject(
            "quantized weights must not be compiled: torch.compile of torch 2.13 gives wrong text; "
            "use --enforce-eager, or leave VLLM_USE_BREAKABLE_CUDAGRAPH unset"
        )
    _check_engine(vllm_config)
    if vllm_config.attention_config.hisparse_config is not None:
        _reject("hisparse_config must be unset: caches stay in the memory of the CPU")
    if non_causal:
        _reject("non-causal attention among the new tokens is not supported")
    other = modules.fused_qkv_a_proj is None or modules.g_proj is not None
    if other or not isinstance(modules.indexer, Indexer | None):
        _reject("the attention must be that of DeepSeek-V3.2 or GLM-5, got another one")
    _check_config(vllm_config.model_config.hf_config, modules.indexer_rotary_emb)
    if vllm_config.cache_config.cache_dtype in FORMATS:
        _check_format(vllm_config)


def reject_reload(model, packed: type) -> None:
    """Rejects new weights for a model of which vLLM keeps copies of the old ones.

    Args:
        packed: class of the methods that pack the weights of experts.
    Raises:
        ValueError: with the module and the remedy.
    """
    for name, module in model.named_modules():
        if isinstance(getattr(module, "quant_method", None), packed):
            what = f"the packed experts {name}"
        elif getattr(module, "learnable_sink", False):
            what = f"the sinks of {name}"
        else:
            continue
        _reject(
            f"reload_weights must not be called for this model: vLLM would keep {what} of the old "
            "weights; start a new engine, or serve quantized experts of a model without sinks"
        )


def check_weights(model_config) -> None:
    if model_config.quantization == "fp8":
        block = model_config.hf_config.quantization_config.get("weight_block_size")
        if block != [128, 128]:
            _reject(
                "weights in fp8 must be in blocks of 128 x 128, as DeepSeek publishes them, got "
                f"weight_block_size {block}; examples/convert_checkpoint.py SOURCE TARGET converts "
                "published ones to bfloat16"
            )


def check_sharing(vllm_config) -> None:
    """Rejects a layer that shares a selection which it would not get.

    Raises:
        TypeError, ValueError: names the key of config.json, or the stage of the pipeline.
    """
    config, parallel = vllm_config.model_config.hf_text_config, vllm_config.parallel_config
    keys = config.to_dict()
    sources, stages = sharing(keys), parallel.pipeline_parallel_size
    v32 = config.model_type in ("deepseek_v32", "glm_moe_dsa")
    asked = keys.get("index_topk_pattern") or (keys.get("index_topk_freq") or 1) != 1
    if v32 and keys.get("use_index_cache") is False and asked:
        _reject(
            "use_index_cache must not be false with index_topk_freq or index_topk_pattern, which "
            "vLLM heeds all the same; leave them out, or set it"
        )
    if not sources or stages == 1:
        return
    from vllm.distributed.utils import get_pp_indices

    for stage in range(stages):
        start, end = get_pp_indices(config.num_hidden_layers, stage, stages)
        if cut := [i for i, source in sources.items() if source < start <= i < end]:
            _reject(
                "a stage of a pipeline must have the layers whose selections its layers share, got "
                f"layers {cut} of stage {stage} without layer {sources[cut[0]]}; begin stages with "
                "layers that select, by VLLM_PP_LAYER_PARTITION, or use --tensor-parallel-size"
            )


def _check_quantized_linears(quantization, modules) -> None:
    """What vLLM does not reject, and then fails at while it loads."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
        CompressedTensorsW8A8Int8,
    )

    if not isinstance(quantization, CompressedTensorsConfig):
        return
    if isinstance(getattr(modules.kv_b_proj, "scheme", None), CompressedTensorsW8A8Int8):
        _reject(
            "kv_b_proj must not be quantized in W8A8: attention absorbs its weight; quantize the "
            'model with "re:.*kv_b_proj" in `ignore`'
        )
    if modules.indexer is None:
        return
    for name in ("wk", "weights_proj"):
        merged = modules.indexer.wk_weights_proj  # vLLM's, never quantized
        scheme = quantization.get_scheme_dict(merged, f"{modules.indexer.prefix}.{name}")
        if scheme is not None and scheme["weights"].type == "int":
            _reject(
                f"{name} of the indexer must not be quantized: vLLM merges wk and weights_proj "
                f'into a plain layer; quantize the model with "re:.*indexer.{name}" in `ignore`'
            )


def _check_format(vllm_config) -> None:
    # not above: without custom_pypto, register() says what to install
    from custom_pypto.rows import index_format, latent_format

    model, cache = vllm_config.model_config, vllm_config.cache_config
    word = cache.cache_dtype
    if skipped := cache.kv_cache_dtype_skip_layers:
        _reject(
            f"--kv-cache-dtype {word} is for all layers, got --kv-cache-dtype-skip-layers {skipped}"
        )
    for rows in (latent_format(FORMATS[word]), index_format(FORMATS[word])):
        if why := rows.lacking(model.hf_config, model.dtype):
            _reject(f"--kv-cache-dtype must be auto for {why}, got {word}")


def check_v4(vllm_config) -> None:
    """Rejects what the attention of DeepSeek-V4 does not support.

    Raises:
        ValueError: with the setting, what is supported, and what came.
    """
    config = vllm_config.model_config.hf_config
    cache = vllm_config.cache_config.cache_dtype
    if cache not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")):
        _reject(f"--kv-cache-dtype must be auto with DeepSeek-V4, got {cache}")
    if vllm_config.speculative_config and vllm_config.speculative_config.method != "ngram":
        _reject(
            "vLLM has no draft layers of DeepSeek-V4 for CPUs: speculative decoding must be "
            f"ngram, got {vllm_config.speculative_config.method}"
        )
    if vllm_config.kv_transfer_config is not None:
        _reject(
            "kv_transfer_config must be unset with DeepSeek-V4, whose windows and compressed rows "
            f"have blocks of their own, got {vllm_config.kv_transfer_config.kv_connector}"
        )
    if getattr(config, "vision_n_layers", 0):
        _reject("DeepSeek-V4 must be a model of text, got one with images")
    ratios = compress_ratios(config.to_dict())
    if other := set(ratios) - {0, 1, 4, 128}:
        _reject(f"compress_ratios must be of 0, 1, 4 and 128, got {sorted(other)}")
    _check_stages(ratios[: config.num_hidden_layers], vllm_config.parallel_config)
    check_sharing(vllm_config)
    _check_engine(vllm_config)
    _check_count(config.index_topk)


def check_hy_v4(vllm_config) -> None:
    """Rejects what the attention of Hy4 does not support.

    Raises:
        ValueError: with the setting, what is supported, and what came.
    """
    config, speculative = vllm_config.model_config.hf_config, vllm_config.speculative_config
    check_sharing(vllm_config)
    _check_engine(vllm_config)
    _check_count(config.index_topk)
    types = config.layer_types or ["full_attention"]
    if "full_attention" in types:
        _reject(
            "every layer of Hy4 must select its keys, with layer_types in config.json of "
            f"indexed_attention, got {types}"
        )
    if speculative and speculative.method != "ngram":
        _reject(f"speculative decoding of Hy4 must be ngram, got {speculative.method}")
    if (word := vllm_config.cache_config.cache_dtype) in FORMATS:
        _reject(f"--kv-cache-dtype must be auto with Hy4, whose softmax has sinks, got {word}")


def _check_stages(ratios: list[int], parallel) -> None:
    """vLLM fails at a stage of a pipeline without a layer of some kind of cache."""
    from vllm.distributed.utils import get_pp_indices

    stages = parallel.pipeline_parallel_size
    for stage in range(stages):
        start, end = get_pp_indices(len(ratios), stage, stages)
        if missing := set(ratios) - {0, 1} - set(ratios[start:end]):
            _reject(
                "every stage of a pipeline must have a layer of each of compress_ratios, got none "
                f"of {sorted(missing)} in layers {start} to {end - 1}; use another "
                "--pipeline-parallel-size, or VLLM_PP_LAYER_PARTITION"
            )


def check_block_size(size: int) -> None:
    if size % 16 or size > MAX_BLOCK_SIZE:
        _reject(f"--block-size must be a multiple of 16, at most {MAX_BLOCK_SIZE}, got {size}")


def _check_engine(vllm_config) -> None:
    check_block_size(vllm_config.cache_config.block_size)  # vLLM's own platform does not, with AMX
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            _reject(f"{name} must be 1, got {size}; use --tensor-parallel-size")
    if (size := parallel.pipeline_parallel_size) > 1 and not vllm_config.compilation_config.mode:
        # without compilation vLLM's CPU workers pass no hidden states to the next stage, and the
        # first request kills the engine
        _reject(
            f"pipeline_parallel_size must be 1 without compilation, got {size}; set "
            "VLLM_USE_BREAKABLE_CUDAGRAPH=0 without --enforce-eager and --enable-lora, or use "
            "--tensor-parallel-size"
        )


def _check_count(count: int) -> None:
    # not above: without custom_pypto, register() says what to install
    from custom_pypto.descriptions import sparse_count_problem

    if problem := sparse_count_problem(count):
        _reject(f"index_topk {problem}")


def _check_config(config, indexer_rope) -> None:
    _check_count(config.index_topk)
    if config.model_type != "glm_moe_dsa":
        return
    if indexer_rope is not None and indexer_rope.is_neox_style:
        _reject(
            'config.json of a GLM-5 must have "indexer_rope_interleave": true, which transformers '
            "drops when it saves; --hf-overrides '{\"indexer_rope_interleave\": true}' sets it"
        )
    types = getattr(config, "indexer_types", None) or []
    pattern = getattr(config, "index_topk_pattern", None)
    if "shared" in types and pattern is None and getattr(config, "index_topk_freq", 1) == 1:
        wanted = "".join("S" if kind == "shared" else "F" for kind in types)
        _reject(
            "config.json shares indices among layers by indexer_types, which vLLM does not read; "
            f'--hf-overrides \'{{"index_topk_pattern": "{wanted}"}}\' sets what it reads'
        )
