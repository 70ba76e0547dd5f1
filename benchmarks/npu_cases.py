"""Calls of the NPU kernels to estimate: arguments, and their minimal bytes and operations.

Inputs are those of the tests, with the sizes of DeepSeek-V3.2: the time of gathers and sorting
depends on values, where these calls run on an NPU.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import inputs
import torch
from cases import index_kl, of
from inputs import BLOCK, INDEX_HEADS, D, K, L, R
from torch.utils._pytree import tree_map_only

import custom_pypto
from custom_pypto import layer_ops, npu, reference
from custom_pypto.descriptions import LAYER_KERNELS
from custom_pypto.rows.latents import int8_row_bytes

if TYPE_CHECKING:  # else imported where a case is estimated: the calls run on an NPU, too
    from custom_pypto import simulation

HBM_BYTES_PER_US = 24 * 1850 * 32  # ddr_rate of PyPTO's A2A3.ini
CUBE_FLOP_PER_US = 24 * 1850 * 4096 * 2
N1, DTYPE, WIDTH = 128, torch.bfloat16, L + R
PACKED = dict(heads=N1, latent=L, rope=R, index_heads=INDEX_HEADS, dim=D, layout="BSND")


@dataclass
class Case:
    """One call and its minimal cost.

    ``floor`` is the highest accepted estimate in µs, by the model of PyPTO 0.2.0.
    """

    name: str
    op: str
    shape: str
    arguments: dict
    bytes: int
    flop: int
    floor: float | None = None

    @property
    def title(self) -> str:
        return f"{self.name} {self.shape}"

    def rooflines(self) -> tuple[float, float]:
        """µs that its bytes and its products take at least."""
        return self.bytes / HBM_BYTES_PER_US, self.flop / CUBE_FLOP_PER_US

    def on(self, device: str) -> partial:
        """The call of the op, with its tensors moved to a device once."""
        moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), self.arguments)
        return partial(
            getattr(layer_ops if self.op in LAYER_KERNELS else custom_pypto, self.op), **moved
        )

    def launch(self, launch) -> None:
        npu.implementations(launch)[self.op](**self.arguments)

    def estimate(self, trace: Path | None = None) -> "simulation.Estimate":
        from custom_pypto import simulation

        found = []
        self.launch(
            lambda kernel, tensors: found.append(
                simulation.estimate(kernel, *tensors.values(), trace=trace)
            )
        )
        (estimate,) = found
        return estimate


def shape(B: int, S1: int, lengths: list[int]) -> str:
    keys = f"{lengths[0]}" if len(set(lengths)) == 1 else str(lengths)
    return f"{B},{S1},{keys}"


def indexer(
    B: int,
    S1: int,
    S2: int | list[int],
    floor: float | None = None,
    *,
    count: int = K,
    cmp_ratio: int = 1,
) -> Case:
    """``S2``: tokens, of which ``cmp_ratio`` share a key."""
    tokens, op = [S2] * B if isinstance(S2, int) else S2, "npu_lightning_indexer_pto"
    x = inputs.call(op, S1, tokens, DTYPE, sparse_count=count, cmp_ratio=cmp_ratio)
    keys = sum(n // cmp_ratio for n in tokens)
    name = "lightning indexer"
    if cmp_ratio > 1:
        name += f", cmp_ratio {cmp_ratio}, K {count}"
    bytes = 2 * keys * D + 2 * x["query"].numel() + 4 * B * S1 * count
    flop = 2 * S1 * keys * INDEX_HEADS * D
    return Case(name, op, shape(B, S1, tokens), x, bytes, flop, floor)


def attention(
    B: int,
    S1: int,
    S2: int,
    heads: int = N1,
    floor: float | None = None,
    *,
    count: int = K,
    **sizes,
) -> Case:
    op = "npu_sparse_flash_attention_pto"
    x = inputs.call(op, S1, [S2] * B, DTYPE, heads=heads, sparse_count=count, **sizes)
    name = "sparse attention" + ("" if heads == N1 else f", {heads} heads")
    if x["sinks"] is not None:
        name += f", sinks, K {count}"
    tokens, width = B * S1, L + sizes.get("rope", R)
    bytes = 2 * tokens * (count * width + heads * (L + width))
    flop = 2 * tokens * heads * count * (L + width)
    return Case(name, op, shape(B, S1, [S2]), x, bytes, flop, floor)


def attention_with_sinks(
    B: int, S1: int, S2: int, count: int, heads: int = 64, floor: float | None = None
) -> Case:
    """A layer of DeepSeek-V4, without rope: ``count`` of ``S2`` rows, window and compressed."""
    more = dict(rope=0, sinks=True, sparse_mode=0)
    return attention(B, S1, S2, heads, floor, count=count, **more)


def int8_indexer(B: int, S1: int, S2: int, floor: float | None = None) -> Case:
    op = "npu_quant_lightning_indexer_pto"
    x = inputs.call(op, S1, [S2] * B, torch.float16)
    x["weights"] = x["weights"].float()
    bytes = B * S2 * (D + 2) + x["query"].numel() + 4 * B * S1 * K
    flop = 2 * S1 * B * S2 * INDEX_HEADS * D
    return Case("lightning indexer, int8", op, shape(B, S1, [S2]), x, bytes, flop, floor)


def int8_attention(B: int, S1: int, S2: int, floor: float | None = None) -> Case:
    op = "npu_kv_quant_sparse_flash_attention_pto"
    x, tokens = inputs.call(op, S1, [S2] * B, DTYPE), B * S1
    bytes = tokens * (K * int8_row_bytes(L, R) + 2 * N1 * (L + WIDTH))
    flop = 2 * tokens * N1 * K * (L + WIDTH)
    return Case("sparse attention, int8", op, shape(B, S1, [S2]), x, bytes, flop, floor)


def fused(B: int, S1: int, S2: int, floor: float | None = None) -> Case:
    op = "npu_sparse_attention_pto"
    x = of(op).inputs([S1], [S2] * B, dtype=DTYPE, **inputs.SIZES[op])
    weights = sum(tensor.numel() for name, tensor in x.items() if name.startswith("w_"))
    select, attend = indexer(B, S1, S2), attention(B, S1, S2)
    bytes = 2 * weights + select.bytes + attend.bytes
    flop = 2 * B * S1 * weights + select.flop + attend.flop
    return Case("fused attention", op, shape(B, S1, [S2]), x, bytes, flop, floor)


def int8_prolog(tokens: int, floor: float | None = None) -> Case:
    op = "npu_lightning_indexer_prolog_pto"
    sizes = dict(hidden=7168, q_rank=1536, heads=INDEX_HEADS, dim=D, rope=R, block_size=BLOCK)
    x = of(op).inputs([tokens], [63 * BLOCK], dtype=DTYPE, w8a8=True, **sizes)
    x |= dict(idx_k_cache_index=x["idx_k_cache_index"].long())
    weights = [x[name] for name in ("wq_b", "wk", "weights_proj")]
    bytes, flop = sum(w.nbytes for w in weights), 2 * tokens * sum(w.numel() for w in weights)
    shape = f"{tokens} token" + "s" * (tokens > 1)
    return Case("indexer prolog, int8", op, shape, x, bytes, flop, floor)


# ---- gradients, of the last tokens of one sequence ----------------------------------------------


def statistics(*shape: int) -> dict:
    """Of no call: they scale weights, and keep them finite."""
    return dict(softmax_max=torch.full(shape, 8.0), softmax_sum=torch.full(shape, 8.0))


def attention_gradient(tokens: int, keys: int, floor: float | None = None) -> Case:
    op = "npu_sparse_flash_attention_grad_pto"
    x = attention(1, tokens, keys, layout_kv="BSND").arguments
    renamed = reference.MODULES[op].RENAMED
    x = {renamed.get(name, name): value for name, value in x.items()}
    x |= dict(d_out=x["query"], out=x["query"], **statistics(1, 1, tokens, N1))
    # rows are read in half precision and added in float32; the keys' gradient is written once
    bytes = tokens * (6 * K * WIDTH + 2 * N1 * (2 * WIDTH + L)) + 2 * keys * WIDTH
    flop = 2 * tokens * N1 * K * (3 * WIDTH + 2 * L)
    shape = f"1,{tokens},{keys}"
    return Case("gradient of sparse attention", op, shape, x, bytes, flop, floor)


def index_gradient(tokens: int, keys: int, floor: float | None = None) -> Case:
    op = "npu_lightning_indexer_grad_pto"
    x = indexer(1, tokens, keys).arguments
    del x["sparse_count"]
    of_keys = inputs.call("npu_lightning_indexer_pto", tokens, [keys], DTYPE, layout_key="BSND")
    x |= {name: of_keys[name] for name in ("key", "block_table", "layout_key")}
    x |= dict(layout=x.pop("layout_query"), weights=x["weights"].to(DTYPE))
    x |= dict(sparse_indices=selection(tokens, keys), dy=torch.randn(1, tokens, 1, K).to(DTYPE))
    bytes, flop = _of_index(tokens, keys)
    return Case("gradient of the indexer", op, f"1,{tokens},{keys}", x, bytes, flop, floor)


def selection(tokens: int, keys: int) -> torch.Tensor:
    return attention(1, tokens, keys, layout_kv="BSND").arguments["sparse_indices"]


def _of_index(tokens: int, keys: int) -> tuple[int, int]:
    """Bytes and operations of an indexer's gradients."""
    of_token = 6 * K * D + 2 * INDEX_HEADS * (2 * D + 2)
    return tokens * of_token + 2 * keys * D, 2 * tokens * INDEX_HEADS * K * 3 * D


