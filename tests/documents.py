"""What documents hold: their tables and outlines, and the files and tests that they name.

python tests/documents.py    # prints what test_documents.py would reject
"""

import functools
import itertools
import re

from repository import REPOSITORY, tracked_files

# whole translations
TRANSLATED = {"README.md": "README.zh-CN.md"} | {
    f"docs/{page}.md": f"docs/zh/{page}.md"
    for page in (
        "checkpoints",
        "diagnosis",
        "dsa",
        "install",
        "npu",
        "shared_selections",
        "training",
    )
}
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
SUFFIXES = (".md", ".py", ".cpp", ".h", ".sh")
TEST = re.compile(r"`(test_\w+)`")
# folders of custom_pypto that pages name without it
SHORT = {"csrc", "kernels", "npu"}
# name what was, CANN's own files, and pages of the site
OF_OTHERS = ("CHANGELOG.md", "tests/cann/", "docs/site/pages/")


def pages() -> list[str]:
    return [name for name in tracked_files() if name.endswith(".md")]


def tables(text: str) -> list[tuple[int, int]]:
    """Rows and columns of each table, in order."""
    lines = FENCE.sub("", text).splitlines()
    found, rows = [], 0
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        rows = rows + 1 if line.startswith("|") else 0
        if rows and not after.startswith("|"):
            found.append((rows, columns(line)))
    return found


def columns(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line)) - 1


def cells(text: str, head: str) -> list[list[str]]:
    """Those of each row of the table whose first line begins with ``head``, which is the first."""
    table = re.search(rf"^{re.escape(head)}.*\n\|[ :|-]+\|\n(?:\|.*\n?)*", text, re.M)
    if table is None:
        raise ValueError(f"cells: a table must begin with {head!r}, got none")
    first, _, *rows = table[0].splitlines()
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in (first, *rows)
    ]


def unequal_tables(english: str, chinese: str) -> list[str]:
    ours, theirs = tables(english), tables(chinese)
    found = [] if len(ours) == len(theirs) else [f"{len(ours)} tables, {len(theirs)} in Chinese"]
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if one != other:
            found.append(f"table {number}: rows and columns {one}, {other} in Chinese")
    return found


def outline(text: str) -> list[str]:
    """Levels of headings and marks of list items, in order."""
    return re.findall(r"^(#+|-|\d+\.) ", FENCE.sub("", text), re.M)


def unequal_outlines(english: str, chinese: str) -> list[str]:
    pairs = itertools.zip_longest(outline(english), outline(chinese), fillvalue="nothing")
    return [
        f"heading or list item {number}: {one}, {other} in Chinese"
        for number, (one, other) in enumerate(pairs, start=1)
        if one != other
    ][:1]


@functools.cache
def _path() -> re.Pattern:
    """Paths such as ``custom_pypto/npu/<op>.py``, ``npu/<op>.py``, ``tests/test_{env,log}.py``."""
    folders = {name.partition("/")[0] for name in tracked_files() if "/" in name} | SHORT
    return re.compile(rf"(?<![\w./:-])(?:{'|'.join(map(re.escape, folders))})/[\w.<>{{}},*/-]*")


def _in_braces(path: str) -> list[str]:
    """The paths of one with alternatives in braces."""
    if not (braces := re.search(r"{([^{}]*)}", path)):
        return [path]
    begin, end = path[: braces.start()], path[braces.end() :]
    return [p for part in braces[1].split(",") for p in _in_braces(begin + part + end)]


def missing_paths(text: str) -> list[str]:
    """The paths that a text names, of which there is no file; ``<op>`` and ``*`` are any name."""
    found = [p for path in _path().findall(text) for p in _in_braces(path.rstrip(".,"))]
    patterns = [re.sub(r"<\w+>", "*", path).rstrip("/") for path in found]
    places = REPOSITORY, REPOSITORY / "custom_pypto"
    return [path for path in patterns if not any(any(place.glob(path)) for place in places)]


def _named_in(name: str) -> str:
    """The part of a file that must name existing paths: a page, or the first line of a program."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        return text
    lines = text.splitlines() or [""]
    return lines[1] if lines[0].startswith("#!") and len(lines) > 1 else lines[0]


def missing(suffix: str) -> dict[str, list[str]]:
    """What the files of a suffix name and nobody has."""
    names = [name for name in tracked_files() if name.endswith(suffix)]
    texts = {name: _named_in(name) for name in names if not name.startswith(OF_OTHERS)}
    found = {name: missing_paths(text) + missing_tests(text) for name, text in texts.items()}
    return {name: wrong for name, wrong in found.items() if wrong}


def missing_tests(text: str) -> list[str]:
    """Tests in backquotes that no file has."""
    return [name for name in TEST.findall(text) if name not in _tests()]


@functools.cache
def _tests() -> set[str]:
    files = [*REPOSITORY.glob("tests/**/*.py"), *REPOSITORY.glob("integrations/**/*.py")]
    return {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}


def main() -> None:
    for english, chinese in TRANSLATED.items():
        both = [(REPOSITORY / page).read_text() for page in (english, chinese)]
        for what in unequal_tables(*both) + unequal_outlines(*both):
            print(f"{english}: {what}")
    for suffix in SUFFIXES:
        for name, wrong in missing(suffix).items():
            print(f"{name}: {', '.join(wrong)} is missing")


if __name__ == "__main__":
    main()
