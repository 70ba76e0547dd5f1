"""PyPTO's generated code, executed on the host: what it finds, and the ops on it."""

import functools
import importlib.util
import shutil

import pytest
import torch
from cases import INT_MAX, INT_MIN, without_nan
from cases.npu_programs import (
    ATTENTION,
    HALF,
    INDEXER,
    INT8_ATTENTION,
    INT8_INDEXER,
    VERIFIED,
    attention_case,
    block_ids_clamped,
    calls,
    check_attention,
    check_by_its_rule,
    check_fused,
    check_int8_attention,
    check_int8_selection,
    check_selection,
    fused_case,
    index_case,
    int8_attention_case,
    int8_index_case,
)

import custom_pypto
from custom_pypto.reference import MODULES

if importlib.util.find_spec("pypto") is None:
    pytest.skip("the sim extra is not installed", allow_module_level=True)
if shutil.which("g++") is None:
    pytest.skip("g++, which compiles the generated code, is not installed", allow_module_level=True)

# before pypto, which reads its configuration while it is imported
from custom_pypto import simulation  # noqa: E402

# isort: split
import pypto  # noqa: E402
from cases.npu_kernels import affine_kernel, product_kernel  # noqa: E402

from custom_pypto.kernels import npu_sparse_flash_attention_pto as attention  # noqa: E402
from custom_pypto.simulation import bodies, generated  # noqa: E402

pytestmark = pytest.mark.sim

ROWS, WIDTH = pypto.DYNAMIC, pypto.STATIC


@pytest.mark.parametrize("fill", [generated.NAN, generated.LARGE], ids=["nan", "large"])
def test_execute_returns_every_argument_and_changes_none(fill):
    x, out = torch.randn(19, 64), torch.zeros(19, 64)
    before = x.clone()
    new_x, new_out = simulation.execute(affine_kernel(), x, out, fill=fill)
    torch.testing.assert_close(new_out, 3 * before + 1)
    torch.testing.assert_close(new_x, 2 * new_out)
    assert torch.equal(x, before) and not out.any()


def test_generated_code_is_the_same_in_every_run_and_compiled_once(monkeypatch):
    x, out = torch.randn(8, 64), torch.zeros(8, 64)
    simulation.execute(affine_kernel(), x, out)
    monkeypatch.setattr(bodies, "_compile", lambda what, *arguments: pytest.fail(what))
    assert torch.equal(simulation.execute(affine_kernel(), x, out)[1], 3 * x + 1)


def test_a_product_is_computed_on_the_layouts_of_the_cube_unit():
    a, b = torch.randn(48, 128).bfloat16(), torch.randn(128, 192).bfloat16()
    out = simulation.execute(product_kernel(), a, b, torch.zeros(48, 192))[2]
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-4)


# ---- mistakes in a program or in generated code; PyPTO's own are in test_pypto_faults.py ---------


def test_a_missing_clamp_is_found(monkeypatch):
    """The interpreter rejects this address as well."""

    def unchecked(block_table, sequence, last_block, width):
        row = pypto.view(block_table, [1, width], [sequence, 0], valid_shape=[1, width])
        pypto.set_vec_tile_shapes(1, width)
        return pypto.clone(row)

    x = attention_case([1], [64 * 128], sparse_count=64, block_size=128)
    x["block_table"][0, :] = INT_MAX
    with simulation.on_cpu(generated=True):
        custom_pypto.npu_sparse_flash_attention_pto(**x)
        monkeypatch.setattr(attention, "checked_table", unchecked)
        monkeypatch.setattr(attention, "kernel", functools.cache(attention.kernel.__wrapped__))
        with pytest.raises(RuntimeError, match=r"TLOAD: reads \d+ bytes at byte \d+ of"):
            custom_pypto.npu_sparse_flash_attention_pto(**x)


@pytest.mark.parametrize(
    "dropped, message",
    [
        pytest.param("wait_flag", "is set and never waited for", id="wait"),
        pytest.param("set_flag", "is waited for before it is set", id="set"),
    ],
)
def test_a_dropped_fence_is_found(dropped, message, monkeypatch):
    for_host = bodies._for_host

    def changed(text):
        lines = for_host(text).splitlines()
        lines.remove(next(line for line in lines if line.startswith(f"{dropped}(PIPE_MTE2")))
        return "\n".join(lines)

    monkeypatch.setattr(bodies, "_for_host", changed)
    with pytest.raises(simulation.SimulationError, match=message):
        simulation.execute(affine_kernel(), torch.randn(8, 64), torch.zeros(8, 64))


