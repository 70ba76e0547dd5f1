"""Draws speed.png, our time over that of ik_llama.cpp, from benchmarks/results/*/llama.json, and
prints the same ratios as the rows of a table of docs/comparison.md.

python docs/figures/speed.py
"""

import json
import re

from matplotlib.ticker import NullFormatter
from style import GREEN, RED, REPOSITORY, plt, write

RESULTS = REPOSITORY / "benchmarks/results"
# of a machine: colour, place beside the middle of a row
MACHINES = [("#1d4ed8", 0.17), ("#c2410c", -0.17)]
# of our layers in eager mode, and compiled
MARKS = {"custom_pypto / ik": ("", "full"), "compiled / ik": (", compiled layers", "none")}
THREADS = {1: "o", 2: "D"}
LAYERS = {
    "attention": "DeepSeek-V3.2,\nattention",
    "with experts": "DeepSeek-V3.2,\n8 experts",
    "GLM-5, with experts": "GLM-5,\n8 experts",
    "DeepSeek-V4-Flash, two layers": "DeepSeek-V4-\nFlash, two layers",
}
FORMATS = ["stored, BF16", "fp8, Q8_0", "int8, Q8_0", "int4, Q4_K", "fp4, MXFP4"]
CASES = ["token, 4K", "4 tokens at once", "prompt of 512", "prompt of 2048"]
TICKS = [0.1, 0.2, 0.5, 0.7, 1, 1.4]


def data() -> list[dict]:
    """Of each run and way to run our layers: the ratio in each case."""
    found = []
    for file in sorted(RESULTS.glob("*/llama.json")):
        for run in json.loads(file.read_text()):
            for figure in MARKS:
                at = len(run["case"]) + run["figures"].index(figure)
                ratios = [row[:3] + [row[at]] for row in run["rows"] if row[at] is not None]
                cpu = re.sub(r"\(R\)| Processor| \(family.*", "", run["cpu"])
                about = {"machine": f"{cpu} with {file.parent.name}", "threads": run["threads"]}
                if ratios:
                    found.append({**about, "of": figure, "ratios": ratios})
    return found


def table() -> list[str]:
    """A row of each machine, number of threads and layer: the ratios of each format, those of
    compiled layers where they were measured."""
    found: dict[tuple[str, int], dict] = {}
    for run in data():
        ratios = {tuple(case): ratio for *case, ratio in run["ratios"]}
        found.setdefault((run["machine"], run["threads"]), {}).update(ratios)
    rows = []
    for (machine, threads), ratios in found.items():
        for layer, name in LAYERS.items():
            cells = [
                "; ".join(shown(ratios.get((layer, weights, case))) for case in CASES)
                for weights in FORMATS
                if any(case[0] == layer for case in ratios)
            ]
            if cells:
                about = f"{machine}, {threads}", name.replace("-\n", "-").replace("\n", " ")
                none = "; ".join("–" for _ in CASES)
                rows.append(f"| {' | '.join([*about, *cells])} |".replace(none, "–"))
    return rows


def shown(ratio: float | None) -> str:
    """Bold where ik_llama.cpp is ahead."""
    text = "–" if ratio is None else f"{ratio:.2f}"
    return f"**{text}**" if ratio is not None and ratio > 1 else text


def draw() -> plt.Figure:
    runs = data()
    cases = {(layer, weights) for run in runs for layer, weights, *_ in run["ratios"]}
    # a line of space between layers
    rows, y = {}, 0.0
    for layer in LAYERS:
        for weights in (one for one in FORMATS if (layer, one) in cases):
            rows[layer, weights] = y
            y -= 1
        y -= 0.4
    looks = dict(zip(dict.fromkeys(run["machine"] for run in runs), MACHINES, strict=True))

    figure, all_axes = plt.subplots(1, len(CASES), figsize=(10, 7), dpi=150, sharey=True)
    for axes, column in zip(all_axes, CASES, strict=True):
        found = []
        for run in runs:
            colour, beside = looks[run["machine"]]
            more, fill = MARKS[run["of"]]
            points = [
                (ratio, rows[layer, weights] + beside)
                for layer, weights, of, ratio in run["ratios"]
                if of == column
            ]
            found += [ratio for ratio, _ in points]
            axes.plot(
                *zip(*points, strict=True) if points else ([], []),
                linestyle="none",
                marker=THREADS[run["threads"]],
                fillstyle=fill,
                color=colour,
                markersize=5.5,
                label=f"{run['machine']}, threads: {run['threads']}{more}",
            )
        low, high = min(found) / 1.15, max(found) * 1.15
        axes.axvspan(low, 1, color=GREEN, zorder=0)
        axes.axvspan(1, high, color=RED, zorder=0)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_xticks(ticks := [x for x in TICKS if low < x < high], [f"{x:g}" for x in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", bottom=False)
        axes.set_title(column, fontsize=10)
        for y in rows.values():
            axes.axhline(y, color="white", linewidth=0.8, zorder=0.5)
    first = all_axes[0]
    first.set_yticks(list(rows.values()), [weights for _, weights in rows])
    first.set_ylim(min(rows.values()) - 0.6, 0.6)
    for layer, text in LAYERS.items():
        own = [y for (of, _), y in rows.items() if of == layer]
        middle = sum(own) / len(own)
        at = {"transform": first.get_yaxis_transform(), "rotation": 90, "ha": "center"}
        first.text(-0.73, middle, text, va="center", fontsize=9, **at)
    figure.suptitle(
        "time of custom_pypto over time of ik_llama.cpp: left of 1 (green) custom_pypto is "
        "faster, right (red) ik_llama.cpp",
        fontsize=10,
    )
    figure.legend(*first.get_legend_handles_labels(), loc="lower center", ncols=2, fontsize=9)
    figure.subplots_adjust(left=0.17, right=0.99, top=0.9, bottom=0.17, wspace=0.06)
    return figure


if __name__ == "__main__":
    write(__file__, draw(), data())
    print(*table(), sep="\n")
