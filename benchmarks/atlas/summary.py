"""The page that sums up a run, and the archive that holds it."""

import json
import tempfile
import zipfile
from datetime import datetime
from pathlib import Path

from atlas.children import FAILED, OK, SKIPPED, Ended
from atlas.parts import Machine, Step
from atlas.run import Result, lines

SIMULATOR = """**Host simulator of CANN: this was no NPU.** CPU memory and CPU kernels computed all,
PyPTO's interpreter the ops. Times say nothing. Shortened: one op in `again`, `ready` and `aclnn`,
two in `times`, the first case of an op in `times`, a short prompt in `graph`."""
VERDICTS = 10  # lines of a log that begin with FAILED
LAST = 15  # further lines, from its end


def page(results: list[Result], machine: Machine, date: datetime) -> str:
    """The summary in Markdown."""
    count = {status: sum(r.status == status for r in results) for status in (OK, FAILED, SKIPPED)}
    other = len(results) - sum(count.values())
    counted = [f"{n} {status}" for status, n in count.items() if n]
    counted += [f"{other} not finished"] if other else []
    text = [f"# custom_pypto on {_where(machine)}, {date:%Y-%m-%d}"]
    text += [SIMULATOR] if machine.simulator else []
    text += [_machine(machine.report), f"Parts: {', '.join(counted)}."]
    rows = [["part", "shows", "result", "seconds", "in a line"], ["---"] * 5]
    rows += [[r.part.name, r.part.shows, r.status, f"{r.seconds:.1f}", r.line()] for r in results]
    text.append("\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows))
    for result in results:
        text += [_failure(result, *failed, machine.simulator) for failed in result.failures()]
    for result in results:
        if result.part.tables and (table := _tables(result)):
            note = "**On the simulator: no times of an NPU.**\n\n" if machine.simulator else ""
            text.append(f"## {result.part.name}: {result.part.shows}\n\n{note}{table}")
    return "\n\n".join(text) + "\n"


def _where(machine: Machine) -> str:
    if machine.simulator:
        return "a simulator"
    return "an NPU" if machine.has_npu else "a machine without an NPU"


def _machine(report: dict) -> str:
    versions, devices = report["env"]["versions"], report["env"]["npu"]["devices"]
    package = report["env"]["custom_pypto"]
    names = [f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices)]
    shown = ["CANN", "torch", "torch_npu", "pypto", "python"]
    return "; ".join(
        [", ".join(names) or "no NPU", *(f"{name} {versions[name] or 'none'}" for name in shown)]
        + [f"custom_pypto {package['version']} {package['commit'] or ''}".strip()]
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]


def _failure(result: Result, step: Step, ended: Ended, log: str, simulator: bool) -> str:
    said = lines(log)
    verdicts = [line for line in said[:-LAST] if line.startswith("FAILED")][:VERDICTS]
    shown = "\n".join([*verdicts, *(["…"] if verdicts else []), *said[-LAST:]])
    # no line of a log may end the block
    block = shown.replace("```", "'''")
    only = f"bash run.sh atlas{' --simulator' * simulator} --only {result.part.name}"
    return (
        f"## Failed: {result.part.name} {step.name}".rstrip()
        + f"\n\n{ended.how}, after {ended.seconds:.1f} s.\n\n```\n{block}\n```\n\n"
        + f"Next: {result.next_step(step, ended, log)}. To repeat: `{only}`."
    )


def _tables(result: Result) -> str:
    """The tables of the logs, those with the same header as one, then their notes."""
    tables: dict[tuple[str, ...], list[str]] = {}
    notes: dict[str, None] = {}
    for _, _, log in result.steps:
        rows = [line for line in log.splitlines() if line.startswith("| ")]
        tables.setdefault(tuple(rows[:2]), []).extend(rows[2:])
        notes |= dict.fromkeys(line for line in log.splitlines() if line.startswith("> "))
    parts = ["\n".join([*head, *rows]) for head, rows in tables.items() if rows]
    return "\n\n".join([*parts, *notes])


def write(archive: Path, results: list[Result], machine: Machine, date: datetime) -> None:
    """Writes the archive: the page, the report, a log for each part, the files that it made."""
    members = {"summary.md": page(results, machine, date)}
    report = machine.report["env"] | {k: v for k, v in machine.report.items() if k != "env"}
    members["env.json"] = json.dumps(report, indent=2, ensure_ascii=False)
    for result in results:
        if result.steps:
            members[f"{result.part.name}.log"] = "\n".join(
                f"==== {step.name or result.part.name}: {ended.status}, {ended.how}, "
                f"{ended.seconds:.1f} s\n{text}"
                for step, ended, text in result.steps
            )
        for file in sorted(machine.scratch.glob(result.part.files or "no file")):
            if file.is_file():
                members[f"{result.part.name}/{file.name}"] = file.read_text("utf-8", "replace")
    # not by the package, which may be what does not work
    with tempfile.TemporaryDirectory(prefix=f".{archive.name}.", dir=archive.parent) as folder:
        part = Path(folder) / archive.name
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as file:
            for name, text in members.items():
                data = text.encode("utf-8", "replace")
                file.writestr(zipfile.ZipInfo(name, date.timetuple()[:6]), data, file.compression)
        part.replace(archive)
