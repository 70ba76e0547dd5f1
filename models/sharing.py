"""How the ranks of torch's process group share a model: by transformers' plans, a process a device.

Tensor parallelism shards attention heads and the widths of MLPs and experts. Expert parallelism
gives each rank whole experts; without tensor parallelism it leaves the layers else as they are.
Both share embedding and head by the vocabulary.
"""

import os

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

import custom_pypto
from custom_pypto.requirements import TRANSFORMERS

from .patched import text_model
from .weights.modules import EXPERT_WEIGHTS, SCALE, stored_parameters

# query heads that npu_sparse_flash_attention_pto takes on an NPU; on CPU it takes any number
NPU_HEADS = 128
#: styles of transformers' plans that leave each rank a part of a parameter
SHARDED = {"colwise", "rowwise", "packed_colwise", "colwise_gather_output", "embedding_rowwise"}
SHARDED |= {"grouped_gemm"}
LOAD_ALIKE = "load the same checkpoint with the same arguments and versions on all ranks"
SAMPLED = 1000  # values of a tensor that ranks compare


def check_sharing(config, device, heads: bool, experts: bool) -> int:
    """The number of ranks that share a model with ``config``.

    Args:
        device: the argument of ``load``.
        heads: ``tensor_parallel``.
        experts: ``expert_parallel``.
    Raises:
        RuntimeError: there is no process group.
        ValueError: unsupported model or number of ranks, or ``device`` is not None.
    """
    option = "tensor_parallel" if heads else "expert_parallel"
    if heads:
        check_heads(config)
    if experts and not config.base_model_ep_plan:
        raise ValueError(
            f"load: expert_parallel must be False for {config.model_type}: transformers has no "
            "plan that gives ranks whole experts of it"
        )
    if device is not None:
        raise ValueError(
            f"load: device must be None with {option} (each rank uses its own), got {device}"
        )
    check_process_group("load", option)
    kind = own_device().type
    ranks, possible = dist.get_world_size(), possible_sizes(config, kind, heads, experts)
    if ranks not in possible:
        shared = [f"{' and '.join(map(str, heads_of(config)))} heads"] * heads
        if experts:
            shared.append(f"{config.n_routed_experts} experts")
        else:
            shared.append(f"experts of width {config.moe_intermediate_size}")
        raise ValueError(
            f"load: {option} must have {', '.join(map(str, possible))} ranks for "
            f"{' and '.join(shared)} on {kind}, got {ranks}; set torchrun's --nproc-per-node"
        )
    return ranks


def check_process_group(caller: str, option: str) -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            f"{caller}: {option} needs a process group: start the program with torchrun and call "
            "torch.distributed.init_process_group() first"
        )


def check_heads(config) -> None:
    """Rejects a model whose attention heads the ranks cannot share.

    Raises:
        ValueError: names the model and the remedy.
    """
    plan = config.base_model_tp_plan
    if not any(".self_attn." in name for name in plan):
        raise ValueError(
            f"load: tensor_parallel must be False for {config.model_type}: transformers shards no "
            "attention heads of it; pass expert_parallel=True"
        )
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(
            f"load: tensor_parallel must be False for {config.model_type}: transformers shards the "
            "output projection of its linear attention, and not its heads; pass "
            "expert_parallel=True"
        )
    sharded_sinks = any(name.endswith(".self_attn.sinks") for name in plan)
    if sharded_sinks and not any(name.endswith(".self_attn") for name in plan):
        raise ValueError(
            f"load: tensor_parallel must be False for {config.model_type} with transformers "
            f"{transformers.__version__}, which gives the ops no rank's share of the sinks; "
            f"install transformers {TRANSFORMERS[-1]}, or pass expert_parallel=True alone"
        )


def own_device() -> torch.device:
    """The device on which transformers puts this rank's shard."""
    # ignores the accelerator of a torch build if this machine lacks it
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", 0)))


def heads_of(config) -> list[int]:
    """The different numbers of attention heads of the layers, ascending."""
    return sorted({layer.num_attention_heads for layer in config.per_layer_config})