def test_an_instruction_that_is_not_modelled_is_named():
    @pypto.frontend.jit
    def remainders(
        x: pypto.Tensor([ROWS, WIDTH], pypto.DT_FP32),
        out: pypto.Tensor([ROWS, WIDTH], pypto.DT_FP32),
    ):
        for _ in pypto.loop(1, name="ONCE", idx_name="i"):
            pypto.set_vec_tile_shapes(8, 64)
            pypto.assemble(pypto.fmod(pypto.view(x, [8, 64], [0, 0]), 2.0), [0, 0], out)

    message = "code of ONCE path 0 aiv 0 does not compile for the host: .*TFMODS is not modelled"
    with pytest.raises(simulation.SimulationError, match=message):
        simulation.execute(remainders, torch.randn(8, 64), torch.zeros(8, 64))


# ---- the ops -------------------------------------------------------------------------------------


def each_with_a_dtype(rows: list) -> list:
    """The rows with a dtype each, in turns: the generated code of the other differs in the type
    alone."""
    return [
        pytest.param(*row.values, HALF[i % 2], id=f"{row.id}-{HALF[i % 2]}", marks=row.marks)
        for i, row in enumerate(rows)
    ]


@pytest.fixture
def on_generated_code():
    with simulation.on_cpu(generated=True):
        yield


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (33, 1000)], ids=str)
def test_add_is_exact(shape, dtype, on_generated_code):
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    assert torch.equal(custom_pypto.add_custom(x, y), x + y)


@pytest.mark.parametrize(
    "arguments, dtype",
    each_with_a_dtype(
        calls(
            INDEXER
            | {
                "two-tokens": dict(lengths_query=[2, 1], lengths_key=[600, 70], sparse_count=64),
                "chunks": dict(lengths_query=[2], lengths_key=[20000], sparse_count=256, heads=32),
                "levels": dict(lengths_query=[1], lengths_key=[50000], sparse_count=4096, heads=8),
            }
            | {
                f"{heads}-heads-{block_size}-keys": dict(
                    lengths_query=[2, 1],
                    lengths_key=[1100, 70],
                    heads=heads,
                    block_size=block_size,
                    sparse_count=64,
                )
                for heads, block_size in ((1, 16), (12, 48), (33, 1024))
            },
            # one-key, a table of one tile of keys: its valid shape was lost where it was sorted in
            # the same graph
            fast=["one-key", "two-tokens"],
        )
    ),
)
def test_indexer_selects_what_the_reference_selects(arguments, dtype, on_generated_code):
    check_selection(index_case(**arguments, dtype=dtype))


# each selection with one dtype, as each_with_a_dtype
@pytest.mark.parametrize(
    "dtype, hostile",
    [(torch.bfloat16, False), (torch.float16, True)],
    ids=["selected-bfloat16", "hostile-float16"],
)
@pytest.mark.parametrize(
    "arguments",
    calls(
        ATTENTION
        | {
            # several gathers for the scores: with parts of a tensor as indices they read another
            # tensor
            "two-tiles-of-keys": dict(
                lengths_query=[1, 1], lengths_key=[300, 700], sparse_count=512
            ),
            # queries that do not fill a tile: the last ones were loaded from behind the tensor
            "4-heads": dict(lengths_query=[2, 1], lengths_key=[300, 70], sparse_count=64, heads=4),
            # one row of 512 values is too few for a mean error: three tokens
            "1-head": dict(lengths_query=[3], lengths_key=[300], sparse_count=64, heads=1),
            "all-heads": dict(lengths_query=[1], lengths_key=[3000], sparse_count=2048, heads=128),
            # rows in two parts for the scores, in columns that are no power of two for the output
            **{
                f"latent-{n}": dict(
                    lengths_query=[2, 1], lengths_key=[300, 70], latent=n, sparse_count=64
                )
                for n in (320, 1024)
            },
            # rows of rope longer than a tile of the scores
            **{
                f"latent-{latent}-rope-{rope}": dict(
                    lengths_query=[2, 1],
                    lengths_key=[300, 70],
                    latent=latent,
                    rope=rope,
                    sparse_count=64,
                )
                for latent, rope in ((48, 32), (96, 64), (32, 48))
            },
            "no-rope": dict(lengths_query=[2], lengths_key=[300], rope=0, sparse_count=64),
            "values": dict(lengths_query=[2], lengths_key=[300], own_value=True, sparse_count=64),
            "sinks-of-5-heads": dict(
                lengths_query=[2, 1],
                lengths_key=[300, 40],
                sparse_count=64,
                heads=5,
                sinks=(-9, 9),
                statistics=True,
            ),
        }
        | {
            f"K-{count}": dict(lengths_query=[2, 1], lengths_key=[700, 40], sparse_count=count)
            for count in (1, 7, 100, 1000)
        }
        | {
            f"{heads}-heads-{block_size}-keys": dict(
                lengths_query=[2, 1],
                lengths_key=[1100, 70],
                heads=heads,
                block_size=block_size,
                sparse_count=64,
            )
            for heads, block_size in ((2, 1024), (24, 48), (72, 16))
        },
        fast=["two-tiles-of-keys", "4-heads", "latent-48-rope-32", "sinks"],
    ),
)
def test_attention_equals_the_reference(arguments, dtype, hostile, on_generated_code):
    check_attention(attention_case(**arguments, dtype=dtype, hostile=hostile))


