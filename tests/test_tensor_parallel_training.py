"""Two ranks that share a model train it as one process does, its indexers too."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from memory import in_ranks
from tiny import SHARED, clear_case, tiny_model
from torch.distributed.tensor import DTensor
from training_harness import padded, trained

from custom_pypto import models
from custom_pypto.models import latent_attention
from custom_pypto.models.latent_attention import LatentAttention

LOSSES = [None, "sparse", "dense"]
# use_reentrant of checkpointing; None: without
CHECKPOINTS = [None, False, True]
# of a gradient's norm, in float32: two partial sums in place of one
TOLERANCE = 1e-5
# those of hyper-connections nearly cancel
HYPER_CONNECTIONS = 1e-4


def batch_of(seed):
    return padded(left=(0, 9), right=(4, 0), seed=seed)


def gradients(model, seed, loss, checkpoint=None):
    """The loss, that of the indexers, and the gradients of all parameters, whole."""
    models.use_custom_pypto(model, block_size=16, training="ops", indexer_loss=loss)
    LatentAttention.slice_tokens = models.training.DENSE_TOKENS = 23  # several turns of each rank
    if checkpoint is None:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
        model.enable_input_require_grads()
    model.zero_grad()
    output = model(**batch_of(seed), use_cache=False)
    output.loss.backward()
    found = {"loss": output.loss.detach()}
    if loss:
        found["indexer_loss"] = output.indexer_loss.detach()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in grads.items()}


def work(rank: int, folder: Path, seeds: dict):
    torch.set_num_threads(1)
    latent_attention.CHECK_RANKS = True  # as CUSTOM_PYPTO_CHECK_RANKS=1 does at the import
    dist.init_process_group(
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    seen = {}
    for kind, seed in seeds.items():
        model = models.load(folder / kind, tensor_parallel=True).train()
        for loss in LOSSES:
            for checkpoint in CHECKPOINTS:
                seen[kind, loss, checkpoint] = gradients(model, seed, loss, checkpoint)
    torch.save(seen, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What two ranks have computed, and what one process does."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.set_num_threads(1)
    alone, seeds = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        # put back what gradients() changes
        patch.setattr(LatentAttention, "slice_tokens", LatentAttention.slice_tokens)
        patch.setattr(models.training, "DENSE_TOKENS", models.training.DENSE_TOKENS)
        for kind in SHARED:
            model = tiny_model(kind).train()
            model.save_pretrained(folder / kind)

            def run(seed, model=model):
                models.use_transformers(model)
                upstream = trained(model, batch_of(seed))  # shows close calls of the selection
                return upstream, {loss: gradients(model, seed, loss) for loss in LOSSES}

            seeds[kind], (upstream, of_loss) = clear_case(run)
            alone |= {(kind, loss): found for loss, found in of_loss.items()}
            alone[kind, "upstream"] = {"loss": upstream[0]}, upstream[1]
        in_ranks(work, folder, seeds)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)], alone


def assert_near(got, want):
    """Losses and gradients."""
    for name, value in want[0].items():
        torch.testing.assert_close(got[0][name], value, rtol=TOLERANCE, atol=0)
    assert want[1] and got[1].keys() == want[1].keys()
    for name, x in want[1].items():
        error = float((got[1][name].double() - x.double()).norm() / x.double().norm())
        assert error <= (HYPER_CONNECTIONS if "hc" in name else TOLERANCE), (name, error)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", SHARED)
def test_two_ranks_have_the_losses_and_gradients_of_one_process(shared, kind, loss, checkpoint):
    ranks, alone = shared
    learning = [name for name in alone[kind, loss][1] if ".indexer." in name]
    assert bool(learning) is (loss is not None)
    for rank in ranks:
        assert_near(rank[kind, loss, checkpoint], alone[kind, loss])


@pytest.mark.parametrize("kind", SHARED)
def test_two_ranks_have_the_gradients_of_upstream(shared, kind):
    ranks, alone = shared
    for rank in ranks:
        assert_near(rank[kind, None, None], alone[kind, "upstream"])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", SHARED)
def test_both_ranks_have_equal_bits(shared, kind, loss):
    """Else weights that both have would drift apart."""
    for checkpoint in CHECKPOINTS:
        one, other = (rank[kind, loss, checkpoint] for rank in shared[0])
        for found, same in zip(one, other, strict=True):
            assert found.keys() == same.keys()
            assert [name for name, x in found.items() if not torch.equal(x, same[name])] == []
