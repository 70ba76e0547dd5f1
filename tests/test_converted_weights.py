"""examples/convert_checkpoint.py --weights: what models.load and save_pretrained write, in the
memory of a shard; with --format compressed-tensors what vLLM reads."""

import json
import re
import resource
import sys

import pytest
import torch
from conversion_harness import (  # noqa: F401
    assert_checksums_hold,
    assert_gives_up,
    assert_same_tensors,
    convert_checkpoint,
    convert_in_this_process,
    tensors_of,
)
from loading_harness import INDEX, LOADED_KINDS, edit_tensor
from mtp_harness import MTP_KINDS
from processes import PAGES, in_a_process, peak_of, status
from published import V4, published, save_sparse, true_weights, write_published
from tiny import ALL_KINDS, marks_of, tiny_config, tiny_model

from custom_pypto import models
from custom_pypto.models.weights.modules import stored_parameters
from custom_pypto.weight_formats import values_of

KINDS_OF_WEIGHTS = ("int8", "int4", "stored")
COMPRESSED = ["--format", "compressed-tensors"]
# rows of experts, and of groups of DeepSeek-V4's output projection, in whole blocks of fp8
WIDE = dict(moe_intermediate_size=128)
# every width a multiple of 32, as vLLM's formats need
EVEN = dict(WIDE, q_lora_rank=64, hidden_size=192, v_head_dim=32, intermediate_size=160)
SHARDS = ["--max-shard-size", "60KB"]


def saved_in_bfloat16(path, kind):
    tiny_model(kind).to(torch.bfloat16).save_pretrained(path)
    return path


def published_wide(path, kind):
    return published(path, kind, **WIDE | (dict(o_lora_rank=128) if kind == V4 else {}))


SOURCES = [
    pytest.param(make, kind, id=f"{make.__name__}-{kind}", marks=marks_of(kind))
    for make, kinds in ((saved_in_bfloat16, ALL_KINDS), (published_wide, LOADED_KINDS))
    for kind in kinds
]


def texts_of(path, *names):
    return {name: json.loads((path / name).read_text()) for name in names}


@pytest.mark.parametrize("make, kind", SOURCES)
def test_files_are_those_that_load_and_save_pretrained_write(make, kind, convert, tmp_path):
    source = make(tmp_path / "source", kind)
    (source / "tokenizer.json").write_text("{}")
    mtp = make is published_wide and kind in MTP_KINDS
    for weights in KINDS_OF_WEIGHTS:
        saved, target = tmp_path / f"{weights}-saved", tmp_path / weights
        model = models.load(source, weights=weights, mtp=mtp)
        model.save_pretrained(saved, max_shard_size="60KB")
        assert "0 kept" in convert(source, target, "--weights", weights, *SHARDS)
        assert_same_tensors(tensors_of(target), tensors_of(saved))
        names = ("config.json", "generation_config.json")
        assert texts_of(target, *names) == texts_of(saved, *names)
        ours, theirs = ((texts_of(path, INDEX)[INDEX]) for path in (target, saved))
        assert ours["metadata"] == theirs["metadata"]
        assert ours["weight_map"].keys() == theirs["weight_map"].keys()
        assert (target / "tokenizer.json").read_text() == "{}"
        assert_checksums_hold(target)
        assert_same_tensors(models.load(target).state_dict(), models.load(saved).state_dict())
        if mtp:
            assert_same_tensors(models.load(target, mtp=True).state_dict(), model.state_dict())


def test_a_model_that_was_saved_without_its_mtp_layer(convert, tmp_path):
    source = published_wide(tmp_path / "source", "glm_moe_dsa")
    models.load(source).save_pretrained(tmp_path / "saved")  # whose config.json still has the key
    convert(tmp_path / "saved", tmp_path / "int4", "--weights", "int4")
    want = models.load(tmp_path / "saved", weights="int4").state_dict()
    assert_same_tensors(models.load(tmp_path / "int4").state_dict(), want)


def test_the_first_layers(convert, tmp_path):
    source = published_wide(tmp_path / "source", "glm_moe_dsa")
    convert(source, tmp_path / "part", "--weights", "int4", "--layers", 2)
    whole = models.load(source, weights="int4", num_hidden_layers=2)
    assert_same_tensors(models.load(tmp_path / "part").state_dict(), whole.state_dict())


