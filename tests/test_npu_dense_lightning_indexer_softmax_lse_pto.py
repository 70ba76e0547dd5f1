"""The statistics of an indexer's softmax over every visible key.

tests/test_npu_dense_lightning_indexer_grad_kl_loss_pto.py compares them with float64.
"""

import torch
from cases import inputs_of

import custom_pypto

OP = "npu_dense_lightning_indexer_softmax_lse_pto"
softmax_lse = custom_pypto.npu_dense_lightning_indexer_softmax_lse_pto


def test_tokens_without_keys_have_statistics_of_none():
    largest, total = softmax_lse(**inputs_of(OP, [4], [2]))
    assert torch.equal(largest[0, :2], torch.full([2], -torch.inf)) and not total[0, :2].any()
    assert largest[0, 2:4].isfinite().all() and (total[0, 2:4] >= 1).all()


def test_weights_of_zero_make_every_key_as_likely():
    x = inputs_of(OP, [1, 2], [7, 9])
    largest, total = softmax_lse(**x | dict(weights=torch.zeros_like(x["weights"])))
    assert not largest[0, :3].any() and total[0, :3].tolist() == [7, 8, 9]
