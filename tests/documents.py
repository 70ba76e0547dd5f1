"""What pages hold: their tables, and the files that they name.

python tests/documents.py    # prints what test_documents.py would reject
"""

import functools
import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
# whole translations: the Chinese pages on checkpoints and training are shorter than the English
TRANSLATED = {"README.md": "README.zh-CN.md"} | {
    f"docs/{page}.md": f"docs/zh/{page}.md"
    for page in (
        "dsa",
        "graph_mode",
        "install",
        "npu",
        "npu_simulation",
        "pypto_versions",
        "serving",
    )
}
FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
# paths in backquotes that begin with a folder of the repository
FOLDERS = "benchmarks|custom_pypto|docs|examples|integrations|models|tests|csrc|kernels|npu"
TEST = re.compile(r"`(test_\w+)`")
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./*<>{{}},-]+)`")


def pages() -> list[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    done = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (REPOSITORY / name).is_file()]


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


def unequal_tables(english: str, chinese: str) -> list[str]:
    ours, theirs = tables(english), tables(chinese)
    found = [] if len(ours) == len(theirs) else [f"{len(ours)} tables, {len(theirs)} in Chinese"]
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if one != other:
            found.append(f"table {number}: rows and columns {one}, {other} in Chinese")
    return found


def missing_paths(text: str) -> list[str]:
    """Files and folders in backquotes that are not there; `<op>`, `*` and `{a,b}` stand for any."""
    found = []
    for path in PATH.findall(FENCE.sub("", text)):
        pattern = re.sub(r"<\w+>|\{[^}]*\}", "*", path).rstrip("/")
        places = (REPOSITORY, REPOSITORY / "custom_pypto")
        if not any(next(place.glob(pattern), None) for place in places):
            found.append(path)
    return found


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
        for what in unequal_tables(*both):
            print(f"{english}: {what}")
    for page in pages():
        text = (REPOSITORY / page).read_text()
        for name in missing_paths(text) + missing_tests(text):
            print(f"{page}: {name} is missing")


if __name__ == "__main__":
    main()
