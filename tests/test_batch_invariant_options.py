"""A batch-invariant model with additions and other options, and what it cannot have."""

import copy

import peft
import pytest
import torch
from model_harness import left_padded, no_grad_and_one_thread, trace, whole_graph  # noqa: F401
from mtp_harness import MTP_KINDS, upstream_drafting
from published import published
from streaming_harness import streamed
from test_batch_invariance import different_ways, in_training, invariant, model_of
from test_models_quantized import as_int8_rows
from test_models_weights import WIDE
from tiny import REPRESENTATIVES, tiny_model, token_ids
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from custom_pypto import models


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_are_invariant(when):
    model = tiny_model("glm_moe_dsa")
    if when == "after":
        invariant(model)
    config = peft.LoraConfig(
        r=4, target_modules=["q_b_proj", "kv_b_proj", "o_proj", "wq_b"], init_lora_weights=False
    )
    plain = invariant(copy.deepcopy(model))(token_ids(1, 9)).logits
    peft.inject_adapter_in_model(config, model.eval())
    if when == "before":
        invariant(model)
    assert different_ways(model.eval()) == []
    assert not torch.equal(model(token_ids(1, 9)).logits, plain)


@pytest.mark.parametrize("kind", REPRESENTATIVES)
def test_the_option_is_set_and_undone_as_a_whole(kind):
    model = tiny_model(kind)
    upstream = trace(model)
    usual = trace(models.use_custom_pypto(model, block_size=16))
    on = trace(invariant(model))
    assert on[0] != usual[0] and trace(invariant(model))[0] == on[0]
    assert trace(models.use_custom_pypto(model, block_size=16))[0] == usual[0]
    invariant(model)
    models.use_transformers(model)
    assert trace(model)[:3] == upstream[:3]


REJECTED = {
    "training='upstream'": dict(training="upstream"),
    "context_parallel=True": dict(context_parallel=True),
}


@pytest.mark.parametrize("what", REJECTED)
def test_options_that_exclude_it_are_named(what):
    model = tiny_model()
    before = trace(model)
    with pytest.raises(ValueError, match="batch_invariant must be False") as error:
        models.use_custom_pypto(model, batch_invariant=True, **REJECTED[what])
    assert what in str(error.value)
    assert trace(model) == before


def test_models_that_cannot_have_it_are_named():
    with pytest.raises(ValueError, match="whose linear attention takes prompts by another rule"):
        invariant(tiny_model("glm5_next"))
    with pytest.raises(ValueError, match="but for a model in bfloat16, .* torch.float64 on cpu"):
        invariant(tiny_model().double())


def test_models_in_files_and_of_ranks_are_named(tmp_path):
    model = streamed(published(tmp_path, "deepseek_v32", **WIDE["deepseek_v32"]), 3)
    with pytest.raises(ValueError, match="whose experts are in its files, got True and model"):
        invariant(model)
    model = tiny_model("glm_moe_dsa")
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        projection = model.model.layers[1].self_attn.q_b_proj
        mesh = init_device_mesh("cpu", (2,))
        projection.weight = nn.Parameter(distribute_tensor(projection.weight, mesh, [Shard(0)]))
        with pytest.raises(ValueError, match="that ranks share, got True and model.layers.1.self"):
            invariant(model)
    finally:
        torch.distributed.destroy_process_group()


def test_forwards_on_another_path_are_rejected():
    model, ids = model_of("deepseek_v32"), token_ids(1, 8)
    with pytest.raises(ValueError, match="got one inside of autocast"):
        with torch.autocast("cpu", torch.bfloat16):
            model(ids)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match="got one on transformers' path"):
        model(ids, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="must be 0 to train on the ops"):
        model.model.layers[0].self_attn.attention_dropout = 0.5
        in_training(model, ids)


class BmmMLP(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return torch.bmm(x, self.weight.T.expand(len(x), -1, -1))


def test_a_record_of_experts_is_not_needed_and_says_so():
    model = model_of("deepseek_v32")
    with pytest.raises(ValueError, match="record_indices: experts must be False for a batch-inv"):
        models.record_indices(model, experts=True).__enter__()
    with models.record_indices(model) as record:
        model(token_ids(1, 12))
    assert record.indices and not record.experts


def test_functions_that_depend_on_other_rows_are_named():
    model = model_of("deepseek_v32")
    model.model.layers[0].mlp = BmmMLP(torch.randn(96, 96))
    with pytest.raises(TypeError, match="must not call torch's bmm, whose bits for a row may"):
        model(token_ids(1, 4))


def test_weights_of_another_library_are_named():
    model = tiny_model("deepseek_v32")
    layer = model.model.layers[0].self_attn
    as_int8_rows(other := tiny_model("deepseek_v32"))
    layer.q_b_proj.weight = other.model.layers[0].self_attn.kv_b_proj.weight
    with pytest.raises(TypeError, match="must have plain weights .*, got a Int8Tensor"):
        invariant(model)(token_ids(1, 4))


@pytest.mark.parametrize("kind", [kind for kind in MTP_KINDS if kind != "glm5_next"])
@torch.no_grad()
def test_logits_of_a_text_have_the_same_bits_with_drafts(kind):
    model = upstream_drafting(kind).bfloat16()
    models.use_custom_pypto(model, block_size=16, batch_invariant=True)
    options = {"max_new_tokens": 16, "return_dict_in_generate": True, "output_logits": True}
    want, got = (
        model.generate(token_ids(1, 40), **options, **more)
        for more in ({}, {"use_mtp": True, "num_assistant_tokens": 3})
    )
    assert torch.equal(got.sequences, want.sequences) and got.drafts.accepted[0] > 0
    assert all(map(torch.equal, got.logits, want.logits))
