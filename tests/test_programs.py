"""The NPU kernels of all ops, interpreted and as generated code, against the references."""

import pytest
import torch
from cases import INT_MAX, INT_MIN, without_nan
from cases.npu_checks import PROGRAMS, VERIFIED, block_ids_clamped, check_by_its_rule, needs_gcc
from cases.npu_programs import HALF
from with_pypto import simulation

import custom_pypto
from custom_pypto.reference import MODULES

pytestmark = pytest.mark.sim
ROWS = [(op, id) for op, program in PROGRAMS.items() for id in program.calls]
FIRST = {(op, next(iter(program.calls))) for op, program in PROGRAMS.items()}


def row(number: int, *values, slow: bool):
    name = "-".join(map(str, (*ROWS[number], *values)))
    return pytest.param(
        *(*ROWS[number], *values), id=name, marks=[pytest.mark.slow] if slow else []
    )


def interpreted_rows():
    """Each row in both dtypes, one for each data; by default each op's first row and every twelfth
    one, with one data."""
    for i, (op, id) in enumerate(ROWS):
        number = len(PROGRAMS[op].data)
        for data in range(number):
            first = (i // 2 + data) % 2
            for dtype in HALF if number == 1 else HALF[first:][:1]:
                thinned = data != i % number or i % 12 and (op, id) not in FIRST
                yield row(i, data, dtype, slow=thinned or dtype != HALF[first])


@pytest.mark.parametrize("op, id, data, dtype", [*interpreted_rows()])
def test_results_equal_the_reference(op, id, data, dtype, interpreted):
    program = PROGRAMS[op]
    program.check(program.case(**program.calls[id] | program.data[data], dtype=dtype))


@needs_gcc
@pytest.mark.parametrize(
    "op, id, dtype",
    # the generated code of the other dtype differs in the type alone
    [row(i, HALF[i % 2], slow=id not in PROGRAMS[op].fast) for i, (op, id) in enumerate(ROWS)],
)
def test_generated_code_equals_the_reference(op, id, dtype):
    """To the same bits again, since the task graph orders all additions to a row; only indices that
    name a row twice leave the order of two open."""
    program = PROGRAMS[op]
    for data in program.data:
        hostile = data.get("hostile", False)
        x = program.case(**program.calls[id] | data, dtype=dtype)
        with simulation.on_cpu(generated=True, unordered_adds=hostile):
            first = program.check(x)
            if "grad" in op and not hostile:
                second = getattr(custom_pypto, op)(**x)
                for one, other in zip(first, second, strict=True):
                    assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("op", VERIFIED)
def test_ops_without_calls_here_pass_their_checks(op, dtype, interpreted):
    for _, _, x in MODULES[op].checks([dtype]):
        check_by_its_rule(op, x)


@needs_gcc
@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=pytest.mark.slow if i % 2 else []) for i, op in enumerate(VERIFIED)],
)
def test_generated_code_passes_the_checks_too(op, generated):
    for _, _, x in MODULES[op].checks([torch.bfloat16]):
        check_by_its_rule(op, x)


BEYOND = [
    # from 131,073 keys on, candidates of 2048 a chunk are merged twice
    pytest.param([131_073, 150_000], 2048, id="131073"),
    pytest.param([262_144], 4096, id="262144", marks=pytest.mark.slow),  # merged three times
    pytest.param([2**20], 2048, id="1048576", marks=pytest.mark.slow),
]


def over_many_keys(op: str, lengths: list[int], sparse_count: int) -> dict:
    """Block tables that name 61 blocks again and again, in other places of each chunk of 64: the
    interpreter copies a cache for each chunk."""
    heads = {"npu_lightning_indexer_pto": 4, "npu_quant_lightning_indexer_pto": 16}[op]
    few = [61 * 128] * len(lengths)
    x = PROGRAMS[op].case([1] * len(few), few, sparse_count=sparse_count, heads=heads)
    blocks = -(-max(lengths) // 128)
    table = x["block_table"][:, :61].repeat(1, -(-blocks // 61))[:, :blocks].contiguous()
    return x | dict(block_table=table, actual_seq_lengths_key=torch.tensor(lengths).int())


@pytest.mark.parametrize("lengths, sparse_count", BEYOND)
@pytest.mark.parametrize(
    "op",
    [
        "npu_lightning_indexer_pto",
        pytest.param("npu_quant_lightning_indexer_pto", marks=pytest.mark.slow),
    ],
)
def test_indexers_select_beyond_128k_keys(op, lengths, sparse_count, interpreted):
    PROGRAMS[op].check(over_many_keys(op, lengths, sparse_count))


@needs_gcc
@pytest.mark.slow
@pytest.mark.parametrize("op", ["npu_lightning_indexer_pto", "npu_quant_lightning_indexer_pto"])
def test_generated_code_selects_beyond_128k_keys(op, generated):
    PROGRAMS[op].check(over_many_keys(op, [131_073, 150_000], 2048))


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("value", [INT_MIN, -1, 0, 10**6, INT_MAX])
@pytest.mark.parametrize(
    "op, arguments",
    [
        ("npu_lightning_indexer_pto", dict(lengths_key=[300, 40])),
        ("npu_lightning_indexer_pto", dict(lengths_key=[301, 40], cmp_ratio=4)),
        ("npu_sparse_flash_attention_pto", dict(lengths_key=[300, 40])),
        ("npu_quant_lightning_indexer_pto", dict(lengths_key=[300, 40])),
        ("npu_kv_quant_sparse_flash_attention_pto", dict(lengths_key=[300, 40])),
    ],
    ids=lambda of: of if isinstance(of, str) else f"{of.get('cmp_ratio', 1)}",
)
def test_no_length_and_no_block_id_leads_outside(op, arguments, value, layout, both_ways):
    # the interpreter rejects most addresses outside a tensor; of the others the result tells
    program = PROGRAMS[op]
    x = program.case([2, 1], **arguments, layout_query=layout, sparse_count=64)
    if op == "npu_kv_quant_sparse_flash_attention_pto":
        x["key"][..., 512:] = 0  # scales: every row may be reached now
    else:
        x = without_nan(x)
    for name in (name for name in x if name.startswith(("actual_seq", "block_table"))):
        hostile = x | {name: x[name].clone()}
        hostile[name].view(-1)[0] = value
        program.check(hostile, like=block_ids_clamped(hostile))
    everywhere = x | dict(block_table=torch.full_like(x["block_table"], value))
    program.check(everywhere, like=block_ids_clamped(everywhere))


@pytest.mark.parametrize("slot", [-1, INT_MIN, INT_MAX, 10**6])
def test_fused_does_not_write_a_slot_outside_the_cache(slot, both_ways):
    fused = PROGRAMS["npu_sparse_attention_pto"]
    x = without_nan(fused.case([300, 129], 2))
    x["cache_index"][0, 1] = slot
    fused.check(x)
    x["cache_index"] = x["cache_index"].long()
    fused.check(x)
