"""Keywords of other loaders, above all transformers' ``from_pretrained``, that ``load`` has by
another name or not at all."""

from collections.abc import Iterable

_WEIGHTS = "pass weights='int8' or 'int4'"
_PARALLEL = "pass tensor_parallel=True or expert_parallel=True in each of several processes"

REMEDIES = {
    "torch_dtype": "pass dtype",
    "device_map": f"pass device, memory, or {_PARALLEL}",
    "offload_folder": "pass memory: experts then stay in the files of the checkpoint",
    "tp_plan": _PARALLEL,
    "attn_implementation": "omit it: attention runs on the ops, and on transformers' own after "
    "models.use_transformers(model)",
    "load_in_4bit": "pass weights='int4'",
    "load_in_8bit": "pass weights='int8'",
    "quantization_config": f"omit it, or {_WEIGHTS}",
    "low_cpu_mem_usage": "omit it: loading takes no more than the model and one file",
    "max_memory": "pass memory, in bytes or as '64GB'",
    "trust_remote_code": "omit it: the code of a checkpoint is never run",
    "use_safetensors": "omit it: nothing else is read",
    "token": "run hf auth login, or set HF_TOKEN",
    "cache_dir": "set HF_HOME",
    "local_files_only": "set HF_HUB_OFFLINE=1",
    "config": "omit it: it is the config.json of path",
}


def check_keywords(names: Iterable[str], others: Iterable[str]) -> None:
    """Rejects every keyword that is not among the ``names`` of ``load``.

    Raises:
        TypeError: names the keyword and the remedy.
    """
    for name in others:
        remedy = REMEDIES.get(name, f"its keywords are {', '.join(sorted(names))}")
        raise TypeError(f"load: {name} is no keyword of models.load; {remedy}")
