"""Draws memory.png: GB of weights by model and format, as examples/model_memory.py computes them.

python docs/figures/memory.py
"""

import sys

from style import REPOSITORY, plt, write

sys.path.append(str(REPOSITORY / "examples"))
import memory_tables  # noqa: E402
import model_memory  # noqa: E402
import transformers  # noqa: E402

COLOURS = {"bfloat16": "#94a3b8", "stored": "#3b82f6", "int8": "#f59e0b", "int4": "#22c55e"}


def data() -> dict:
    """By model and format: GB of weights, GB of them that a token reads. And the machines."""
    transformers.logging.set_verbosity_error()  # it reports what default configurations leave out
    found = sorted(model_memory.defaults(), key=lambda model: model.sizes["int4"].weights)
    sizes = {
        model.name: {
            label: [*map(memory_tables.shown, size[:2])] for label, size in model.sizes.items()
        }
        for model in found
    }
    return {"sizes": sizes, "machines": memory_tables.MACHINES, "free": memory_tables.FREE}


def draw() -> plt.Figure:
    sizes, machines, free = data().values()
    count = sum(map(len, sizes.values())) + 0.6 * len(sizes)
    figure, axes = plt.subplots(figsize=(10, 0.215 * count + 1), dpi=150)
    y, ticks = 0.0, []
    for formats in sizes.values():
        ticks.append(y - (len(formats) - 1) / 2)
        for label, (weights, read) in formats.items():
            axes.barh(y, float(weights), height=0.85, color=COLOURS[label], alpha=0.5, zorder=2)
            axes.barh(y, float(read), height=0.85, color=COLOURS[label], zorder=2)
            text = axes.text(
                float(weights) * 1.04, y, f"{weights}; {read}", va="center", fontsize=8, zorder=3
            )
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6})
            y -= 1
        y -= 0.6
    for machine in machines:
        at = machine * (1 - free)
        axes.axvline(at, color="#64748b", linewidth=0.9, linestyle=":", zorder=1)
        above = {"transform": axes.get_xaxis_transform(), "rotation": 60, "fontsize": 8.5}
        axes.text(at, 1.02, f"{machine} GB", **above)
    axes.set_yticks(ticks, list(sizes))
    axes.set_xscale("log")
    axes.set_xlim(1, 4500)
    axes.set_ylim(y + 0.7, 0.8)
    axes.set_xticks(ticks := [1, 10, 100, 1000], [f"{x} GB" for x in ticks])
    axes.spines[["top", "right"]].set_visible(False)
    bars = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[label]) for label in memory_tables.LABELS]
    axes.legend(bars, memory_tables.LABELS, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    axes.set_xlabel(
        "GB of weights; the dark part: of them read for a token. Dotted: the memory of a machine, "
        f"less {free:.0%} for the rest",
        fontsize=9,
    )
    figure.tight_layout(pad=0.4)
    return figure


if __name__ == "__main__":
    write(__file__, draw(), data())
