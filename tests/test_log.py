"""``CUSTOM_PYPTO_LOG``: what each level logs, and that a dumped call can be repeated."""

import functools
import logging
import re
import sys
import tempfile

import pytest
import torch
from cases import inputs_of, on_meta
from cases.npu_lightning_indexer_pto import inputs as indexer_inputs
from numerics import reference
from tiny import tiny_model, token_ids
from torch.utils._pytree import tree_leaves

import custom_pypto
from custom_pypto import layer_ops, log, models, threads
from custom_pypto.__main__ import main
from custom_pypto.descriptions import ALL_OPS, LAYER_OPS
from custom_pypto.requirements import Problem
from custom_pypto.schemas import overload

ATTENTION = "npu_sparse_flash_attention_pto"
INPUTS = {op: functools.partial(inputs_of, op) for op in ALL_OPS}


@pytest.fixture
def logging_at(monkeypatch, tmp_path):
    """Switches a level on, for this test; files go to ``tmp_path``."""

    def start(level: int, crowded=None) -> None:
        # else the first line may be about the machine that runs the tests
        monkeypatch.setattr(threads, "oversubscription", lambda count: crowded)
        monkeypatch.setenv(log.VARIABLE, str(level))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(log, "_files", 0)
        log.start_if_wanted()

    yield start
    if log._library is not None:
        log._library._destroy()
        log._library = None
    log.logger.handlers.clear()
    log.logger.setLevel(logging.NOTSET)


def call(op: str):
    return getattr(custom_pypto, op)(**INPUTS[op]())


def is_in_the_way(op: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload(op).name(), "BackendSelect")


@pytest.mark.parametrize("op", [*INPUTS, *LAYER_OPS])
def test_switched_off_nothing_is_in_the_way_of_a_call(op, logging_at):
    logging_at(0)
    assert not is_in_the_way(op)
    logging_at(1)
    assert is_in_the_way(op)


def test_level_1_logs_the_first_call_of_each_op_with_its_backend(logging_at, caplog):
    logging_at(1)
    for op in INPUTS:
        call(op)
        call(op)
    backend = f"on cpu ({torch.ops.custom_pypto.cpu_isa()})"
    starts = [message.split(":")[0] + message.split(",")[1] for message in caplog.messages]
    assert [text.split(":")[0] for text in starts] == [f"{op} {backend}" for op in INPUTS]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_layer_ops_are_logged_as_the_public_ones(logging_at, caplog):
    logging_at(1)
    x = torch.ones(2, 3)
    want = torch.full((2, 3), 0.5**0.5)
    torch.testing.assert_close(layer_ops.rms_norm(x, None, 1.0), want)
    assert caplog.messages == [
        f"rms_norm: first call, on cpu ({torch.ops.custom_pypto.cpu_isa()}): x float32 [2, 3], "
        "weight None, eps 1.0"
    ]


def test_the_first_line_is_about_too_many_threads(logging_at, caplog):
    logging_at(1, crowded=Problem("4 threads on 1 core", "take fewer"))
    assert caplog.messages == ["oversubscribed: 4 threads on 1 core; take fewer"]


def test_level_2_logs_every_call_with_shapes_and_dtypes(logging_at, caplog):
    logging_at(2)
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    custom_pypto.add_custom(x, x)
    torch.ops.custom_pypto.add_custom(x, torch.ones(3, 2, dtype=torch.bfloat16).T)
    call("npu_lightning_indexer_pto")
    backend = f"on cpu ({torch.ops.custom_pypto.cpu_isa()})"
    assert caplog.messages[:2] == [
        f"add_custom: first call, {backend}: x bfloat16 [2, 3], y bfloat16 [2, 3]",
        f"add_custom: {backend}: x bfloat16 [2, 3], y bfloat16 [2, 3] strides [1, 2]",
    ]
    # an argument that has its default value is left out
    assert re.search(r"query float32 \[1, 3, 4, 32\], .* sparse_count 8$", caplog.messages[2])
    assert re.search(r"block_table int32 \[[\d, ]+\] of -?\d+ to \d+", caplog.messages[2])


def test_level_1_tells_whether_a_model_runs_on_the_ops(logging_at, caplog):
    logging_at(1)
    model, ids = tiny_model(), token_ids(1, 20)
    model(ids)
    assert not caplog.messages
    models.use_custom_pypto(model)(ids)
    called = {message.split(":")[0] for message in caplog.messages}
    assert called - {*LAYER_OPS} == {"npu_lightning_indexer_pto", ATTENTION}
    caplog.clear()
    models.use_transformers(model)(ids)
    assert not caplog.messages


