"""Tables whose cells people write name what the code has: formats, architectures, options, ops.

``tests/facts.py`` makes the tables whose cells are facts alone.
"""

import ast
import inspect
import re

import pytest
from documents import FENCE, REPOSITORY, cells, pages

from custom_pypto import eager, standard
from custom_pypto.descriptions import ALL_OPS
from custom_pypto.models import training, use_custom_pypto
from custom_pypto.models.architectures import ARCHITECTURES, available
from custom_pypto.models.indexer_loss import INDEXER_LOSS
from custom_pypto.weight_formats import WEIGHT_FORMATS, rounded_formats

NEWEST = pytest.mark.skipif(
    available() != list(ARCHITECTURES), reason="this transformers lacks classes of the tables"
)
PLUGIN = "integrations/vllm/custom_pypto_vllm"


def text(name: str) -> str:
    return (REPOSITORY / name).read_text()


def code(cell: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`\"?([^`\"]+)\"?`", cell)


def models_in(words: str) -> set[str]:
    """Architectures, by their names in the tables."""
    names = sorted((it.name for it in ARCHITECTURES.values()), key=len, reverse=True)
    return {*re.findall("|".join(map(re.escape, names)), words)}


def architectures(has) -> set[str]:
    """Those whose attention class has a property."""
    from facts import attention  # imports every architecture

    return {it.name for it in ARCHITECTURES.values() if has(attention(it))}


# ---- docs/serving.md ----------------------------------------------------------------------------


def test_serving_has_a_column_for_each_model_that_vllm_serves():
    page = text("docs/serving.md")
    served = [it.name for it in ARCHITECTURES.values() if it.served]
    head, tests, *_ = cells(page, "| | DeepSeek-V3.2, GLM-5 |")
    assert ", ".join(head[1:]).split(", ") == served
    assert (
        page.partition("\n")[0] == f"# Serving: {', '.join(served[:-1])} and {served[-1]} in vLLM"
    )
    for models, (file,) in zip(head[1:], map(code, tests[1:]), strict=True):
        words = {*re.findall(r"\w+", text(f"integrations/vllm/tests/{file}"))}
        for architecture, it in ARCHITECTURES.items():
            assert it.name not in models.split(", ") or {architecture, it.folder} & words, file


def test_serving_has_a_row_for_each_format_of_experts():
    """Lines of the first paragraph of their classes."""
    tree = ast.parse(text(f"{PLUGIN}/weights/experts.py"))
    lines = [
        line.removesuffix(".")
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "WeightOnlyExperts" in map(ast.unparse, node.bases)
        for line in ast.get_docstring(node).partition("\n\n")[0].splitlines()
    ]
    _, *rows = cells(text("docs/serving.md"), "| | linear layers | routed experts |")
    of_op = [row[0].replace("×", "x") for row in rows if "the op" in row[2]]
    assert len(lines) == 6 and sorted(of_op) == sorted(lines)


def test_serving_gives_formats_the_sizes_that_they_have():
    page = text("docs/serving.md")
    rows = [row[0] for row in cells(page, "| | linear layers | routed experts |")]
    block, (group,) = WEIGHT_FORMATS["fp8"].block, WEIGHT_FORMATS["fp4"].groups
    assert any(row.startswith(f"fp8 in blocks of {block} × {block},") for row in rows)
    assert any(row.startswith(f"fp4 with a scale for {group} values,") for row in rows)
    (converted,) = (row for row in rows if "`--format compressed-tensors`" in row)
    assert re.findall(r"\bint\d\b", converted) == rounded_formats()
    (function,) = (
        node
        for node in ast.parse(text(f"{PLUGIN}/weights/linears.py")).body
        if isinstance(node, ast.FunctionDef) and node.name == "rejects"
    )
    names: dict = {}
    exec(ast.unparse(function), names)
    for kind, sizes, least in (("W8A16", "a scale per row", 0), ("W4A16", "per 32·n values", 32)):
        (row,) = (row for row in rows if f" {kind}: packed, symmetric," in row)
        taken = [g for g in range(1, 129) if names["rejects"](int(kind[1]), g) is None]
        assert row.endswith(sizes) and taken == ([*range(32, 129, 32)] if least else [])
        assert names["rejects"](int(kind[1]), -1) is None


def test_serving_names_each_word_for_a_format_of_caches(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "integrations/vllm")
    from custom_pypto_vllm.config import FORMATS

    words = {*re.findall(r"--kv-cache-dtype (\w+)", text("docs/serving.md"))}
    assert words == {*FORMATS}


# ---- docs/training.md ---------------------------------------------------------------------------

# the word for a default, and the heads of the tables of forwards and of losses
TRAINING_PAGES = {
    "docs/training.md": ("default", "| in training |", "| with `indexer_loss` |"),
    "docs/zh/training.md": ("默认", "| 训练中 |", "| 有 `indexer_loss` 时 |"),
}


