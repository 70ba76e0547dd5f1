"""Compares the results of two commits, or of two folders, of the same kernels on the same CPU."""

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import results

NOISE = 0.1  # medians of two runs in a virtual machine differ by so much
HEADER = ["name", "run", "case", "figure", "A", "B", "B / A", ""]
SAME = ("cpu", "threads", "case", "figures")


def read(source: str) -> results.Results:
    """Of a folder, or of a commit."""
    return results.of_folder(Path(source)) if Path(source).is_dir() else results.of_commit(source)


def pairs(a: results.Results, b: results.Results, names: list[str]) -> Iterator[tuple]:
    """Name, run, and both runs, or why they cannot be compared."""
    for name, kernels in sorted(a.keys() | b.keys()):
        if names and name not in names:
            continue
        sides = [
            {run["variant"]: run for run in found.get((name, kernels), [])} for found in (a, b)
        ]
        for variant in sorted(sides[0].keys() | sides[1].keys()):
            label = ", ".join(filter(None, [kernels, variant]))
            one, other = (side.get(variant) for side in sides)
            if one is None or other is None:
                yield name, label, f"only {'B' if one is None else 'A'} has it", one, other
                continue
            reasons = [
                f"{key} is {one[key]} in A, {other[key]} in B"
                for key in SAME
                if one[key] != other[key]
            ]
            yield name, label, "; ".join(reasons), one, other


def compared(name: str, label: str, one: results.Run, other: results.Run) -> Iterator[list[str]]:
    """The rows of the cases that both have; ``*``: beyond noise."""
    count = len(one["case"])
    of = {tuple(row[:count]): row[count:] for row in other["rows"]}
    for row in one["rows"]:
        for figure, a, b in zip(
            one["figures"], row[count:], of.get(tuple(row[:count]), []), strict=False
        ):
            if all(isinstance(x, Decimal | int) for x in (a, b)) and a:
                ratio = float(b / a)
                mark = "*" if not 1 / (1 + NOISE) <= ratio <= 1 + NOISE else ""
                cells = [str(a), str(b), f"{ratio:.2f}", mark]
                yield [name, label, ", ".join(map(str, row[:count])), figure, *cells]


def main(a: str, b: str, names: list[str]) -> int:
    """Prints the table, then what was not compared; exit code 1 if nothing was."""
    rows, rejected = [], []
    for name, label, reason, one, other in pairs(read(a), read(b), names):
        if reason:
            rejected.append(f"{name}, {label}: not compared: {reason}")
        else:
            rows += compared(name, label, one, other)
    if rows:
        print(f"A: {a}, B: {b}; *: beyond {NOISE:.0%}")
        print(results.table(HEADER, rows))
    print(*(rejected or ([] if rows else ["neither has results"])), sep="\n")
    return int(not rows)
