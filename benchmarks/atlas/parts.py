"""What ``run.sh atlas`` runs: the list of parts, in order; and what to try after a failure."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
sys.path.append(str(EXAMPLES))

from modes import MODES  # noqa: E402

from atlas import cycles  # noqa: E402

OPS_ON_NPU = "ops on the NPU"
ON_SIMULATOR = ["-m", "custom_pypto.simulation.ascend_host"]
VERIFY = ["-m", "custom_pypto", "verify", "--device"]
# ops on the chip's simulator, which is slow
ON_CHIP = ("add_custom", "npu_lightning_indexer_pto", "npu_sparse_flash_attention_pto")
# the ops of benchmarks/npu_cases.py, each in a process of its own
TIMED = (
    "npu_lightning_indexer_pto",
    "npu_sparse_flash_attention_pto",
    "npu_quant_lightning_indexer_pto",
    "npu_kv_quant_sparse_flash_attention_pto",
    "npu_lightning_indexer_prolog_pto",
    "npu_sparse_attention_pto",
    "npu_sparse_flash_attention_grad_pto",
    "npu_lightning_indexer_grad_pto",
    "npu_sparse_lightning_indexer_grad_kl_loss_pto",
    "npu_dense_lightning_indexer_softmax_lse_pto",
    "npu_dense_lightning_indexer_grad_kl_loss_pto",
    "hyper_connection",
    "pool_groups",
)


@dataclass(frozen=True)
class Step:
    """A child process of a part, with the variables of its environment."""

    name: str
    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """Where the parts run.

    ``report`` is what ``installed.py`` found: the report of ``custom-pypto env``, and more.
    """

    report: dict
    scratch: Path
    simulator: bool

    def step(self, name: str, *program: str, **variables: str) -> Step:
        """A Python program, or one of this folder, with an NPU, or the simulator for one."""
        if program[0].endswith(".py"):
            program = (str(HERE / program[0]), *program[1:])
        way = ON_SIMULATOR if self.simulator else []
        return Step(name, [sys.executable, *way, *program], variables)

    def verify(self, ops: list[str], **variables: str) -> list[Step]:
        return [self.step(op, *VERIFY, "npu", "--op", op, **variables) for op in ops]

    def short(self, ops: list[str]) -> list[str]:
        """The ops, or on the simulator, which is slow, the last of them."""
        return ops[-1:] if self.simulator else ops

    @property
    def has_npu(self) -> bool:
        """Whether ops run on an NPU, or on the simulator for one; before the report, perhaps."""
        return not self.report or self.report["env"]["ways"][OPS_ON_NPU]["works"]

    @property
    def needs_package(self) -> bool:
        """Whether the simulator needs a kernel package of its own, as none is installed."""
        return self.simulator and not self.report["packaged"]


@dataclass(frozen=True)
class Part:
    """A part of the run.

    ``seconds`` is the time limit of each step; ``lacks`` gives the reason to skip the part, if any,
    besides the want of an NPU, which ``anywhere`` parts do without;
    ``advice`` is the next thing to try where :data:`KNOWN` has nothing more specific; the lines
    of ``tables`` in the log, which begin with ``| `` or ``> ``, go to the summary; ``files`` are a
    pattern of texts below ``Machine.scratch`` that go to the archive.
    """

    name: str
    shows: str
    seconds: float
    steps: Callable[[Machine], list[Step]]
    advice: str
    lacks: Callable[[Machine], str] = lambda machine: ""
    tables: bool = False
    files: str = ""
    anywhere: bool = False

    def why_skipped(self, machine: Machine) -> str:
        """The reason to skip the part, empty if it runs."""
        if not (self.anywhere or machine.has_npu):
            return "no NPU"
        return self.lacks(machine)


def launches(machine: Machine) -> list[Step]:
    steps = [machine.step(x, "launches.py", x) for x in ("streams", "replay", "devices")]
    levels = [] if machine.simulator else ["0", "1", "2"]  # the simulator has no task queue
    for level in levels:
        # an op that torch_npu queues must run before ours, which is launched past its queue
        name, queue = f"streams, task queue {level}", dict(TASK_QUEUE_ENABLE=level)
        steps.append(machine.step(name, "launches.py", "streams", **queue))
    return steps


def graph(machine: Machine) -> list[Step]:
    example = [sys.executable, str(EXAMPLES / "compile_torchair.py")]
    sizes = ["--prompt-tokens", "48", "--questions", "2"] if machine.simulator else []
    # the example starts the simulator itself
    return [Step(mode, [*example, "--mode", mode, *sizes]) for mode in MODES]


def aclnn(machine: Machine) -> list[Step]:
    if not machine.needs_package:
        # CANN's tutorial makes one with add_custom
        return machine.verify(machine.short(machine.report["packaged"]), CUSTOM_PYPTO_EAGER="aclnn")
    folder = str(machine.scratch / "kernel_package")
    writer = ["-m", "custom_pypto.simulation.ascend_host.kernel_package", folder]
    variables = dict(CUSTOM_PYPTO_EAGER="aclnn", ASCEND_CUSTOM_OPP_PATH=folder)
    return [
        Step("package", [sys.executable, *writer]),
        *machine.verify(machine.short(machine.report["ops"]), **variables),
    ]


def times(machine: Machine, *options: str) -> list[Step]:
    options += ("--quick",) if machine.simulator else ()
    ops = TIMED[:2] if machine.simulator else TIMED
    return [machine.step(op, "times.py", op, *options) for op in ops]


def on_chip(machine: Machine) -> list[Step]:
    program = [sys.executable, str(HERE / "cycles.py")]
    return [Step(op, [*program, op, str(machine.scratch / "cycles")]) for op in ON_CHIP]


def no_chip(machine: Machine) -> str:
    return "the host simulator counts no cycles" if machine.simulator else cycles.lacking()


def no_package(machine: Machine) -> str:
    if machine.report["packaged"] or machine.needs_package:
        return ""
    return "no installed kernel package lists the operators of an op"


def no_pypto(machine: Machine) -> str:
    return "" if machine.report["env"]["versions"]["pypto"] else "PyPTO is not installed"


PARTS = [
    Part(
        "installed",
        "versions, devices, what works",
        120,
        lambda here: [here.step("", "installed.py", str(here.scratch / "env.json"))],
        "`bash run.sh env` names what is missing, and the remedy",
        anywhere=True,
    ),
    Part(
        "cpu",
        "every check of `verify` on the CPU",
        600,
        lambda here: [Step("", [sys.executable, *VERIFY, "cpu"])],
        "the reference does not hold on this CPU, so results of the NPU say nothing yet: "
        "`bash run.sh test`, and send its output",
        anywhere=True,
    ),
    Part(
        "npu",
        "every check of `verify` on the NPU, a process for each op",
        600,
        lambda here: here.verify(here.report["ops"]),
        "run `custom-pypto verify --device generated --op {step}` on a machine with the "
        "`sim` extra: if that fails, the program is wrong; if it passes, the device's compiler, "
        "flags between pipes, or an instruction",
    ),
    Part(
        "again",
        "the same results, to the bit, in repeated calls and in another process",
        600,
        lambda here: [here.step(op, "again.py", op) for op in here.short(here.report["ops"])],
        "set `ASCEND_LAUNCH_BLOCKING=1`: if results then repeat, work overlaps that must not; also "
        "try `CUSTOM_PYPTO_READY_ON_HOST=0`, in case it is set",
    ),
    Part(
        "ready",
        "`verify` with lengths and tables declared ready (`CUSTOM_PYPTO_READY_ON_HOST=1`)",
        600,
        lambda here: here.verify(here.short(here.report["ops"]), CUSTOM_PYPTO_READY_ON_HOST="1"),
        "leave the variable unset; if part `npu` passed, only `ready_on_host_tensors` is at fault",
    ),
    Part(
        "launches",
        "other streams, each setting of the task queue, capture and replay, a second device",
        600,
        launches,
        "for `replay`, first see that `streams` passes; `ASCEND_LAUNCH_BLOCKING=1` tells a missing "
        "wait from a wrong launch",
    ),
    Part(
        "model",
        "the answer of a small model",
        600,
        lambda here: [here.step("", "answer.py")],
        "if part `npu` passed, the fault is between the ops: repeat with `CUSTOM_PYPTO_LOG=2`, "
        "whose last line is the last call",
    ),
    Part(
        "graph",
        "the model compiled by torchair in three modes, equal to eager",
        1200,
        graph,
        "docs/graph_mode.md, Troubleshooting; `npugraph_ex` needs least of CANN, so begin there",
    ),
    Part(
        "aclnn",
        "`verify` through the functions of an installed kernel package",
        600,
        aclnn,
        "`custom-pypto env` compares the package with our operators; docs/graph_mode.md, "
        '"Which kernel packages count"',
        lacks=no_package,
    ),
    Part(
        "times",
        "times of eager calls next to PyPTO's estimates and the rooflines",
        1800,
        times,
        "the table has the cases that were timed before; repeat the last case by itself: "
        "`python benchmarks/atlas/times.py {step} --quick`",
        lacks=no_pypto,
        tables=True,
    ),
    Part(
        "replayed",
        "times of captured calls, without the host's launches",
        1800,
        lambda here: times(here, "--replay"),
        "part `launches` shows whether a capture works at all; times of eager calls are in `times`",
        lacks=no_pypto,
        tables=True,
    ),
    Part(
        "profile",
        "torch_npu's profile of a decode step: its trace and tables, as files",
        600,
        lambda here: [here.step("", "profiled.py", str(here.scratch / "profile"))],
        "the log has what torch_npu.profiler lacks; its analysis calls CANN's `msprof`, which must "
        "be on `PATH`: source CANN's `set_env.sh`",
        files="profile/*/ASCEND_PROFILER_OUTPUT/*",
    ),
    Part(
        "cycles",
        "traces of three ops on the toolkit's simulator of the chip (`msprof op simulator`)",
        1800,
        on_chip,
        "the log has msprof's command and what it said; docs/npu.md says what is not known of it",
        lacks=no_chip,
        files="cycles/*.json",
        anywhere=True,
    ),
]

# the next thing to try, by the end of a child and its log: the first that matches decides; \1 is
# what the pattern found
KNOWN = [
    (
        r"(\w+) in (\S+) is another operator",
        r"\2 has an operator \1 that is not ours, and CANN takes the first one: put a package "
        "built from custom_pypto/graph/*.h before it in ASCEND_CUSTOM_OPP_PATH",
    ),
    (
        r"has no function (aclnn\w+)",
        r"the package has no \1: build it again, with op_api and with this operator",
    ),
    (
        r"(aclnn\w+) failed with (\d+)",
        r"the message after `\1 failed with \2` is CANN's; `ASCEND_GLOBAL_LOG_LEVEL=1 "
        "ASCEND_SLOG_PRINT_TO_STDOUT=1` says more",
    ),
    (
        r"(aclnn\w+) .*not in libopapi\.so",
        r"this CANN has no \1: install a newer one that matches torch_npu",
    ),
    (
        r"(?i)PTO_TILE_LIB_CODE_PATH|pto/\S+: No such file|pto-inst\.hpp",
        "PyPTO lacks the headers of pto-isa: install CANN's package of them, or set "
        "PTO_TILE_LIB_CODE_PATH to a checkout (docs/npu.md)",
    ),
    (
        r"(bisheng|ccec|bishengir-compile)\b.*(?:not found|No such file)",
        r"the device's compiler \1 is not on PATH: source CANN's set_env.sh before Python",
    ),
    (
        r"graph/custom_op\.h|before compiling custom ops",
        "this CANN has no custom-op callbacks for GE: use `npugraph_ex`, a newer CANN, or a kernel "
        "package",
    ),
    (
        r"(?i)out of memory|alloc\w* .*fail\w* .*device",
        "another process may hold the device: `npu-smi info`, then another device by "
        "`ASCEND_RT_VISIBLE_DEVICES=1`",
    ),
    (
        r"(lib\w+\.so)[.\d]*: cannot open shared object file",
        r"\1 is not found: source CANN's set_env.sh before Python; `ldd` names what it lacks",
    ),
    (
        r"undefined symbol: (\w+)",
        r"the library that lacks \1 is of another release: `custom-pypto env` and torch_npu's "
        "release notes name the versions that fit",
    ),
    (
        r"(?i)\b507\d{3}\b|\b(?:aicore|vector core|mte)\b.*(?:exception|error)",
        "the device reports an exception: repeat with `ASCEND_LAUNCH_BLOCKING=1`, which names the "
        "launch, and send the newest file of ~/ascend/log/debug/plog with the archive",
    ),
    (
        r"Run pass failed|Errcode: F\w+|SimulationError",
        "PyPTO's compiler rejects the kernel: repeat with `ASCEND_GLOBAL_LOG_LEVEL=1 "
        "ASCEND_SLOG_PRINT_TO_STDOUT=1`, and compare the PyPTO in env.json with the one of "
        "`custom-pypto env` elsewhere",
    ),
    (
        r"\Astopped after",
        "`npu-smi info` says whether the device still answers. The traceback in the log says where "
        "it waited: in a compilation, allow more with `--limit 4`; in a launch, repeat with "
        "`ASCEND_LAUNCH_BLOCKING=1`",
    ),
    (
        r"\Adied of SIGKILL",
        "the system killed it, most often for want of memory: `dmesg | tail`, `free -g`",
    ),
    (
        r"\Adied of (SIG\w+)",
        r"the log has the traceback at \1: its first line that is not PyPTO's or torch_npu's is "
        "the call; `CUSTOM_PYPTO_LOG=2` logs its shapes",
    ),
]


def next_step(how: str, log: str, otherwise: str) -> str:
    """The next thing to try.

    Args:
        how: the end of the child, as ``children.Ended`` has it; log: its output.
        otherwise: the advice of the part.
    """
    text = f"{how}\n{log}"
    for pattern, advice in KNOWN:
        if match := re.search(pattern, text):
            return match.expand(advice)
    return otherwise
