"""How the plugin starts, and what it corrects of vLLM."""

import inspect
import itertools
import re
import subprocess
import sys

import pytest
import torch
from custom_pypto_vllm.config import check_environment
from custom_pypto_vllm.patches import PATCHES, Patch

from custom_pypto import npu


@pytest.fixture
def rope():
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig())):
        yield get_rope(
            64,
            max_position=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            is_neox_style=False,
            dtype=torch.float32,
        )


def rotated(x, positions):
    """RoPE of interleaved pairs, theta 10000 (arXiv:2104.09864, equation 34)."""
    angle = positions[:, None, None] * 10000 ** (-torch.arange(0, 64, 2) / 64)
    even, odd = x[..., ::2], x[..., 1::2]
    pairs = even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()
    return torch.stack(pairs, dim=-1).flatten(-2)


def test_queries_of_three_dimensions_are_rotated_right(rope):
    from custom_pypto_vllm.attention.layer import _rotate

    positions = torch.arange(7) + 100
    q, k = torch.randn(7, 4, 64), torch.randn(7, 64)
    got_q, got_k = _rotate(rope, positions, q.clone(), k.clone())
    torch.testing.assert_close(got_q, rotated(q, positions), rtol=0, atol=1e-4)
    torch.testing.assert_close(got_k, rotated(k[:, None], positions), rtol=0, atol=1e-4)


def test_the_kernel_of_vllm_still_rotates_them_wrong(rope):
    """Fails when vLLM's kernel is right: then layer._rotate can call the embedding itself."""
    positions = torch.arange(7) + 100
    q, k = torch.randn(7, 4, 64), torch.randn(7, 1, 64)
    got, _ = rope.forward_cpu(positions, q.clone(), k.clone())
    assert not torch.allclose(got.view_as(q), rotated(q, positions), atol=1e-4)


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_a_batch_invariant_vllm_is_rejected(value):
    environment = {} if value is None else {"VLLM_BATCH_INVARIANT": value}
    if value != "1":
        return check_environment(environment)
    with pytest.raises(ValueError, match="BATCH_INVARIANT must be unset or 0 .*, got 1; unset"):
        check_environment(environment)


