"""Runs everything that needs an NPU and packs the results into one archive.

    bash run.sh atlas                       # on an Atlas A2 or A3, with CANN's set_env.sh sourced
    bash run.sh atlas --simulator           # anywhere: on the host simulator of CANN, to see it run
    bash run.sh atlas --only npu,graph      # some parts again

Every part is one or more child processes with a time limit; what fails does not stop the others.
The archive has summary.md, env.json and a log for each part, with paths, host and user names.
Without an NPU, a CANN toolkit that has a simulator of the chip runs the parts that need no more.
Exit code: 0 if nothing failed, 1 if something did or nothing can run here, 130 after Ctrl-C, which
still writes the archive. Not verified on hardware.
"""

import argparse
import json
import signal
import sys
import tempfile
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from atlas import children, summary  # noqa: E402
from atlas.children import FAILED, INTERRUPTED  # noqa: E402
from atlas.parts import OPS_ON_NPU, PARTS, Machine, Part, no_chip  # noqa: E402
from atlas.run import NOT_RUN, Result, lines, run  # noqa: E402

REPORT = '"Hardware report" (.github/ISSUE_TEMPLATE/hardware_report.md)'
TRY_SIMULATOR = (
    "bash run.sh atlas --simulator runs everything on the host simulator of CANN instead"
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh atlas",
        description=__doc__,
        epilog="Parts: " + "; ".join(f"{part.name}: {part.shows}" for part in PARTS) + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--simulator", action="store_true", help="on the host simulator of CANN")
    parser.add_argument("--only", type=chosen, default=PARTS, metavar="PART[,PART]")
    parser.add_argument(
        "--limit", type=float, default=1.0, metavar="FACTOR", help="multiplies the time limits"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the archive, a zip")
    return parser.parse_args(arguments)


def chosen(names: str) -> list[Part]:
    """The parts of those names and the first one, on which the others stand."""
    wanted, known = set(names.split(",")), {part.name for part in PARTS}
    if unknown := sorted(wanted - known):
        raise argparse.ArgumentTypeError(
            f"must name parts ({', '.join(part.name for part in PARTS)}), got {', '.join(unknown)}"
        )
    return [part for part in PARTS if part is PARTS[0] or part.name in wanted]


def why_not(found: Result, machine: Machine) -> str:
    """Why nothing can run here, with the remedies; empty: it can. Reads the machine's report."""
    if found.status != children.OK:
        said = "\n".join(lines(found.steps[-1][2])[-summary.LAST :] if found.steps else [])
        return f"{said}\n\nno report of this machine ({found.line()}): {found.part.advice}"
    machine.report.update(json.loads((machine.scratch / "env.json").read_text("utf-8")))
    npu, way = machine.report["env"]["npu"], machine.report["env"]["ways"][OPS_ON_NPU]
    if machine.has_npu or not (npu["devices"] or no_chip(machine)):
        return ""
    lacking = [f"  missing: {x['what']}\n  remedy:  {x['remedy']}" for x in way["missing"]]
    return "\n".join(["the ops do not run on this NPU" if npu["devices"] else "no NPU", *lacking])


def tell(results: list[Result], archive: Path) -> None:
    """The end of the output: what failed, the next thing to try, where the archive is."""
    print()
    for result in results:
        for step, ended, text in result.failures():
            print(f"FAILED  {result.part.name} {step.name}: {ended.how}")
            print(f"        next: {result.next_step(step, ended, text)}")
    for result in results:
        if result.status in (children.SKIPPED, NOT_RUN):
            print(f"{result.status:7} {result.part.name}: {result.line()}".rstrip(": "))
    print("Read this archive: its logs have paths, host and user names, in plain text. Then please")
    print(f"attach it to an issue of the kind {REPORT}")
    print(archive)


def main(parts: list[Part], options: argparse.Namespace) -> int:
    """Runs the parts, of which the first one makes the report of the machine."""
    date = datetime.now()
    archive = options.output or Path(f"custom_pypto-atlas-{date:%Y-%m-%d-%H%M}.zip")
    if not archive.absolute().parent.is_dir():
        print(f"run.sh atlas: --output must be in a folder, got {archive}", file=sys.stderr)
        return 2
    children.prepare()
    # as Ctrl-C, which a shell's background programs ignore: the archive is still written
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="custom_pypto-atlas-") as scratch:
        machine = Machine({}, Path(scratch), options.simulator)
        results = run(parts, machine, options.limit, lambda first: not why_not(first, machine))
        if reason := why_not(results[0], machine):
            print(reason if options.simulator else f"{reason}\n{TRY_SIMULATOR}", file=sys.stderr)
            return 1
        summary.write(archive, results, machine, date)
    tell(results, archive)
    found = {result.status for result in results}
    if found & {INTERRUPTED, NOT_RUN}:
        return 130
    return int(FAILED in found)


if __name__ == "__main__":
    options = parse()
    sys.exit(main(options.only, options))
