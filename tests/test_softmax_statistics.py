"""What the sinks and the softmax's statistics of sparse attention mean; test_npu_sparse_flash_*.py
compares them with the reference."""

import pytest
import torch
from cases import LAYOUT_IDS, LAYOUTS, int32
from cases.npu_sparse_flash_attention_pto import inputs
from numerics import assert_close_to_rows, reference
from torch import Tensor

import custom_pypto

attend = custom_pypto.npu_sparse_flash_attention_pto


def statistics(**x) -> tuple[Tensor, Tensor, Tensor]:
    return attend(**x, return_softmax_lse=True)


def one_token(*, heads: int = 3, keys: int = 40, **arguments) -> tuple[dict, Tensor, Tensor]:
    """A call that selects every key; its logits ``[N1, keys]`` and values in float64."""
    x = inputs([1], [keys], heads=heads, layout_kv="BSND", sparse_count=keys, **arguments)
    x = {name: t[:, :1] if name in ("query", "query_rope") else t for name, t in x.items()}
    x |= dict(sparse_indices=torch.arange(keys).int().view(1, 1, 1, -1))
    x |= dict(actual_seq_lengths_query=None)
    q = torch.cat([x["query"], x["query_rope"]], -1)[0, 0].double()
    k = torch.cat([x["key"], x["key_rope"]], -1)[0, :keys, 0].double()
    return x, x["scale_value"] * q @ k.T, x["key"][0, :keys, 0].double()


def test_a_sink_is_one_more_term_of_the_sum_and_is_not_scaled():
    x, logits, values = one_token(sinks=True)
    terms, sinks = logits.exp(), x["sinks"].double().exp()
    expected = terms / (terms.sum(-1) + sinks)[:, None] @ values
    assert_close_to_rows(attend(**x)[0, 0], expected.float())
    scaled = terms / (terms.sum(-1) + sinks ** x["scale_value"])[:, None] @ values
    assert (expected - scaled).abs().max() > 1e-3


def test_the_statistics_are_the_maximum_and_the_sum_of_exponentials():
    x, logits, _ = one_token()
    _, largest, total = statistics(**x)
    expected = logits.amax(-1)
    assert_close_to_rows(largest[0, 0], expected[None].float())
    assert_close_to_rows(total[0, 0], (logits - expected[:, None]).exp().sum(-1)[None].float())


@pytest.mark.parametrize("sink", [-3.0, 3.0, 1e4])
def test_a_sink_counts_in_both_statistics(sink):
    x, logits, _ = one_token()
    x["sinks"] = torch.full((3,), sink)
    _, largest, total = statistics(**x)
    logits = torch.cat([logits, x["sinks"][:, None].double()], -1)
    expected = logits.amax(-1)
    assert_close_to_rows(largest[0, 0], expected[None].float())
    assert_close_to_rows(total[0, 0], (logits - expected[:, None]).exp().sum(-1)[None].float())


@pytest.mark.parametrize("tokens, keys", [(3, 40), (40, 60), (1, 3000)])
def test_a_sink_of_minus_infinity_is_none(tokens, keys):
    x = inputs([tokens], [keys], sparse_count=min(keys, 2048))
    with_sinks = statistics(**x | dict(sinks=torch.full((4,), -torch.inf)))
    for got, expected in zip(with_sinks, statistics(**x), strict=True):
        assert torch.equal(got, expected)


def test_a_sink_far_above_the_logits_takes_all_the_weight():
    x = inputs([3], [40]) | dict(sinks=torch.tensor([1e4, 3e38, 200.0, 0.0]))
    out, largest, total = statistics(**x)
    assert (out[0, :3, :3] == 0).all() and (out[0, :3, 3] != 0).any(-1).all()
    assert torch.equal(largest[0, 0, :3, :3], x["sinks"][:3].expand(3, 3))
    assert (total[0, 0, :3, :3] == 1).all()


def test_a_sink_far_below_the_logits_counts_nothing():
    x = inputs([3], [40])
    far = x | dict(sinks=torch.tensor([-1e4, -3e38, -200.0, -150.0]))
    for got, expected in zip(statistics(**far), statistics(**x), strict=True):
        assert torch.equal(got, expected)


