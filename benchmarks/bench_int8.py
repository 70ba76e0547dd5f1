"""Every floor of the caches in int8, in one table: accuracy, memory, speed, PyPTO's estimates.

Recall is the share of the bfloat16 indexer's 2048 positions that the int8 indexer selects, of
Gaussian queries and keys; next to it that of fp8 (e4m3 with a scale per row, as DeepSeek's own
inference code quantizes), which must not be larger. The lookup checkpoint answers questions on
texts of 512 and 2048 tokens. Speeds are those of one thread, relative to the bfloat16 op in the
same run (bench int8_ops); estimates are of PyPTO's cost model, not of hardware
(bench npu).
"""

import statistics
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import bench_ops
import npu_cases
import torch
from measure import Benchmark, Floor, known
from train_lookup import lookup_accuracy, lookup_batch

import custom_pypto
from custom_pypto import models
from custom_pypto.reference.npu_quant_rows_pto import hadamard_matrix

ROOT = Path(__file__).resolve().parents[1]
LOOKUP = ROOT / "examples/checkpoints/lookup"
HEADS, D, K = 64, 128, 2048
BOTH = dict(index_dtype=torch.int8, kv_dtype=torch.int8)
# estimates of CANN's own int8 sparse attention in the same cost model, us
OFFICIAL = {(1, 1, 4096): 70.7, (4, 2, 8192): 118.4, (16, 1, 16384): 207.7}


def paged(rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(0, (-1, 128)).unsqueeze(2)


def of_e4m3(rows: torch.Tensor) -> torch.Tensor:
    """Rows of D after e4m3 with a scale each."""
    scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (rows.float() / scale).to(torch.float8_e4m3fn).float() * scale


def overlap(got: torch.Tensor, want: torch.Tensor) -> float:
    pairs = zip(got.flatten(0, -2), want.flatten(0, -2), strict=True)
    return torch.stack([torch.isin(w, g).float().mean() for g, w in pairs]).mean().item()


def recalls(keys: int, tokens: int) -> tuple[float, float]:
    """Of int8 and of e4m3, both rotated, against the bfloat16 op."""
    generator = torch.Generator().manual_seed(keys)
    query = torch.randn(1, tokens, HEADS, D, generator=generator).bfloat16()
    key = torch.randn(keys, D, generator=generator).bfloat16()
    weights = torch.randn(1, tokens, HEADS, generator=generator)
    call = dict(
        actual_seq_lengths_key=torch.tensor([keys], dtype=torch.int32),
        block_table=torch.arange(keys // 128, dtype=torch.int32)[None],
        sparse_count=K,
        sparse_mode=0,
    )
    want = custom_pypto.npu_lightning_indexer_pto(query, paged(key), weights, **call)
    rotation = hadamard_matrix(D).to(key.device, torch.bfloat16)
    rows, scales = custom_pypto.npu_quant_rows_pto(query, hadamard=rotation)
    key_rows, key_scales = custom_pypto.npu_quant_rows_pto(paged(key), hadamard=rotation)
    got = custom_pypto.npu_quant_lightning_indexer_pto(
        rows, key_rows, weights, scales, key_scales, 0, 0, **call
    )
    q8, k8 = of_e4m3(query[0] @ rotation), of_e4m3(key @ rotation)
    scores = [
        torch.einsum("h,hs->s", w, (q @ k8.T).relu()) for q, w in zip(q8, weights[0], strict=True)
    ]
    fp8 = torch.stack(scores).topk(K).indices[None, :, None]
    return overlap(got, want), overlap(fp8, want)


def lookup(**dtypes):
    return models.use_custom_pypto(models.load(LOOKUP, dtype=torch.bfloat16), **dtypes)


def answers(model, length: int) -> float:
    return lookup_accuracy(
        model, length, new_cache=lambda: models.PagedCache(model, 1, length + 128)
    )


def recalls_of_16(model, length: int) -> tuple[float, float]:
    """Of the int8 indexer on the queries and keys of each layer of ``model``, rotated both, and
    queries alone; of tokens that see more than they select."""
    ids, _ = lookup_batch(1, length, questions=16, seed=5)
    cache = models.PagedCache(model, 1, length)
    rotation = hadamard_matrix(D).to(ids.device, model.dtype)
    op, found = custom_pypto.npu_lightning_indexer_pto, []

    def both(query, key, weights, *, cmp_ratio, **call):
        want = op(query, key, weights, **call)
        rows, scales = custom_pypto.npu_quant_rows_pto(query, hadamard=rotation)
        for of_keys in (rotation, None):
            key_rows, key_scales = custom_pypto.npu_quant_rows_pto(key, hadamard=of_keys)
            got = custom_pypto.npu_quant_lightning_indexer_pto(
                rows, key_rows, weights, scales, key_scales.view(key.shape[:3]), 0, 0, **call
            )
            found.append(overlap(got[:, 64:], want[:, 64:]))
        return want

    with mock.patch.object(custom_pypto, "npu_lightning_indexer_pto", both):
        model(ids, cache=cache)
    return statistics.mean(found[::2]), statistics.mean(found[1::2])


@torch.no_grad()
def accuracy() -> Iterator[Floor]:
    for keys, tokens in ((8192, 16), (65536, 4)):
        int8, fp8 = recalls(keys, tokens)
        yield known(f"recall of 2048 of {keys // 1024}K keys", int8, 0.985)
        yield known(f"recall of 2048 of {keys // 1024}K keys, above fp8's", int8, fp8)
    plain, quantized = lookup(), lookup(**BOTH)
    for length in (512, 2048):
        right = answers(plain, length)
        yield known(f"right answers, {length} tokens", answers(quantized, length), right - 0.02)
        rotated, alone = recalls_of_16(plain, length)
        yield known(f"recall of 16, {length} tokens", rotated, 0.985)
        yield known(f"recall of 16, {length} tokens, queries alone rotated", alone, 0.3, False)


def memory() -> Iterator[Floor]:
    model = lookup(**BOTH)
    small, large = (models.PagedCache(model, 1, tokens).nbytes for tokens in (1024, 2048))
    per_token = (large - small) / 1024 / model.config.num_hidden_layers
    yield known("bytes of a token and layer", per_token, 786, False)


def estimates() -> Iterator[Floor]:
    def us(case: npu_cases.Case) -> float:
        return case.estimate().latency_us

    for shape, most in {(4, 2, 8192): 1.0, (1, 1, 65536): 1.0, (1, 1, 8192): 1.25}.items():
        share = us(npu_cases.int8_indexer(*shape)) / us(npu_cases.indexer(*shape))
        yield known(f"estimate of the indexer over bfloat16's, {shape}", share, most, False)
    for shape, most in OFFICIAL.items():
        found = us(npu_cases.int8_attention(*shape))
        yield known(f"estimate of attention, us, {shape}", found, most, False)


def every_floor(repeats: int) -> Iterator[Floor]:
    yield from accuracy()
    yield from memory()
    yield from bench_ops.int8_floors(repeats)
    yield from estimates()


BENCHMARKS = {
    "int8": Benchmark(
        "Floors of caches in int8",
        ["", "measured", "floor", ""],
        lambda repeats: (floor.row() for floor in every_floor(repeats)),
        floors=every_floor,
    )
}
