"""The pictures of docs/figures are drawn from the figures of today, and show all of them."""

import json
import runpy

import pytest
from repository import REPOSITORY

from custom_pypto import requirements

pytest.importorskip("matplotlib")
FOLDER = REPOSITORY / "docs/figures"
PROGRAMS = sorted({path.stem for path in FOLDER.glob("*.py")} - {"style"})
SLOW = {"memory": pytest.mark.slow}


@pytest.fixture
def program(monkeypatch):
    """What a program of the folder defines, by its name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: runpy.run_path(str(FOLDER / f"{name}.py"))


@pytest.mark.parametrize("name", [pytest.param(x, marks=SLOW.get(x, ())) for x in PROGRAMS])
def test_the_picture_is_drawn_from_the_data_of_today(name, program):
    if name == "memory":
        version = pytest.importorskip("transformers").__version__
        if requirements.minor(version) != requirements.TRANSFORMERS[-1]:
            pytest.skip("the picture has the sizes of the newest transformers")
    style = program("style")
    picture = FOLDER / f"{name}.png"
    today = json.loads(json.dumps(program(name)["data"]()))
    assert style["drawn"](picture) == today, f"run python docs/figures/{name}.py"
    with style["Image"].open(picture) as image:
        assert image.width <= 1600 and picture.stat().st_size < 200e3


def test_the_drawing_of_the_data_flow_has_every_box_and_arrow(program):
    dsa = program("dsa")
    boxes, arrows = dsa["BOXES"], dsa["ARROWS"]
    assert {name for start, end, _ in arrows for name in (start, end)} == boxes.keys()
    (axes,) = dsa["draw"]().axes
    assert len(axes.patches) == len(boxes) + len(arrows)
    assert {text for *_, text in boxes.values()} <= texts(axes)


def test_the_drawing_of_the_ways_to_an_npu_has_every_text(program):
    ways = program("npu_ways")
    (axes,) = ways["draw"]().axes
    cells = {text for way in ways["WAYS"].values() for text in way}
    shown = {text.replace("\n", " ") for text in texts(axes)}
    assert cells | {ways["NPU"], *ways["WAYS"]} <= shown


def test_the_picture_of_the_status_has_every_cell_of_the_table(program):
    status = program("status")
    (axes,) = status["draw"]().axes
    cells = {cell for row in status["data"]() for cell in row}
    assert cells == {text.replace("\n", " ") for text in texts(axes)}


def test_the_picture_of_the_speed_has_a_dot_for_each_ratio(program):
    speed = program("speed")
    dots = [
        len(line.get_xdata())
        for axes in speed["draw"]().axes
        for line in axes.lines
        if line.get_marker() != "None"
    ]
    assert sum(dots) == sum(len(run["ratios"]) for run in speed["data"]()) > 100


def test_the_page_has_the_ratios_of_the_speed(program):
    text = (REPOSITORY / "docs/comparison.md").read_text()
    rows = program("speed")["table"]()
    assert len(rows) > 10 and [row for row in rows if f"{row}\n" not in text] == []


def texts(axes) -> set[str]:
    return {text.get_text() for text in axes.texts}
