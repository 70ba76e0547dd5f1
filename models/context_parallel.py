"""Tokens over ranks: each takes its tokens of a prompt through all layers, every rank writes the
cache rows of all tokens, and so the caches end equal and whole.

In training the rows of a layer's call are gathered alike, and each rank gets the sum of all ranks'
gradients of its own. The hidden states at the end, too: every rank computes the same loss, so that
the gradients of its layers are those of its tokens, times the number of ranks. Their mean over the
ranks, which DistributedDataParallel and fully_shard take, is the gradient.

In every layer the ranks send each other the latent, the RoPE key and the index key of their tokens,
before they are written. :mod:`.pieces` says which tokens a rank takes.
"""

import torch
import torch.distributed as dist

from . import calls
from .cache import Step
from .cache.saved import checksum
from .latent_attention import LatentAttention
from .patched import patched_attentions
from .pieces import Pieces
from .projection import is_sharded
from .sharing import (
    check_agreement,
    check_process_group,
    facts_of_config,
    facts_of_weights,
)
from .training_rows import TrainingRows

# of a prompt over ranks; fewer are not worth the exchange
FEWEST_SHARED = 32
SAME_MODEL = "with context_parallel all ranks have the same model, options and format of the cache"


@torch.compiler.disable(reason="a prompt over ranks is no graph; compile steps of a token")
def share(model, step: Step, kwargs: dict) -> tuple[Step, dict]:
    """The part of this rank in a step, and in the arguments of a forward; all of both if the prompt
    is short.

    Raises:
        ConnectionError: a rank has ended or hangs.
        ValueError: the ranks have other tokens, or caches of other lengths; or all hidden states
            are requested.
    """
    whole, ranks = step.whole, dist.get_world_size()
    if whole.count() < max(FEWEST_SHARED, 2 * ranks):
        return step, kwargs
    for name in ("output_hidden_states", "output_router_logits"):
        if kwargs.get(name, getattr(model.config, name, False)):
            raise ValueError(
                f"patched model: {name} must be False for tokens over ranks, which have a part of "
                "them each, got True; call models.use_custom_pypto(model) without context_parallel"
            )
    facts = {
        "tokens [B, S]": [*whole.valid.shape],
        "cached tokens": int(step.sequences.seen),
        "mask": checksum(whole.valid),
        "position_ids": checksum(whole.position_ids),
    }
    for name in ("input_ids", "inputs_embeds"):
        facts[name] = None if kwargs.get(name) is None else checksum(kwargs[name])
    check_agreement("patched model", facts, "with context_parallel all ranks make the same calls")
    check_agreement("patched model", facts_of_model(model, step), SAME_MODEL)
    pieces = Pieces(dist.get_rank(), ranks, whole.count())
    ids = {
        name: pieces.own(x)
        for name in ("input_ids", "inputs_embeds")
        if (x := kwargs.get(name)) is not None
    }
    own = whole._replace(
        valid=pieces.own(whole.valid),
        positions=pieces.own(whole.positions),
        position_ids=pieces.own(whole.position_ids),
        on_every_rank=False,
    )
    if isinstance(step.rows, TrainingRows):
        batch, tokens = whole.valid.shape
        bounds = pieces.bounds()
        step.rows.take(
            [range(b * tokens + x, b * tokens + y) for b in range(batch) for x, y in bounds]
        )
    return step._replace(own=own, pieces=pieces), kwargs | ids


def facts_of_model(model, step: Step) -> dict[str, object]:
    """What decides which tokens a model computes; in every call, as weights may have changed."""
    patch, attentions = model._custom_pypto, patched_attentions(model)
    selecting = {i: each for i, each in attentions.items() if each.selects}
    facts = facts_of_config(model.config, "the config")
    facts |= {f"{name} of the patch": str(value) for name, value in patch.facts()}
    facts |= {f"index_topk of layer {i}": each.selection_width for i, each in selecting.items()}
    facts["dtype of the model"] = str(model.dtype)
    facts["contexts of the call"] = [type(context).__name__ for context in calls.around(model)]
    if not isinstance(step.rows, TrainingRows):
        pools = step.layer_of(attentions[min(attentions)]).pools
        facts |= {f"dtype of {x} in the cache": str(pool.dtype) for x, pool in pools.items()}
    return facts | facts_of_weights(model)


def whole_output(step: Step, output):
    """The output of the base model for all tokens, from that for this rank's."""
    if isinstance(output, tuple):
        return step.gathered(output[0]), *output[1:]
    output.last_hidden_state = step.gathered(output.last_hidden_state)
    return output


def check_context_parallel(caller: str, model, paged: type, indexer_loss: str | None) -> None:
    """Rejects a model that cannot share tokens.

    Raises:
        RuntimeError: there is no process group.
        ValueError: names the model and the reason.
    """
    why = None
    if not issubclass(paged, LatentAttention) or paged.upstream_layers:
        why = f"model_type {model.config.model_type}, whose tokens need states of earlier ones"
    elif any(map(is_sharded, model.modules())):
        why = "a model whose weights are shared by ranks, which compute the same tokens together"
    elif indexer_loss is not None:
        why = f"indexer_loss={indexer_loss!r}, which ranks with other tokens do not add up"
    if why is not None:
        raise ValueError(f"{caller}: context_parallel must be False for {why}")
    check_process_group(caller, "context_parallel")
