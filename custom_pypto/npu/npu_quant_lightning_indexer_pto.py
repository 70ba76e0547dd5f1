"""``npu_quant_lightning_indexer_pto`` on an NPU."""

from torch import Tensor

from .common import Arguments, Launch, Limits, name
from .npu_lightning_indexer_pto import check_sizes, select

OP = "npu_quant_lightning_indexer_pto"
CUBE = 32  # int8: PyPTO 0.2.0 loads the operands of a product in tiles of so many rows


def check(a: Arguments) -> None:
    limits = Limits(OP, a)
    check_sizes(limits)
    # else the last tile of a block is loaded from behind it
    block_size = a.key.size(1)
    limits.require(block_size % CUBE == 0, "key.size(1)", f"a multiple of {CUBE}", block_size)
    limits.contiguous("key", "key_dequant_scale")
    # block ids go through float32
    blocks = a.key.size(0)
    limits.require(blocks <= 2**24 - 2**13, "key.size(0)", "at most 16 million", blocks)


def run(launch: Launch, a: Arguments, out: Tensor) -> Tensor:
    return select(
        OP,
        launch,
        a,
        out,
        cube=CUBE,
        query_scale=[a.query_dequant_scale.contiguous().view(-1, 1)],
        key_scale=[a.key_dequant_scale.squeeze(2)],
        scale_dtype=name(a.query_dequant_scale.dtype),
        cache_blocks=a.key.size(0),
    )
