"""``custom-pypto verify`` tells a right op from a wrong one."""

import functools
import itertools
import os
import re

import pytest
import torch
from processes import python
from repository import REPOSITORY
from torch.utils._pytree import tree_map_only

from custom_pypto import env, ops, verify
from custom_pypto.__main__ import main
from custom_pypto.descriptions import ALL_OPS, KERNELS, LAYER_KERNELS, TRAINING
from custom_pypto.reference import MODULES

LINE = re.compile(r"(ok|FAILED) +(\w+) +(bfloat16|float16|float32|int8) +(.*\S) +(\S+) +(\S+)")


def spoilt(out: torch.Tensor) -> torch.Tensor:
    return out * 1.1 if out.is_floating_point() else out.roll(1, -1)


def wrong(op):
    """``op``, but its results, or the cache if it only writes that, are others."""

    def call(**arguments):
        out = op(**arguments)
        if out is None:
            arguments["cache"].copy_(spoilt(arguments["cache"]))
        return tree_map_only(torch.Tensor, spoilt, out)

    return call


def test_every_op_is_checked_in_every_dtype_and_passes(capsys):
    assert main(["verify"]) == 0
    out = capsys.readouterr().out
    rows = [LINE.fullmatch(line) for line in out.splitlines() if LINE.fullmatch(line)]
    assert {row[1] for row in rows} == {"ok"}
    assert {row[2] for row in rows} == {*ALL_OPS, *LAYER_KERNELS}
    assert all(float(row[5]) <= float(row[6]) for row in rows)
    assert len({row[4] for row in rows}) >= 6 and f"{len(rows)} of {len(rows)} checks" in out
    assert out.startswith("custom_pypto ") and torch.ops.custom_pypto.cpu_isa() in out


def first_checks(checks, in_float32, dtypes):
    """``in_float32``: its bound is the narrowest."""
    return itertools.islice(checks([torch.float32] if in_float32 else dtypes), 2)


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=pytest.mark.slow if i % 3 else []) for i, op in enumerate(ALL_OPS)],
)
def test_a_wrong_result_fails_the_command_and_the_others_still_run(op, monkeypatch, capsys):
    monkeypatch.setattr(ops, op, wrong(getattr(ops, op)))
    for name, module in MODULES.items():  # two of each op
        checks = functools.partial(first_checks, module.checks, name in TRAINING)
        monkeypatch.setattr(module, "checks", checks)
    assert main(["verify", "--device", "cpu"]) == 1
    rows = [LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
    results = {(row[1], row[2]) for row in rows if row}
    assert ("FAILED", op) in results
    assert results >= {("ok", other) for other in ALL_OPS if other != op}


def test_one_op_is_checked_by_itself(capsys):
    assert main(["verify", "--device", "cpu", "--op", "npu_quant_rows_pto"]) == 0
    rows = [LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
    assert {row[2] for row in rows if row} == {"npu_quant_rows_pto"}


@pytest.mark.parametrize("device", ["npu", "interpreter", "generated"])
def test_an_op_without_an_npu_program_does_not_pass_where_programs_run(device, capsys):
    op = "weight_only_linear"
    assert not verify.verify(device, op)
    assert capsys.readouterr().out == (
        f"FAILED  {op} has no NPU kernel; verify --device cpu checks it\n"
    )


def test_an_unknown_op_is_named_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--op", "npu_quant_row"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "argument --op: invalid choice: 'npu_quant_row'" in said
    assert all(op in said for op in ALL_OPS)


def test_an_op_that_raises_fails_the_command(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(ops, "add_custom", broken)
    assert not verify.verify("cpu", "add_custom")
    out = capsys.readouterr().out
    assert out.count("RuntimeError: no such kernel") == 3 and "0 of 3 checks passed on cpu" in out


@pytest.mark.slow
def test_an_npu_that_is_there_and_does_not_work_fails_the_command(monkeypatch, capsys):
    collect = env.collect

    def with_a_device_node(load_error):
        report = collect(load_error)
        report["npu"]["device_nodes"] = 1
        return report

    monkeypatch.setattr(env, "collect", with_a_device_node)
    if collect()["ways"]["ops on the NPU"]["works"]:
        pytest.skip("the NPU works here")
    assert main(["verify"]) == 1
    out = capsys.readouterr().out
    assert "checks passed on cpu" in out
    assert "FAILED  ops on the NPU\n        missing: " in out and "remedy:" in out


@pytest.mark.parametrize("page, words", [("npu", "{} checks"), ("zh/npu", "共 {} 项检查")])
def test_the_page_has_the_number_of_checks_on_an_npu(page, words):
    dtypes = [torch.bfloat16, torch.float16]
    count = sum(len([*MODULES[op].checks(dtypes)]) for op in KERNELS)
    assert words.format(count) in (REPOSITORY / f"docs/{page}.md").read_text()


def test_the_report_shows_the_settings(monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("CUSTOM_PYPTO_")]:
        monkeypatch.delenv(name)
    main(["env"])
    assert re.search(r"^Settings +none$", capsys.readouterr().out, re.M)
    monkeypatch.setenv("CUSTOM_PYPTO_READY_ON_HOST", "1")
    monkeypatch.setenv("CUSTOM_PYPTO_LOG", "2")
    monkeypatch.setenv("CUSTOM_PYPTO_LOGS", "1")
    main(["env"])
    wanted = "CUSTOM_PYPTO_LOG=2 CUSTOM_PYPTO_LOGS=1 (unknown) CUSTOM_PYPTO_READY_ON_HOST=1"
    assert re.search(rf"^Settings +{re.escape(wanted)}$", capsys.readouterr().out, re.M)


def test_the_report_and_the_page_have_the_same_settings():
    text = (REPOSITORY / "docs/settings.md").read_text()
    assert {*re.findall(r"^\| `(CUSTOM_PYPTO_\w+)`", text, re.M)} == env.SETTINGS


@pytest.mark.sim
@pytest.mark.parametrize("device", ["interpreter", "generated"])
def test_a_cache_that_cannot_be_written_fails_the_command_with_one_line(
    device, tmp_path, monkeypatch
):
    monkeypatch.delenv("TILEFWK_CONFIG_PATH", raising=False)  # set where PyPTO was imported
    (tmp_path / "file").touch()
    command = ["-m", "custom_pypto_command", "verify", "--device", device, "--op", "add_custom"]
    done = python(*command, XDG_CACHE_HOME=str(tmp_path / "file"))
    line = done.stdout.splitlines()[-1]
    assert done.returncode == 1 and done.stderr == ""
    assert line.startswith("FAILED  custom_pypto.simulation: cannot keep ")
    assert line.endswith("set XDG_CACHE_HOME to a folder that can be written")
