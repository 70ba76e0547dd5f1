"""Tokens that see no more keys than are selected attend to all by position, and nothing is scored
for a step of such tokens."""

import itertools

import pytest
import torch
from custom_pypto_vllm.attention.backend import SparseMetadata

from custom_pypto.rows import index_format
from custom_pypto.rows.index import score_weights
from custom_pypto.rows.parts import row_bytes, side_by_side

COUNT, HEADS, DIM, BLOCK, BLOCKS = 16, 8, 64, 16, 4
# keys of each sequence of a step with the new ones, and how many are new
STEP = [(3, 3), (COUNT, 1), (COUNT + 1, 2), (COUNT - 1, 1), (60, 5)]


def step_of(sequences, numbers) -> SparseMetadata:
    lengths, new = zip(*sequences, strict=True)
    tokens = sum(new)
    return SparseMetadata(
        num_actual_tokens=tokens,
        query_ends=torch.tensor(list(itertools.accumulate(new)), dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.arange(len(STEP) * BLOCKS, dtype=torch.int32).view(-1, BLOCKS)[numbers],
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        num_decodes=len(lengths),
        num_decode_tokens=tokens,
    )


@pytest.mark.parametrize(
    "dtype, ratio", [(None, 1), (torch.int8, 1), (None, 4)], ids=["plain", "int8", "compressed"]
)
def test_a_step_selects_of_each_token_as_one_of_its_own_does(dtype, ratio):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = index_format(dtype)(torch.float32, DIM, "cpu")
    parts = rows.parts(DIM)
    pool = torch.zeros(len(STEP) * BLOCKS, BLOCK, row_bytes(parts), dtype=torch.int8)
    pools = side_by_side(pool, parts)
    rows.write(
        pools, torch.arange(len(STEP) * BLOCKS * BLOCK), torch.randn(pool[..., 0].numel(), DIM)
    )
    query = torch.randn(sum(new for _, new in STEP), HEADS, DIM)
    weights = score_weights(torch.randn(len(query), HEADS), DIM)
    asked = []

    def selected(numbers, own):
        """Of a step of these sequences, and of the tokens ``own`` of the whole one."""
        step = step_of([(ratio * STEP[n][0], STEP[n][1]) for n in numbers], numbers)

        def scored():
            asked.append(numbers)
            others = step.paged | (dict(cmp_ratio=ratio) if ratio > 1 else {})
            return rows.select(
                pools,
                query[own],
                weights[own],
                COUNT,
                lengths=step.seq_lens,
                **others,
            )

        return step.select(COUNT, scored, ratio), step.seen // ratio, scored().squeeze(1)

    whole, seen, scored = selected(list(range(len(STEP))), slice(len(query)))
    few = (seen <= COUNT).squeeze(1)
    assert few.any() and not few.all()
    assert whole[~few].equal(scored[~few])
    assert whole[few].sort(-1).values.equal(scored[few].sort(-1).values)
    for row, count in zip(whole[few], seen[few], strict=True):
        assert row.tolist() == [*range(count), *[-1] * (COUNT - count)]
    end = 0
    for number, (keys, new) in enumerate(STEP):
        own = slice(end, end := end + new)
        asked.clear()
        alone, seen, _ = selected([number], own)
        assert alone.equal(whole[own])
        assert len(asked) == 1 + int(keys > COUNT)  # this test itself asks once
    asked.clear()
    together, *_ = selected([0, 1, 3], [*range(4), 6])
    assert together.equal(whole[[*range(4), 6]]) and len(asked) == 1
