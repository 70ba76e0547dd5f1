"""Models with stored weights: computed, saved and loaded as they are, or rejected."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from loading_harness import LOADED_KINDS, edit_json, edit_tensor, saved_checkpoint  # noqa: F401
from published import V4, published, true_weights
from safetensors.torch import load_file
from tiny import tiny_model, token_ids
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

import custom_pypto
from custom_pypto import layer_ops, models
from custom_pypto.models import absorbed
from custom_pypto.models.loading import plan, reader
from custom_pypto.models.weights.modules import (
    EXPERT_WEIGHTS,
    StoredLinear,
    is_experts,
    matrices,
    stored_parameters,
)
from custom_pypto.weight_formats import values_of

MIXED = {"experts": "int4", "rest": "int8"}
OPTIONS = ["int8", "int4", MIXED]
IDS = ["int8", "int4", "mixed"]
# rows of experts, and of groups of DeepSeek-V4's output projection, in whole blocks of fp8
WIDE = {
    "deepseek_v32": dict(moe_intermediate_size=128),
    V4: dict(moe_intermediate_size=128, o_lora_rank=128),
}


@torch.no_grad()
def logits(model, tokens=40):
    return model(token_ids(1, tokens), use_cache=False).logits


def load(path, weights, **options):
    return models.load(path, dtype=torch.float32, weights=weights, **options)


def distance(one, other):
    return float((one - other).norm() / other.norm())


def stored_modules(model):
    """Format, weight and scales of each stored weight, by the name of its parameter."""
    for name, module in model.named_modules():
        if getattr(module, "kind", None) is None:
            continue
        for weight in ["weight"] if isinstance(module, StoredLinear) else EXPERT_WEIGHTS:
            scales = getattr(module, f"{weight}_scale")
            yield f"{name}.{weight}", module.kind, matrices(getattr(module, weight)), scales


@pytest.fixture(scope="module", name="saved")
def saved_deepseek_v32(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    tiny_model().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["deepseek_v32", V4], name="on_disk")
def published_with_wide_experts(request, tmp_path_factory):
    return published(tmp_path_factory.mktemp(request.param), request.param, **WIDE[request.param])


# ---- computation --------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", OPTIONS, ids=IDS)
def test_patched_equals_upstream_with_the_same_modules(weights, checkpoint):
    model = load(checkpoint[0], weights)
    patched = logits(model)
    upstream = logits(models.use_transformers(model))
    # 4 bits: rows of x are rounded to 16, each in its own way after the first difference
    assert distance(patched, upstream) <= (1e-5 if weights == "int8" else 1e-4)
    assert distance(patched, logits(models.load(checkpoint[0], dtype=torch.float32))) > 1e-4


@pytest.mark.parametrize("weights", OPTIONS, ids=IDS)
def test_experts_and_linear_layers_are_stored_and_the_others_plain(weights, checkpoint):
    model = load(checkpoint[0], weights)
    wanted = weights if isinstance(weights, dict) else dict.fromkeys(MIXED, weights)
    kinds = {name: module.kind for name, module in model.named_modules() if hasattr(module, "kind")}
    experts = {name for name, module in model.named_modules() if hasattr(module, "_apply_gate")}
    assert experts and all(kinds[name] == wanted["experts"] for name in experts)
    assert {kind for name, kind in kinds.items() if name not in experts} == {wanted["rest"]}
    plain = {
        name.split(".")[-2] for name, x in model.named_parameters() if x.dtype.is_floating_point
    }
    assert plain >= {"lm_head", "embed_tokens", "gate"}
    assert ("kv_b_proj" in plain) == (load_kind(checkpoint) != V4)
    for name, module in model.named_modules():
        assert not isinstance(module, DeepseekV4GroupedLinear)
        if type(module) is torch.nn.Linear:
            assert name.rpartition(".")[2] in ("kv_b_proj", "weights_proj", "lm_head") or (
                module.in_features % 32
            )


def load_kind(checkpoint):
    return json.loads((checkpoint[0] / "config.json").read_text())["model_type"]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_values_are_the_nearest_ones(weights, checkpoint):
    plain = models.load(checkpoint[0], dtype=torch.float32).state_dict()
    for name, kind, weight, scales in stored_modules(load(checkpoint[0], weights)):
        values, exact = values_of(weight, scales), plain[name]
        if kind == "int8":
            step = scales[..., None]
            # the largest value of a row is exact
            assert torch.allclose(step[..., 0] * 127, exact.abs().amax(-1), rtol=1e-6)
            assert ((values - exact).abs() <= 0.501 * step).all()
        else:
            step = scales[..., :1].float().repeat_interleave(exact.size(-1) // scales.size(-2), -2)
            # scale and zero are rounded to bfloat16: 8 steps and 15 of them
            assert ((values - exact).abs() <= (0.5 + 0.1) * step[..., 0]).all()


def test_published_weights_are_kept_bit_for_bit(on_disk):
    model = load(on_disk, "stored")
    exact = models.load(on_disk, dtype=torch.float32)
    state, found = exact.state_dict(), {}
    for name, kind, weight, scales in stored_modules(model):
        assert values_of(weight, scales).equal(state[name]), name
        found[name.split(".", 3)[-1]] = kind
    v4 = V4 in str(on_disk)
    assert {*found.values()} == ({"fp8", "fp4", "bfloat16"} if v4 else {"fp8"})
    assert found.get("self_attn.o_a_proj.weight") == ("fp8" if v4 else None)
    assert distance(logits(model), logits(exact)) <= 1e-4
    assert true_weights(on_disk, torch.float32).keys()


def test_scales_of_the_neighbour_would_show(on_disk):
    model, exact = load(on_disk, "stored"), models.load(on_disk, dtype=torch.float32)
    for _, kind, _, scales in stored_modules(model):
        if kind != "bfloat16":
            scales.data = (
                scales.view(torch.uint8).roll(scales.element_size(), -1).view(scales.dtype)
            )
    assert distance(logits(model), logits(exact)) > 1e-3


# ---- what else works ----------------------------------------------------------------------------


@pytest.mark.parametrize("weights", OPTIONS, ids=IDS)
def test_a_saved_model_loads_as_it_was(weights, checkpoint, tmp_path):
    model = load(checkpoint[0], weights)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    for again in (
        models.load(tmp_path, dtype=torch.float32),
        models.use_custom_pypto(
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        ),
    ):
        state = again.state_dict()
        assert state.keys() == before.keys()
        for name, x in before.items():
            same = state[name]
            assert x.dtype == same.dtype and x.view(torch.uint8).equal(same.view(torch.uint8))
        assert logits(again).equal(logits(model))
    first = models.load(tmp_path, dtype=torch.float32, num_hidden_layers=1)
    assert stored_parameters(first) == {n for n in stored_parameters(model) if ".layers.0." in n}


@pytest.mark.parametrize("weights", OPTIONS, ids=IDS)
def test_generate_continues_as_a_forward_says(weights, checkpoint):
    model = load(checkpoint[0], weights)
    ids = token_ids(1, 30)
    new = model.generate(ids, max_new_tokens=6, do_sample=False)[:, 30:]
    with torch.no_grad():
        once = model(torch.cat([ids, new], 1), use_cache=False).logits[:, 29:-1]
    chosen = once.gather(-1, new[..., None])[..., 0]
    assert (once.amax(-1) - chosen <= 1e-3 * once.abs().amax()).all()


def test_with_caches_in_int8(saved):
    model = models.load(saved, dtype=torch.bfloat16, weights="int8")
    models.use_custom_pypto(model, index_dtype=torch.int8)
    assert model.generate(token_ids(1, 30), max_new_tokens=4, do_sample=False).shape == (1, 34)


def test_experts_compile_to_one_graph(saved):
    model = load(saved, MIXED)
    experts = next(module for module in model.modules() if hasattr(module, "_apply_gate"))
    x, ids = torch.randn(3, experts.hidden_dim), torch.tensor([[0, 1], [1, 3], [2, 0]])
    weights = torch.rand(3, 2)
    with torch.no_grad():
        eager = experts(x, ids, weights)
        compiled = torch.compile(experts, backend="eager", fullgraph=True)(x, ids, weights)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


def test_experts_of_another_rank_add_nothing(saved):
    experts = next(m for m in load(saved, "int8").modules() if hasattr(m, "_apply_gate"))
    assert is_experts(experts)
    x, weights = torch.randn(2, experts.hidden_dim), torch.tensor([[0.5, 0.5], [1.0, 0.25]])
    with torch.no_grad():
        both = experts(x, torch.tensor([[0, experts.num_experts], [1, 1]]), weights)
        alone = experts(x[:1], torch.tensor([[0]]), weights[:1, :1])
    torch.testing.assert_close(both[:1], alone)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_files_of_a_saved_model_are_mapped(saved, tmp_path):
    load(saved, "int8").save_pretrained(tmp_path)
    model = models.load(tmp_path)
    addresses = [weight.data_ptr() for _, _, weight, _ in stored_modules(model)]
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in maps
        if str(tmp_path) in line
    ]
    assert all(any(first <= at < end for first, end in ranges) for at in addresses)


@pytest.mark.parametrize("fast", [False, True])
def test_a_cpu_without_bfloat16_is_named_once(fast, saved, monkeypatch, caplog):
    monkeypatch.setattr(absorbed, "HAS_BF16", fast)
    absorbed.advise_on_bfloat16.cache_clear()
    load(saved, None)
    models.load(saved, dtype=torch.bfloat16, weights="int8")
    assert not caplog.messages
    for _ in range(2):
        models.load(saved, dtype=torch.bfloat16)
    assert len(caplog.messages) == (not fast)
    assert all("has no bfloat16 instructions" in message for message in caplog.messages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_products_of_heads_are_those_of_einsum(dtype, tokens):
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(4, 96, 64, generator=g).to(dtype)  # of kv_b_proj: 32 rows of W_UK
    query = torch.randn(2, tokens, 4, 32, generator=g).to(dtype)
    # float32: up to 64 terms, up to 40 in all, in any order
    rounding = dict(rtol=2**-7, atol=2**-4) if dtype == torch.bfloat16 else dict(rtol=0, atol=2e-4)
    exact = torch.einsum("bshd,hdl->bshl", query.float(), weight[:, :32].float())
    torch.testing.assert_close(absorbed.absorbed_query(query, weight), exact.to(dtype), **rounding)
    latent = torch.randn(2, tokens, 4, 64, generator=g).to(dtype)
    exact = torch.einsum("bshl,hvl->bshv", latent.float(), weight[:, 32:].float())
    torch.testing.assert_close(
        absorbed.of_heads(latent, weight[:, 32:]), exact.to(dtype), **rounding
    )


# ---- rejections ---------------------------------------------------------------------------------


def test_a_gradient_is_rejected(saved):
    model = load(saved, "int8")
    ids = token_ids(1, 8)
    with pytest.raises(
        ValueError, match="weights in int8 must not require a gradient.*weights=None"
    ):
        model.train()(ids, labels=ids)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(weights="int3"), "weights must be one of 'stored', 'int8', 'int4', None, or a dict"),
        (dict(weights={"heads": "int8"}), "got {'heads': 'int8'}"),
        (dict(weights={"experts": "fp4"}), "got {'experts': 'fp4'}"),
        (dict(weights="int8", device="meta"), "device must be a CPU or an NPU"),
    ],
)
def test_an_option_that_does_not_work_is_rejected(options, message, saved):
    with pytest.raises(ValueError, match=message):
        models.load(saved, **options)


def test_tensor_parallel_is_rejected(saved, monkeypatch):
    monkeypatch.setattr(plan, "check_sharing", lambda *arguments: 1)
    for options in [{"weights": "int8"}, {"weights": {"experts": "int8"}}]:
        with pytest.raises(ValueError, match="tensor_parallel must be False with stored weights"):
            models.load(saved, tensor_parallel=True, **options)
    with pytest.raises(ValueError, match="tensor_parallel must be False with stored weights"):
        models.load(saved, weights="int8", tensor_parallel=True, expert_parallel=True)


def test_a_saved_model_is_not_rounded_again(saved, tmp_path):
    load(saved, "int8").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="saved with weights in int8, got .*load the original"):
        models.load(tmp_path, weights="int4")


def test_blocks_that_experts_share_are_rejected(tmp_path):
    path = published(tmp_path / "narrow")
    with pytest.raises(ValueError, match="multiple of 128 rows in each projection.*weights='int8'"):
        models.load(path, weights="stored")
    edit_json(
        path / "config.json",
        quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]},
    )
    with pytest.raises(ValueError, match="scale"):
        models.load(path, weights="stored")


DAMAGES = {
    "scale-nan": (r"q_a_proj\.weight_scale$", lambda x: x.fill_(torch.nan), "must be finite"),
    "scale-dtype": (r"q_a_proj\.weight_scale$", lambda x: x.half(), "must be F32 .*got F16"),
    "scale-shape": (r"q_a_proj\.weight_scale$", lambda x: x[1:], "must be of shape"),
    "scale-missing": (r"q_a_proj\.weight_scale$", lambda x: None, "lacks .*q_a_proj.weight_scale"),
    "dtype": (r"q_a_proj\.weight$", lambda x: x.float(), "must be I8 .*got F32"),
    "shape": (r"q_a_proj\.weight$", lambda x: x[:, 1:].clone(), "must be of shape"),
    "experts": (r"experts\.down_proj_scale$", lambda x: x[:1], "must be of shape"),
}


@pytest.mark.parametrize("pattern, edit, message", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_saved_model_is_rejected_by_name(pattern, edit, message, saved, tmp_path):
    load(saved, "int8").save_pretrained(tmp_path, max_shard_size="60KB")
    name = edit_tensor(tmp_path, pattern, edit, listed=False)["name"]
    with pytest.raises(ValueError, match=message) as raised:
        models.load(tmp_path)
    assert name in str(raised.value)


def with_one_nan(weight, byte):
    """In the last value: ``weight`` in float8_e4m3fn, in which these two bytes are NaN."""
    damaged = weight.clone()
    damaged.view(torch.uint8)[-1, -1] = byte
    return damaged


@pytest.mark.parametrize(
    "damage, message",
    [
        pytest.param(lambda x: with_one_nan(x, 0x7F), "has NaN", id="nan"),
        pytest.param(lambda x: with_one_nan(x, 0xFF), "has NaN", id="negative-nan"),
        pytest.param(None, "must be finite", id="scales"),
    ],
)
def test_a_damaged_published_weight_is_rejected_by_name(damage, message, on_disk, tmp_path):
    path = shutil.copytree(on_disk, tmp_path / "damaged")
    pattern = r"(q_a_proj|wq_a)\.weight$"
    if damage is None:
        pattern = r"(q_a_proj\.weight_scale_inv|wq_a\.scale)$"
        damage = lambda x: torch.full(x.shape, torch.nan).to(x.dtype)  # noqa: E731
    edited = edit_tensor(path, pattern, damage)
    with pytest.raises(ValueError, match=message) as raised:
        models.load(path, weights="stored")
    assert edited["name"] in str(raised.value) and edited["shard"] in str(raised.value)


@pytest.mark.parametrize("weights", [None, "stored", *OPTIONS], ids=str)
def test_weights_that_are_read_in_many_parts_are_the_same(weights, on_disk, monkeypatch):
    whole = models.load(on_disk, weights=weights).state_dict()
    monkeypatch.setattr(reader, "AT_ONCE", 1)  # rows of a block
    parts = models.load(on_disk, weights=weights).state_dict()
    for name, weight in whole.items():
        assert weight.view(-1).view(torch.uint8).equal(parts[name].view(-1).view(torch.uint8)), name


def test_the_op_computes_both_experts_and_linear_layers(saved, monkeypatch):
    calls = []

    def recorded(module, name):
        function = getattr(module, name)

        def call(*args, **options):
            calls.append(name)
            return function(*args, **options)

        monkeypatch.setattr(module, name, call)

    recorded(custom_pypto, "weight_only_linear")
    recorded(layer_ops, "experts")
    logits(load(saved, "int8"))
    assert {*calls} == {"weight_only_linear", "experts"}


@pytest.mark.parametrize("weights", [None, {"rest": "int8"}])
def test_experts_that_are_not_stored_are_computed_as_upstream_does(weights, saved):
    upstream = AutoModelForCausalLM.from_pretrained(saved)
    own = load(saved, weights).config._experts_implementation
    assert own == upstream.config._experts_implementation
    assert load(saved, "int8").config._experts_implementation != own


def test_files_name_the_format(saved, tmp_path):
    load(saved, "int4").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "custom_pypto" and [*config["modules"]] == ["int4"]
    stored = load_file(next(tmp_path.glob("*.safetensors")))
    assert {x.dtype for name, x in stored.items() if name.endswith("down_proj")} == {torch.uint8}
