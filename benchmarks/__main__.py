"""Runs benchmarks: a table each, nothing before the results of all sides were compared.

    bash run.sh bench [NAME...] [--check] [--write] [--list]
    bash run.sh bench --compare A B [NAME...]

Several run one after the other, each in a process of its own.
"""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

import compare
import results
from registry import BENCHMARKS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SERVING = ROOT / "build/serving/bin/python"


def listed() -> str:
    lines = []
    for name, entry in BENCHMARKS.items():
        options = " ".join(f"[{flag(option)}]" for option in entry.options)
        lines.append(f"  {name:<14} {entry.about}\n  {'':<14} {options}".rstrip())
    return "\n".join(lines)


def flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh bench",
        usage="run.sh bench [NAME...] [--check] [--write] [--list] [options of benchmarks]",
        description=__doc__.partition("\n")[0],
        epilog=f"benchmarks, and their options:\n{listed()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all that need no more")
    parser.add_argument("--check", action="store_true", help="floors; exit code 1: missed, or busy")
    parser.add_argument("--write", action="store_true", help="keep the figures, in RESULTS.md too")
    parser.add_argument(
        "--results",
        type=Path,
        default=results.FOLDER,
        metavar="FOLDER",
        help="of --write; default: benchmarks/results",
    )
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="results of commits, or folders of them"
    )
    parser.add_argument("--list", action="store_true", help="print the names")
    defaults = {k: v for entry in BENCHMARKS.values() for k, v in entry.options.items()}
    for option, value in defaults.items():
        how = dict(action="store_true") if value is False else dict(type=type(value))
        parser.add_argument(flag(option), default=None, help=argparse.SUPPRESS, **how)
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark is called {unknown[0]!r}: {', '.join(BENCHMARKS)}")
    args.needs = set()  # what to install
    if args.compare or args.list:
        return args
    args.names = args.names or [n for n, entry in BENCHMARKS.items() if entry.needs == "models"]
    args.needs = {BENCHMARKS[name].needs for name in args.names}
    args.options = {k: v for k in defaults if (v := getattr(args, k)) is not None}
    for option in args.options:
        if not any(option in BENCHMARKS[name].options for name in args.names):
            parser.error(f"{flag(option)} is no option of {', '.join(args.names)}")
    if args.check and args.write:
        parser.error("--check writes nothing: leave out --write")
    return args


def given(name: str, options: dict) -> list[str]:
    """The options on a command line, without those of other benchmarks and those at a default."""
    defaults, words = BENCHMARKS[name].options, []
    for option, value in options.items():
        if option in defaults and value != defaults[option]:
            words += [flag(option)] if value is True else [flag(option), str(value)]
    return words


def elsewhere(python: str | Path, name: str, args: argparse.Namespace) -> int:
    """Runs a benchmark by another process."""
    modes = [flag(mode) for mode in ("check", "write") if getattr(args, mode)]
    modes += ["--results", str(args.results)]
    command = [python, HERE, name, *modes, *given(name, args.options)]
    return subprocess.run(command).returncode


def run(name: str, args: argparse.Namespace) -> int:
    entry = BENCHMARKS[name]
    if entry.needs == "serving" and Path(sys.executable) != SERVING:
        if not SERVING.exists():
            raise SystemExit(f"{name} needs the environment of vLLM: bash run.sh bench {name}")
        args.options.setdefault("python", sys.executable)  # of the models
        return elsewhere(SERVING, name, args)
    if entry.needs == "torch_npu":  # which cannot load by itself without CANN
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        sys.path += [str(ROOT / "build/torch_npu")]
    options = entry.options | {k: v for k, v in args.options.items() if k in entry.options}
    sys.path += [str(ROOT / folder) for folder in ("tests", "examples")]

    import torch
    from measure import check, machine

    benchmark = importlib.import_module(entry.module).BENCHMARKS[name]
    torch.set_num_threads(options.get("threads", 1))
    torch.manual_seed(0)
    print(f"{name}: {entry.about}\n{machine()}", flush=True)
    if args.check:
        command = " ".join(["bash run.sh bench", name, *given(name, options), "--check"])
        return check(benchmark.floors(**options) if benchmark.floors else [], command)
    rows = []
    print(*benchmark.header, sep="  ")
    for row in benchmark.rows(**options):
        rows.append(row)
        print(*row, sep="  ", flush=True)
    if args.write:
        # a path is of this machine
        shown = {k: k.upper() if os.sep in str(v) else v for k, v in options.items()}
        command = " ".join(["bash run.sh bench", name, *given(name, shown), "--write"])
        results.add(args.results, name, *benchmark.run(rows, command, options))
    return 0


def main(args: argparse.Namespace) -> int:
    if args.list:
        print(listed())
        return 0
    if args.compare:
        try:
            return compare.main(*args.compare, args.names)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"bench --compare: {error.stderr.strip()}") from None
    if len(args.names) > 1:
        return max([elsewhere(sys.executable, name, args) for name in args.names])
    return run(args.names[0], args)


if __name__ == "__main__":
    try:
        sys.exit(main(parse(sys.argv[1:])))
    except KeyboardInterrupt:
        print("run.sh bench: interrupted", file=sys.stderr)
        sys.exit(130)
