"""What ``run.sh atlas`` runs: the list of parts, in order."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ON_SIMULATOR = ["-m", "custom_pypto.simulation.ascend_host"]
MODES = ["max-autotune", "reduce-overhead", "npugraph_ex"]
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
)
STANDARD = TIMED[:4]  # those that torch_npu has, too


@dataclass(frozen=True)
class Machine:
    """Where the parts run.

    ``report`` is what ``installed.py`` found: the report of ``custom-pypto env``, and more.
    """

    report: dict
    scratch: Path
    simulator: bool

    def on_npu(self, *program: str) -> list[str]:
        """The command that runs a Python program with an NPU, or the simulator for one."""
        return [sys.executable, *(ON_SIMULATOR if self.simulator else []), *program]

    def short(self, ops: list[str]) -> list[str]:
        """The ops, or on the simulator, which is slow, the last of them."""
        return ops[-1:] if self.simulator else ops


@dataclass(frozen=True)
class Step:
    """A child process of a part, with the variables of its environment."""

    name: str
    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A part of the run.

    ``seconds`` is the time limit of each step; ``lacks`` gives the reason to skip the part, if any;
    ``advice`` is the next thing to try where :mod:`.advice` knows nothing more specific; the lines
    of ``tables`` in the log, which begin with ``| `` or ``> ``, go to the summary.
    """

    name: str
    shows: str
    seconds: float
    steps: Callable[[Machine], list[Step]]
    advice: str
    lacks: Callable[[Machine], str] = lambda machine: ""
    tables: bool = False


def program(name: str, *arguments: str) -> list[str]:
    return [str(HERE / name), *arguments]


def verify(device: str, op: str) -> list[str]:
    return ["-m", "custom_pypto", "verify", "--device", device, "--op", op]


def installed(machine: Machine) -> list[Step]:
    return [Step("", machine.on_npu(*program("installed.py", str(machine.scratch / "env.json"))))]


def verify_cpu(machine: Machine) -> list[Step]:
    return [Step("", [sys.executable, "-m", "custom_pypto", "verify", "--device", "cpu"])]


def verify_npu(machine: Machine) -> list[Step]:
    return [Step(op, machine.on_npu(*verify("npu", op))) for op in machine.report["ops"]]


def again(machine: Machine) -> list[Step]:
    ops = machine.short(machine.report["ops"])
    return [Step(op, machine.on_npu(*program("again.py", op))) for op in ops]


def ready(machine: Machine) -> list[Step]:
    ops = machine.short(machine.report["ops"])
    declared = {"CUSTOM_PYPTO_READY_ON_HOST": "1"}
    return [Step(op, machine.on_npu(*verify("npu", op)), declared) for op in ops]


def launches(machine: Machine) -> list[Step]:
    checks = ["streams", "replay", "devices"]
    steps = [Step(check, machine.on_npu(*program("launches.py", check))) for check in checks]
    if machine.simulator:  # it has no task queue
        return steps
    streams = machine.on_npu(*program("launches.py", "streams"))
    # an op that torch_npu queues must run before ours, which is launched past its queue
    return steps + [
        Step(f"streams, task queue {level}", streams, {"TASK_QUEUE_ENABLE": level})
        for level in ("0", "1", "2")
    ]


def model(machine: Machine) -> list[Step]:
    return [Step("", machine.on_npu(*program("answer.py")))]


def graph(machine: Machine) -> list[Step]:
    example = str(HERE.parents[1] / "examples/compile_torchair.py")
    sizes = ["--prompt-tokens", "48", "--questions", "2"] if machine.simulator else []
    # the example starts the simulator itself
    return [Step(mode, [sys.executable, example, "--mode", mode, *sizes]) for mode in MODES]


def aclnn(machine: Machine) -> list[Step]:
    asked = {"CUSTOM_PYPTO_EAGER": "aclnn"}
    ops = machine.short(machine.report["packaged"])  # CANN's tutorial makes one with add_custom
    made = []
    if own_package(machine):
        ops = machine.short(machine.report["ops"])
        folder = machine.scratch / "kernel_package"
        asked["ASCEND_CUSTOM_OPP_PATH"] = str(folder)
        writer = ["-m", "custom_pypto.simulation.ascend_host.kernel_package", str(folder)]
        made = [Step("package", [sys.executable, *writer])]
    return made + [Step(op, machine.on_npu(*verify("npu", op)), asked) for op in ops]


def times(machine: Machine, *options: str) -> list[Step]:
    options += ("--quick",) if machine.simulator else ()
    ops = TIMED[:2] if machine.simulator else TIMED
    return [Step(op, machine.on_npu(*program("times.py", op, *options))) for op in ops]


def replayed(machine: Machine) -> list[Step]:
    return times(machine, "--replay")


def standard(machine: Machine) -> list[Step]:
    return [Step(op, machine.on_npu(*program("standard.py", op))) for op in STANDARD]


def own_package(machine: Machine) -> bool:
    """Whether the simulator needs a kernel package of its own, for want of an installed one."""
    return machine.simulator and not machine.report["packaged"]


def no_package(machine: Machine) -> str:
    if machine.report["packaged"] or own_package(machine):
        return ""
    return "no installed kernel package lists the operators of an op"


def no_pypto(machine: Machine) -> str:
    return "" if machine.report["env"]["versions"]["pypto"] else "PyPTO is not installed"


def no_operators(machine: Machine) -> str:
    if machine.simulator:
        return "the simulator has no operators of CANN: it computes torch_npu's ops as ours"
    return no_pypto(machine)


PARTS = [
    Part(
        "installed",
        "versions, devices, what works",
        120,
        installed,
        "`bash run.sh env` names what is missing, and the remedy",
    ),
    Part(
        "cpu",
        "every check of `verify` on the CPU",
        600,
        verify_cpu,
        "the reference does not hold on this CPU, so results of the NPU say nothing yet: "
        "`bash run.sh test`, and send its output",
    ),
    Part(
        "npu",
        "every check of `verify` on the NPU, a process for each op",
        600,
        verify_npu,
        "run `custom-pypto verify --device generated --op {step}` on a machine with the "
        "`sim` extra: if that fails, the program is wrong; if it passes, the device's compiler, "
        "flags between pipes, or an instruction",
    ),
    Part(
        "again",
        "the same results, to the bit, in repeated calls and in another process",
        600,
        again,
        "set `ASCEND_LAUNCH_BLOCKING=1`: if results then repeat, work overlaps that must not; also "
        "try `CUSTOM_PYPTO_READY_ON_HOST=0`, in case it is set",
    ),
    Part(
        "ready",
        "`verify` with lengths and tables declared ready (`CUSTOM_PYPTO_READY_ON_HOST=1`)",
        600,
        ready,
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
        model,
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
        "times of eager calls beside PyPTO's estimates and the rooflines",
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
        replayed,
        "part `launches` shows whether a capture works at all; times of eager calls are in `times`",
        lacks=no_pypto,
        tables=True,
    ),
    Part(
        "torch_npu",
        "torch_npu's own ops beside ours: results, then times",
        900,
        standard,
        "the log has both calls; if only torch_npu's fails, its limits for these shapes are in the "
        "documentation of CANN's operator, and our times are in `times`",
        lacks=no_operators,
        tables=True,
    ),
]
