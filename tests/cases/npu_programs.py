"""Calls of the ops that the NPU kernels take, by mechanism of the programs."""

import torch

from custom_pypto.reference.npu_dense_lightning_indexer_softmax_lse_pto import of_indexer

from .npu_dense_lightning_indexer_grad_kl_loss_pto import inputs as dense_loss_inputs
from .npu_kv_quant_sparse_flash_attention_pto import inputs as int8_attention_inputs
from .npu_lightning_indexer_grad_pto import inputs as index_gradient_inputs
from .npu_lightning_indexer_pto import inputs as indexer_inputs
from .npu_quant_lightning_indexer_pto import inputs as int8_indexer_inputs
from .npu_sparse_attention_pto import fused_inputs
from .npu_sparse_flash_attention_grad_pto import inputs as gradient_inputs
from .npu_sparse_flash_attention_pto import inputs as attention_inputs
from .npu_sparse_lightning_indexer_grad_kl_loss_pto import inputs as loss_inputs

HALF = [torch.bfloat16, torch.float16]
BF16, F32 = torch.bfloat16, torch.float32


def call(lengths_query: list[int], lengths_key: list[int], sparse_count: int = 64, **more) -> dict:
    return dict(lengths_query=lengths_query, lengths_key=lengths_key) | dict(
        sparse_count=sparse_count, **more
    )


def of_every_op(keys: str) -> dict[str, dict]:
    """``keys``: the name of the argument with the layout of the keys."""
    ragged = [4, 0, 3], [140, 9, 300]
    return {
        "one-key": call([1], [1], 16),
        "ragged-and-empty": call([1, 1, 1], [300, 0, 1000], 128),
        # more tokens than destinations of a gradient's sums, some of them without keys
        "padded-and-shorter-than-the-query": call([6, 3, 2, 1], [131, 3, 1, 700], 16),
        "packed": call(*ragged, layout_query="TND"),
        "packed-keys": call(*ragged, layout_query="TND", **{keys: "TND"}),
        "keys-by-sequence": call([3, 2], [140, 30], **{keys: "BSND"}),
        "every-key": call([3, 2], [140, 30], 16, sparse_mode=0),
        "prefill": call([20, 9], [50, 9], 16),
    }


INDEXER = of_every_op("layout_key") | {
    # tiles of 4 tokens, padding among them
    "four-per-tile": call([9, 6], [2500, 4]),
    # DeepSeek-V4: lengths around a multiple of the ratio, and below it
    "compressed": call([1, 4, 2, 3], [399, 800, 4, 2], 512, cmp_ratio=4),
    "compressed-every-key": call([2, 3], [403, 3], 16, cmp_ratio=4, sparse_mode=0),
    "compressed-packed": call([9, 0, 6], [2050, 9, 7], cmp_ratio=4, layout_query="TND"),
    "compressed-by-128": call([3, 2], [2560, 128], 16, cmp_ratio=128),
    "two-tokens": call([2, 1], [600, 70]),
    "chunks": call([1, 2], [9000, 300]),
    "levels": call([1], [50000], 4096, heads=8),
    "fewer-keys-than-K": call([2, 2], [3000, 300], 2048),
    "1-head": call([2, 1], [1100, 70], heads=1, block_size=16),
    "12-heads": call([2, 1], [1100, 70], heads=12, block_size=48),
    "33-heads": call([2, 1], [1100, 70], heads=33, block_size=1024),
}

