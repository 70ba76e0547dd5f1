"""Two ranks that share a model train it as one process does, its indexers too."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from memory import in_ranks
from tiny import SHARED, clear_case, representatives, tiny_model
from torch.distributed.tensor import DTensor
from training_harness import (
    TOLERANCES,
    assert_equal,
    assert_near,
    checkpointed,
    gradients,
    padded,
    trained,
)

from custom_pypto import models
from custom_pypto.models import latent_attention
from custom_pypto.models.latent_attention import LatentAttention

LOSSES = [None, "sparse", "dense"]
# use_reentrant of checkpointing; None: without
CHECKPOINTS = [None, False, True]


def batch_of(seed):
    return padded(left=(0, 9), right=(4, 0), seed=seed)


def losses_and_gradients(model, seed, loss, checkpoint=None):
    """The loss, that of the indexers, and the gradients of all parameters, whole."""
    models.use_custom_pypto(model, block_size=16, training="ops", indexer_loss=loss)
    LatentAttention.slice_tokens = models.training.DENSE_TOKENS = 23  # several turns of each rank
    model.gradient_checkpointing_disable()
    if checkpoint is not None:
        checkpointed(model, checkpoint)
    output = model(**batch_of(seed), use_cache=False)
    grads = gradients(model, output.loss)
    found = {"loss": output.loss.detach()}
    if loss:
        found["indexer_loss"] = output.indexer_loss.detach()
    return found, {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in grads.items()}


def work(rank: int, folder: Path, kind: str, seed: int):
    torch.set_num_threads(1)
    latent_attention.CHECK_RANKS = True  # as CUSTOM_PYPTO_CHECK_RANKS=1 does at the import
    dist.init_process_group(
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    model = models.load(folder / kind, tensor_parallel=True).train()
    seen = {
        (loss, checkpoint): losses_and_gradients(model, seed, loss, checkpoint)
        for loss in LOSSES
        for checkpoint in CHECKPOINTS
    }
    torch.save(seen, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=representatives(SHARED))
def shared(request, tmp_path_factory):
    """What two ranks have computed, and what one process does."""
    folder, kind = tmp_path_factory.mktemp("ranks"), request.param
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # put back what losses_and_gradients() changes
        patch.setattr(LatentAttention, "slice_tokens", LatentAttention.slice_tokens)
        patch.setattr(models.training, "DENSE_TOKENS", models.training.DENSE_TOKENS)
        model = tiny_model(kind).train()
        model.save_pretrained(folder / kind)

        def run(seed):
            models.use_transformers(model)
            loss, grads = trained(model, batch_of(seed))  # shows close calls of the selection
            of_loss = {loss: losses_and_gradients(model, seed, loss) for loss in LOSSES}
            return of_loss | {"upstream": ({"loss": loss}, grads)}

        seed, alone = clear_case(run)
        in_ranks(work, folder, kind, seed)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)], alone


def assert_same(got, want):
    """Losses and gradients, but for the order of sums."""
    for name, value in want[0].items():
        torch.testing.assert_close(got[0][name], value, rtol=TOLERANCES["deepseek_v32"], atol=0)
    assert_near(got[1], want[1])


@pytest.mark.parametrize("loss", LOSSES)
def test_two_ranks_have_the_losses_and_gradients_of_one_process(shared, loss):
    ranks, alone = shared
    learning = [name for name in alone[loss][1] if ".indexer." in name]
    assert bool(learning) is (loss is not None)
    for rank in ranks:
        for checkpoint in CHECKPOINTS:
            assert_same(rank[loss, checkpoint], alone[loss])


def test_two_ranks_have_the_gradients_of_upstream(shared):
    ranks, alone = shared
    for rank in ranks:
        assert_same(rank[None, None], alone["upstream"])


def test_both_ranks_have_equal_bits(shared):
    """Else weights that both have would drift apart."""
    one, other = shared[0]
    assert one.keys() == other.keys()
    for case, of_one in one.items():
        for found, same in zip(of_one, other[case], strict=True):
            assert_equal(found, same)
