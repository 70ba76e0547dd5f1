"""The patch of a model: undone to the bit, copied and saved with it, and rejected with a reason."""

import copy
import importlib
import io
import json
import re
from pathlib import Path

import pytest
import torch
from model_harness import (
    TOLERANCES,
    WRONG,
    assert_same_gradients,
    furthest,
    gradients,
    no_grad_and_one_thread,  # noqa: F401
    patched_model,
    prompt,
    trace,
    upstream_and_patched,
)
from tiny import (
    ALL_KINDS,
    CLASSES,
    KINDS,
    NAMES,
    representatives,
    tiny_config,
    tiny_model,
    token_ids,
)
from training_harness import assert_near
from transformers import LlamaConfig, LlamaForCausalLM

from custom_pypto import models
from custom_pypto.models import CACHE
from custom_pypto.models.architectures import ARCHITECTURES, available
from custom_pypto.models.patched import text_model


@pytest.mark.parametrize(
    "kind, implementation",
    [(kind, "eager") for kind in ALL_KINDS]
    + [(kind, "sdpa") for kind in KINDS if CLASSES[kind][1]._supports_sdpa],
)
def test_use_transformers_undoes_the_patch_to_the_bit(kind, implementation):
    model = tiny_model(kind)
    model.set_attn_implementation(implementation)
    weights = {name: t.data_ptr() for name, t in model.state_dict().items()}

    def results():
        assert {name: t.data_ptr() for name, t in model.state_dict().items()} == weights
        return model(**prompt()).logits, model.generate(**prompt(), max_new_tokens=6)

    before, want = trace(model), results()
    assert models.use_custom_pypto(model) is model
    results()
    assert trace(model) != before
    assert models.use_transformers(model) is model
    assert trace(model) == before
    assert all(map(torch.equal, results(), want))


def test_a_patch_leaves_other_models_alone():
    config = tiny_config()
    one, other = (CLASSES["deepseek_v32"][1](config).eval() for _ in range(2))
    want = trace(other), other(**prompt()).logits
    models.use_custom_pypto(one)  # built from the same config object
    one.generate(**prompt(), max_new_tokens=2)
    assert trace(other) == want[0] and torch.equal(other(**prompt()).logits, want[1])


def test_patching_twice_and_undoing_twice_are_harmless():
    upstream, model = tiny_model(), tiny_model()
    models.use_custom_pypto(models.use_custom_pypto(model), block_size=32)
    cache = model(token_ids(1, 4))[CACHE]
    assert cache.block_size == 32
    models.use_transformers(models.use_transformers(model))
    assert trace(model) == trace(upstream)


def through_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_a_copy_of_a_patched_model_is_a_patched_model_of_its_own(duplicate):
    upstream, patched = upstream_and_patched()
    copied = duplicate(patched)
    models.use_transformers(patched)
    assert trace(patched) == trace(upstream)
    assert furthest(upstream, copied) <= TOLERANCES["deepseek_v32"]
    cache = copied.generate(**prompt(), max_new_tokens=2, return_dict_in_generate=True)[CACHE]
    assert isinstance(cache, models.PagedCache)
    assert trace(models.use_transformers(copied)) == trace(upstream)


@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_model_saves_what_upstream_saves(kind, tmp_path):
    upstream, patched = upstream_and_patched(kind)
    for name, model in (("upstream", upstream), ("patched", patched)):
        model.save_pretrained(tmp_path / name)
    files, saved = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("upstream", "patched")
    )
    assert files.keys() == saved.keys()
    assert [name for name in files if files[name] != saved[name]] == []
    assert json.loads(saved["config.json"])["architectures"] == [CLASSES[kind][1].__name__]
    assert furthest(upstream, models.load(tmp_path / "patched")) <= TOLERANCES[kind]


def test_the_experts_implementation_can_still_be_chosen():
    # generate() does so on every device but CPU
    upstream, patched = upstream_and_patched()
    for model in (upstream, patched):
        model.set_experts_implementation("batched_mm")
        assert model.config._experts_implementation == "batched_mm"
    assert furthest(upstream, patched) <= TOLERANCES["deepseek_v32"]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_training_mode_gives_upstream_gradients(kind):
    assert_same_gradients(*upstream_and_patched(kind))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_evaluation_mode_gives_upstream_gradients(kind):
    want, got = map(gradients, upstream_and_patched(kind))
    assert_near(got, want, kind)


def test_a_backward_through_a_cache_that_was_written_since_is_rejected():
    patched, ids = patched_model(), token_ids(2, 20)
    with torch.enable_grad():
        first = patched(ids[:, :12], use_cache=True)
        second = patched(ids[:, 12:], cache=first[CACHE])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (first.logits.sum() + second.logits.sum()).backward()


def test_a_backward_through_latents_of_int8_is_rejected():
    patched = models.use_custom_pypto(tiny_model(kv_lora_rank=128).bfloat16(), block_size=16)
    ids = token_ids(2, 20)
    cache = models.PagedCache(patched, 2, 32, block_size=16, kv_dtype=torch.int8)
    with torch.enable_grad():
        loss = patched(ids, labels=ids, cache=cache).loss
        with pytest.raises(RuntimeError, match="npu_kv_quant_sparse_flash_attention_pto"):
            loss.backward()


# ---- rejections -----------------------------------------------------------------------------


def wrapped_forward():
    model = tiny_model()
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward
    return model


def llama():
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))


