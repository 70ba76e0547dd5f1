"""The figures of benchmarks: ``results/<kernels>/<name>.json``, and RESULTS.md, made from them.

A file is a list of runs, one of each variant, as of 1 thread and of 2. A run has what is needed to
repeat it, the names of the columns that tell its cases apart, those of its figures, and a row of
each case.
"""

import json
import re
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

from registry import BENCHMARKS, Entry

HERE = Path(__file__).parent
FOLDER, PAGE = HERE / "results", HERE / "RESULTS.md"
NOT_MEASURED = "–"
INTRODUCTION = """# Results

Made by `bash run.sh bench NAME --write` from `results/`, where every figure is; do not edit.
`bash run.sh bench --compare A B` compares two commits, or two folders. Upstream is transformers
5.23. One thread is timed by its own CPU time, more by the clock. Sides of a row ran interleaved:
compare them, not runs. Ratios depend on the machine. CPU figures say nothing about an NPU. Why
small shapes are slower: [docs/cpu_kernels.md](../docs/cpu_kernels.md#measuring). Figures to
2026-11-26 are of the programs that these commands replaced: calls of the same sizes. Names of CPUs
are what the hypervisor reports: that of the Xeon with AMX, model 167, is of a CPU without."""

Run = dict[str, Any]
Results = dict[tuple[str, str], list[Run]]  # by name and kernels


def number(text: str) -> Decimal | str | None:
    """A cell as a number, with the digits that it has, if it is one; None: nothing was measured."""
    if text in ("", "-", NOT_MEASURED, "not measured"):
        return None
    return Decimal(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else text


def parsed(text: str) -> list[Run]:
    return json.loads(text, parse_float=Decimal)


def text_of(runs: list[Run]) -> str:
    """JSON with a line for each row, so that a difference is read by case."""
    return "[\n" + ",\n".join(_text_of(run) for run in runs) + "\n]\n"


def _text_of(run: Run) -> str:
    def text(x: Any) -> str:
        return str(x) if isinstance(x, Decimal) else json.dumps(x, ensure_ascii=False)

    rows = ",\n".join(f"      [{', '.join(map(text, row))}]" for row in run["rows"])
    lines = [f"    {text(key)}: {text(value)}" for key, value in run.items() if key != "rows"]
    return "  {\n" + ",\n".join([*lines, f'    "rows": [\n{rows}\n    ]']) + "\n  }"


def of_folder(folder: Path) -> Results:
    if not folder.is_dir():
        raise ValueError(f"must be a commit or a folder of results, got {folder}")
    files = sorted(folder.glob("*/*.json"))
    return {(file.stem, file.parent.name): parsed(file.read_text("utf-8")) for file in files}


def of_commit(commit: str) -> Results:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HERE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    files = map(Path, git("ls-tree", "-r", "--name-only", commit, "results").splitlines())
    return {
        (file.stem, file.parent.name): parsed(git("show", f"{commit}:./{file}")) for file in files
    }


def add(folder: Path, name: str, kernels: str, run: Run) -> None:
    """Writes a run in the place of the one of its variant."""
    file = folder / kernels / f"{name}.json"
    old = parsed(file.read_text("utf-8")) if file.exists() else []
    runs = [one for one in old if one["variant"] != run["variant"]] + [run]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text_of(sorted(runs, key=lambda one: one["variant"])), "utf-8")
    if folder == FOLDER:
        PAGE.write_text(page(of_folder(FOLDER)), "utf-8")


# ---- RESULTS.md ---------------------------------------------------------------------------------


def page(results: Results) -> str:
    sections = [INTRODUCTION]
    for name, entry in BENCHMARKS.items():
        runs = {
            ", ".join(filter(None, [kernels, run["variant"]])): run
            for (of, kernels), found in results.items()
            for run in found
            if of == name
        }
        if runs:
            legend = f"Cells: {' · '.join(entry.shown)}." if _side_by_side(entry, runs) else ""
            about = " ".join(filter(None, [f"{entry.about}.", entry.note, legend]))
            about = about if re.match(r"\w+[.\d]", about) else about[0].upper() + about[1:]
            lines = [f"- {label}: {_made(run)}" for label, run in runs.items()]
            sections += [f"## {name}", about, "\n".join(lines), _table(entry, runs)]
    return "\n\n".join(sections) + "\n"


def _made(run: Run) -> str:
    load = "" if run["load"] is None else f", load {run['load']}"
    threads = f"{run['threads']} thread{'s' * (run['threads'] > 1)}"
    note = f"; {run['note']}" if run["note"] else ""
    return (
        f"`{run['command']}`, {run['commit']}, {run['date']}, {run['cpu']}, {threads}{load}, "
        f"torch {run['torch']}{note}"
    )


def _cell(figures: list[Any]) -> str:
    shown = [NOT_MEASURED if figure is None else str(figure) for figure in figures]
    while len(shown) > 1 and shown[-1] == NOT_MEASURED:
        shown.pop()
    return " · ".join(shown)


def _side_by_side(entry: Entry, runs: dict[str, Run]) -> bool:
    return bool(entry.across) or len(runs) > 1 and bool(entry.shown)


def _table(entry: Entry, runs: dict[str, Run]) -> str:
    """A row of each case and run; or runs, or values of ``entry.across``, side by side."""
    first = next(iter(runs.values()))
    keys, shown = first["case"], entry.shown or first["figures"]
    side_by_side = _side_by_side(entry, runs)
    found: dict[tuple[str, ...], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for label, run in runs.items():
        for row in run["rows"]:
            case = row[: len(keys)]
            values = dict(zip(run["figures"], row[len(keys) :], strict=True))
            column = label
            if entry.across:
                column = case.pop(keys.index(entry.across))
                case += [label] * (len(runs) > 1)
            elif not side_by_side:
                case += [label] * (len(runs) > 1)
            named = {column: _cell([values.get(name) for name in shown])}  # a new figure: None
            if not side_by_side:
                named = {name: _cell([values.get(name)]) for name in shown}
            columns |= dict.fromkeys(named)
            found.setdefault(tuple(case), {}).update(named)
    names = [name for name in keys if name != entry.across]
    if len(runs) > 1 and (entry.across or not side_by_side):
        names.append("run")
    lines = [[*case, *(of.get(x, NOT_MEASURED) for x in columns)] for case, of in found.items()]
    return table([*names, *columns], lines)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
