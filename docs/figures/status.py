"""Draws status.png: what ran on hardware, from the first table of README.md.

python docs/figures/status.py
"""

import re

from style import AMBER, GREEN, GREY, RED, REPOSITORY, plt, wrapped, write

# of the columns of the table, but the first; and of a cell with nothing in it
COLOURS, NOTHING = [GREEN, AMBER, RED], "–"
WIDTHS = [26, 28, 32, 22]  # characters


def data() -> list[list[str]]:
    """The cells of the table, without their links."""
    lines = (REPOSITORY / "README.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| | ran on hardware "))
    last = lines.index("", first)
    rows = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in lines[first:last]]
    del rows[1]  # dashes
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def draw() -> plt.Figure:
    head, *rows = data()
    text = [
        [wrapped(cell, width - 2) for cell, width in zip(row, WIDTHS, strict=True)] for row in rows
    ]
    heights = [max(cell.count("\n") + 1 for cell in row) + 0.9 for row in text]
    figure = plt.figure(figsize=(10, 0.2 * (sum(heights) + 2)), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, sum(WIDTHS))
    axes.set_ylim(-sum(heights) - 0.1, 1.9)
    axes.axis("off")
    x = 0
    for title, width in zip(head, WIDTHS, strict=True):
        axes.text(x + 1, 0.9, title, va="center", fontsize=11, weight="bold")
        x += width
    y = 0.0
    for row, height in zip(text, heights, strict=True):
        x, y = 0, y - height
        for cell, width, colour in zip(row, WIDTHS, ["white", *COLOURS], strict=True):
            filled = GREY if cell == NOTHING else colour
            axes.add_patch(
                plt.Rectangle((x, y), width, height, facecolor=filled, edgecolor="white", lw=3)
            )
            axes.text(x + 1, y + height / 2, cell, va="center", fontsize=9.5)
            x += width
    return figure


if __name__ == "__main__":
    write(__file__, draw(), data())
