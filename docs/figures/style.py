"""How the figures look, and the file of each: a PNG that also holds the data it was drawn from, so
that a test can tell a picture that is out of date.
"""

import json
import textwrap
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

REPOSITORY = Path(__file__).parents[2]
GREY, BLUE, AMBER, GREEN, RED = "#eceff1", "#dbeafe", "#fef3c7", "#dcfce7", "#fee2e2"
LINE = "#475569"


def box(axes, x: float, y: float, width: float, height: float, colour: str, text: str, size=9.5):
    shape = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=colour, edgecolor=LINE)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def arrow(axes, begin: tuple[float, float], end: tuple[float, float]):
    look = {"arrowstyle": "-|>", "mutation_scale": 12, "color": LINE, "linewidth": 1.2}
    axes.add_patch(FancyArrowPatch(begin, end, **look))


def wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False)


def write(program: str, figure: plt.Figure, data) -> None:
    """The picture beside the program of the figure, in a palette, which halves the file."""
    figure.canvas.draw()
    told = PngInfo()
    told.add_text("Description", json.dumps(data))
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB").quantize(128)
    image.save(Path(program).with_suffix(".png"), pnginfo=told, optimize=True)


def drawn(picture: Path):
    """The data that a picture was drawn from."""
    with Image.open(picture) as image:
        return json.loads(image.text["Description"])
