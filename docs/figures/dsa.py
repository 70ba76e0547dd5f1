"""Draws dsa.png: the data flow of DeepSeek sparse attention, with DeepSeek-V3.2's sizes.

python docs/figures/dsa.py
"""

from style import AMBER, BLUE, GREEN, GREY, arrow, box, plt, write

INPUT, INDEXER, CACHE, ATTENTION = GREY, BLUE, AMBER, GREEN
HEIGHT = 1.3

# name: (x, y, width, colour, text)
BOXES = {
    "x": (0.0, 3.1, 1.7, INPUT, "hidden state x\n7168"),
    "iq": (2.7, 5.2, 2.2, INDEXER, "index query, weights\n64 × 128, 64"),
    "ik": (2.7, 3.45, 2.2, INDEXER, "index key\n128"),
    "lat": (2.7, 1.7, 2.2, ATTENTION, "latent | RoPE key\n512 | 64"),
    "q": (2.7, 0.0, 2.2, ATTENTION, "query, absorbed\n128 × (512 | 64)"),
    "icache": (5.9, 3.45, 2.0, CACHE, "index cache\nS × 128"),
    "lcache": (5.9, 1.7, 2.0, CACHE, "latent cache, paged\nS × (512 | 64)"),
    "score": (8.9, 4.3, 2.2, INDEXER, "scores\n1 × S"),
    "topk": (11.9, 4.3, 1.9, INDEXER, "top-k\n2048 positions"),
    "gather": (8.9, 1.7, 2.2, CACHE, "gathered rows\n2048 × (512 | 64)"),
    "attn": (11.9, 0.85, 1.9, ATTENTION, "softmax attention\n128 × 512"),
    "out": (14.6, 0.85, 1.7, INPUT, "W_UV, o_proj\n7168"),
}
# from, to, what it carries for a token, in a layer, in bfloat16
ARROWS = [
    ("x", "iq", ""),
    ("x", "ik", ""),
    ("x", "lat", ""),
    ("x", "q", ""),
    ("ik", "icache", "writes\n256 B"),
    ("lat", "lcache", "writes\n1152 B"),
    ("icache", "score", "reads\nS · 256 B"),
    ("iq", "score", ""),
    ("score", "topk", ""),
    ("lcache", "gather", "reads\n2.4 MB"),
    ("topk", "gather", ""),
    ("gather", "attn", ""),
    ("q", "attn", ""),
    ("attn", "out", ""),
]


def side(start: str, end: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where an arrow leaves a box and where it enters the other one."""
    x0, y0, width0, *_ = BOXES[start]
    x1, y1, width1, *_ = BOXES[end]
    if (start, end) == ("topk", "gather"):  # down
        return (x0 + width0 / 2, y0), (x1 + width1, y1 + 0.8 * HEIGHT)
    return (x0 + width0, y0 + HEIGHT / 2), (x1, y1 + HEIGHT / 2)


def data() -> dict:
    return {"boxes": BOXES, "arrows": ARROWS}


def draw() -> plt.Figure:
    figure, axes = plt.subplots(figsize=(13, 5.6), dpi=120)
    for x, y, width, colour, text in BOXES.values():
        box(axes, x, y, width, HEIGHT, colour, text)
    for start, end, carries in ARROWS:
        begin, finish = side(start, end)
        arrow(axes, begin, finish)
        middle = [(a + b) / 2 for a, b in zip(begin, finish, strict=True)]
        axes.text(*middle, carries, ha="center", va="center", fontsize=8, backgroundcolor="white")
    axes.text(8.9, 6.15, "npu_lightning_indexer_pto", fontsize=10, family="monospace")
    axes.text(8.9, 0.1, "npu_sparse_flash_attention_pto", fontsize=10, family="monospace")
    axes.set_xlim(-0.2, 16.5)
    axes.set_ylim(-0.3, 6.7)
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    return figure


if __name__ == "__main__":
    write(__file__, draw(), data())
