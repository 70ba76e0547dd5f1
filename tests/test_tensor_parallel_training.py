"""Two ranks that share a model train it as one process does, its indexers and adapters too."""

import copy
from pathlib import Path

import peft
import pytest
import torch
from model_harness import COUNT_PADDING
from processes import in_ranks
from tiny import ALL_KINDS, SHARED_HEADS, clear_case, marks_of, query_projection, tiny_model
from torch.distributed.tensor import DTensor
from training_harness import (
    LEARNING,
    TOLERANCES,
    assert_equal,
    assert_near,
    checkpointed,
    gradients,
    not_checkpointed,
    padded,
    trained,
)

from custom_pypto import models
from custom_pypto.models import latent_attention
from custom_pypto.models.latent_attention import LatentAttention
from custom_pypto.models.training import TRAINING

LOSSES = [None, "sparse", "dense"]
# use_reentrant of checkpointing; None: without
CHECKPOINTS = [None, False, True]
HEADS, EXPERTS = dict(tensor_parallel=True), dict(expert_parallel=True)
# the attention's, of all architectures; of projections whose heads ranks share there are none
ADAPTED = ["q_a_proj", "q_b_proj", "q_gate_proj", "kv_a_proj_with_mqa", "kv_b_proj", "kv_proj"]
ADAPTED += ["o_proj", "o_b_proj"]
WHOLE = ["q_a_proj"]
# architecture, how the ranks share it, their number
CASES = [(kind, HEADS, 2) for kind in SHARED_HEADS] + [(kind, EXPERTS, 2) for kind in ALL_KINDS]
RARE = [(kind, HEADS | EXPERTS, 2) for kind in SHARED_HEADS]
RARE += [("deepseek_v32", EXPERTS, 4), ("glm_moe_dsa", HEADS | EXPERTS, 4)]
PARAMETERS = [
    pytest.param(case, id="-".join(map(str, [case[0], *case[1], case[2]])), marks=marks)
    for cases in (CASES, RARE)
    for case in cases
    for marks in [pytest.mark.slow if cases is RARE else marks_of(case[0])]
]


def losses_of(kind):
    return LOSSES if kind in LEARNING else [None]


def checkpoints_of(way):
    return CHECKPOINTS if way == HEADS else CHECKPOINTS[:2]


def batch_of(model, seed):
    left = (0, 0) if model.config.model_type in COUNT_PADDING else (0, 9)
    return padded(left=left, right=(4, 0), seed=seed)


def losses_and_gradients(model, seed, loss, checkpoint=None):
    """The loss, that of the indexers, and the gradients of all parameters, whole."""
    models.use_custom_pypto(model, block_size=16, training="ops", indexer_loss=loss)
    LatentAttention.slice_tokens = models.training.DENSE_TOKENS = 23  # several turns of each rank
    not_checkpointed(model)
    if checkpoint is not None:
        checkpointed(model, checkpoint)
    output = model(**batch_of(model, seed), use_cache=False)
    grads = gradients(model, output.loss)
    found = {"loss": output.loss.detach()}
    if loss:
        found["indexer_loss"] = output.indexer_loss.detach()
    return found, {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in grads.items()}


def evaluated(model, seed):
    """The same in evaluation mode, on a cache that the forward makes and drops."""
    left = (0, 0) if model.config.model_type in COUNT_PADDING else (0, 9)
    output = model.eval()(**padded(left=left, right=(0, 0), seed=seed), use_cache=False)
    grads = gradients(model, output.loss)
    model.train()
    whole = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in grads.items()}
    return {"loss": output.loss.detach()}, whole


def adapted(model, names):
    """With adapters on these projections alone to train, equal in all processes."""
    torch.manual_seed(3)
    lora = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    peft.inject_adapter_in_model(lora, model, "lora")
    return model


def assert_not_trained(model, name, seed):
    """Upstream, too, an adapter gets the gradients of its rank's heads alone."""
    with pytest.raises(TypeError, match=f"{name} of layer 0 must have no adapter while ranks"):
        model(**batch_of(model, seed), use_cache=False)


def work(rank: int, folder: Path, kind: str, way: dict, seed: int):
    latent_attention.CHECK_RANKS = True  # as CUSTOM_PYPTO_CHECK_RANKS=1 does at the import
    model = models.load(folder / kind, **way).train()
    seen = {
        (loss, checkpoint): losses_and_gradients(model, seed, loss, checkpoint)
        for loss in losses_of(kind)
        for checkpoint in checkpoints_of(way)
    }
    models.use_custom_pypto(model)
    seen["evaluation", None] = evaluated(model, seed)
    adapted(model, WHOLE if way.keys() & HEADS.keys() else ADAPTED)
    seen["adapters", None] = losses_and_gradients(model, seed, None)
    if way == HEADS:
        for name in (query_projection(kind), "kv_a_proj_with_mqa"):
            for training in TRAINING:
                tuned = models.use_custom_pypto(
                    models.load(folder / kind, **way), training=training
                )
                assert_not_trained(adapted(tuned, [name]).train(), name, seed)
    torch.save(seen, folder / f"{rank}.pt")


@pytest.fixture(scope="module", params=PARAMETERS)
def shared(request, tmp_path_factory):
    """What ranks have computed, and what one process does."""
    folder, (kind, way, ranks) = tmp_path_factory.mktemp("ranks"), request.param
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        # put back what losses_and_gradients() changes
        patch.setattr(LatentAttention, "slice_tokens", LatentAttention.slice_tokens)
        patch.setattr(models.training, "DENSE_TOKENS", models.training.DENSE_TOKENS)
        model = tiny_model(kind).train()
        model.save_pretrained(folder / kind)
        names = WHOLE if way.keys() & HEADS.keys() else ADAPTED

        def run(seed):
            models.use_transformers(model)
            loss, grads = trained(
                model, batch_of(model, seed)
            )  # shows close calls of the selection
            tuned = adapted(copy.deepcopy(model), names)
            trained(tuned, batch_of(model, seed))
            of_loss = {x: losses_and_gradients(model, seed, x) for x in losses_of(kind)}
            of_loss["adapters"] = losses_and_gradients(tuned, seed, None)
            of_loss["evaluation"] = evaluated(models.use_transformers(model), seed)
            return of_loss | {"upstream": ({"loss": loss}, grads)}

        seed, alone = clear_case(run)
        in_ranks(work, folder, kind, way, seed, ranks=ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)], alone, kind


def assert_same(got, want, kind):
    """Losses and gradients, but for the order of sums."""
    for name, value in want[0].items():
        torch.testing.assert_close(got[0][name], value, rtol=TOLERANCES[kind], atol=0)
    assert_near(got[1], want[1], kind)


def test_ranks_have_the_losses_and_gradients_of_one_process(shared):
    ranks, alone, kind = shared
    for loss in losses_of(kind):
        learning = [name for name in alone[loss][1] if ".indexer." in name]
        assert bool(learning) is (loss is not None) or kind not in LEARNING
    for rank in ranks:
        for (loss, _), found in rank.items():
            assert_same(found, alone[loss], kind)


def test_ranks_have_the_gradients_of_upstream(shared):
    ranks, alone, kind = shared
    for rank in ranks:
        assert_same(rank[None, None], alone["upstream"], kind)


def test_all_ranks_have_equal_bits(shared):
    """Else weights that all have would drift apart."""
    one, *others = shared[0]
    for other in others:
        assert one.keys() == other.keys()
        for case, of_one in one.items():
            for found, same in zip(of_one, other[case], strict=True):
                assert_equal(found, same)