def test_weights_that_no_layer_has_are_rejected(convert, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    tiny_model().save_pretrained(source)  # in float32
    said = convert(source, target, "--weights", "stored")
    assert_gives_up(said, "SOURCE must have linear layers or experts that --weights stored keeps")
    assert "--experts must be omitted" in convert(
        source, target, "--weights", "int8", "--experts", 4
    )
    for weights in ([], ["--weights", "stored"]):
        said = convert(source, target, *weights, *COMPRESSED)
        assert_gives_up(said, "--format compressed-tensors needs --weights int8 or int4, got")
    assert not target.exists()


@pytest.mark.parametrize("options", [[], ["--weights", "int8"]], ids=["bf16", "int8"])
def test_scales_that_are_no_numbers_are_rejected_before_a_shard(options, convert, tmp_path):
    source, target = published_wide(tmp_path / "source", "deepseek_v32"), tmp_path / "target"
    edited = edit_tensor(source, r"scale_inv$", lambda scales: scales.fill_(torch.inf))
    said = convert(source, target, *options)
    assert_gives_up(said, f"load: .*{edited['shard']}: {edited['name']} must be finite")
    assert not list(target.glob("*.safetensors"))


def test_what_does_not_fit_on_the_disk_is_not_begun(convert, tmp_path):
    with torch.device("meta"):  # 4 TB, of which the disk holds the headers
        write_published(tmp_path / "fp8", tiny_config(vocab_size=10**10), save=save_sparse)
    said = convert(tmp_path / "fp8", tmp_path / "int4", "--weights", "int4")
    assert_gives_up(said, r".* needs 3\.84TB of free disk space, has ")


# ---- memory -------------------------------------------------------------------------------------


def converted_in_memory(small, large, options):
    """Bytes that the conversion of ``large`` takes at its peak, under a limit of ROOM more than
    that of ``small`` has left taken: the system refuses what is beyond."""
    with pytest.MonkeyPatch.context() as patch:
        for source in (small, large):
            target = source.with_name(f"{source.name}-target")
            patch.setattr("sys.argv", ["", str(source), str(target), *options])
            if source is small:
                convert_checkpoint.main()  # has imported all there is to import
        limit = status("VmData") + ROOM
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return peak_of(convert_checkpoint.main)


SHARD = 10_000_000
# the allocators keep free pages beside those of a shard; seen up to 20 MB
ROOM = SHARD + 3 * PAGES


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--weights", "int8"], id="int8"),
        pytest.param(["--weights", "int4", *COMPRESSED], id="packed", marks=pytest.mark.slow),
        pytest.param([], id="bf16", marks=pytest.mark.slow),
    ],
)
def test_a_conversion_takes_the_memory_of_a_shard(options, tmp_path):
    small = published(tmp_path / "small", **EVEN)
    sizes = dict(hidden_size=1024, moe_intermediate_size=512, n_routed_experts=8)
    large = published(tmp_path / "large", **EVEN | sizes, num_hidden_layers=14)
    size = ["--max-shard-size", f"{SHARD // 1000}KB"]
    peak = in_a_process(converted_in_memory, small, large, [*options, *size])
    whole = sum(file.stat().st_size for file in (tmp_path / "large-target").glob("*.safetensors"))
    assert peak < ROOM < whole / 3, (peak, whole)


# ---- compressed-tensors -------------------------------------------------------------------------


def unpacked(packed, bits):
    """The integers of ``pack-quantized``: a word has the first value in its low bits, each plus
    half of the range."""
    words = packed.long() & 0xFFFFFFFF
    shifts = torch.arange(0, 32, bits)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2) - 2 ** (bits - 1)


