"""The NPU kernels of gradients and of divergences: interpreted, and as generated code."""

import pytest
import torch
from cases import INT_MAX, INT_MIN, without_nan
from cases import npu_checks as checks
from cases.npu_checks import (
    block_ids_clamped,
    check_by_its_rule,
    needs_gcc,
    pypto_0_2_0_only,
)
from cases.npu_programs import (
    HALF,
    attention_case,
    dense_loss_case,
    gradient_case,
    index_gradient_case,
    index_loss_case,
    statistics_case,
)
from with_pypto import pypto

import custom_pypto
from custom_pypto import npu, reference
from custom_pypto.kernels import (
    npu_dense_lightning_indexer_grad_kl_loss_pto,
    npu_lightning_indexer_grad_pto,
    npu_sparse_flash_attention_grad_pto,
    npu_sparse_lightning_indexer_grad_kl_loss_pto,
    selected_rows,
)
from custom_pypto.reference import MODULES
from custom_pypto.reference.npu_dense_lightning_indexer_grad_kl_loss_pto import with_statistics

pytestmark = pytest.mark.sim
PROGRAMS = [
    npu_dense_lightning_indexer_grad_kl_loss_pto,
    npu_lightning_indexer_grad_pto,
    npu_sparse_flash_attention_grad_pto,
    npu_sparse_lightning_indexer_grad_kl_loss_pto,
]
OF_ATTENTION, OF_INDEXER = "npu_sparse_flash_attention_grad_pto", "npu_lightning_indexer_grad_pto"
SPARSE = "npu_sparse_lightning_indexer_grad_kl_loss_pto"
DENSE = "npu_dense_lightning_indexer_grad_kl_loss_pto"
LSE = "npu_dense_lightning_indexer_softmax_lse_pto"
SMALL = dict(lengths_query=[5], lengths_key=[300])


def row(op: str, *values, slow: bool = False) -> pytest.param:
    return pytest.param(op, *values, id=op, marks=[pytest.mark.slow] if slow else [])


@needs_gcc
@pypto_0_2_0_only
@pytest.mark.parametrize(
    "op, program, arguments",
    [
        # arguments with a dynamic dim: the terms of the sinks, the losses of the tokens
        row(OF_ATTENTION, npu_sparse_flash_attention_grad_pto, dict(sinks=(-9, 9), **SMALL)),
        row(SPARSE, npu_sparse_lightning_indexer_grad_kl_loss_pto, SMALL, slow=True),
        row(DENSE, npu_dense_lightning_indexer_grad_kl_loss_pto, SMALL, slow=True),
    ],
)
def test_a_missing_barrier_is_found(op, program, arguments, monkeypatch, fresh_kernels, generated):
    monkeypatch.setattr(program, "after_all", lambda name: program.loop(name, 1))
    x = checks.PROGRAMS[op].case(**arguments)
    with pytest.raises(RuntimeError, match="race: task"):
        getattr(custom_pypto, op)(**x)


@needs_gcc
@pytest.mark.parametrize(
    "op, keys", [row(OF_ATTENTION, "layout_kv", slow=True), row(OF_INDEXER, "layout_key")]
)
def test_a_missing_clamp_is_found(op, keys, monkeypatch, fresh_kernels, generated):
    def unchecked(indices, row, last):
        width = indices.shape[1]
        pypto.set_vec_tile_shapes(1, width)
        index = pypto.cast(pypto.view(indices, [1, width], [row, 0]), pypto.DT_FP32)
        return index, pypto.where(pypto.eq(index, index), 1.0, 0.0)

    monkeypatch.setattr(selected_rows, "checked_indices", unchecked)
    x = checks.PROGRAMS[op].case(**SMALL, sparse_count=64, **{keys: "BSND"})
    x["sparse_indices"][..., 1] = -INT_MAX
    with pytest.raises(RuntimeError, match="reads 4 bytes at byte"):
        getattr(custom_pypto, op)(**x)


@pytest.mark.slow
@needs_gcc
@pypto_0_2_0_only
def test_keys_without_a_last_tile_are_found(monkeypatch, fresh_kernels, generated):
    """Rows behind the keys, which the wrapper appends."""
    x = dense_loss_case([2], [70])
    monkeypatch.setattr(npu._module(DENSE), "padded", lambda matrix, rows: matrix)
    with pytest.raises(RuntimeError, match="reads .* bytes at"):
        getattr(custom_pypto, DENSE)(**x)


# ---- lengths and block ids -----------------------------------------------------------------------


def with_gradient(x: dict) -> dict:
    return MODULES[OF_ATTENTION].with_gradient(x, torch.ones_like(x["query"]))


def with_selection(x: dict) -> dict:
    return x | MODULES[SPARSE].with_selection(x, 16)


def without_statistics(x: dict) -> dict:
    return {name: y for name, y in x.items() if not name.startswith("softmax_")}


