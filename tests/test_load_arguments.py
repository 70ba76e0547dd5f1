"""What a caller of ``models.load`` passes, and what the environment lacks."""

import inspect
import json
import subprocess
import sys
import typing

import pytest
import torch
import transformers
from loading_harness import edit_json
from repository import REPOSITORY
from tiny import OWN, tiny_model, token_ids
from transformers import LlamaConfig

from custom_pypto import models, requirements
from custom_pypto.models.loading.keywords import REMEDIES
from custom_pypto.models.weights.choice import PARTS, STORED, Kind, OfParts, check_stored
from custom_pypto.weight_formats import rounded_formats

MULTIMODAL = sorted(OWN.keys() - {"deepseek_v4"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_dtype_goes_by_its_name(name, folder):
    model = models.load(folder, dtype=name, num_hidden_layers=1)
    assert model.dtype == getattr(torch, name)


@pytest.mark.parametrize("dtype", ["bf16", "int8", torch.int8, "Tensor", 16])
def test_another_dtype_is_rejected(dtype, folder):
    message = f"load: dtype must be 'auto', 'float32', .*, got {dtype!r}"
    with pytest.raises(ValueError, match=message):
        models.load(folder, dtype=dtype)


DEVICES = {
    "npu": "load: device 'npu' needs torch_npu, which is not loaded; custom-pypto env says",
    "npu:1": "load: device 'npu:1' needs torch_npu",
    "cuda": "load: device must be a CPU or an NPU, where the ops run, got 'cuda'",
    "nonsense": "load: device must be a CPU or an NPU, where the ops run, got 'nonsense'",
}


@pytest.mark.parametrize("device, message", DEVICES.items(), ids=DEVICES)
def test_a_device_without_ops_is_rejected(device, message, folder):
    with pytest.raises(ValueError, match=message):
        models.load(folder, device=device)


def test_stored_weights_need_a_cpu():
    with pytest.raises(ValueError, match="device must be None or 'cpu' with stored weights, got"):
        check_stored({"experts": "int8", "rest": None}, {}, "meta", False, False)


@pytest.mark.parametrize("name", [x for x in models.__all__ if x != "CACHE"])
def test_every_public_function_has_types(name):
    signature = inspect.signature(getattr(models, name))
    untyped = [x.name for x in signature.parameters.values() if x.annotation is x.empty]
    assert untyped == []
    assert name == "PagedCache" or signature.return_annotation is not signature.empty


KEYWORDS = {
    "torch_dtype": "pass dtype$",
    "device_map": "pass device, memory, or pass tensor_parallel=True or expert_parallel=True in",
    "attn_implementation": "omit it: attention runs on the ops",
    "load_in_4bit": "pass weights='int4'$",
    "quantization_config": "omit it, or pass weights='int8' or 'int4'$",
    "layers": "its keywords are activations, device, dtype, expert_parallel, memory, mtp, ",
}


@pytest.mark.parametrize("name, remedy", KEYWORDS.items(), ids=KEYWORDS)
def test_a_keyword_of_other_loaders_names_ours(name, remedy, folder):
    with pytest.raises(TypeError, match=f"^load: {name} is no keyword of models.load; {remedy}"):
        models.load(folder, **{name: "auto"})


def test_no_remedy_is_for_a_keyword_that_load_has():
    assert not REMEDIES.keys() & inspect.signature(models.load).parameters.keys()


def test_the_types_of_weights_are_the_formats_that_load_takes():
    assert [*typing.get_args(Kind)] == [STORED, *rounded_formats()]
    assert [*typing.get_type_hints(OfParts)] == [*PARTS]


WRONG_TYPES = {
    "layers": (dict(num_hidden_layers="4"), "num_hidden_layers must be an int, got str '4'"),
    "layers-of-a-float": (dict(num_hidden_layers=1.0), "num_hidden_layers must be an int, got flo"),
    "path": (dict(path=None), "path must be a directory or the name of a .*, got NoneType None"),
}


@pytest.mark.parametrize("call, message", WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_an_argument_of_another_type_is_named(call, message, folder):
    with pytest.raises(TypeError, match=f"^load: {message}"):
        models.load(**{"path": folder} | call)


def test_a_path_may_begin_at_the_home_of_the_user(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert models.load(f"~/{folder.name}", num_hidden_layers=1).config.num_hidden_layers == 1


OTHER_FORMATS = {
    "adapter": (
        {"adapter_config.json": '{"base_model_name_or_path": "owner/base"}'},
        "config.json, got .*: it is an adapter of owner/base; load that, and then .*PeftModel",
    ),
    "gguf": ({"a-Q4.gguf": ""}, "config.json, got .*: GGUF is not read; .* with weights='int4'"),
    "pickle": (
        {"config.json": None, "pytorch_model-00001-of-00002.bin": ""},
        "model.safetensors is missing: pytorch_model.bin is not read; .*save_pretrained",
    ),
    "gguf-with-config": (
        {"config.json": None, "a.gguf": ""},
        "model.safetensors is missing: GGUF is not read",
    ),
}


@pytest.mark.parametrize("files, message", OTHER_FORMATS.values(), ids=OTHER_FORMATS)
def test_a_folder_of_another_format_is_named(files, message, folder, tmp_path):
    for name, text in files.items():
        text = (folder / name).read_text() if text is None else text
        (tmp_path / name).write_text(text)
    with pytest.raises(FileNotFoundError, match=f"^load: .*{message}"):
        models.load(tmp_path)


def test_a_file_in_gguf_is_named(tmp_path):
    (tmp_path / "a.gguf").touch()
    with pytest.raises(FileNotFoundError, match="got .*a.gguf: GGUF is not read"):
        models.load(tmp_path / "a.gguf")


NO_DSA = {
    "llama": (LlamaConfig(architectures=["LlamaForCausalLM"]).to_dict(), "a LlamaForCausalLM"),
    "deepseek_v3": (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        "a DeepseekV3ForCausalLM",
    ),
}


@pytest.mark.parametrize("config, named", NO_DSA.values(), ids=NO_DSA)
def test_a_model_without_sparse_attention_is_named(config, named, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", **config)
    message = f"load: .*config.json is of {named}, without index_topk, so without sparse attention"
    with pytest.raises(TypeError, match=message):
        models.load(tmp_path)


LOOK_ALIKES = {
    "deepseek_v3": (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        "a DeepseekV3ForCausalLM, with index_topk, but without a lightning indexer in transformers "
        "[0-9.]+ .DeepseekV32ForCausalLM, of model_type deepseek_v32, has one.; supported are ",
    ),
    "longcat": (
        {"architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash"},
        "a LongcatFlashForCausalLM, with index_topk, but without a lightning indexer .* "
        ".LongCat-2.0 always selects the first 16 and the last 1024 positions besides, as no op "
        "here does.; supported are ",
    ),
    "deepseek_v41": (
        {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"},
        "a DeepseekV41ForCausalLM, unknown to transformers [0-9.]+ .DeepSeek-V4.1 selects from "
        "blocks of candidates and reads engram tables, as no op here does.; supported are ",
    ),
    "unheard-of": (
        {"architectures": ["NewForCausalLM"], "model_type": "new"},
        "a NewForCausalLM, unknown to transformers [0-9.]+; supported are ",
    ),
}


@pytest.mark.parametrize("place", ["config", "text_config", "remote-code"])
@pytest.mark.parametrize("config, message", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_a_model_with_index_topk_that_cannot_be_patched_is_named(config, message, place, tmp_path):
    config = config | {"index_topk": 8}
    if place == "remote-code":
        config["auto_map"] = {"AutoConfig": "configuration_new.NewConfig"}
    if place == "text_config":
        if config["model_type"] in transformers.CONFIG_MAPPING:
            config = {**config, "model_type": "mistral3", "text_config": config}
        else:
            config = {**config, "text_config": {"index_topk": config.pop("index_topk")}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TypeError, match=f"^load: .*config.json is of {message}"):
        models.load(tmp_path)


def test_a_model_type_that_transformers_does_not_know_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v99", "index_topk": 8}')
    with pytest.raises(TypeError, match="model of type deepseek_v99, unknown to transformers 5"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"model_type": 3', '\ufeff{"model_type": "glm_moe_dsa"}']
)
def test_a_config_that_is_none_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    message = (
        "is not the configuration of a model, JSON in UTF-8 without a byte-order mark: .*again"
    )
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path)


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_a_multimodal_model_loads_to_the_bit(kind, tmp_path):
    model = OWN[kind]()
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    loaded = models.load(tmp_path)
    assert type(loaded) is type(model)
    want, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == want.keys()
    assert [name for name in want if not torch.equal(found[name], want[name])] == []
    ids = token_ids(1, 7)
    with torch.no_grad():
        same = models.use_custom_pypto(model)(ids).logits
        assert torch.equal(loaded(ids).logits, same)


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_a_multimodal_model_saved_after_loading_has_the_same_shards(kind, tmp_path):
    OWN[kind]().save_pretrained(tmp_path / "one", max_shard_size="300KB")
    models.load(tmp_path / "one").save_pretrained(tmp_path / "two", max_shard_size="300KB")
    files = sorted((tmp_path / "one").glob("model*"))
    assert len(files) > 2
    for file in files:
        assert (tmp_path / "two" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_first_layers_of_a_multimodal_model(kind, tmp_path):
    model = OWN[kind]()
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    loaded = models.load(tmp_path, num_hidden_layers=2)
    assert loaded.config.text_config.num_hidden_layers == 2
    want = model.state_dict()
    assert all(torch.equal(tensor, want[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_text_of_a_multimodal_model_takes_stored_weights(kind, tmp_path):
    OWN[kind]().save_pretrained(tmp_path, max_shard_size="300KB")
    loaded = models.load(tmp_path, dtype="bfloat16", weights={"experts": "int8"})
    kinds = {name for name, module in loaded.named_modules() if getattr(module, "kind", None)}
    assert kinds and all("language_model" in name for name in kinds)
    with torch.no_grad():
        assert loaded(token_ids(1, 7)).logits.isfinite().all()


MISSING = """
import importlib.metadata as metadata, sys
found = metadata.version
def version(name):
    if name == "transformers":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version, sys.modules["transformers"] = version, None
import custom_pypto.models
"""


def test_without_transformers_the_import_names_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", MISSING], cwd=REPOSITORY, capture_output=True, text=True
    )
    first, last = requirements.TRANSFORMERS
    above = requirements.below(last)
    assert done.stderr.splitlines()[-1].startswith(
        f"ImportError: custom_pypto.models: needs transformers {first} to {last}, found none; "
        f"pip install 'transformers>={first},<{above}' 'safetensors"
    )
