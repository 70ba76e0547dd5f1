"""Pages agree with their translations, name files and tests that exist, and show what programs
compute."""

import re

import documents
import pytest
from documents import REPOSITORY, TRANSLATED, pages

from custom_pypto.models.architectures import ARCHITECTURES, available

CHINESE = TRANSLATED | {"docs/training.md": "docs/zh/training.md"}
TABLE = "| a | b |\n| --- | --- |\n| 1 | `x\\|y` |\n"


@pytest.mark.parametrize("page", TRANSLATED)
def test_both_languages_have_equal_tables_headings_and_lists(page):
    english, chinese = ((REPOSITORY / name).read_text() for name in (page, TRANSLATED[page]))
    assert documents.outline(english) and not documents.unequal_tables(english, chinese)
    assert not documents.unequal_outlines(english, chinese)


@pytest.mark.parametrize(
    "chinese, says",
    [
        (TABLE + "| 2 | 3 |\n", r"table 1: rows and columns (3, 2), (4, 2) in Chinese"),
        (TABLE.replace("| 1 | ", "| 1 | 2 | "), "table 1: rows and columns (3, 2), (3, 3) in"),
        ("text\n", "1 tables, 0 in Chinese"),
        (f"```\n{TABLE}```\n", "1 tables, 0 in Chinese"),
    ],
    ids=["row", "column", "table", "code"],
)
def test_a_table_that_differs_is_found(chinese, says):
    (found,) = documents.unequal_tables(TABLE, chinese)
    assert found.startswith(says)
    assert not documents.unequal_tables(TABLE, f"text\n\n{TABLE}\ntext")


def test_a_heading_or_list_item_that_differs_is_found():
    page = "# a\n\n- b\n- c\n\n## d\n\n1. e\n"
    for other, says in (
        (page.replace("- c\n", ""), "3: -, ## in Chinese"),
        (page.replace("## d", "### d"), "4: ##, ### in Chinese"),
        (page.replace("1. e", "e"), "5: 1., nothing in Chinese"),
    ):
        (found,) = documents.unequal_outlines(page, other)
        assert found == f"heading or list item {says}"
    assert not documents.unequal_outlines(page, f"text\n\n{page}\n```\n- f\n```\n")


@pytest.mark.parametrize("page", [p for p in CHINESE if "```" in (REPOSITORY / p).read_text()])
def test_the_chinese_page_shows_the_code_of_the_english_one(page):
    def code(name):
        text = (REPOSITORY / name).read_text()
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
        # comments are translated, and the labels of diagrams
        return [
            (language, re.sub(r'"[^"]*"' if language == "mermaid" else r" *#.*", "", block))
            for language, block in blocks
        ]

    assert code(CHINESE[page]) == code(page) != []


def test_every_file_that_a_page_links_to_exists():
    # links of docs/site/pages are the site's: its build checks them
    for page in (REPOSITORY / page for page in pages() if not page.startswith("docs/site/")):
        for link in re.findall(r"\]\((?!https:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), (page, link)


@pytest.mark.parametrize("suffix", documents.SUFFIXES)
def test_every_path_and_test_that_is_named_exists(suffix):
    assert documents.missing(suffix) == {}


def test_a_path_or_test_that_is_missing_is_found():
    text = "`docs/npu.md`, tests/test_{ops,env}.py: docs/<op>.md https://x/docs/y models/z*/a."
    assert documents.missing_paths(text) == ["tests/test_ops.py", "models/z*/a"]
    assert documents.missing_paths("`csrc/nothing.cpp`, csrc/ops") == ["csrc/nothing.cpp"]
    own = test_a_path_or_test_that_is_missing_is_found.__name__
    assert documents.missing_tests(f"`{own}`, `test_of_nothing_`") == ["test_of_nothing_"]


@pytest.mark.parametrize("page", ["docs/training.md", "docs/zh/training.md"])
def test_the_blocks_of_a_page_run_from_top_to_bottom(page, monkeypatch):
    """As somebody does who copies one after the other."""
    pytest.importorskip("peft")
    monkeypatch.chdir(REPOSITORY)
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text(), re.S | re.M)
    names = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    indexers = [p.grad for n, p in names["adapted"].named_parameters() if ".wk.lora_B" in n]
    assert len(blocks) == 5 and all(grad.any() for grad in indexers) and indexers


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_readme_is_short(page):
    assert len((REPOSITORY / page).read_text().splitlines()) <= 180


NEWEST = pytest.mark.skipif(
    available() != list(ARCHITECTURES), reason="this transformers lacks classes of the tables"
)


@NEWEST
def test_tables_are_those_of_the_code():
    import facts  # imports every architecture

    pages = "README.md", "README.zh-CN.md", "docs/support.md", "docs/models.md"
    assert {*pages, "docs/checkpoints.md", "docs/zh/checkpoints.md"} <= {*facts.pages()}
    assert facts.stale() == []


@NEWEST
def test_an_architecture_more_asks_for_the_command_that_adds_it_to_the_tables():
    import facts

    more = {**ARCHITECTURES, "MoreForCausalLM": ARCHITECTURES["HYV4ForCausalLM"]._replace(name="M")}
    found = facts.stale(more)
    pages = [said.partition(": ")[0] for said in found]
    assert pages == ["README.md", "README.zh-CN.md", "docs/models.md", "docs/support.md"]
    assert all(said.endswith("; run python tests/facts.py --write") for said in found)
    for page in pages:
        text = facts.pages()[page]
        once = facts.rewritten(page, text, more)
        assert sum(line.startswith("| M | ") for line in once.splitlines()) == 1
        assert facts.rewritten(page, once, more) == once
        assert facts.rewritten(page, once) == text


def test_the_models_that_vllm_serves_are_those_of_the_tests_of_the_plugin():
    tests = (REPOSITORY / "integrations/vllm/tests").glob("*.py")
    words = {word for file in tests for word in re.findall(r"\w+", file.read_text())}
    served = {name for name, it in ARCHITECTURES.items() if it.served}
    assert served == {name for name, it in ARCHITECTURES.items() if {name, it.folder} & words}


def test_every_page_is_in_the_index():
    index = (REPOSITORY / "docs/README.md").read_text()
    for page in pages():
        folder, _, name = page.rpartition("/")
        if folder in ("docs", "docs/zh") and page != "docs/README.md":
            assert f"]({page.removeprefix('docs/')})" in index, page


def test_every_example_is_in_its_index():
    index = (REPOSITORY / "examples/README.md").read_text()
    programs = [
        path.name
        for path in (REPOSITORY / "examples").glob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    ]
    assert len(programs) > 5 and all(f"]({name})" in index for name in programs)


@pytest.mark.parametrize("page", ["docs/dsa.md", "docs/zh/dsa.md"])
def test_the_cost_of_dsa_is_that_of_its_sizes(page):
    heads, latent, rope, index_heads, dim, topk = 128, 512, 64, 64, 128, 2048
    row, product = 2 * (latent + rope), 2 * heads * (2 * latent + rope)
    text = (REPOSITORY / page).read_text()
    for context in (4096, 16384, 65536, 131072):
        read = (context * 2 * dim, topk * row, context * row)
        megabytes = " | ".join(f"{count / 1e6:.1f} MB" for count in read)
        indexer, attention = 2 * context * index_heads * dim, topk * product
        gigaflop = f"{indexer / 1e9:.2f}, {attention / 1e9:.2f} | {context * product / 1e9:.1f}"
        assert f"| {context} | {megabytes} | {gigaflop} |" in text