@pytest.mark.parametrize(
    "arguments",
    calls(
        INT8_INDEXER
        | {
            "chunks": dict(lengths_query=[1, 2], lengths_key=[9000, 300], sparse_count=64),
            "blocks-of-32": dict(
                lengths_query=[2, 1], lengths_key=[300, 77], sparse_count=64, block_size=32
            ),
        },
        fast=["packed"],
    ),
)
def test_indexer_of_int8_selects_what_the_reference_selects(arguments, on_generated_code):
    check_int8_selection(int8_index_case(**arguments))


@pytest.mark.parametrize(
    "arguments, dtype",
    each_with_a_dtype(calls(INT8_ATTENTION, fast=["packed"])),
)
def test_attention_of_int8_equals_the_reference(arguments, dtype, on_generated_code):
    check_int8_attention(int8_attention_case(**arguments, dtype=dtype, hostile=True))


@pytest.mark.parametrize("op", VERIFIED)
def test_writers_of_int8_write_what_the_reference_writes(op, on_generated_code):
    for _, _, x in MODULES[op].checks([torch.bfloat16]):
        check_by_its_rule(op, x)


@pytest.mark.slow
@pytest.mark.parametrize("value", [INT_MIN, -1, 10**6, INT_MAX])
def test_no_length_and_no_block_id_leads_outside(value, on_generated_code):
    index = without_nan(index_case([2, 1], [300, 40], sparse_count=64))
    compressed = without_nan(index_case([2, 1], [301, 40], sparse_count=64, cmp_ratio=4))
    attend = without_nan(attention_case([2, 1], [300, 40], sparse_count=64))
    for x, keys, check in (
        (index, "actual_seq_lengths_key", check_selection),
        (compressed, "actual_seq_lengths_key", check_selection),
        (attend, "actual_seq_lengths_kv", check_attention),
    ):
        for name in (keys, "actual_seq_lengths_query", "block_table"):
            hostile = x[name].clone()
            hostile.view(-1)[0] = value
            check(x | {name: hostile}, like=block_ids_clamped(x | {name: hostile}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths, S1, arguments, dtype",
    each_with_a_dtype(
        [
            pytest.param([1], 1, {}, id="first-token"),
            pytest.param([300, 1, 129], 1, {}, id="decode"),
            pytest.param([300, 2], 3, {}, id="mtp-and-padding"),
            pytest.param([20], 20, {}, id="prefill"),
            pytest.param([200] * 16, 1, dict(heads=16), id="16-tokens"),
            pytest.param([40, 3], 1, dict(heads=5, index_heads=12), id="heads-that-fill-no-tile"),
        ]
    ),
)
def test_fused_equals_the_reference_caches_included(
    lengths, S1, arguments, dtype, on_generated_code
):
    check_fused(fused_case(lengths, S1, dtype=dtype, sparse_count=512, **arguments))


@pytest.mark.slow
@pytest.mark.parametrize("slot", [-1, INT_MIN, INT_MAX, 10**6])
def test_fused_does_not_write_a_slot_outside_the_cache(slot, on_generated_code):
    x = without_nan(fused_case([300, 129], 2, sparse_count=512))
    x["cache_index"][0, 1] = slot
    check_fused(x)
    x["cache_index"] = x["cache_index"].long()
    check_fused(x)