def of_both(tokens: int, keys: int, **sizes) -> dict:
    """A call of a divergence, without its selection and statistics."""
    x = index_kl.inputs([tokens], [keys], dtype=DTYPE, **PACKED | sizes)
    x |= inputs.first(x, ("query", "query_rope", "query_index", "weights"), tokens)
    return x | inputs.first(x, ("key", "key_rope", "key_index"), keys)


def index_loss(tokens: int, keys: int, floor: float | None = None) -> Case:
    x = of_both(tokens, keys) | statistics(1, 1, tokens, N1)
    x |= dict(sparse_indices=selection(tokens, keys))
    bytes, flop = _of_index(tokens, keys)
    bytes += tokens * 2 * WIDTH * (K + N1)
    flop += 2 * tokens * N1 * K * WIDTH
    op = "npu_sparse_lightning_indexer_grad_kl_loss_pto"
    return Case("loss of the indexer", op, f"1,{tokens},{keys}", x, bytes, flop, floor)


def dense_statistics(tokens: int, keys: int, floor: float | None = None) -> Case:
    op = "npu_dense_lightning_indexer_softmax_lse_pto"
    x = reference.MODULES[op].of_indexer(of_both(tokens, keys, weights_dtype=torch.float32))
    bytes = 2 * D * (tokens * INDEX_HEADS + keys) + 4 * tokens * (INDEX_HEADS + 2)
    flop = 2 * tokens * keys * INDEX_HEADS * D
    name, shape = "statistics of the indexer over every key", f"1,{tokens},{keys}"
    return Case(name, op, shape, x, bytes, flop, floor)