@pytest.mark.parametrize("page", TRAINING_PAGES)
def test_training_has_a_row_for_each_value_of_its_options(page):
    _, *paths = cells(text(page), "| `training` |")
    assert sorted(code(row[0])[0] for row in paths) == sorted(training.TRAINING)
    (default,) = (row[0] for row in paths if TRAINING_PAGES[page][0] in row[0])
    assert code(default) == [inspect.signature(use_custom_pypto).parameters["training"].default]
    _, *losses = cells(text(page), "| `indexer_loss` |")
    assert [code(row[0])[0] for row in losses] == [*INDEXER_LOSS]


@pytest.mark.parametrize("page", TRAINING_PAGES)
def test_training_has_the_limits_of_auto_and_the_arguments_that_it_rejects(page):
    limits = re.findall(r"(?:less than|小于|不到|少于) (\d+) ([GM])iB", text(page))
    sizes = {int(number) << {"G": 30, "M": 20}[unit] for number, unit in limits}
    assert sizes == {training.UPSTREAM_SCORES, training.FEW_SCORES}
    rejected = re.findall(r'"(\w+) must (?:be|not)\b', inspect.getsource(training.obstacle))
    table = " ".join(row[0] for row in cells(text(page), TRAINING_PAGES[page][1]))
    assert len(rejected) == 4 and [x for x in rejected if f"`{x}" not in table] == []


@NEWEST
@pytest.mark.parametrize("page", TRAINING_PAGES)
def test_training_names_the_models_that_are_exceptions(page):
    forwards, losses = (cells(text(page), head) for head in TRAINING_PAGES[page][1:])
    groups = architectures(lambda cls: cls.counting.groups)
    (rejected,) = (row[0] for row in losses if '`training="upstream"`' in row[0])
    assert models_in(rejected) == groups
    (packed,) = (row[1] for row in forwards if "`use_cache=False`" in row[0])
    assert models_in(packed) == groups
    (positions,) = (row[1] for row in forwards if row[0].endswith(" `position_ids`"))
    assert models_in(positions) == architectures(lambda cls: cls.counting.positions)
    (checkpoints,) = (row[1] for row in forwards if "`use_reentrant`" in row[0])
    assert models_in(checkpoints) == architectures(lambda cls: cls.shares_latents is not False)


# ---- formats of weights -------------------------------------------------------------------------


def test_checkpoints_names_each_published_format():
    """In a row of prose; ``tests/facts.py`` has the others."""
    (row,) = (
        row for row in cells(text("docs/checkpoints.md"), "| `weights` |") if "stored" in row[0]
    )
    published = [name for name, form in WEIGHT_FORMATS.items() if form.on_disk]
    assert re.findall(r"(?:bfloat|fp)\d+", row[1]) == published


@pytest.mark.parametrize(
    "page, row",
    [("README.md", "quantized weights on a CPU"), ("README.zh-CN.md", "CPU 上的量化权重")],
)
def test_the_readme_has_the_bits_of_quantized_weights(page, row):
    (bits,) = re.findall(rf"^\| {row} \| ([^|]*) \|", text(page), re.M)
    forms = [form for form in WEIGHT_FORMATS.values() if form.scale_dtype]
    assert {*map(int, re.findall(r"\d+", bits))} == {8 * x.dtype.itemsize // x.codes for x in forms}


# ---- kernels and ops ----------------------------------------------------------------------------


def test_pages_have_each_set_of_cpu_kernels():
    csrc = REPOSITORY / "custom_pypto/csrc"
    files = [*(csrc / "cpu").glob("*.cpp"), csrc / "tasks/kernel_set.cpp"]
    name = r'(?:kernel_table<[^"\n]*>\(|\.name = )"(\w+)"'
    sets = {x for file in files for x in re.findall(name, file.read_text())}
    rows = {code(row[0])[0] for row in cells(text("docs/support.md"), "| set of kernels |")[1:]}
    settings = {row[0]: row[1] for row in cells(text("docs/settings.md"), "| variable | values |")}
    assert sets == {*code(settings["`CUSTOM_PYPTO_CPU_ISA`"])} == rows | {"amx_emulated"}


def test_pages_have_each_value_of_the_choice_of_eager_calls():
    values = ast.literal_eval(re.search(r"value not in (\(.*?\))", inspect.getsource(eager))[1])
    _, *rows = cells(text("docs/graph_mode.md"), "| `CUSTOM_PYPTO_EAGER` |")
    assert sorted(x for row in rows for x in code(row[0])) == sorted(values)


def test_pages_have_the_keywords_with_one_legal_value():
    tables = {}
    for op in standard.KEYWORDS:
        page = REPOSITORY / f"docs/{op}.md"
        if page.exists() and "| keyword |" in page.read_text():
            tables[op] = {
                x for row in cells(page.read_text(), "| keyword |")[1:] for x in code(row[0])
            }
    assert len(tables) == 3 and tables == {op: {*standard.KEYWORDS[op]} for op in tables}


def test_every_op_that_a_page_names_exists():
    for page in pages():
        named = {*re.findall(r"`(npu_\w+_pto)`", FENCE.sub("", text(page)))}
        assert page == "CHANGELOG.md" or named <= {*ALL_OPS}, page