def possible_sizes(config, device: str, heads: bool = True, experts: bool = False) -> list[int]:
    """Numbers of ranks that leave each rank whole heads, no more than the op supports, and as many
    experts, or as wide ones, as the others."""
    counts, fewest = heads_of(config) if heads else [], 1
    if heads and device == "npu":
        fewest = -(-counts[-1] // NPU_HEADS)
    if any(kind != "dense" for kind in config.mlp_layer_types):
        counts = [*counts, config.n_routed_experts if experts else config.moe_intermediate_size]
    most = min(counts, default=1)
    return [
        ranks for ranks in range(fewest, most + 1) if all(count % ranks == 0 for count in counts)
    ]


def share_experts_alone(config) -> None:
    """Takes the rules of the layers but those of experts from the plan for tensor parallelism."""
    plan = config.base_model_tp_plan
    config.base_model_tp_plan = {rule: plan[rule] for rule in plan if ".experts" in rule}


def plan_of(model: nn.Module, ranks: int, experts: bool) -> DistributedConfig:
    """The sharing of a model like ``model`` by this many ranks.

    Args:
        model: with its stored weights.
        experts: each rank has whole ones.
    """
    if not experts:
        return DistributedConfig(tp_size=ranks)
    stored = set(map(replace_layer_number_by_wildcard, stored_parameters(model)))
    rules = {rule: style for rule, style in model.ep_plan.items() if rule.endswith(EXPERT_WEIGHTS)}
    scales = {rule + SCALE: style for rule, style in rules.items() if rule + SCALE in stored}
    return DistributedConfig(tp_size=ranks, ep_size=ranks, ep_plan=scales)


def check_agreement(caller: str, facts: dict[str, object], remedy: str) -> None:
    """Rejects, on all ranks, ``facts`` that differ between them: by name, with their values.

    Raises:
        ConnectionError: a rank has ended, or does not answer in the time of the process group.
        ValueError: names the first fact that differs.
    """
    of_rank: list[dict] = [{} for _ in range(dist.get_world_size())]
    try:
        dist.all_gather_object(of_rank, facts)
    except RuntimeError as error:
        raise ConnectionError(
            f"{caller}: a rank that rank {dist.get_rank()} waits for has ended or hangs; its own "
            "error says why"
        ) from error
    for name in dict.fromkeys(name for found in of_rank for name in found):
        values = [found.get(name) for found in of_rank]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise ValueError(
                f"{caller}: {name} must be equal on all ranks, got {values[0]!r} on rank 0 and "
                f"{values[other]!r} on rank {other}; {remedy}"
            )


def facts_of_files(config, tensors: dict) -> dict[str, object]:
    """What ranks read, by ``config.json`` and the headers of the files, and with what.

    Args:
        tensors: dtype and shape on disk, after the file, by name.
    """
    versions = {"torch": torch, "transformers": transformers, "custom_pypto": custom_pypto}
    return (
        {f"the version of {name}": module.__version__ for name, module in versions.items()}
        | facts_of_config(config, "config.json")
        | {name: f"{dtype} {shape}" for name, (_, dtype, shape) in tensors.items()}
    )


def facts_of_config(config, title: str) -> dict[str, object]:
    """The values of a config, but those that tell where it is from.

    Args:
        title: what messages call it.
    """
    values = config.to_dict().items()
    return {f"{x} of {title}": y for x, y in values if x not in ("_name_or_path", "_commit_hash")}


def is_shared(model: nn.Module) -> bool:
    """Whether the ranks of the process group share the weights of ``model``."""
    return dist.is_initialized() and (model._tp_size or 1) == dist.get_world_size() > 1


def check_requests(model: nn.Module, generation_config, tokens: bool) -> None:
    """Rejects a ``generate()`` of ranks that share a model, or prompts, with other arguments: the
    ranks would go on with other tokens, or one would wait for those that have stopped.

    Args:
        tokens: they share prompts.
    Raises:
        ConnectionError: a rank has ended or hangs.
        ValueError: names the value.
    """
    if not (tokens or is_shared(model)):
        return
    facts = facts_of_config(generation_config, "generation_config")
    facts |= {f"{x} of use_custom_pypto": y for x, y in text_model(model)._custom_pypto.facts()}
    facts = {name: str(x) for name, x in facts.items() if not name.startswith("_")}
    if tokens:  # a forward compares the rest
        facts |= {"dtype of the model": str(model.dtype)}
        facts |= facts_of_weights(model.get_output_embeddings(), "the head's ")
    check_agreement("generate", facts, "ranks that share a model make the same calls")


def facts_of_weights(model: nn.Module, owner: str = "") -> dict[str, object]:
    """A checksum for each tensor that every rank has whole, of values from all parts of it.

    Args:
        owner: what messages put before the name of a tensor.
    """
    facts: dict[str, object] = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, DTensor):
            values = tensor.detach().flatten()
            sample = values[:: len(values) // SAMPLED + 1].clone().cpu().view(torch.uint8)
            places = torch.arange(1, len(sample) + 1)
            facts[f"a checksum of {owner}{name}"] = int((sample * places).sum())
    return facts


def part_of_rank(count: int) -> slice:
    """This rank's share of ``count`` experts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return slice(rank * count // ranks, (rank + 1) * count // ranks)


def shared_parameters(model: nn.Module, plan: DistributedConfig) -> set[str]:
    """Names of the parameters of which each rank has a part alone."""
    rules = dict(model.tp_plan)
    if plan.ep_size > 1:
        rules |= model.ep_plan | plan.ep_plan
    found = set()
    for name, _ in model.named_parameters():
        rule = replace_layer_number_by_wildcard(name)
        style = rules.get(rule, rules.get(rule.rpartition(".")[0]))
        if style in SHARDED:
            found.add(name)
    return found


def gather_sharded_state_dict_for_save(
    model: nn.Module, model_to_save: nn.Module, state: dict[str, torch.Tensor], *args, **kwargs
) -> dict[str, torch.Tensor]:
    """Of transformers' ``save_pretrained``, which finds tied tensors by their memory: their whole
    copies are tied, too, else it would write a tied head twice."""
    whole = type(model).gather_sharded_state_dict_for_save(
        model, model_to_save, state, *args, **kwargs
    )
    first: dict[tuple, str] = {}
    for name, tensor in state.items():
        if isinstance(tensor, DTensor) and name in whole:
            local = tensor.to_local()
            if local.numel():
                memory = local.data_ptr(), local.shape, local.stride()
                whole[name] = whole[first.setdefault(memory, name)]
    return whole