ATTENTION = of_every_op("layout_kv") | {
    "statistics": call([4, 3, 2, 1], [131, 3, 1, 700], 16, statistics=True),
    "sinks": call([2, 1], [300, 40], sinks=(-9, 9)),
    "sinks-and-statistics-packed": call(
        [4, 0, 3], [140, 9, 300], layout_query="TND", sinks=(-9, 9), statistics=True
    ),
    # with exp of a logit or of a sink alone they would be infinite, or 0 / 0
    "sinks-beyond-exp": call([3, 2], [300, 1], sinks=(-1e4, 1e4), statistics=True),
    # two groups of heads, of which the second has sinks of its own
    "sinks-of-128-heads": call([1], [900], 640, rope=0, heads=128, sinks=(-9, 9)),
    # DeepSeek-V4: 128 rows of the window, and 512, 1024 or all compressed ones of a million tokens
    "window-and-512": call([2, 1], [700, 90], 640, sparse_mode=0, rope=0, heads=64, sinks=(-9, 9)),
    "window-and-1024": call(
        [1, 2], [1200, 90], 1152, sparse_mode=0, rope=0, heads=64, sinks=(-9, 9)
    ),
    "window-and-8192": call(
        [1], [8320], 8320, sparse_mode=0, rope=0, sinks=(-9, 18), statistics=True
    ),
    "no-rope": call([2, 1], [300, 70], rope=0),
    "values": call([2, 1], [300, 70], own_value=True),
    # several gathers for the scores: with parts of a tensor as indices they read another tensor
    "two-tiles-of-keys": call([1, 1], [300, 700], 512),
    "fewer-keys-than-K": call([2, 2], [300, 2047], 2048),
    "128-heads": call([1], [3000], 2048, heads=128),
    # queries that do not fill a tile: the last ones were loaded from behind the tensor
    "4-heads": call([2, 1], [300, 70], heads=4),
    "sinks-of-5-heads": call([2, 1], [300, 40], heads=5, sinks=(-9, 9), statistics=True),
    # one row of 512 values is too few for a mean error: three tokens
    "1-head": call([3], [300], heads=1),
    "2-heads": call([2, 1], [1100, 70], heads=2, block_size=1024),
    "24-heads": call([2, 1], [1100, 70], heads=24, block_size=48),
    "72-heads": call([2, 1], [1100, 70], heads=72, block_size=16),
    # rows in two parts for the scores, in columns that are no power of two for the output
    "latent-320": call([2, 1], [300, 70], latent=320),
    "latent-1024": call([2, 1], [300, 70], latent=1024),
    # rows of rope longer than a tile of the scores
    "latent-48-rope-32": call([2, 1], [300, 70], latent=48, rope=32),
    "latent-96-rope-64": call([2, 1], [300, 70], latent=96, rope=64),
    "latent-32-rope-48": call([2, 1], [300, 70], latent=32, rope=48),
    "K-1": call([2, 1], [700, 40], 1),
    "K-7": call([2, 1], [700, 40], 7),
    "K-100": call([2, 1], [700, 40], 100),
    "K-1000": call([2, 1], [700, 40], 1000),
}

# K is no less than the keys: rounding before the selection does not change it
FUSED = {
    "first-token": dict(lengths=[1], S1=1),
    "decode": dict(lengths=[300, 1, 129], S1=1),
    "mtp-and-padding": dict(lengths=[300, 2], S1=3),
    "prefill": dict(lengths=[20], S1=20),
    "16-tokens": dict(lengths=[200] * 16, S1=1, heads=16),
    "heads-that-fill-no-tile": dict(lengths=[40, 3], S1=1, heads=5, index_heads=12),
}

GRADIENT = of_every_op("layout_kv") | {
    "blocks-of-48": call([2, 1], [700, 40], 8, block_size=48),
    "no-rope": call([2], [300], rope=0),
    "values": call([5], [300], own_value=True),
    "sinks-beyond-exp": call([3, 2], [300, 1], sinks=(-1e4, 1e4)),
    # heads that fill no tile
    "sinks-of-5-heads": call([2, 1], [300, 40], heads=5, sinks=(-9, 9)),
    # rows of rope longer than a tile of the scores
    "latent-48-rope-32": call([2, 1], [300, 40], 100, latent=48, rope=32),
    "latent-32-rope-48": call([2, 1], [300, 40], latent=32, rope=48),
    "128-heads-2048-keys": call([2], [3000], 2048, heads=128, layout_query="TND", layout_kv="TND"),
}

INDEX_GRADIENT = of_every_op("layout_key") | {
    "blocks-of-48": call([2, 1], [700, 40], 8, block_size=48),
    "weights-and-dy-of-float32": call([2], [300], 100, weights_dtype=F32, dy_dtype=F32),
    # lengths around a multiple of the ratio, and below it
    "compressed": call([1, 4, 2, 3], [399, 800, 4, 2], cmp_ratio=4),
    "compressed-packed": call(
        [9, 0, 6], [410, 9, 7], cmp_ratio=4, layout_query="TND", layout_key="TND"
    ),
    "compressed-by-sequence": call([3, 2], [141, 30], 16, cmp_ratio=4, layout_key="BSND"),
    # heads and dims that fill no tile
    "5-heads": call([2, 1], [300, 40], 8, heads=5, dim=48),
    "512-dims": call([2], [300], 256, heads=64, dim=512),
    "64-heads-2048-keys": call([2], [3000], 2048, heads=64, layout_query="TND", layout_key="TND"),
}

INDEX_LOSS = {
    "one-key": call([1], [1], 16),
    "ragged-and-empty": call([2, 1, 0, 1], [300, 0, 5, 1000], 128),
    # more tokens than destinations of the sums, some of them without keys
    "shorter-than-the-query": call([6, 3, 2, 1], [131, 2, 1, 300], 16),
    "by-sequence": call([4, 3], [140, 2], layout="BSND"),
    "every-key": call([3, 2], [140, 30], 16, sparse_mode=0),
    "prefill": call([20, 9], [50, 9], 16),
    "no-rope": call([2], [300], 100, rope=0),
    "weights-of-float32": call([2], [300], weights_dtype=F32),
    "compressed": call([1, 4, 2, 3], [399, 600, 4, 2], cmp_ratio=4),
    "compressed-by-sequence": call([3, 2], [141, 30], 16, cmp_ratio=4, layout="BSND"),
    # heads and dims that fill no tile
    "5-heads": call([2, 1], [300, 40], 8, heads=5, index_heads=3, latent=48, dim=48),
}