def values_by_name(tensors):
    """What each packed weight stands for."""
    values = {}
    for name in [name for name in tensors if name.endswith("_packed")]:
        name = name.removesuffix("_packed")
        rows, columns = shape = tensors[f"{name}_shape"].tolist()
        scales = tensors[f"{name}_scale"].float()
        codes = unpacked(
            tensors[f"{name}_packed"], 32 * tensors[f"{name}_packed"][0].numel() // columns
        )
        assert list(codes.shape) == shape
        values[name] = codes * scales.repeat_interleave(columns // scales.shape[1], 1)
    return values


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"], name="even")
def published_in_even_widths(request, tmp_path_factory):
    return published(tmp_path_factory.mktemp(request.param), request.param, **EVEN)


def test_packed_int8_stands_for_what_load_rounds_to(even, convert, tmp_path):
    convert(even, tmp_path, "--weights", "int8", *COMPRESSED, *SHARDS)
    packed = values_by_name(tensors_of(tmp_path))
    model = models.load(even, weights="int8")
    ours = {}
    for name in stored_parameters(model):
        if name.endswith("_scale"):
            continue
        weight, scales = model.get_parameter(name), model.get_parameter(f"{name}_scale")
        values = values_of(weight.squeeze(-1), scales)
        for expert, of_expert in enumerate(values if values.dim() == 3 else ()):
            prefix, _, projection = name.rpartition("experts.")
            of_projections = of_expert.chunk(2) if projection == "gate_up_proj" else [of_expert]
            names = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
            for one, matrix in zip(names, of_projections, strict=True):
                ours[f"{prefix}experts.{expert}.{one}.weight"] = matrix
        if values.dim() == 2 and not name.endswith("indexer.wk.weight"):
            ours[name] = values
    last = {name for name in packed if ".layers.3." in name}  # drafts, which load leaves out
    assert {re.sub(r"layers\.\d", "", name) for name in last} < {
        re.sub(r"layers\.\d", "", name) for name in ours
    }
    assert_same_tensors({name: packed[name] for name in packed.keys() - last}, ours)


def test_packed_int4_is_the_nearest_of_its_steps(even, convert, tmp_path):
    convert(even, tmp_path, "--weights", "int4", *COMPRESSED)
    tensors, exact = tensors_of(tmp_path), true_weights(even, torch.float32)
    for name, values in values_by_name(tensors).items():
        steps = tensors[f"{name}_scale"].float()
        group = values.shape[1] // steps.shape[1]
        assert tensors[f"{name}_scale"].dtype == torch.bfloat16 and group == 32
        largest = exact[name].unflatten(1, (-1, group)).abs().amax(-1)
        torch.testing.assert_close(steps, largest / 7.5, rtol=2**-8, atol=0)
        # a scale that is rounded down leaves the largest value up to 7.5 · 2^-8 steps further off
        error = (values - exact[name]).abs().unflatten(1, (-1, group)).amax(-1)
        assert (error <= (0.5 + 7.5 * 2**-8 + 1e-5) * steps).all(), name


def test_the_rest_of_a_packed_checkpoint_is_as_in_bfloat16(even, convert, tmp_path):
    convert(even, tmp_path / "packed", "--weights", "int4", *COMPRESSED)
    convert(even, tmp_path / "bf16")
    packed, plain = tensors_of(tmp_path / "packed"), tensors_of(tmp_path / "bf16")
    ends = ("_packed", "_scale", "_shape")
    rest = {name: it for name, it in packed.items() if not name.endswith(ends)}
    assert_same_tensors(rest, {name: plain[name] for name in rest})
    quantized = {name.removesuffix("_packed") for name in packed if name.endswith("_packed")}
    assert plain.keys() - rest.keys() == quantized
    linear = {name.split(".", 3)[-1] for name in rest if rest[name].dim() == 2}
    assert {name.rpartition(".")[0] for name in linear} == {
        "", "mlp.gate", "self_attn.kv_b_proj", "self_attn.indexer.wk",
        "self_attn.indexer.weights_proj", "eh_proj",
    }  # fmt: skip
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((tmp_path / "bf16" / "config.json").read_text())
    ignored = [re.compile(name.removeprefix("re:")) for name in quantization["ignore"]]
    for name in plain:
        if plain[name].dim() == 2 and name.startswith("model.layers."):
            ignore = any(it.match(name.removesuffix(".weight")) for it in ignored)
            assert ignore == (name in rest), name


def test_the_first_layers_are_packed_without_drafts(even, convert, tmp_path):
    convert(even, tmp_path, "--weights", "int8", *COMPRESSED, "--layers", 2)
    layers = {
        found[1] for name in tensors_of(tmp_path) if (found := re.search(r"layers\.(\d)", name))
    }
    assert layers == {"0", "1"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 2 and config["num_nextn_predict_layers"] == 0


def test_what_vllm_cannot_read_is_not_packed(convert, tmp_path):
    options = ["--weights", "int4", *COMPRESSED]
    published(tmp_path / "v4", V4)
    said = convert(tmp_path / "v4", tmp_path / "target", *options)
    assert_gives_up(said, "SOURCE must be one of deepseek_v32, glm_moe_dsa for --format compressed")
    published(tmp_path / "odd", **EVEN | dict(q_lora_rank=48))
    said = convert(tmp_path / "odd", tmp_path / "target", *options)
    assert_gives_up(said, r"model\.layers\.0.*wq_b.weight must have a multiple of 32 columns")
    assert not (tmp_path / "target").exists()


def test_load_says_that_packed_weights_are_for_vllm(even, convert, tmp_path):
    convert(even, tmp_path, "--weights", "int4", *COMPRESSED)
    with pytest.raises(ValueError, match="must be fp8 with a weight_block_size"):
        models.load(tmp_path)