def dense_loss(tokens: int, keys: int, floor: float | None = None) -> Case:
    op = "npu_dense_lightning_indexer_grad_kl_loss_pto"
    x = of_both(tokens, keys, weights_dtype=torch.float32) | statistics(1, 1, tokens, N1)
    of_index = statistics(1, 1, tokens)
    x |= {f"{name}_index": value for name, value in of_index.items()}
    # each is read once; the indexer's have a gradient
    bytes = 2 * (tokens * (N1 * WIDTH + 2 * INDEX_HEADS * D) + keys * (WIDTH + 2 * D))
    flop = 2 * tokens * keys * (N1 * WIDTH + 3 * INDEX_HEADS * D)
    name, shape = "loss of the indexer over every key", f"1,{tokens},{keys}"
    return Case(name, op, shape, x, bytes, flop, floor)


# ---- layers of DeepSeek-V4, beside attention ----------------------------------------------------


def connection(tokens: int, floor: float | None = None) -> Case:
    """Of DeepSeek-V4-Flash: 4 streams of 4096, 20 iterations."""
    op, streams, width = "hyper_connection", 4, 4096
    x = reference.MODULES[op].arguments(DTYPE, 1, tokens, width, 20)
    numbers = (2 + streams) * streams
    of_token = 2 * (streams + 1) * width + 4 * (streams + 1) * streams
    bytes = x["weight"].nbytes + tokens * of_token
    flop = 2 * tokens * numbers * streams * width
    return Case("hyper-connection, 4 streams", op, f"1,{tokens}", x, bytes, flop, floor)