DEEPSEEK_V3_2 = dict(heads=128, latent=512, rope=64, index_heads=64, dim=128)
DENSE_LOSS = {
    "one-key": dict(lengths_query=[1], lengths_key=[1]),
    "ragged-and-empty": dict(lengths_query=[2, 0, 1], lengths_key=[70, 0, 33]),
    # tiles of 4 tokens, of which some see no key; BSND: padding among them
    "shorter-than-the-query": dict(lengths_query=[9, 6, 4], lengths_key=[131, 4, 1]),
    "every-key": dict(lengths_query=[3, 2], lengths_key=[140, 30], sparse_mode=0),
    "several-tiles": dict(lengths_query=[5, 1], lengths_key=[2100, 1500]),
    "compressed": dict(lengths_query=[3, 2], lengths_key=[483, 21], cmp_ratio=4),
    "no-rope": dict(lengths_query=[3, 2], lengths_key=[40, 33], rope=0),
    "strided": dict(lengths_query=[3, 2], lengths_key=[40, 33], strided=True),
    "weights-of-float32": dict(
        lengths_query=[2], lengths_key=[300], weights_dtype=F32, index_heads=16
    ),
    # heads that divide no power of two
    "48-heads": dict(lengths_query=[4, 1], lengths_key=[300, 7], heads=80, index_heads=48),
    "heads-of-deepseek-v3-2": dict(lengths_query=[6], lengths_key=[300], **DEEPSEEK_V3_2),
    "keys-of-deepseek-v3-2": dict(
        lengths_query=[5], lengths_key=[1500], weights_dtype=F32, **DEEPSEEK_V3_2
    ),
}

# those of the calls above that the ops on int8 caches take
INT8_INDEXER = {
    id: x
    for id, x in INDEXER.items()
    if not {"cmp_ratio", "layout_key", "heads"} & {*x} and id != "levels"
} | {"blocks-of-32": call([2, 1], [300, 77], block_size=32), "8K": call([1], [8192], 2048)}
INT8_ATTENTION = {
    id: x
    for id, x in ATTENTION.items()
    if not {"sinks", "statistics", "rope", "layout_kv", "own_value", "latent", "block_size"} & {*x}
    and id != "every-key"
}


def with_defaults(inputs, **defaults):
    def case(lengths_query, lengths_key, **arguments) -> dict:
        return inputs(lengths_query, lengths_key, **defaults | arguments)

    return case


index_case = with_defaults(indexer_inputs, heads=64, dim=128, block_size=128, dtype=BF16)
int8_index_case = with_defaults(int8_indexer_inputs, heads=64, dim=128, block_size=128)
index_gradient_case = with_defaults(
    index_gradient_inputs, heads=16, dim=128, block_size=128, dtype=BF16
)
index_loss_case = with_defaults(
    loss_inputs, heads=16, latent=512, rope=64, index_heads=16, dim=128, dtype=BF16
)
dense_loss_case = with_defaults(dense_loss_inputs, dtype=BF16)
of_attention = dict(heads=16, latent=512, rope=64, block_size=128)
int8_attention_case = with_defaults(int8_attention_inputs, **of_attention)


def attention_case(lengths_query, lengths_key, *, sinks=None, statistics=False, **arguments):
    """``sinks``: those of the first and of the last head. Logits are about -9 to 9."""
    arguments = of_attention | dict(dtype=BF16) | arguments
    x = attention_inputs(lengths_query, lengths_key, **arguments)
    if sinks is not None:
        x["sinks"] = torch.linspace(*sinks, x["query"].size(-2))
    return x | (dict(return_softmax_lse=True) if statistics else {})


def gradient_case(lengths_query, lengths_key, *, sinks=None, **arguments):
    """``sinks``: as in :func:`attention_case`."""
    arguments = of_attention | dict(dtype=BF16) | arguments
    if sinks is not None:
        arguments["sinks"] = torch.linspace(*sinks, arguments["heads"])
    return gradient_inputs(lengths_query, lengths_key, **arguments)


def statistics_case(*lengths, **arguments) -> dict:
    """A call of the statistics of the indexer of a divergence over every key."""
    x = of_indexer(dense_loss_case(*lengths, **arguments))
    return {name: y for name, y in x.items() if not name.startswith("softmax_")}


def fused_case(lengths, S1, **arguments):
    sizes = dict(hidden=128, q_rank=64, heads=4, nope=32, latent=512, rope=64)
    index = dict(index_heads=64, index_dim=128, block_size=128, dtype=BF16, sparse_count=512)
    return fused_inputs(lengths, S1, **sizes | index | arguments)