def test_forms_of_an_op_share_their_first_call(logging_at, caplog):
    logging_at(1)
    custom_pypto.npu_sparse_flash_attention_pto(**INPUTS[ATTENTION](), return_softmax_lse=True)
    call(ATTENTION)
    [message] = caplog.messages
    assert message.startswith(f"{ATTENTION}: first call, ")
    assert message.endswith(", return_softmax_lse True")


@pytest.mark.parametrize("op", INPUTS)
def test_what_is_logged_computes_what_it_computed(op, logging_at):
    def outcome() -> list:
        inputs = INPUTS[op]()
        out = getattr(custom_pypto, op)(**inputs)
        return [out, *(value for value in inputs.values() if isinstance(value, torch.Tensor))]

    want = outcome()  # the caches that the fused op writes are among the inputs
    logging_at(2)
    for got, expected in zip(outcome(), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_gradients_pass_as_before(logging_at):
    logging_at(2)
    x, y = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(custom_pypto.add_custom, (x, y))


def test_a_compiled_graph_stays_whole_and_logs_what_it_runs(logging_at, caplog):
    logging_at(2)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def twice(x):
        return custom_pypto.add_custom(x, x) * 2

    for n in (3, 4, 5):
        assert torch.equal(twice(torch.ones(n)), torch.full((n,), 4.0))
    # tracing with fake tensors is no call
    lines = [r.getMessage() for r in caplog.records if r.name == "custom_pypto"]
    assert [re.search(r"x float32 \[(\d)\]", line)[1] for line in lines] == list("345")


@pytest.mark.parametrize("op", INPUTS)
def test_a_meta_call_is_not_logged(op, logging_at, caplog):
    logging_at(2)
    out = getattr(custom_pypto, op)(**on_meta(INPUTS[op]()))
    assert all(x.device.type == "meta" for x in tree_leaves(out) if x is not None)
    assert caplog.messages == []


def test_opcheck_passes_with_logging_on(logging_at):
    logging_at(3)
    arguments = INPUTS["npu_sparse_attention_pto"]()
    torch.library.opcheck(torch.ops.custom_pypto.npu_sparse_attention_pto.default, (), arguments)


def test_none_in_the_place_of_a_tensor_is_rejected_in_the_same_words(logging_at):
    def rejection(*args) -> str:
        with pytest.raises((RuntimeError, NotImplementedError)) as error:
            torch.ops.custom_pypto.add_custom(*args)
        return str(error.value).splitlines()[0]

    calls = [(None, torch.ones(2)), (torch.ones(2), None)]
    want = [rejection(*args) for args in calls]
    logging_at(3)
    assert [rejection(*args) for args in calls] == want


@pytest.mark.ascend_host
def test_a_call_on_an_npu_is_logged_with_its_device(logging_at, caplog):
    logging_at(3)
    x = torch.ones(4, dtype=torch.bfloat16).npu()
    custom_pypto.add_custom(x, x)
    assert caplog.messages[-1].startswith("add_custom: first call, on npu:0: x bfloat16 [4]")
    with pytest.raises(RuntimeError):
        custom_pypto.add_custom(x, x.float())
    assert caplog.messages[-1].endswith(".safetensors --device npu:0")


# ---- level 3 --------------------------------------------------------------------------------


def failing_inputs() -> dict:
    """Rejected for D; among them an expanded tensor, a view of wider rows, and a scalar."""
    inputs = indexer_inputs([2], [20], strided=True, sparse_count=5)
    query = inputs["query"]
    inputs["query"] = query[:, :1, :1].expand(query.shape)
    inputs["key"] = inputs["key"][..., :16]
    return inputs


def fail() -> str:
    with pytest.raises(RuntimeError) as error:
        custom_pypto.npu_lightning_indexer_pto(**failing_inputs())
    return str(error.value)


def test_level_3_writes_the_inputs_of_a_failing_call(logging_at, caplog, tmp_path):
    plain = fail()
    assert plain == "npu_lightning_indexer_pto: key.size(3) must be 32 (D of query), got 16"
    logging_at(3)
    call("npu_lightning_indexer_pto")
    assert list(tmp_path.iterdir()) == []
    assert fail() == plain  # to the letter
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert f"inputs in {path}" in caplog.messages[-1]
    op, arguments, error = log.read_call(path)
    assert (op, error) == ("npu_lightning_indexer_pto", plain)
    want = failing_inputs()
    given = {name: value for name, value in want.items() if name in arguments}
    assert {"query", "key", "weights", "block_table", "sparse_count"} <= given.keys()
    for name, expected in given.items():
        if isinstance(expected, torch.Tensor):
            assert arguments[name].stride() == expected.stride(), name
            assert arguments[name].dtype == expected.dtype
            torch.testing.assert_close(
                arguments[name], expected, rtol=0, atol=0, equal_nan=True, msg=name
            )
        else:
            assert arguments[name] == expected, name


@pytest.mark.parametrize("on_path", [True, False], ids=["command", "by-its-python"])
def test_the_reproducer_repeats_the_failure(
    on_path, logging_at, caplog, capsys, monkeypatch, tmp_path
):
    if on_path:
        (tmp_path / "custom-pypto").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    logging_at(3)
    message = fail()
    command = "custom-pypto" if on_path else f"{sys.executable} -m custom_pypto_command"
    reproducer = re.search(f"reproduce: {re.escape(command)} (.*)$", caplog.messages[-1])[1]
    assert main(reproducer.split()) == 1
    out = capsys.readouterr().out
    assert f"then: {message}\nnow:  {message}\n" in out


def described(x: torch.Tensor) -> str:
    values = "" if x.is_floating_point() else f" of {x.min()} to {x.max()}"
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{values}"


@pytest.mark.parametrize(
    "op, more",
    [("npu_lightning_indexer_pto", {}), (ATTENTION, dict(return_softmax_lse=True))],
    ids=["one-result", "statistics"],
)
def test_a_call_that_succeeds_when_repeated_says_so(op, more, logging_at, capsys):
    logging_at(3)
    inputs = INPUTS[op]() | more
    path = log._write(op, inputs, RuntimeError("another machine's"))
    assert main(["replay", path]) == 0
    outputs = tree_leaves(getattr(reference, op)(**inputs))
    results = ", ".join(map(described, outputs))
    assert f"then: another machine's\nnow:  returns {results}\n" in capsys.readouterr().out


def test_no_file_is_written_over_and_they_are_no_more_than_ten(logging_at, caplog, tmp_path):
    logging_at(3)
    for _ in range(log.MOST_FILES + 2):
        fail()
    assert len(list(tmp_path.iterdir())) == log.MOST_FILES == 10
    assert "inputs not written: limit of 10 files per process reached" in caplog.messages[-1]


def test_inputs_that_cannot_be_written_do_not_hide_the_error(logging_at, caplog, monkeypatch):
    logging_at(3)
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    assert "key.size(3) must be 32" in fail()
    assert "inputs not written: FileNotFoundError" in caplog.messages[-1]


def test_a_file_that_is_no_dump_is_rejected(tmp_path, capsys):
    (tmp_path / "x.safetensors").write_bytes(b"not a dump")
    assert main(["replay", str(tmp_path / "x.safetensors")]) == 2
    assert "must be a file written by CUSTOM_PYPTO_LOG=3, got" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err


# ---- the variable ---------------------------------------------------------------------------

ADD = "import torch, custom_pypto; custom_pypto.add_custom(torch.ones(2), torch.ones(2))"


def test_whoever_has_not_set_up_logging_sees_the_lines_on_standard_error(with_torch):
    result = with_torch(ADD, CUSTOM_PYPTO_LOG="1")
    # a busy machine is named first
    busy = r"(custom_pypto: oversubscribed: .*\n)?"
    assert re.fullmatch(busy + r"custom_pypto: add_custom: first call, on cpu .*\n", result.stderr)
    assert result.stdout == ""


def test_whoever_has_set_up_logging_gets_each_line_once_and_there(with_torch):
    setup = "import logging; logging.basicConfig(format='mine %(message)s');"
    result = with_torch(setup + ADD, CUSTOM_PYPTO_LOG="2")
    busy = r"(mine oversubscribed: .*\n)?"
    assert re.fullmatch(busy + r"mine add_custom: first call, .*\n", result.stderr)


@pytest.mark.parametrize("value", ["4", "-1", "yes", "1 "])
def test_another_value_is_rejected(value, monkeypatch):
    monkeypatch.setenv(log.VARIABLE, value)
    wanted = re.escape(
        "CUSTOM_PYPTO_LOG must be 0 (off), 1 (first call of each op), 2 (every call)"
    )
    with pytest.raises(ValueError, match=f"{wanted}.*got {value!r}"):
        log.start_if_wanted()


def test_the_import_says_that_the_value_is_wrong(with_torch):
    result = with_torch("import custom_pypto", CUSTOM_PYPTO_LOG="loud")
    assert "ValueError: custom_pypto: CUSTOM_PYPTO_LOG must be" in result.stderr.splitlines()[-1]


def test_level_3_without_safetensors_is_rejected_with_the_remedy(monkeypatch, logging_at):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="LOG=3 needs safetensors.*pip install safetensors"):
        logging_at(3)
    logging_at(2)
    assert is_in_the_way("add_custom")
