"""PyPTO's generated code, executed on the host: what it finds, and the ops on it."""

import functools

import pytest
import torch
from cases import INT_MAX, INT_MIN, without_nan
from cases.npu_checks import (
    VERIFIED,
    block_ids_clamped,
    calls,
    check_attention,
    check_by_its_rule,
    check_fused,
    check_int8_attention,
    check_int8_selection,
    check_selection,
    each_with_a_dtype,
    needs_gcc,
)
from cases.npu_kernels import ROWS, WIDTH, affine_kernel, assert_product, product_kernel
from cases.npu_programs import (
    ATTENTION,
    HALF,
    INDEXER,
    INT8_ATTENTION,
    INT8_INDEXER,
    attention_case,
    call,
    fused_case,
    index_case,
    int8_attention_case,
    int8_index_case,
)
from program_fixtures import pypto, simulation

import custom_pypto
from custom_pypto.kernels import npu_sparse_flash_attention_pto as attention
from custom_pypto.reference import MODULES
from custom_pypto.simulation import bodies, control_flow
from custom_pypto.simulation import generated as code

pytest_plugins = ["program_fixtures"]
pytestmark = [pytest.mark.sim, needs_gcc]


@pytest.mark.parametrize("fill", [code.NAN, code.LARGE], ids=["nan", "large"])
def test_execute_returns_every_argument_and_changes_none(fill):
    x, out = torch.randn(19, 64), torch.zeros(19, 64)
    before = x.clone()
    new_x, new_out = simulation.execute(affine_kernel(), x, out, fill=fill)
    torch.testing.assert_close(new_out, 3 * before + 1)
    torch.testing.assert_close(new_x, 2 * new_out)
    assert torch.equal(x, before) and not out.any()


def test_generated_code_is_the_same_in_every_run_and_compiled_once(monkeypatch, tmp_path):
    x, out = torch.randn(8, 64), torch.zeros(8, 64)
    simulation.execute(affine_kernel(), x, out)
    monkeypatch.setattr(bodies, "_compile", lambda what, *arguments: pytest.fail(what))
    (tmp_path / "headers.h").touch()
    monkeypatch.setattr(control_flow, "folder", lambda: tmp_path)
    simulation.execute(affine_kernel(), x, out)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert torch.equal(simulation.execute(affine_kernel(), x, out)[1], 3 * x + 1)
    assert len(kept) > 1 and kept == {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}


def test_a_product_is_computed_on_the_layouts_of_the_cube_unit():
    a, b = torch.randn(48, 128).bfloat16(), torch.randn(128, 192).bfloat16()
    assert_product(simulation.execute(product_kernel(), a, b, torch.zeros(48, 192))[2], a, b)


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


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (33, 1000)], ids=str)
def test_add_is_exact(shape, dtype, generated):
    x, y = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    assert torch.equal(custom_pypto.add_custom(x, y), x + y)


@pytest.mark.parametrize(
    "arguments, dtype",
    each_with_a_dtype(
        calls(
            INDEXER
            | {
                "two-tokens": call([2, 1], [600, 70]),
                "chunks": call([2], [20000], 256, heads=32),
                "levels": call([1], [50000], 4096, heads=8),
            }
            | {
                f"{heads}-heads-{size}-keys": call([2, 1], [1100, 70], heads=heads, block_size=size)
                for heads, size in ((1, 16), (12, 48), (33, 1024))
            },
            # one-key, a table of one tile of keys: its valid shape was lost where it was sorted in
            # the same graph
            fast=["one-key", "two-tokens"],
        )
    ),
)
def test_indexer_selects_what_the_reference_selects(arguments, dtype, generated):
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
            "two-tiles-of-keys": call([1, 1], [300, 700], 512),
            # queries that do not fill a tile: the last ones were loaded from behind the tensor
            "4-heads": call([2, 1], [300, 70], heads=4),
            # one row of 512 values is too few for a mean error: three tokens
            "1-head": call([3], [300], heads=1),
            "all-heads": call([1], [3000], 2048, heads=128),
            # rows in two parts for the scores, in columns that are no power of two for the output
            **{f"latent-{n}": call([2, 1], [300, 70], latent=n) for n in (320, 1024)},
            # rows of rope longer than a tile of the scores
            **{
                f"latent-{latent}-rope-{rope}": call([2, 1], [300, 70], latent=latent, rope=rope)
                for latent, rope in ((48, 32), (96, 64), (32, 48))
            },
            "sinks-of-5-heads": call([2, 1], [300, 40], heads=5, sinks=(-9, 9), statistics=True),
            **{f"K-{K}": call([2, 1], [700, 40], K) for K in (1, 7, 100, 1000)},
            **{
                f"{heads}-heads-{size}-keys": call([2, 1], [1100, 70], heads=heads, block_size=size)
                for heads, size in ((2, 1024), (24, 48), (72, 16))
            },
        },
        fast=["two-tiles-of-keys", "4-heads", "latent-48-rope-32", "sinks"],
    ),
)
def test_attention_equals_the_reference(arguments, dtype, hostile, generated):
    check_attention(attention_case(**arguments, dtype=dtype, hostile=hostile))


@pytest.mark.parametrize(
    "arguments",
    calls(
        INT8_INDEXER
        | {
            "chunks": call([1, 2], [9000, 300]),
            "blocks-of-32": call([2, 1], [300, 77], block_size=32),
        },
        fast=["packed"],
    ),
)
def test_indexer_of_int8_selects_what_the_reference_selects(arguments, generated):
    check_int8_selection(int8_index_case(**arguments))


@pytest.mark.parametrize(
    "arguments, dtype", each_with_a_dtype(calls(INT8_ATTENTION, fast=["packed"]))
)
def test_attention_of_int8_equals_the_reference(arguments, dtype, generated):
    check_int8_attention(int8_attention_case(**arguments, dtype=dtype, hostile=True))


@pytest.mark.parametrize("op", VERIFIED)
def test_writers_of_int8_write_what_the_reference_writes(op, generated):
    for _, _, x in MODULES[op].checks([torch.bfloat16]):
        check_by_its_rule(op, x)


@pytest.mark.slow
@pytest.mark.parametrize("value", [INT_MIN, -1, 10**6, INT_MAX])
def test_no_length_and_no_block_id_leads_outside(value, generated):
    sizes = call([2, 1], [300, 40])
    for x, check in (
        (index_case(**sizes), check_selection),
        (index_case(**sizes | dict(lengths_key=[301, 40]), cmp_ratio=4), check_selection),
        (attention_case(**sizes), check_attention),
    ):
        x = without_nan(x)
        for name in (name for name in x if name.startswith(("actual_seq", "block_table"))):
            hostile = x | {name: x[name].clone()}
            hostile[name].view(-1)[0] = value
            check(hostile, like=block_ids_clamped(hostile))


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
def test_fused_equals_the_reference_caches_included(lengths, S1, arguments, dtype, generated):
    check_fused(fused_case(lengths, S1, dtype=dtype, sparse_count=512, **arguments))


@pytest.mark.slow
@pytest.mark.parametrize("slot", [-1, INT_MIN, INT_MAX, 10**6])
def test_fused_does_not_write_a_slot_outside_the_cache(slot, generated):
    x = without_nan(fused_case([300, 129], 2, sparse_count=512))
    x["cache_index"][0, 1] = slot
    check_fused(x)
    x["cache_index"] = x["cache_index"].long()
    check_fused(x)