def pooling(B: int, S: int, rate: int, floor: float | None = None) -> Case:
    """Of rows of 512; groups of 4 tokens overlap. The last new token completes a group."""
    op, width = "pool_groups", 512
    x = reference.MODULES[op].arguments(DTYPE, B, S, rate, width, rate == 4)
    before = 4 * rate - S % rate
    x |= dict(start=torch.full_like(x["start"], before))
    x |= dict(lengths=x["start"] + S)
    groups, wide = B * -(-S // rate), x["bias"].size(1)
    new = max(S, x["bias"].numel() // width)  # rows of a call, of which groups share some
    bytes = 4 * B * new * wide + x["bias"].nbytes + 4 * groups * width
    name = f"pooling of groups of {rate}"
    return Case(name, op, f"{B},{S}", x, bytes, 0, floor)


# ---- the steps that check drafts ----------------------------------------------------------------


def steps(
    make: Callable[..., Case], *sizes: int, floors: dict, sequences=(1, 4, 16), **more
) -> list[partial]:
    """Of so many sequences a step without drafts, and those that check 1, 2 and 3.

    Args:
        floors: of some of them, by (B, S1).
    """
    return [
        partial(make, B, S1, *sizes, floor=floors.get((B, S1)), **more)
        for B in sequences
        for S1 in (1, 2, 3, 4)
    ]


# makers of the cases of each op
CASES: dict[str, list[Callable[[], Case]]] = {
    "npu_sparse_flash_attention_pto": [
        # with the indices of parts of rows that the PyPTO of CANN 9.1 needs
        partial(attention, 1, 1, 4096, floor=30),
        *steps(attention, 8192, floors={(4, 1): 40, (4, 2): 49}),
        partial(attention, 16, 1, 16384, floor=66),
        partial(attention, 1, 1, 131072),
        partial(attention, 4, 2, 8192, heads=64),
        partial(attention, 4, 2, 8192, heads=16),
        partial(attention, 1, 256, 8192, floor=515),
        # V4 at 8192 tokens: window, selected, and heavily compressed rows
        partial(attention_with_sinks, 64, 2, 128, count=128, floor=91),
        *steps(
            *(attention_with_sinks, 128 + 2048),
            count=128 + 512,
            floors={(1, 1): 23.5, (4, 1): 33},
        ),
        partial(attention_with_sinks, 64, 2, 128 + 2048, count=128 + 512, floor=117),
        partial(attention_with_sinks, 64, 2, 128 + 64, count=128 + 64, floor=104),
    ],
    "npu_sparse_flash_attention_grad_pto": [
        partial(attention_gradient, 64, 8192, floor=690),
        partial(attention_gradient, 256, 8192, floor=2320),
    ],
    "npu_lightning_indexer_grad_pto": [
        partial(index_gradient, 64, 8192, floor=437),
        partial(index_gradient, 256, 8192, floor=1665),
    ],
    "npu_sparse_lightning_indexer_grad_kl_loss_pto": [
        partial(index_loss, 64, 8192, floor=560),
        partial(index_loss, 256, 8192, floor=2185),
    ],
    "npu_dense_lightning_indexer_softmax_lse_pto": [
        partial(dense_statistics, 64, 8192, floor=300),
        partial(dense_statistics, 256, 8192, floor=1180),
    ],
    "npu_dense_lightning_indexer_grad_kl_loss_pto": [
        partial(dense_loss, 64, 8192, floor=1600),
        partial(dense_loss, 256, 8192, floor=6280),
    ],
    "npu_lightning_indexer_pto": [
        *steps(indexer, 8192, floors={(1, 1): 25, (4, 2): 42}),
        partial(indexer, 16, 1, 16384),
        partial(indexer, 1, 1, 65536, floor=85),
        partial(indexer, 1, 1, 131072, floor=135),
        partial(indexer, 4, 2, [65536, 971, 32869, 16383], floor=105),
        partial(indexer, 1, 256, 8192, floor=400),
        partial(indexer, 1, 1, 8192, count=512, cmp_ratio=4, floor=18),
        partial(indexer, 64, 2, 8192, count=512, cmp_ratio=4, floor=99),
        partial(indexer, 1, 1, 65536, count=512, cmp_ratio=4, floor=34),
    ],
    "npu_quant_lightning_indexer_pto": [
        # against 21.5, 40.1 and 64.9 in bfloat16
        partial(int8_indexer, 1, 1, 8192, floor=27),
        partial(int8_indexer, 4, 2, 8192, floor=42),
        partial(int8_indexer, 1, 1, 65536, floor=66),
    ],
    "npu_kv_quant_sparse_flash_attention_pto": [
        # the published kernel for such rows: 70.7, 118.4 and 207.7
        partial(int8_attention, 1, 1, 4096, floor=65),
        partial(int8_attention, 4, 2, 8192, floor=110),
        partial(int8_attention, 16, 1, 16384, floor=145),
    ],
    "npu_lightning_indexer_prolog_pto": [
        partial(int8_prolog, 1, floor=46),
        partial(int8_prolog, 8, floor=60),  # the published kernel: 54.5
        partial(int8_prolog, 64, floor=195),
    ],
    "npu_sparse_attention_pto": [
        *steps(fused, 8192, sequences=(1, 4), floors={(4, 1): 170}),
    ],
    "hyper_connection": [
        # PyPTO's own program: 38.3, 43.0, 54.0 and 60.7 for the first four
        partial(connection, 1, floor=32),
        partial(connection, 4, floor=44),
        partial(connection, 16, floor=45),
        partial(connection, 64, floor=65),
        partial(connection, 256),
    ],
    "pool_groups": [
        partial(pooling, 1, 1, 4, floor=17),
        partial(pooling, 16, 1, 4),
        partial(pooling, 1, 256, 4, floor=53),
        partial(pooling, 1, 1, 128, floor=11),
        partial(pooling, 16, 1, 128),
        partial(pooling, 1, 256, 128),
    ],
}


def cases(op: str | None = None) -> Iterator[Case]:
    """Of an op, or all; made one by one: together they are gigabytes."""
    for make in CASES[op] if op else itertools.chain(*CASES.values()):
        yield make()
