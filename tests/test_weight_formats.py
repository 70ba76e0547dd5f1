"""A format of stored weights is one record in Python, which the table in C++ equals."""

import re
import sys
from random import Random

import int8_groups
import pytest
import torch
from cases import of
from cases.hostile import Maker
from published import V4, published
from repository import REPOSITORY, tracked_files
from tiny import token_ids

import custom_pypto
from custom_pypto import models
from custom_pypto.files import NAMES
from custom_pypto.models.weights.modules import EXPERT_WEIGHTS, SCALE, matrices
from custom_pypto.reference import MODULES
from custom_pypto.weight_formats import WEIGHT_FORMATS, values_of

sys.path.append(str(REPOSITORY / "examples"))
import model_memory  # noqa: E402

KIND = int8_groups.NAME


@pytest.fixture
def sixth(monkeypatch):
    monkeypatch.setitem(WEIGHT_FORMATS, KIND, int8_groups.FORMAT)
    with int8_groups.kernels():
        yield


@torch.no_grad()
def logits(model):
    return model(token_ids(1, 40), use_cache=False).logits


def named(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def test_the_table_in_cpp_has_the_same_formats():
    records = [
        f"{name} {named(form.dtype)} {named(form.scale_dtype)} {form.codes} {form.block > 0:d} "
        f"{form.groups[0] if len(form.groups) == 1 else 0} {form.zeros:d} {form.rounded:d}"
        for name, form in WEIGHT_FORMATS.items()
    ]
    assert torch.ops.custom_pypto.weight_formats() == records


@pytest.mark.parametrize("kind", WEIGHT_FORMATS)
def test_shapes_are_those_of_quantized_weights(kind):
    form, shape = WEIGHT_FORMATS[kind], [3, 300, 64]
    weight, scales = form.quantize(torch.randn(shape))
    assert [*weight.shape] == form.shape(shape) and weight.dtype == form.dtype
    if form.scale_dtype is None:
        assert scales is None
    else:
        assert [*scales.shape] == form.scale_shape(shape) and scales.dtype == form.scale_dtype


def test_the_docstring_has_a_row_for_each_format():
    """With the dtypes of codes and scales."""
    text = custom_pypto.weight_only_linear.__doc__
    rows = re.findall(r"^ +(\w+) ``\[N, K[^]]*\]`` +(\w+)", text, re.MULTILINE)
    records = [(named(form.dtype), named(form.scale_dtype)) for form in WEIGHT_FORMATS.values()]
    assert sorted(rows) == sorted(records)


def recipe() -> tuple[list[str], list[str]]:
    """Files of a new format, and those besides of one that weights are rounded to."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = (
        text.partition("## Add a format of weights")[2].partition("\n## ")[0].partition("\n1. ")[2]
    )
    every, _, rounded = section.partition("A format that `models.load` rounds")
    return tuple(re.findall(r"`([\w/]+/[\w.]+)`", part) for part in (every, rounded))


def test_the_recipe_names_eight_files_and_each_exists():
    every, rounded = recipe()
    assert len(every) == len(set(every)) == 8
    assert rounded == ["models/weights/choice.py"] and {*every, *rounded} <= {*tracked_files()}


# those of DotsKernels besides the one in float may lack formats
TABLE = r"\bk(WeightFacts|Weights|FloatDots|WidenBf16)\[(cpu::)?kWeightFormats\] = "


def test_the_recipe_has_each_file_of_cpp_with_a_table_of_formats():
    tables = {
        path
        for path in tracked_files()
        if path.startswith("custom_pypto/csrc")
        and re.search(TABLE, (REPOSITORY / path).read_text())
    }
    assert len(tables) == 3 and tables <= set(recipe()[0])


# ---- a sixth one, of which Python alone knows ---------------------------------------------------


@pytest.mark.parametrize("kind", ["deepseek_v32", V4])
def test_a_model_is_loaded_computed_and_saved_in_it(kind, sixth, tmp_path):
    source = published(tmp_path / "published", kind)
    model = models.load(source, dtype=torch.float32, weights=KIND)
    exact = models.load(source, dtype=torch.float32)
    plain = {name: tensor.clone() for name, tensor in exact.state_dict().items()}
    rounded = {}
    for name, module in model.named_modules():
        for weight in ("weight", *EXPERT_WEIGHTS):
            if getattr(module, "kind", None) == KIND and weight in module._parameters:
                codes, scales = matrices(getattr(module, weight)), getattr(module, weight + SCALE)
                rounded[f"{name}.{weight}"] = values_of(codes, scales)
    assert len(rounded) > 8
    assert all((plain[name] - x).norm() / x.norm() < 0.01 for name, x in rounded.items())
    exact.load_state_dict(rounded, strict=False)
    got = logits(model)
    assert (got - logits(exact)).norm() / got.norm() <= 1e-4
    model.save_pretrained(tmp_path / "saved")
    again = models.load(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again), got)
    for name in rounded:
        model.get_parameter(name).zero_()
    model.load_state_dict(plain, strict=False)  # rounded as by load
    assert torch.equal(logits(model), got)


def test_its_memory_is_estimated(sixth, tmp_path):
    source = published(tmp_path, "deepseek_v32")
    config = model_memory.source_of(str(source), None)[1]
    built = model_memory.build(config, None)
    size = model_memory.size(built, dict.fromkeys(("experts", "rest"), KIND)).weights
    state = models.load(source, dtype=torch.bfloat16, weights=KIND).state_dict()
    assert size == sum(tensor.nbytes for tensor in state.values())
    with pytest.raises(ValueError, match=f"'int8', 'int4', '{KIND}', None, or a dict"):
        models.load(source, weights="int3")


def test_the_op_on_it_equals_the_reference(sixth):
    module = MODULES["weight_only_linear"]
    labels = []
    for _, label, call in module.checks([torch.float32]):
        if label.startswith(f"{KIND} "):
            labels.append(label)
            got = custom_pypto.weight_only_linear(**call)
            assert module.error(got, module.weight_only_linear(**call), call, call)[0] <= 1
    assert len(labels) == 4


def test_cases_draw_it(sixth):
    seen = set()
    for seed in range(60):
        call = of("weight_only_linear").random_call(Maker(Random(seed)))
        if int8_groups.is_own(call["weight"], call["scales"]) and call["scales"].numel():
            assert values_of(call["weight"], call["scales"]).shape == call["weight"].shape
            seen.add(seed)
    assert seen and NAMES[int8_groups.FORMAT.dtype] == "I8"
