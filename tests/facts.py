"""What architectures and ops can do, as the tables of the documents, read from the code.

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


# by the name of a place; Chinese pages have ``models`` alone
TABLES = {
    "models": model_table,
    "support": support_table,
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
