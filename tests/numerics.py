"""Comparisons with the reference, and the messages of their failures."""

from types import SimpleNamespace

import torch
from torch import Tensor

import custom_pypto
import custom_pypto.reference
from custom_pypto.descriptions import ALL_OPS, LAYER_KERNELS
from custom_pypto.reference import MODULES
from custom_pypto.reference.checks import ROUNDING
from custom_pypto.reference.sequences import keys_of, query_tokens
from custom_pypto.verify import one_thread

reference = SimpleNamespace(
    **{op: one_thread()(MODULES[op].__dict__[op]) for op in ALL_OPS | LAYER_KERNELS}
)

ROW_TOLERANCE = ROUNDING | {torch.float64: 1e-12}


def assert_close_to_rows(
    got: Tensor,
    expected: Tensor,
    tolerance: float | None = None,
    *,
    magnitude: Tensor | None = None,
    smallest: float = 0,
) -> None:
    """Every element is within ``tolerance`` of the largest magnitude of its row (the last dim).

    NaN must match NaN, an infinity itself, and a row of zeros must be zeros. ``magnitude``: sums of
    the magnitudes of the terms, for rows in which they cancel. ``smallest``: the largest number
    that may be zero instead, since subnormal numbers have no relative rounding.
    """
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{got.dtype}, not {expected.dtype}"
    tolerance = ROW_TOLERANCE[got.dtype] if tolerance is None else tolerance
    got, expected = got.double(), expected.double()
    same = (got == expected) | (got.isnan() & expected.isnan())
    finite = torch.where(expected.isfinite(), expected, 0)
    largest = finite.abs() if magnitude is None else magnitude.double().nan_to_num(0, 0, 0)
    limit = (tolerance * largest.amax(-1, keepdim=True)).clamp(min=smallest)
    error = torch.where(same, 0, (got - expected).abs()).nan_to_num(nan=torch.inf)
    excess = error - limit
    if not (excess <= 0).all():
        worst = torch.unravel_index(excess.argmax(), excess.shape)
        at = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{int((excess > 0).sum())} of {error.numel()} elements differ by more than "
            f"{tolerance:.2g} of their row; worst at {at}: got {got[worst]:.7g}, expected "
            f"{expected[worst]:.7g}, row maximum {finite[at[:-1]].abs().max():.7g}"
        )


def exact_scores(query: Tensor, keys: Tensor, weights: Tensor) -> tuple[Tensor, float, bool]:
    """One token's scores in float64, the largest difference of two float32 evaluations, and whether
    that is unbounded: an infinite weight times a sum that cancels within rounding."""
    q, k, w = query.double(), keys.double(), weights.double()
    added, dots = q.abs() @ k.abs().T, q @ k.T
    magnitude = w.abs() @ added
    # errors of 2^-24 grow with the root of the number of roundings, some hundred
    eps = 2**-20 * float(magnitude.amax()) if len(keys) else 0.0
    cancels = (added > 0) & (dots.abs() <= 2**-20 * added)
    return w @ torch.relu(dots), eps, bool((w.isinf()[:, None] & cancels).any())


def exact_scores_of_int8(
    query: Tensor, keys: Tensor, weights: Tensor, query_scale: Tensor, key_scale: Tensor
) -> tuple[Tensor, float, bool]:
    """As :func:`exact_scores`. Products are exact, so only the terms of the weighted sum round."""
    dots = torch.relu(query.double() @ keys.double().T)
    w, scale = weights.double() * query_scale.double(), key_scale.double()
    added, summed = w.abs() @ dots, w @ dots
    magnitude = (added * scale.abs()).nan_to_num(0, 0, 0)
    eps = 2**-20 * float(magnitude.amax()) if len(keys) else 0.0
    cancels = (added > 0) & (summed.abs() <= 2**-20 * added)
    return summed * scale, eps, bool((scale.isinf() & cancels).any())


