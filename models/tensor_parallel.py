"""Tensor parallelism by transformers' plan: one process per device.

Attention heads and the widths of MLPs and experts are sharded. Caches and indexers are replicated
on every rank, as in DeepSeek's implementation: all heads use the same indices, and the 576 values
per token that all heads read are too few to be worth an exchange.
"""

import os

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.distributed import DistributedConfig

from custom_pypto.requirements import TRANSFORMERS, switched_on

from .absorbed import first_derivative

# compare the indices of all ranks after every indexer, to find a rank with different results
CHECK_RANKS = switched_on("CUSTOM_PYPTO_CHECK_RANKS")
# query heads that npu_sparse_flash_attention_pto takes on an NPU; on CPU it takes any number
NPU_HEADS = 128


def sharing(config, device) -> DistributedConfig:
    """The sharding of a model with ``config`` across all ranks of the process group.

    Raises:
        RuntimeError: there is no process group.
        ValueError: unsupported model or number of ranks, or ``device`` is not None.
    """
    plan = config.base_model_tp_plan
    if not any(".self_attn." in name for name in plan):
        raise ValueError(
            f"load: tensor_parallel must be False for {config.model_type}: transformers shards no "
            "attention heads of it"
        )
    sharded_sinks = any(name.endswith(".self_attn.sinks") for name in plan)
    if sharded_sinks and not any(name.endswith(".self_attn") for name in plan):
        raise ValueError(
            f"load: tensor_parallel must be False for {config.model_type} with transformers "
            f"{transformers.__version__}, which gives the ops no rank's share of the sinks; "
            f"install transformers {TRANSFORMERS[-1]}"
        )
    if device is not None:
        raise ValueError(
            f"load: device must be None with tensor_parallel (each rank uses its own), got {device}"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            "load: tensor_parallel needs a process group: start the program with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    kind = own_device().type
    ranks, possible = dist.get_world_size(), possible_sizes(config, kind)
    if ranks not in possible:
        raise ValueError(
            f"load: tensor_parallel must have {', '.join(map(str, possible))} ranks for "
            f"{' and '.join(map(str, heads_of(config)))} heads and experts of width "
            f"{config.moe_intermediate_size} on {kind}, got {ranks}; set torchrun's "
            "--nproc-per-node"
        )
    return DistributedConfig(tp_size=ranks)


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


def possible_sizes(config, device: str) -> list[int]:
    """Numbers of ranks that leave each rank whole heads, no more than the op supports, and experts
    of equal width."""
    heads = heads_of(config)
    width = config.moe_intermediate_size if "sparse" in config.mlp_layer_types else 0
    fewest = -(-heads[-1] // NPU_HEADS) if device == "npu" else 1
    return [
        ranks
        for ranks in range(fewest, heads[0] + 1)
        if width % ranks == 0 and all(number % ranks == 0 for number in heads)
    ]


class ReadByHeads(torch.autograd.Function):
    """A tensor, equal on all ranks, that each reads for its own heads: the gradient is the sum of
    the ranks'."""

    @staticmethod
    def forward(ctx, x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @first_derivative
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.ranks)
        return gradient, None


def of_all_heads(x: Tensor, ranks: dist.ProcessGroup) -> Tensor:
    """``x [heads of this rank, ..]`` with the heads of all ranks."""
    of_rank = places(x, ranks)
    dist.all_gather(of_rank, x.contiguous(), group=ranks)
    return torch.cat(of_rank)


def at_rank(
    rank: int, of_heads: list[Tensor | None], ranks: dist.ProcessGroup
) -> list[Tensor | None] | None:
    """Tensors ``[T, heads of this rank, ..]`` with the heads of all ranks, on this ``rank`` of the
    group; None on the others."""
    here, gathered = ranks.rank() == rank, []
    for x in of_heads:
        of_rank = places(x, ranks) if here and x is not None else None
        if x is not None:
            dist.gather(x.contiguous(), of_rank, group=ranks, group_dst=rank)
        gathered.append(None if of_rank is None else torch.cat(of_rank, 1))
    return gathered if here else None


def places(x: Tensor, ranks: dist.ProcessGroup) -> list[Tensor]:
    """For the tensors of all ranks that are like ``x``."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(ranks.size())]


def check_indices(layer: int, indices: Tensor) -> None:
    """Raises on all ranks unless all selected the same positions in the same order."""
    of_rank = [torch.empty_like(indices) for _ in range(dist.get_world_size())]
    dist.all_gather(of_rank, indices)
    different = [rank for rank, other in enumerate(of_rank) if not torch.equal(other, of_rank[0])]
    if different:
        batch, token = (of_rank[different[0]] != of_rank[0]).nonzero()[0, :2].tolist()
        raise RuntimeError(
            f"npu_lightning_indexer_pto: the indices of layer {layer} must be equal on all "
            f"ranks, got differences between rank 0 and rank {', '.join(map(str, different))}, "
            f"first for token {token} of sequence {batch}; load the same checkpoint on all ranks, "
            "and do not mix machines or libraries that round differently"
        )