SIZES = dict(lengths_query=[2, 1], lengths_key=[300, 40])
LENGTHS = [
    *((OF_ATTENTION, layout, 1) for layout in ("PA_BSND", "BSND", "TND")),
    *((OF_INDEXER, layout, ratio) for layout in ("PA_BSND", "BSND", "TND") for ratio in (1, 4)),
    *((SPARSE, layout, ratio) for layout in ("BSND", "TND") for ratio in (1, 4)),
    *((op, layout, 1) for op in (DENSE, LSE) for layout in ("BSND", "TND")),
]
# by default each op, layout and ratio
FEW = {(OF_ATTENTION, "PA_BSND", 1), (OF_ATTENTION, "BSND", 1), (OF_INDEXER, "PA_BSND", 1)}
FEW |= {(OF_INDEXER, "BSND", 4), (OF_INDEXER, "TND", 1), (SPARSE, "BSND", 4), (SPARSE, "TND", 1)}
FEW |= {(DENSE, "BSND", 1), (LSE, "TND", 1)}


@pytest.mark.parametrize("value", [-(10**12), INT_MIN, -1, 0, 10**6, INT_MAX, 10**12])
@pytest.mark.parametrize(
    "op, layout, cmp_ratio",
    [pytest.param(*case, marks=[] if case in FEW else [pytest.mark.slow]) for case in LENGTHS],
)
def test_no_length_and_no_block_id_leads_outside(op, layout, cmp_ratio, value, interpreted):
    layouts = dict(layout_query="TND" if layout == "TND" else "BSND")
    if op == OF_ATTENTION:
        # with statistics of each call
        x, again = attention_case(**SIZES, heads=5, layout_kv=layout, **layouts), with_gradient
    elif op == OF_INDEXER:
        layouts |= dict(layout_key=layout, cmp_ratio=cmp_ratio, sparse_count=64)
        x, again = index_gradient_case(**SIZES, heads=5, **layouts), dict
    elif op == SPARSE:
        x = index_loss_case(**SIZES, heads=5, layout=layout, cmp_ratio=cmp_ratio)
        again = with_selection
    elif op == DENSE:
        x, again = without_statistics(dense_loss_case(**SIZES, layout=layout)), with_statistics
    else:
        x, again = statistics_case(**SIZES, layout=layout), dict
    x = without_nan(x)
    for name in (n for n in x if n == "block_table" or n.startswith("actual_seq")):
        for place in range(1 + isinstance(x[name], list)):
            if isinstance(x[name], list):
                hostile = x | {name: [*x[name][:place], value, *x[name][place + 1 :]]}
            elif x[name] is None:
                continue
            else:
                hostile = x | {name: x[name].clone()}
                hostile[name].view(-1)[place] = max(INT_MIN, min(value, INT_MAX))
            call = again(block_ids_clamped(hostile) if layout == "PA_BSND" else hostile)
            given = dict(block_table=hostile["block_table"]) if layout == "PA_BSND" else {}
            check_by_its_rule(op, call | given, like=call)


@pytest.mark.parametrize("op", [SPARSE, DENSE])
@pytest.mark.parametrize("lengths", [([0], [5]), ([2], [0]), ([0, 0], [3, 3])], ids=str)
@pytest.mark.parametrize("layout", ["TND", "BSND"])
def test_without_tokens_or_keys_all_is_zero(op, lengths, layout, interpreted):
    x = checks.PROGRAMS[op].case(*lengths, layout=layout)
    assert not any(result.any() for result in getattr(custom_pypto, op)(**x))


@pytest.mark.parametrize(
    "op, keys, leaves",
    [
        (OF_INDEXER, dict(layout_key="BSND"), ["key"]),
        (SPARSE, dict(layout="BSND"), ["key", "key_rope", "key_index"]),
    ],
    ids=[OF_INDEXER, SPARSE],
)
def test_keys_that_no_token_selects_reach_nothing(op, keys, leaves, interpreted):
    x = checks.PROGRAMS[op].case([2], [40], sparse_count=16, **keys)
    x["sparse_indices"] = x["sparse_indices"].clamp(max=19)
    for name in leaves:
        x[name][:, 20:] = torch.nan
    got = getattr(custom_pypto, op)(**x)
    assert all(result.isfinite().all() for result in got)
    assert got[1][:, :20].any() and not got[1][:, 20:].any()


# ---- precision -----------------------------------------------------------------------------------


def of_any_size(size: float):
    def case(**arguments) -> dict:
        dtypes = dict(weights_dtype=torch.float32, dy_dtype=torch.float32)
        x = index_gradient_case(**dtypes, **arguments)
        x["dy"] = x["dy"] * size
        for name in ("query", "key"):  # float16 holds the results
            x[name] = x[name] * size**-0.6
        return x

    return case


def of_deepseek_v3_2(**arguments) -> dict:
    """Gradients of scores of about 1 / 2048, which float16 holds only scaled."""
    sizes = dict(heads=128, index_heads=64, sparse_count=2048, weights_dtype=torch.float32)
    x = index_loss_case(**sizes, **arguments)
    return x | dict(weights=x["weights"] / 64)


