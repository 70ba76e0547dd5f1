"""Draws npu_ways.png: the ways of an op to an NPU, and what each has been simulated with.

python docs/figures/npu_ways.py
"""

from style import AMBER, BLUE, GREEN, GREY, RED, arrow, box, plt, wrapped, write

ROWS = {  # height, colour
    "you": (0.75, GREY),
    "this package\nand torchair": (0.85, BLUE),
    "PyPTO and\nCANN": (1.1, GREEN),
    "device": (0.5, RED),
    "simulated\nwith": (1.2, AMBER),
}
NPU = "an NPU: none has run any of this yet"
# by column, from docs/graph_mode.md and docs/npu_simulation.md: a text for each row but the device
WAYS = {
    "eager, PyPTO": (
        "call the op",
        "npu/<op>.py: contract, limits, output; kernels/<op>.py",
        "PyPTO compiles the kernel at the first call, launches it on the current stream",
        "PyPTO's interpreter, under torch_npu, too; its generated C++ on a CPU; its cost model for "
        "estimated times",
    ),
    "eager, aclnn": (
        "call the op, with aclnn chosen, or without PyPTO",
        "npu/aclnn.py: contract, output, the call by ctypes",
        "aclnn<Operator> of a kernel package launches (none is shipped here)",
        "host simulator of CANN, real torch_npu, a package made of the CPU kernels",
    ),
    "graph, captured": (
        "torch.compile with npugraph_ex or reduce-overhead",
        "torchair runs the FX graph once, each op as in eager mode",
        "a stream records the launches, PyPTO's or aclnn's, and replays them",
        "host simulator of CANN, real torch_npu and torchair; ops by PyPTO's interpreter or that "
        "package",
    ),
    "graph, GE, converter": (
        "torch.compile with max-autotune and a kernel package",
        "converter/: a node of FX becomes an operator of graph/<op>.h",
        "GE compiles the graph and runs kernels of the package",
        "host simulator of CANN, real torch_npu and torchair; the GE graph is run node by node",
    ),
    "graph, GE, callback": (
        "torch.compile with max-autotune and PyPTO",
        "no converter: torchair writes and compiles a callback in C++",
        "GE compiles the graph and calls back; PyPTO launches (CANN with graph/custom_op.h)",
        "host simulator of CANN, real torch_npu and torchair; the callback's node; its C++ never "
        "ran",
    ),
}
LEFT, WIDTH, GAP, SPACE = 1.12, 1.72, 0.11, 0.25


def data() -> dict:
    return {"rows": ROWS, "ways": WAYS, "device": NPU}


def draw() -> plt.Figure:
    height = sum(height + SPACE for height, _ in ROWS.values()) + 0.2
    width = LEFT + len(WAYS) * (WIDTH + GAP)
    figure = plt.figure(figsize=(width, height), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    places = [LEFT + i * (WIDTH + GAP) for i in range(len(WAYS))]
    for x, title in zip(places, WAYS, strict=True):
        axes.text(x + WIDTH / 2, height - 0.18, title, ha="center", va="center", weight="bold")
    top, texts = height - 0.35, iter(range(len(ROWS)))
    for name, (tall, colour) in ROWS.items():
        bottom = top - tall
        axes.text(0.08, bottom + tall / 2, name, va="center", fontsize=9, weight="bold")
        if name == "device":
            box(axes, LEFT, bottom, width - LEFT - GAP, tall, colour, NPU, size=10)
        else:
            row = next(texts)
            for x, way in zip(places, WAYS.values(), strict=True):
                box(axes, x, bottom, WIDTH, tall, colour, wrapped(way[row], 23), size=8.5)
        if name != list(ROWS)[-1] and name != "device":
            for x in places:
                middle = x + WIDTH / 2
                arrow(axes, (middle, bottom), (middle, bottom - SPACE))
        top = bottom - SPACE
    return figure


if __name__ == "__main__":
    write(__file__, draw(), data())
