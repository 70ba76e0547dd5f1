"""Training on the ops: which forwards do, and what their layers attend to.

No row outlives a call of its layer, since activation checkpointing calls layers again in the
backward. The ops see the tokens of a batch laid end to end as sequences: a row of the batch is one
sequence, more if it is packed, and its padding on the left is one too. Padding on the right ends
its sequence, where no token before it sees it.

Shapes: B batch, S tokens, T = B * S.
"""

import logging
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from transformers.masking_utils import find_packed_sequence_indices

from . import masks
from .cache import Step, Tokens
from .cache.sequence import Sequences
from .indexer_loss import IndexerLoss
from .masks import Request
from .memory import has_numbers, is_transformed
from .patched import checkpoints, device_of, dropout_of
from .training_rows import REENTRANT, TrainingRows

logger = logging.getLogger("custom_pypto")

Training = Literal["auto", "ops", "upstream"]
TRAINING = get_args(Training)
# Limits on the bytes of a layer's scores. From the first on, upstream's backward needs too much
# memory. Below the second, the ops save nothing, so upstream runs.
UPSTREAM_SCORES, FEW_SCORES = 2**30, 2**20
# tokens whose indices of all keys exist at once: 64 MiB for 131072 keys
DENSE_TOKENS = 128


def step_of(
    model,
    by_layer: dict[int, nn.Module],
    request: Request,
    loss: IndexerLoss | None = None,
    mtp_loss: object | None = None,
) -> Step | None:
    """The step of a training forward; None: it runs the upstream path.

    Args:
        by_layer: the patched attentions.
        loss: of the indexers, if they have one.
        mtp_loss: of the MTP layer, which runs on the ops alone.
    Raises:
        ValueError: ``training="ops"`` and an argument that the ops cannot honour.
        TypeError: ``training="ops"`` and a projection or indexer with additions that they bypass.
    """
    option = model._custom_pypto.training if mtp_loss is None else "ops"
    if option == "upstream":
        return None
    attentions = list(by_layer.values())
    if checkpoints(model) and torch.is_grad_enabled():
        options = getattr(model._gradient_checkpointing_func, "keywords", {})
        if options.get("use_reentrant") and any(each.shares_latents for each in attentions):
            raise ValueError(f"patched model: {REENTRANT}")
    try:
        device = device_of(model, by_layer)
        attentions[0].check(by_layer)
    except (TypeError, ValueError) as error:  # of modules that the ops would bypass
        if option == "ops":
            raise
        problem = str(error)
    else:
        problem = obstacle(option, by_layer, device, request)
    if problem and option == "auto":
        tell_once(model, problem)
        return None
    if problem:
        other = 'training="auto"' if mtp_loss is None else "mtp_loss_coefficient=0"
        raise ValueError(
            f"patched model: {problem}; call models.use_custom_pypto(model, {other}) for the "
            "upstream path where the ops cannot run"
        )
    if model._custom_pypto.indexer_loss.kind and loss is None and torch.is_grad_enabled():
        raise ValueError(
            "patched model: the whole model must be called for indexer_loss, got a call of "
            f"{type(model).__name__} or of a forward() that bypasses hooks; call the model that "
            "models.use_custom_pypto returned"
        )
    if option == "auto" and (
        device.type != "cpu"  # no NPU has run the programs of the gradients
        or torch.compiler.is_compiling()
        or upstream_is_cheaper(attentions, request.batch, request.tokens, model.dtype.itemsize)
    ):
        return None
    step = place(model, by_layer, device, request, loss)
    step.rows.mtp_loss = mtp_loss
    return step


def tell_once(model, problem: str) -> None:
    """Logs, once for a model, why it trains on the upstream path, which takes more memory."""
    told = model._custom_pypto.told
    if not torch.compiler.is_compiling() and problem not in told:
        told.add(problem)
        logger.warning("training on the upstream path: %s", problem)


