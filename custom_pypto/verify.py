"""Compares the ops on a device with their definition: ``python -m custom_pypto verify``.

Every check makes seeded inputs, calls the op on the device and :mod:`custom_pypto.reference` on the
CPU, and prints the error beside what is allowed. Sequences are ragged, blocks shuffled, and block
ids past a sequence's end are no blocks.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import ops, reference

BLOCK = 128
# 2 units of rounding of bfloat16 and float16: one for the result, one for what is rounded before;
# float32 sums of some hundred products in another order
ROUNDING = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
ROW = "{:<7} {:<30} {:<9} {:<35} {:>8} {:>8}"


class Check(NamedTuple):
    op: str
    dtype: torch.dtype
    shape: str
    run: Callable[[], tuple[float, float]]  # gives the error and what is allowed


def verify(device: str, op: str = "") -> bool:
    """Runs every check on ``device`` (``cpu``, ``npu`` or ``interpreter``), prints a line each.

    ``interpreter`` runs the NPU programs on the CPU in PyPTO's interpreter. Only the checks of
    ``op`` are run if it is named.

    Returns:
        Whether every check passed.
    """
    checks = [check for check in _checks(device) if op in ("", check.op)]
    context = contextlib.nullcontext()
    if device == "interpreter":
        from .simulation import calculator, on_cpu

        calculator.load()  # once, and not within a check
        context = on_cpu()
    failed = 0
    print(ROW.format("result", f"op on {device}", "dtype", "shape", "error", "allowed"))
    with context:
        for check in checks:
            dtype = str(check.dtype).removeprefix("torch.")
            try:
                error, limit = check.run()
            except Exception as failure:  # one failed check must not hide the others
                failed += 1
                print(ROW.format("FAILED", check.op, dtype, check.shape, "-", "-"))
                print(f"        {type(failure).__name__}: {failure}", flush=True)
                continue
            result = "ok" if error <= limit else "FAILED"
            failed += result == "FAILED"
            numbers = f"{error:.2g}", f"{limit:.2g}"
            print(ROW.format(result, check.op, dtype, check.shape, *numbers), flush=True)
    print(f"{len(checks) - failed} of {len(checks)} checks passed on {device}")
    return not failed


def _checks(device: str) -> Iterator[Check]:
    place = "npu" if device == "npu" else "cpu"
    # the NPU programs take no float32
    dtypes = [torch.bfloat16, torch.float16] + [torch.float32] * (device == "cpu")
    for dtype in dtypes:
        yield Check("add_custom", dtype, "37 x 129", lambda t=dtype: _add(place, t))
        for lengths, S1, K in (
            ([1], 1, 16),
            ([300, 0, 1000], 1, 128),
            ([131, 5], 4, 16),
            ([5000], 2, 2048),
        ):
            shape = f"lengths {lengths}, S1 {S1}, K {K}"
            case = (place, dtype, lengths, S1, K)
            yield Check("npu_lightning_indexer_pto", dtype, shape, lambda c=case: _indexer(*c))
            yield Check(
                "npu_sparse_flash_attention_pto", dtype, shape, lambda c=case: _attention(*c)
            )
    for dtype in dtypes:
        if dtype == torch.float16:
            continue  # the programs are those of bfloat16, and the slowest in the interpreter
        for lengths, S1, K in (([40, 3], 1, 64), ([200, 130], 2, 16)):
            shape = f"lengths {lengths}, S1 {S1}, K {K}"
            case = (place, dtype, lengths, S1, K)
            yield Check("npu_sparse_attention_pto", dtype, shape, lambda c=case: _fused(*c))


def _cache(lengths: list[int], g: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Lengths, a shuffled block table that is hostile past the end, and the number of blocks."""
    blocks = [-(-n // BLOCK) for n in lengths]
    hostile = torch.tensor([INT_MIN, -1, INT_MAX], dtype=torch.int32)
    table = hostile.repeat(max(blocks) + 1)[: max(blocks) + 1].repeat(len(lengths), 1)
    ids = torch.randperm(sum(blocks) + 1, generator=g, dtype=torch.int32)
    for row, own in zip(table, ids[: sum(blocks)].split(blocks), strict=True):
        row[: len(own)] = own
    return torch.tensor(lengths, dtype=torch.int32), table, sum(blocks) + 1


def _on(device: str, arguments: dict) -> dict:
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def _row_error(got: Tensor, expected: Tensor) -> float:
    """Largest error relative to the largest magnitude of its row; infinite for NaN."""
    got, expected = got.double().cpu(), expected.double()
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return float(((got - expected).abs() / scale).nan_to_num(nan=torch.inf).amax())


def _add(device: str, dtype: torch.dtype) -> tuple[float, float]:
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(37, 129, generator=g).to(dtype) for _ in range(2))
    got = ops.add_custom(x.to(device), y.to(device))
    return float((got.cpu() != reference.add_custom(x, y)).sum()), 0.0


def _indexer(device, dtype, lengths, S1, K) -> tuple[float, float]:
    """By how much a score that was missed, or one further back in its row, is too good."""
    g = torch.Generator().manual_seed(1)
    actual, table, blocks = _cache(lengths, g)
    heads, dim = 64, 128
    arguments = dict(
        query=torch.randn(len(lengths), S1, heads, dim, generator=g).to(dtype),
        key=torch.randn(blocks, BLOCK, 1, dim, generator=g).to(dtype),
        weights=torch.randn(len(lengths), S1, heads, generator=g),
        actual_seq_lengths_key=actual,
        block_table=table,
        sparse_count=K,
    )
    got = ops.npu_lightning_indexer_pto(**_on(device, arguments)).cpu()
    expected = reference.npu_lightning_indexer_pto(**arguments)
    keys = arguments["key"].view(-1, dim).double()
    worst = 0.0
    for b, i in torch.cartesian_prod(torch.arange(len(lengths)), torch.arange(S1)).tolist():
        mine, best = got[b, i, 0].tolist(), expected[b, i, 0].tolist()
        count = sum(p >= 0 for p in best)
        visible = max(lengths[b] - S1 + i + 1, 0)
        legal = len(set(mine[:count])) == count and all(0 <= p < visible for p in mine[:count])
        if not legal or set(mine[count:]) - {-1}:
            return torch.inf, 0.0
        p = torch.arange(visible)
        rows = keys[table[b].long()[p // BLOCK] * BLOCK + p % BLOCK]
        q, w = arguments["query"][b, i].double(), arguments["weights"][b, i].double()
        score = w @ torch.relu(q @ rows.T)
        scale = float((w.abs() @ (q.abs() @ rows.abs().T)).amax()) if visible else 1.0
        missed, extra = sorted(set(best) - set(mine)), sorted(set(mine) - set(best))
        if missed:
            worst = max(worst, float(score[missed].max() - score[extra].min()) / scale)
        if count > 1:  # best first
            worst = max(worst, float(score[mine[:count]].diff().max()) / scale)
    # float32 sums of some hundred products
    return worst, 2**-20


def _attention(device, dtype, lengths, S1, K) -> tuple[float, float]:
    g = torch.Generator().manual_seed(2)
    actual, table, blocks = _cache(lengths, g)
    heads, latent, rope = 128, 512, 64
    indices = torch.full((len(lengths), S1, 1, K), -1, dtype=torch.int32)
    for b, n in enumerate(lengths):
        for i in range(S1):
            chosen = torch.randperm(max(n - S1 + i + 1, 0), generator=g)[:K].int()
            indices[b, i, 0, : len(chosen)] = chosen
    if K > 16:  # indices that name no visible key contribute nothing
        indices[..., 3], indices[..., 5], indices[..., 7] = INT_MIN, INT_MAX, max(lengths)
    arguments = dict(
        query=torch.randn(len(lengths), S1, heads, latent, generator=g).to(dtype),
        key=torch.randn(blocks, BLOCK, 1, latent, generator=g).to(dtype),
        value=None,
        sparse_indices=indices,
        scale_value=192**-0.5,
        query_rope=torch.randn(len(lengths), S1, heads, rope, generator=g).to(dtype),
        key_rope=torch.randn(blocks, BLOCK, 1, rope, generator=g).to(dtype),
        block_table=table,
        actual_seq_lengths_kv=actual,
    )
    got = ops.npu_sparse_flash_attention_pto(**_on(device, arguments))
    expected = reference.npu_sparse_flash_attention_pto(**arguments)
    # the probabilities are rounded too, before they meet the values
    return _row_error(got, expected), 2 * ROUNDING[dtype]


def _fused(device, dtype, lengths, S1, K) -> tuple[float, float]:
    """Output and the three caches; where K cuts, caches only: rounding changes what is selected."""
    g = torch.Generator().manual_seed(3)
    actual, table, blocks = _cache(lengths, g)
    B, hidden, q_rank, heads, nope, latent, rope, index_heads, dim = (
        *(len(lengths), 256, 128, 16, 128, 512, 64, 64, 128),
    )

    def weight(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) * shape[-2] ** -0.5).to(dtype)

    position = actual[:, None] - S1 + torch.arange(S1)
    angle = (position[..., None] * 10000.0 ** (-torch.arange(0, rope, 2) / rope)).repeat(1, 1, 2)
    slot = table.long().gather(1, position // BLOCK) * BLOCK + position % BLOCK
    arguments = dict(
        x=torch.randn(B, S1, hidden, generator=g).to(dtype),
        w_dq=weight(hidden, q_rank),
        w_uq_qr=weight(q_rank, heads * (nope + rope)),
        w_uk=weight(heads, nope, latent),
        w_dkv_kr=weight(hidden, latent + rope),
        gamma_cq=torch.ones(q_rank, dtype=dtype),
        gamma_ckv=torch.ones(latent, dtype=dtype),
        sin=angle.sin().to(dtype),
        cos=angle.cos().to(dtype),
        cache_index=slot,
        kv_cache=torch.randn(blocks, BLOCK, 1, latent, generator=g).to(dtype),
        kr_cache=torch.randn(blocks, BLOCK, 1, rope, generator=g).to(dtype),
        block_table=table,
        act_seqs=actual,
        w_idx_qb=weight(q_rank, index_heads * dim),
        w_idx_k=weight(hidden, dim),
        w_idx_proj=weight(hidden, index_heads),
        in_gamma_k=torch.ones(dim, dtype=dtype),
        in_beta_k=torch.zeros(dim, dtype=dtype),
        index_k_cache=torch.randn(blocks, BLOCK, 1, dim, generator=g).to(dtype),
        sparse_count=K,
    )
    mine = _on(device, {n: v.clone() if isinstance(v, Tensor) else v for n, v in arguments.items()})
    got = ops.npu_sparse_attention_pto(**mine)
    expected = reference.npu_sparse_attention_pto(**arguments)
    caches = ("kv_cache", "kr_cache", "index_k_cache")
    errors = [_row_error(mine[name], arguments[name]) for name in caches]
    if K >= max(lengths):
        errors.append(_row_error(got, expected))
    # each of the four matmuls in a row rounds its result
    return max(errors), 4 * ROUNDING[dtype]