def assert_same_selection(got: Tensor, inputs: dict, smallest: float = 0) -> None:
    """``got`` is the reference's selection for ``inputs``, of whichever indexer takes these, except
    for scores equal within rounding.

    Both rows have equally many positions, each visible and none twice. A position in only one of
    them scores within eps of the K-th, and no score exceeds the one before it by more than eps,
    which is at least ``smallest``. If a score in a row is unbounded (:func:`exact_scores`), only
    its number of positions, their visibility and their uniqueness are checked.
    """
    quantized = "query_dequant_scale" in inputs
    op = "npu_quant_lightning_indexer_pto" if quantized else "npu_lightning_indexer_pto"
    expected = getattr(reference, op)(**inputs)
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    assert got.dtype == torch.int32
    got, expected = got.flatten(0, -2), expected.flatten(0, -2)
    different = set((got != expected).any(-1).nonzero().flatten().tolist())
    if not different:
        return

    query, key = inputs["query"].flatten(0, -3), inputs["key"]
    weights, key_rows = inputs["weights"].flatten(0, -2), key.reshape(-1, key.size(-1))
    layout_query = inputs.get("layout_query", "BSND")
    lengths_query = inputs.get("actual_seq_lengths_query")
    batch = len(lengths_query) if layout_query == "TND" else inputs["query"].size(0)
    cmp_ratio = inputs.get("cmp_ratio", 1)
    keys = keys_of(
        key,
        inputs.get("layout_key", "PA_BSND"),
        inputs.get("actual_seq_lengths_key"),
        inputs.get("block_table"),
        batch,
        cmp_ratio,
    )
    tokens, sparse_mode = [k.tokens for k in keys], inputs.get("sparse_mode", 3)
    for token in query_tokens(
        inputs["query"], layout_query, lengths_query, tokens, sparse_mode, cmp_ratio
    ):
        if token.row not in different:
            continue
        different.remove(token.row)
        where = f"row {token.row} (sequence {token.sequence})"
        row, best = got[token.row].tolist(), expected[token.row].tolist()
        slot = keys[token.sequence].slots[: token.visible]
        valid = [p for p in best if p >= 0]
        mine = row[: len(valid)]
        wrong = [p for p in mine if not 0 <= p < token.visible or slot[p] < 0]
        assert not wrong, f"{where}: selects {wrong[:5]}, but sees {token.visible} keys"
        assert len(set(mine)) == len(mine), f"{where}: selects a position twice"
        assert set(row[len(valid) :]) <= {-1}, f"{where}: {row[len(valid) :][:5]} after its keys"
        exists = (slot >= 0).nonzero().flatten()
        scores = torch.full((len(slot),), torch.nan, dtype=torch.float64)
        operands = query[token.row], key_rows[slot[exists]], weights[token.row]
        if quantized:
            query_scale = inputs["query_dequant_scale"].flatten(0, -2)[token.row]
            key_scale = inputs["key_dequant_scale"].flatten()[slot[exists]]
            scores[exists], eps, anything = exact_scores_of_int8(*operands, query_scale, key_scale)
        else:
            scores[exists], eps, anything = exact_scores(*operands)
        if anything:  # it determines the selection and its order
            continue
        eps = max(eps, smallest)
        kth = scores[valid].min()
        missing, extra = sorted(set(valid) - set(mine)), sorted(set(mine) - set(valid))
        for p in missing + extra:
            assert abs(scores[p] - kth) <= eps, (
                f"{where}: misses {missing[:5]}, selects {extra[:5]}; position {p} scores "
                f"{scores[p]:.7g}, the {len(valid)}-th best {kth:.7g}, rounding explains {eps:.2g}"
            )
        rise = scores[mine][1:] - scores[mine][:-1]
        assert (rise <= eps).all(), (
            f"{where}: not in descending order at {int(rise.argmax()) + 1}: rises by "
            f"{rise.max():.2g}, rounding explains {eps:.2g}"
        )
    assert not different, f"rows {sorted(different)[:5]} are padding and not all -1"


def assert_attends_as_the_reference(x: dict) -> Tensor:
    """The output of ``npu_sparse_flash_attention_pto``, and its statistics, are the reference's."""
    attend = custom_pypto.npu_sparse_flash_attention_pto
    got, *ours = attend(**x, return_softmax_lse=True)
    expected, *theirs = reference.npu_sparse_flash_attention_pto(**x, return_softmax_lse=True)
    info = torch.finfo(got.dtype)
    # a step of the subnormal numbers: sinks may leave nothing else of a row
    assert_close_to_rows(got, expected, smallest=info.tiny * info.eps)
    # logits round by 2^-20 of the largest, and so does an exponential of two
    largest = theirs[0].nan_to_num(0, 0, 0).abs().max() if theirs[0].numel() else 0
    near = 2**-20 * float(8 + largest)
    for name, mine, other in zip(("max", "sum"), ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=near, atol=near, equal_nan=True, msg=name)
    torch.testing.assert_close(attend(**x), got, rtol=0, atol=0, equal_nan=True)
    return got


def assert_within_its_bound(op: str, x: dict) -> tuple:
    """The results of an op, which are those of the reference within the bound that this states."""
    got, expected = getattr(custom_pypto, op)(**x), getattr(reference, op)(**x)
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert other.isfinite().all()
    error, bound = MODULES[op].error(got, expected, x, x)
    assert error <= bound
    return got