UNPATCHABLE = {
    "another-model": (llama, TypeError, "got .*LlamaForCausalLM"),
    "no-head": (lambda: tiny_model().model, TypeError, "got .*V32Model"),
    "index-topk": (
        lambda: tiny_model(index_topk=2049),
        ValueError,
        "index_topk must be 1 to 2048.*got 2049",
    ),
    "float64": (lambda: tiny_model().double(), ValueError, "model must be .*got torch.float64"),
    "wrapped": (
        wrapped_forward,
        TypeError,
        "layer 1 must be a plain DeepseekV32Attention, got .*a wrapped forward",
    ),
}


@pytest.mark.parametrize("model, error, message", UNPATCHABLE.values(), ids=UNPATCHABLE)
def test_a_model_that_cannot_be_patched_is_rejected_untouched(model, error, message):
    model = model()
    before = {name: type(m) for name, m in model.named_modules()}
    with pytest.raises(error, match=f"use_custom_pypto: .*{message}"):
        models.use_custom_pypto(model)
    assert {name: type(m) for name, m in model.named_modules()} == before


@pytest.mark.parametrize("kind", representatives(KINDS))
def test_a_patched_model_that_becomes_float64_is_named(kind):
    model = patched_model(kind).double()
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="PagedCache: model must be .*got torch.float64"):
            call(token_ids(1, 4))


def test_every_architecture_is_tested_and_named_in_the_rejection_of_others():
    tested = {name for _, name in NAMES.values()}
    tested |= {type(tiny_model(kind)).__name__ for kind in ALL_KINDS}
    assert set(available()) <= tested <= set(ARCHITECTURES)
    root = Path(__file__).parents[1]
    for document in (root / "README.md", root / "README.zh-CN.md"):
        assert all(f"`{name}`" in document.read_text() for name in ARCHITECTURES)
    expected = f"a {' or '.join(available())} of transformers"
    with pytest.raises(TypeError, match=f"use_custom_pypto: model must be {expected}, got .*Llama"):
        models.use_custom_pypto(llama())


def test_both_names_in_the_repository_are_the_same_modules():
    """``custom_pypto/models`` is a link, so that every file has two addresses."""
    for name in ("models", "models.patch", "models.cache.layout"):
        assert importlib.import_module(name) is importlib.import_module(f"custom_pypto.{name}")


def test_what_architectures_share_knows_none_of_them():
    folder = Path(models.__file__).parent
    kinds = [*NAMES, "deepseek_v4", "glm5_next", "mistral_large4", "hy_v4_vl"]
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == {
        *kinds,
        *(shared := ("cache", "loading", "mtp", "streaming", "weights")),
    }
    shared = {*folder.glob("*.py"), *(path for x in shared for path in folder.glob(f"{x}/*.py"))}
    for path in shared - {folder / "architectures.py"}:
        found = re.search("|".join(["transformers.models", *kinds]), path.read_text())
        assert found is None, f"{path.name} names {found[0]}"


def test_use_transformers_names_what_it_cannot_undo():
    with pytest.raises(TypeError, match="use_transformers: model must be .*got .*Llama"):
        models.use_transformers(llama())


@pytest.mark.parametrize("block_size", [0, 24, -16, 2048])
def test_block_sizes_the_ops_do_not_take_are_rejected(block_size):
    with pytest.raises(ValueError, match=f"multiple of 16 from 16 to 1024, got {block_size}"):
        models.use_custom_pypto(tiny_model(), block_size=block_size)


def test_a_shared_first_layer_is_rejected():
    with pytest.raises(
        ValueError, match="must have a 'full' layer before layer 0, which is 'shared'"
    ):
        patched_model("glm_moe_dsa", indexer_types=["shared", "full", "full"])


# of architectures with indexers of their own
BYPASSED = [
    ("deepseek_v4", 1, "compressor", "DeepseekV4CSACompressor"),
    ("deepseek_v4", 1, "compressor.indexer", "DeepseekV4Indexer"),
    ("deepseek_v4", 1, "compressor.indexer.scorer", "DeepseekV4IndexerScorer"),
    ("deepseek_v4", 2, "compressor", "DeepseekV4HCACompressor"),
    ("glm5_next", 1, "indexer", "Glm5NextTextIndexer"),
    ("mistral_large4", 0, "indexer", "MistralLarge4TextIndexer"),
    ("hy_v4_vl", 0, "indexer", "HYV4VLIndexer"),
]


@pytest.mark.parametrize("kind, layer, name, cls", [x for x in BYPASSED if x[0] in ALL_KINDS])
def test_hooks_that_the_ops_would_bypass_are_rejected(kind, layer, name, cls):
    patched = patched_model(kind)
    attention = text_model(patched).layers[layer].self_attn
    attention.get_submodule(name).register_forward_hook(lambda *args: None)
    message = f"of layer {layer} must be a plain {cls} .*forward hook"
    with pytest.raises(TypeError, match=message):
        patched(token_ids(1, 4))


@pytest.mark.parametrize("name", ["q_a_proj", "kv_proj", "o_b_proj", "compressor.kv_proj"])
def test_hooks_of_other_modules_of_deepseek_v4_are_called(name):
    patched, ids = patched_model("deepseek_v4"), token_ids(1, 40)
    before = patched(ids).logits
    module = patched.model.layers[1].self_attn.get_submodule(name)
    module.register_forward_hook(lambda module, args, output: output.roll(1, -1))
    assert (patched(ids).logits - before).abs().max() > WRONG
