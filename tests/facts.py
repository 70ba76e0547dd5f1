"""What architectures, ops and formats of weights can do, as the tables of the documents, read from
the code.

python tests/facts.py            # names the pages whose tables differ from the code
python tests/facts.py --write    # rewrites them

A table stands between ``<!-- facts: NAME -->`` and ``<!-- end -->``.
"""

import importlib
import inspect
import json
import re
import sys

import tiny
from loading_harness import LOADED_KINDS
from repository import REPOSITORY, tracked_files

import custom_pypto
from custom_pypto import models, requirements
from custom_pypto.descriptions import ALL_OPS, OPS, spelled
from custom_pypto.models.architectures import ARCHITECTURES, Architecture, available
from custom_pypto.models.sharing import check_heads
from custom_pypto.models.weights.choice import STORED
from custom_pypto.weight_formats import WEIGHT_FORMATS, WeightFormat, rounded_formats

Table = list[list[str]]  # the first row is the head
PLACE = re.compile(r"(<!-- facts: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)
REMEDY = "run python tests/facts.py --write"
# the pages of ops without one of their own name
ELSEWHERE = {
    "npu_dense_lightning_indexer_softmax_lse_pto": "npu_dense_lightning_indexer_grad_kl_loss_pto",
    **dict.fromkeys(
        ("npu_quant_rows_pto", "npu_quant_index_update_pto", "npu_kv_quant_update_pto"),
        "int8_caches",
    ),
}
# heads and cells in Chinese; names that are the same in both languages, and code, stay
CHINESE = {
    "model": "模型",
    "class of transformers {}": "transformers {} 的类",
    "loss of the indexers": "indexer 的损失",
    "int8 caches": "int8 缓存",
    "vLLM": "vLLM",
    "yes": "有",
    "no": "无",
    "Hy4 with images and videos": "Hy4，含图像和视频",
    "Dots 3 Note, text": "Dots 3 Note，文本",
    "`{}` ({})": "`{}`（{}）",
    "{} to {}": "{} 至 {}",
    "linear layers and experts": "线性层和专家",
    "error": "误差",
    "as on disk: bfloat16, the published fp8 blocks and fp4 groups": (
        "与磁盘上相同：bfloat16、官方发布的 fp8 块和 fp4 组"
    ),
    "none": "无",
    "a {} scale for each row": "每行一个 {} scale",
    "scale and zero in {} for {} values, or {}": "每 {1}（或 {2}）个值一个 {0} scale 和 zero",
    " or ": "、",
    "half a step of 1/{} of the row's largest value": "该行最大值的 1/{} 的半步",
    "half a step of 1/{} of the group's range": "该组取值范围的 1/{} 的半步",
    "a dict": "字典",
    'one of these, or None, for `"experts"` and for `"rest"`': (
        '`"experts"` 和 `"rest"` 各取其一，或 None'
    ),
}


def said(can: bool) -> str:
    return "yes" if can else "no"


def attention(architecture: Architecture) -> type:
    module = importlib.import_module(f"{models.__name__}.{architecture.folder}")
    return getattr(module, architecture.attention)


def has_loss(architecture: Architecture) -> bool:
    """Whether ``indexer_loss`` takes it."""
    return not attention(architecture).counting.groups


def shares_heads(architecture: Architecture) -> bool:
    """Whether ``tensor_parallel`` takes it."""
    try:
        check_heads(tiny.tiny_model(architecture.folder).config.get_text_config())
    except ValueError:
        return False
    return True


def trained() -> set[str]:
    """Model classes of the checkpoints in this repository."""
    configs = REPOSITORY.glob("examples/checkpoints/*/config.json")
    return {name for file in configs for name in json.loads(file.read_text())["architectures"]}


def formats(architecture: Architecture) -> str:
    """Those of the synthetic files with published names that tests load."""
    if architecture.folder not in LOADED_KINDS:
        return "as saved by transformers"
    return "bfloat16, fp8" + ", fp4" * (architecture.folder == "deepseek_v4")


def model_table(architectures, translated=str) -> Table:
    first, last = requirements.TRANSFORMERS
    span = translated("{} to {}").format(first, last)
    heads = [translated("class of transformers {}").format(span)]
    heads += map(translated, ("vLLM", "loss of the indexers", "int8 caches"))
    rows = [[translated("model"), *heads]]
    for name, it in architectures.items():
        newer = it.since != first
        cls = translated("`{}` ({})").format(name, it.since) if newer else f"`{name}`"
        can = (it.served, has_loss(it), attention(it).int8)
        rows.append([translated(it.name), cls, *(translated(said(x)) for x in can)])
    return rows


def support_table(architectures) -> Table:
    rows = [["model", "`tensor_parallel`", "synthetic files in the tests", "trained checkpoint"]]
    for name, it in architectures.items():
        sharing = "yes" if shares_heads(it) else "rejected"
        rows.append([it.name, sharing, formats(it), said(name in trained())])
    return rows


def architecture_table(architectures) -> Table:
    """What the folders say of themselves, and the pools of their caches."""
    rows = [["model", "folder in `models`", "differs in", "pools of the cache: width, where"]]
    for it in architectures.values():
        cls = attention(it)
        pools = []
        for name, pool in cls.pools.items():
            where = " and ".join(f"`{key}` is `{value}`" for key, value in pool.where.items())
            pools.append(f"`{name}`: `{pool.width}`" + f", where {where}" * bool(where))
        about = sentence(sys.modules[cls.__module__].__doc__)
        _, _, differs = about.partition(": ")
        rows.append([it.name, f"`{it.folder}`", differs, "; ".join(pools)])
    return rows


def stored_cells(form: WeightFormat, translated) -> list[str]:
    """What is stored beside codes that values are rounded to, and how far these are."""
    if form.block or form.zeros != bool(form.groups):
        raise ValueError(
            "facts.py: a format that values are rounded to must have a scale for a row, or scale "
            f"and zero for a group, got {form}; add its words to stored_cells"
        )
    dtype, largest = str(form.scale_dtype).removeprefix("torch."), 2 ** (8 // form.codes) - 1
    if form.zeros:
        first, *others = map(str, form.groups)
        scales = translated("scale and zero in {} for {} values, or {}")
        error = translated("half a step of 1/{} of the group's range").format(largest)
        return [scales.format(dtype, first, translated(" or ").join(others)), error]
    error = translated("half a step of 1/{} of the row's largest value").format(largest // 2)
    return [translated("a {} scale for each row").format(dtype), error]


def weight_table(_, translated=str) -> Table:
    """The values of ``models.load(weights=...)``."""
    stored = "as on disk: bfloat16, the published fp8 blocks and fp4 groups"
    either = 'one of these, or None, for `"experts"` and for `"rest"`'
    return [
        ["`weights`", translated("linear layers and experts"), translated("error")],
        [f'`"{STORED}"`', translated(stored), translated("none")],
        *(
            [f'`"{name}"`', *stored_cells(WEIGHT_FORMATS[name], translated)]
            for name in rounded_formats()
        ),
        [translated("a dict"), translated(either), ""],
    ]


def op_table(_) -> Table:
    rows = [["op", "computes", "first argument on an NPU and in torchair"]]
    for op in ALL_OPS:
        function = getattr(custom_pypto, op)
        first = next(iter(inspect.signature(function).parameters))
        dtypes = spelled(OPS[op].dtypes_of(first)) if op in OPS else "–"
        link = f"[`{op}`]({ELSEWHERE.get(op, op)}.md)"
        rows.append([link, sentence(function.__doc__), dtypes])
    return rows


def sentence(docstring: str) -> str:
    """The first of a docstring, in Markdown."""
    text = " ".join(docstring.strip().partition("\n\n")[0].split())
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"\. [A-Z].*|\.$", "", text)


# by the name of a place; Chinese pages have ``models`` and ``weights``
TABLES = {
    "models": model_table,
    "support": support_table,
    "weights": weight_table,
    "architectures": architecture_table,
    "ops": op_table,
}


def rewritten(page: str, text: str, architectures=ARCHITECTURES) -> str:
    """A page with the tables that the code has now."""
    translation = {"translated": lambda cell: CHINESE.get(cell, cell)} if "zh" in page else {}

    def table(place: re.Match) -> str:
        rows = TABLES[place[2]](architectures, **translation)
        lines = [f"| {' | '.join(row)} |\n" for row in rows]
        lines.insert(1, "|" + " --- |" * len(rows[0]) + "\n")
        return place[1] + "".join(lines) + place[4]

    return PLACE.sub(table, text)


def pages() -> dict[str, str]:
    """Names and texts of the pages with tables."""
    texts = {
        name: (REPOSITORY / name).read_text() for name in tracked_files() if name.endswith(".md")
    }
    return {name: text for name, text in texts.items() if "<!-- facts: " in text}


def stale(architectures=ARCHITECTURES) -> list[str]:
    """What is wrong with each page whose tables differ from the code."""
    return [
        f"{page}: a table differs from the code; {REMEDY}"
        for page, text in pages().items()
        if rewritten(page, text, architectures) != text
    ]


def main() -> int:
    if missing := ARCHITECTURES.keys() - available():
        newest = requirements.TRANSFORMERS[1]
        sys.exit(
            f"facts.py: transformers must have {', '.join(sorted(missing))}; "
            f"pip install 'transformers=={newest}.*'"
        )
    if sys.argv[1:] == ["--write"]:
        for page, text in pages().items():
            (REPOSITORY / page).write_text(rewritten(page, text))
    found = stale()
    print(*found, sep="\n", end="\n" * bool(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