def of_many_keys(**arguments) -> dict:
    sizes = dict(heads=16, index_heads=16, dim=128, weights_dtype=torch.float32)
    return dense_loss_case(**sizes, **arguments)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "op, case, arguments",
    [
        pytest.param(
            *(OF_ATTENTION, gradient_case),
            dict(lengths_query=[20], lengths_key=[300], sparse_count=128, own_value=True),
            id="attention",
        ),
        *(
            pytest.param(
                *(OF_INDEXER, of_any_size(size)),
                dict(lengths_query=[20], lengths_key=[300], sparse_count=128),
                id=f"indexer-{size}",
            )
            for size in (1e-5, 1.0, 1e4)
        ),
        pytest.param(
            *(SPARSE, index_loss_case),
            dict(lengths_query=[20], lengths_key=[300], sparse_count=128),
            id="selection",
        ),
        pytest.param(
            *(SPARSE, of_deepseek_v3_2),
            dict(lengths_query=[2], lengths_key=[3000]),
            id="deepseek-v3-2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(DENSE, of_many_keys), dict(lengths_query=[3], lengths_key=[6000]), id="every-key"
        ),
    ],
)
def test_gradients_are_precise_to_some_roundings(op, case, arguments, dtype, interpreted):
    """Of the gradients of products, and of the result: a rounding is at most eps / 2 of an element,
    its root mean square 0.58 of that, and that of three independent ones 1."""
    x = case(**arguments, dtype=dtype)
    limits = torch.finfo(dtype)
    got, expected = getattr(custom_pypto, op)(**x), getattr(reference, op)(**x)
    for mine, exact in zip(got, expected, strict=True):
        if mine.dtype == dtype or len(mine) > 1:
            mine, exact = mine.double().nan_to_num(), exact.double().nan_to_num()
            # results may be below the normal numbers of float16
            difference = ((mine - exact).abs() - limits.tiny * limits.eps).clamp(min=0)
            assert difference.norm() <= limits.eps / 2 * exact.norm()
    if op in (SPARSE, DENSE):
        # relative to the magnitudes of its terms, which cancel: a sum of n float32 terms of either
        # sign has n roundings of 2^-24 of its partial sums, about 1 / sqrt(n) of the magnitudes
        of_loss, _ = MODULES[op].error((*expected[:3], got[3]), expected, x, x)
        assert of_loss <= 4 * 2**-24


# ---- divergences ---------------------------------------------------------------------------------


def test_probabilities_of_zero_teach_nothing(interpreted):
    x = index_loss_case([4], [40], sparse_count=16)
    *gradients, loss = getattr(custom_pypto, SPARSE)(**x | dict(softmax_max=x["softmax_max"] + 500))
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_statistics_of_more_keys_than_the_indices_name(interpreted):
    """As of an attention that also reads a window, or has sinks."""
    x = index_loss_case([4], [40], sparse_count=16)
    x["softmax_sum"] = x["softmax_sum"] * torch.linspace(1, 9, 16)
    check_by_its_rule(SPARSE, x)


def test_statistics_of_the_program_are_good_enough_for_the_divergence(interpreted):
    sizes = [5, 2], [300, 40]
    mine = getattr(custom_pypto, LSE)(**statistics_case(*sizes))
    names = "softmax_max_index", "softmax_sum_index"
    check_by_its_rule(DENSE, dense_loss_case(*sizes) | dict(zip(names, mine, strict=True)))


def test_tokens_without_keys_have_statistics_of_none_and_add_nothing(interpreted):
    largest, total = getattr(custom_pypto, LSE)(**statistics_case([6], [2]))
    assert torch.equal(largest[0, :4], torch.full([4], -torch.inf)) and not total[0, :4].any()
    d_query, _, d_weights, _ = getattr(custom_pypto, DENSE)(**dense_loss_case([6], [2]))
    assert not d_query[:4].any() and not d_weights[:4].any()


def test_lengths_may_be_absent(interpreted):
    absent = dict(actual_seq_qlen=None, actual_seq_klen=None)
    x = without_nan(without_statistics(dense_loss_case([3, 3], [40, 40], layout="BSND")))
    check_by_its_rule(DENSE, with_statistics(x | absent))
    x = without_nan(statistics_case([3, 3], [40, 40], layout="BSND"))
    check_by_its_rule(LSE, x | absent)


def test_no_tensor_has_an_element_per_pair_of_tokens():
    """Of those of the wrapper; a tile of the program has a fixed number of keys."""
    sizes = []

    def launch(kernel, tensors):
        sizes.extend(x.numel() for x in tensors.values())

    small = dict(heads=1, latent=16, rope=0, index_heads=1, dim=16)
    ops = npu.implementations(launch)
    for op in (DENSE, LSE):
        ops[op](**checks.PROGRAMS[op].case([3000], [3000], **small))
    assert 0 < max(sizes) < 3000 * 3000 / 8


def test_a_mask_of_another_tile_is_far_off(monkeypatch, fresh_kernels, interpreted):
    """A token that sees one key more."""
    scores = npu_dense_lightning_indexer_grad_kl_loss_pto.DenseScores
    mask = scores.mask
    monkeypatch.setattr(scores, "mask", lambda self, keys, first: mask(self, keys + 1, first))
    with pytest.raises(AssertionError):
        check_by_its_rule(DENSE, dense_loss_case([3], [140]))