def test_a_sink_takes_all_the_weight_if_every_logit_is_minus_infinity():
    x, _, _ = one_token()
    x["query"] = torch.ones_like(x["query"])
    x["query_rope"] = torch.ones_like(x["query_rope"])
    x["key_rope"] = torch.full_like(x["key_rope"], -torch.inf)
    assert attend(**x).isnan().all()  # as torch.softmax
    sinks = torch.tensor([1.0, -300.0, 0.0])
    out, largest, total = statistics(**x | dict(sinks=sinks))
    assert (out == 0).all()
    assert torch.equal(largest.flatten(), sinks) and (total == 1).all()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("layout_query, layout_kv", LAYOUTS, ids=LAYOUT_IDS)
def test_tokens_without_a_valid_index_have_no_statistics(layout_query, layout_kv, sinks):
    x = inputs([2, 3], [40, 33], layout_query=layout_query, layout_kv=layout_kv, sinks=sinks)
    # of the first token, for BSND of that of each sequence
    x["sparse_indices"][..., 0, 0, :] = -1
    out, largest, total = statistics(**x)
    # a sequence of two tokens and one of three, then padding
    empty = torch.tensor([True, False, False, False, False, True])
    if layout_query == "BSND":
        empty = torch.tensor([[True, False, True, True], [True, False, False, True]])
    assert torch.equal(largest.squeeze(-3).isneginf().all(-1), empty)
    assert torch.equal((total.squeeze(-3) == 0).all(-1), empty)
    assert torch.equal((out == 0).all(-1).all(-1), empty)


@pytest.mark.parametrize("layout_query, layout_kv", LAYOUTS, ids=LAYOUT_IDS)
def test_statistics_have_the_shapes_of_torch_npu(layout_query, layout_kv):
    x = inputs([2, 3], [40, 33], layout_query=layout_query, layout_kv=layout_kv)
    shape = (2, 1, 4, 4) if layout_query == "BSND" else (1, 6, 4)
    for wanted in (True, False):
        op = torch.ops.custom_pypto.npu_sparse_flash_attention_pto
        out, *rest = op(**x, return_softmax_lse=wanted)
        assert out.equal(attend(**x))
        for statistic in rest:
            assert statistic.shape == (shape if wanted else (0,))
            assert statistic.dtype == torch.float32


def test_a_repeated_index_counts_in_the_sum_each_time():
    x, logits, _ = one_token(heads=1)
    x["sparse_indices"] = int32([[[[3, 3, 3, 5]]]])
    _, largest, total = statistics(**x)
    expected = logits[0, [3, 3, 3, 5]]
    assert_close_to_rows(largest.flatten(), expected.amax()[None].float())
    assert_close_to_rows(total.flatten(), (expected - expected.amax()).exp().sum()[None].float())


@pytest.mark.parametrize("tokens", [1, 40], ids=["decode", "prefill"])
def test_attentions_over_disjoint_selections_merge_into_one(tokens):
    """As docs/npu_sparse_flash_attention_pto.md says; the second part has no index for a token."""
    x = inputs([tokens], [60], layout_kv="BSND", sparse_count=50, sinks=True)
    indices = x["sparse_indices"]
    indices[0, tokens - 1, 0, 20:] = -1
    first, second = (x | dict(sparse_indices=i) for i in (indices[..., :20], indices[..., 20:]))
    second |= dict(sinks=None)  # once
    parts = [statistics(**part) for part in (first, second)]
    m = torch.maximum(*(largest for _, largest, _ in parts))
    shift = m.nan_to_num(neginf=0.0)
    weights = [(largest - shift).exp() * total for _, largest, total in parts]
    total = sum(weights)
    shares = [(w / total).nan_to_num().squeeze(1)[..., None] for w in weights]
    out = sum(share * part for share, (part, _, _) in zip(shares, parts, strict=True))
    expected = reference.npu_sparse_flash_attention_pto(**x, return_softmax_lse=True)
    for got, whole in zip((out, m, total), expected, strict=True):
        assert_close_to_rows(got, whole)


def test_without_statistics_a_tensor_is_returned():
    x = inputs([2], [40])
    for no in (dict(), dict(return_softmax_lse=False)):
        assert torch.is_tensor(attend(**x, **no))


def test_more_or_less_than_a_bool_is_rejected():
    with pytest.raises(TypeError, match="return_softmax_lse must be a bool, got str 'yes'"):
        attend(**inputs([2], [40]), return_softmax_lse="yes")