def test_another_version_of_vllm_is_rejected_with_both_versions():
    code = (
        "import vllm, custom_pypto_vllm as plugin\n"
        "vllm.__version__ = '0.33.1+cpu'\n"
        "plugin.register()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode != 0
    assert "vLLM must be 0.31.0 or 0.32.0, the tested versions, got 0.33.1" in run.stderr


def test_the_platform_is_this_ones_without_amx_and_vllms_with_it():
    """Of a platform plugin that fails, vLLM only logs it."""
    code = "from vllm.platforms import current_platform; print(type(current_platform).__name__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wanted = "Cpu" if torch.cpu._is_amx_tile_supported() else "SparseAttentionCpu"
    assert run.stdout.splitlines()[-1] == f"{wanted}Platform"


def test_vllm_has_no_sleep_mode_on_cpus():
    """Fails when it has one: then caches and absorbed weights need a test of sleep and wake."""
    from vllm.platforms import current_platform

    assert not current_platform.is_sleep_mode_available()


def test_the_cache_is_written_with_what_vllm_passes():
    from custom_pypto_vllm.attention.backend import SparseAttentionImpl
    from vllm.v1.attention.backend import MLAAttentionImpl

    theirs, ours = (
        inspect.signature(cls.do_kv_cache_update).parameters
        for cls in (MLAAttentionImpl, SparseAttentionImpl)
    )
    assert len(theirs) == len(ours)


def sparse_attention(indices):
    """vLLM's layer with random weights, without what it makes of an engine's configuration."""
    from custom_pypto_vllm.attention.backend import SparseAttention, SparseAttentionImpl

    sizes = dict(num_heads=4, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=64)
    sizes |= dict(v_head_dim=32, kv_cache_dtype="auto")
    given = sizes | dict(scale=96**-0.5, topk_indices_buffer=indices)
    needed = inspect.signature(SparseAttentionImpl).parameters
    layer = SparseAttention.__new__(SparseAttention)
    torch.nn.Module.__init__(layer)
    layer.impl = SparseAttentionImpl(**dict.fromkeys(needed) | given)
    layer.W_UK_T, layer.W_UV = torch.randn(4, 32, 128) / 11, torch.randn(4, 128, 32) / 11
    bmm = [f"is_{kind}_bmm_enabled" for kind in ("amx", "aiter_triton_fp4", "aiter_triton_fp8")]
    absent = dict.fromkeys([*bmm, "use_pcp", "q_pad_num_heads"])
    for name, value in (sizes | absent).items():
        setattr(layer, name, value)
    return layer


@torch.inference_mode()
def test_prompts_expand_where_that_is_cheaper(monkeypatch):
    """Of four sequences the second: the others have few tokens, or many keys."""
    from custom_pypto_vllm.attention.backend import SparseMetadata

    torch.manual_seed(0)
    lengths, new, count, block = [100, 75, 200, 300], [1, 70, 200, 64], 64, 16
    tokens, table = sum(new), torch.arange(4 * 20).view(4, 20).int()
    layer = sparse_attention(torch.full((tokens, count), -1, dtype=torch.int32))
    keys = [range(length - n + 1, length + 1) for length, n in zip(lengths, new, strict=True)]
    for row, seen in zip(layer.impl.topk_indices_buffer, itertools.chain(*keys), strict=True):
        row[:seen] = torch.randperm(seen)[:count]
    cache = torch.randn(table.numel(), block, 128 + 64)
    query, key = torch.randn(tokens, 4, 32 + 64), torch.randn(tokens, 128)
    outputs = {}
    for absorbs in (True, False):
        monkeypatch.setattr(npu, "on_cpu", absorbs)
        step = SparseMetadata(
            num_actual_tokens=tokens,
            query_ends=torch.tensor(new).cumsum(0).int(),
            seq_lens=torch.tensor(lengths).int(),
            block_table=table,
            slot_mapping=None,
            num_decodes=4,
            num_decode_tokens=tokens,
        )
        outputs[absorbs] = torch.full((tokens, 4 * 32), torch.nan)
        layer.forward_impl(query, key, key, cache, step, output=outputs[absorbs])
    differ = (outputs[True] != outputs[False]).any(1).nonzero().flatten()
    assert 1 <= differ.min() and differ.max() <= 70 and len(differ) > 60
    # 320 terms, of 1 in all: a rounding of float32 for each
    torch.testing.assert_close(outputs[False], outputs[True], rtol=0, atol=2e-5)


def test_unknown_constructor_arguments_are_rejected():
    from custom_pypto_vllm.attention.layer import SparseAttentionLayer

    with pytest.raises(TypeError, match="fused_head_gate"):
        SparseAttentionLayer(128, 4, 1.0, 32, 64, 32, 64, 512, None, fused_head_gate=True)


def test_its_models_are_not_imported():
    """The package of models has another version of transformers than vLLM."""
    code = (
        "import sys, custom_pypto_vllm as plugin\n"
        "plugin.register()\n"
        "print(sorted({'models', 'custom_pypto.models'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def applied(group: str) -> str:
    """What vLLM has of these names after the patches, from a process of their own."""
    code = (
        "from pkgutil import resolve_name\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from custom_pypto_vllm import patches\n"
        f"if {group!r} != 'start': resolve_name('custom_pypto_vllm.patches.{group}')\n"
        f"for patch in patches.PATCHES[{group!r}]:\n"
        "    for name, own in patch.changes.items():\n"
        "        own = resolve_name('custom_pypto_vllm.' + own)\n"
        "        print(name, patch.wraps or resolve_name(name) is own)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


@pytest.mark.parametrize("group", PATCHES)
def test_vllm_has_every_name_that_is_patched(group):
    found = applied(group)
    names = [name for patch in PATCHES[group] for name in patch.changes]
    assert re.findall(r"^(\S+) True$", found, re.M) == names


def test_a_name_that_vllm_lacks_is_rejected_with_the_reason():
    patch = Patch({"vllm.version:absent": "config:is_sparse"}, "a reason", "0.31", "never")
    error = r"vllm.version:absent must exist, which this package replaces \(a reason\), got"
    with pytest.raises(RuntimeError, match=error):
        patch.apply()


def test_a_reload_is_rejected_where_vllm_keeps_copies_of_the_old_weights():
    from custom_pypto_vllm.checks import reject_reload

    class Packed:
        pass

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    reject_reload(model, Packed)
    model[1].quant_method = Packed()
    with pytest.raises(ValueError, match="reload_weights must not .* the packed experts 1 of"):
        reject_reload(model, Packed)
    del model[1].quant_method
    model[0].learnable_sink = True
    with pytest.raises(ValueError, match="the sinks of 0 of the old weights; start a new engine"):
        reject_reload(model, Packed)