def obstacle(option: str, by_layer: dict, device: torch.device, request: Request) -> str | None:
    """Why a training forward with this ``option`` cannot run on the ops; None if it can."""
    attention = next(iter(by_layer.values()))
    if not (torch.compiler.is_compiling() or has_numbers(torch.empty(0, device=device))):
        return "tensors must have numbers to train on the ops, got some on meta or fake ones"
    if is_transformed():
        return "transforms of torch.func have no rules for training on the ops, got one around"
    if dropout := dropout_of(by_layer):
        return f"attention_dropout must be 0 to train on the ops (they have none), got {dropout}"
    if request.output_attentions:
        return "output_attentions must be False (the ops never form the attention matrix), got True"
    if request.use_cache:
        return "use_cache must be False to train on the ops (no row outlives its layer), got True"
    if attention.counting.groups and masks.is_packed(request):
        return (
            "position_ids must not restart (upstream counts groups of tokens across sequences "
            "packed into a row), got sequences packed into a row"
        )
    if problem := masks.problem_of_training(request.mask, request.batch, request.tokens):
        return problem
    if attention.counting.positions:
        shape = request.batch, request.tokens
        real = torch.ones(shape, dtype=torch.bool) if request.mask is None else request.mask.bool()
        if option == "auto" and not real[:, 0].all():
            return (
                "attention_mask must have no padding on the left, which upstream counts as tokens"
            )
        return masks.problem_of_positions(request.positions, count(placed(real)), real)
    return None


@torch.compiler.disable(reason="the sequences of a batch are read from its mask and positions")
def place(
    model, by_layer: dict, device: torch.device, request: Request, loss: IndexerLoss | None
) -> Step:
    """The sequences of a batch, and the parts of them that latent attention takes at once."""
    batch, tokens, positions = request.batch, request.tokens, request.positions
    if positions is None:
        positions = torch.arange(tokens, device=device)
    positions = positions.expand(batch, -1)
    real = torch.ones(batch, tokens, dtype=torch.bool, device=device)
    starts = torch.zeros_like(real)
    starts[:, 0] = True
    if request.mask is not None:
        real = request.mask.to(device).bool()
        starts |= real & ~nn.functional.pad(real, (1, 0))[:, :-1]
    valid = placed(real)
    within = count(valid)
    if masks.is_packed(request):
        segment = find_packed_sequence_indices(positions)
        starts[:, 1:] |= segment.diff(dim=1) > 0
        within = within - torch.where(starts, within, 0).cummax(1).values
    ends = [*starts.flatten().nonzero().flatten().tolist()[1:], batch * tokens]
    dense = model._custom_pypto.indexer_loss.kind == "dense"
    size = DENSE_TOKENS if dense else next(iter(by_layer.values())).slice_tokens
    learning = set() if loss is None else {i for i, each in by_layer.items() if each.selects}
    rows = TrainingRows(model, device, real, ends, size, loss, learning)
    sequences = Sequences(batch, None, device)
    bounds = sequences.lengths, valid.sum(1).int()
    own = Tokens(*bounds, valid, within, positions, slice(0, tokens))
    return Step(rows, sequences, own, own, None)


def placed(real: Tensor) -> Tensor:
    """``[B, S]`` bool, False for padding on the left."""
    return real.cumsum(1) > 0


def count(placed: Tensor) -> Tensor:
    """``[B, S]`` positions from the first real token on."""
    return placed.cumsum(1) - 1


def upstream_is_cheaper(
    attentions: Iterable[nn.Module], batch: int, tokens: int, itemsize: int
) -> bool:
    """Whether upstream trains with fewer operations than the ops and keeps little memory.

    A backward takes 2 times the operations of its forward upstream, 2.53 times on the ops. Upstream
    attends to all S^2 pairs of tokens, 320 multiplications per pair and head with DeepSeek-V3.2's
    dims, the ops to the selected pairs, 1088 each: equal at about 7000 tokens. Upstream keeps
    the scores of all heads and pairs for the backward.
    """
    attentions = list(attentions)
    scores = batch * max(attention.num_heads for attention in attentions) * tokens**2 * itemsize
    if scores >= UPSTREAM_SCORES or scores < FEW_SCORES:
        return scores < UPSTREAM_SCORES
    dense = sparse = 0
    for attention in attentions:
        upstream, ops = attention.multiplications(tokens)
        dense += 3 * attention.num_heads * upstream
        sparse += 3.53 * attention.num_heads * ops
    return dense < sparse
