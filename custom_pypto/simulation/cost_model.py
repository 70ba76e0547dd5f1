"""PyPTO's cost model: the time of a kernel's task graph on a simulated Atlas A2/A3.

The figures are estimates, not device measurements. The model counts copies, matmuls and vector
operations per task, and scheduling per task and per edge. Values count where control flow reads
them, but padding within a task costs as much as valid data. Gathers and sorting count near
zero at any size, and every core has its own memory bandwidth, without a shared limit.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from . import control_flow
from .compiler import SimulationError, compiled, pypto_versions, simulated

CYCLES_PER_US = 1800.0  # PyPTO's own conversion, though its A2A3.ini has cores of 1850 MHz
AI_CORES = {"AIC": 24, "AIV": 48}  # cube and vector cores of the simulated chip


@dataclass(frozen=True)
class Task:
    """One task on one core; times in µs since the first task started."""

    core: str  # "AIC 3"
    name: str  # its loop and its operations
    node: tuple[int, int]  # its key in Estimate.successors
    start: float
    end: float


@dataclass(frozen=True)
class Estimate:
    """PyPTO's estimate of one launch.

    Attributes:
        latency_us: from the first task's start to the last one's end; launching is not counted.
        utilisation: share of ``latency_us`` in which the 72 cores were busy.
        tasks: tasks on AI cores.
        edges: dependencies between tasks; resolving one costs 0.2 µs of a scheduling core.
        batches: groups of tasks that the device runs one after the other.
        timeline: every task, by start.
        successors: the task graph; it has nodes without a task, which join many edges into few.
    """

    latency_us: float
    utilisation: float
    tasks: int
    edges: int
    batches: int
    timeline: tuple[Task, ...]
    successors: dict[tuple[int, int], tuple[tuple[int, int], ...]]

    def write_trace(self, path: Path | str) -> None:
        """Writes the timeline as a file for https://ui.perfetto.dev or chrome://tracing."""
        kinds = list(AI_CORES)
        events, named = [], set()
        for task in self.timeline:
            kind, number = task.core.split()
            row = {"pid": kinds.index(kind), "tid": int(number)}
            if task.core not in named:
                named.add(task.core)
                for what, name in (("process_name", kind), ("thread_name", task.core)):
                    events.append({"ph": "M", "name": what, "args": {"name": name}, **row})
            duration = {"ts": task.start, "dur": task.end - task.start}
            events.append({"ph": "X", "name": task.name, **duration, **row})
        about = {"source": "PyPTO cost model, not a device", "latency_us": self.latency_us}
        Path(path).write_text(json.dumps({"traceEvents": events, "otherData": about}))


def estimate(
    kernel,
    *tensors: Tensor,
    trace: Path | str | None = None,
    timeout: float | None = None,
    **params,
) -> Estimate:
    """Compiles the kernel for Atlas A2/A3 and estimates one launch in PyPTO's cost model.

    The result depends on shapes, dtypes and the values that the kernel's control flow reads, and is
    the same on every run.

    Args:
        tensors: the kernel's tensor arguments, contiguous and on the CPU. They are not changed.
        trace: where to write the timeline for Perfetto.
        timeout: seconds, 600 by default.
        params: the kernel's other arguments.

    Raises:
        SimulationError: the kernel does not compile, with the reason that PyPTO logged, for
            instance a tile that does not fit; it did not finish in time; it ended its process.
    """
    copy = simulated(kernel)
    control_flow.folder()
    with compiled(copy, tensors, params, prepare=control_flow.keep, timeout=timeout) as output:
        swim = output / "CostModelSimulationOutput" / "_simulate.swim.json"
        if not swim.exists():
            raise SimulationError(f"{copy.__name__}: the cost model wrote no timeline")
        result = _read(
            json.loads(swim.read_text()),
            (output / "dyn_topo.txt").read_text(),
            json.loads((output / "program.json").read_text()),
        )
    if trace is not None:
        result.write_trace(trace)
    return result


def _read(cores: list[dict], topology: str, program: dict) -> Estimate:
    functions = {str(f["hash"]): _name(f) for f in program["functions"]}
    names, successors = {}, {}
    for fields, following in pypto_versions.topology(topology):
        batch = int(fields[0])
        node = (batch, int(fields[1]))
        names[node] = functions.get(fields[6], "")
        successors[node] = tuple((batch, int(task)) for task in following)
    found = []
    for core in cores:
        if core["coreType"] in AI_CORES:
            name = f"{core['coreType']} {core['blockIdx']}"
            for task in core["tasks"]:
                node = (task["seqNo"], task["taskId"])
                found.append((task["execStart"], task["execEnd"], name, node))
    begin = min((start for start, *_ in found), default=0)
    length = max((end for _, end, *_ in found), default=0) - begin
    busy = sum(end - start for start, end, *_ in found)
    return Estimate(
        latency_us=length / CYCLES_PER_US,
        # a copy between arguments has no task on a core
        utilisation=busy / (sum(AI_CORES.values()) * length) if found else 0.0,
        tasks=len(found),
        edges=sum(map(len, successors.values())),
        batches=len({batch for batch, _ in successors}),
        timeline=tuple(
            Task(
                core,
                names.get(node, ""),
                node,
                (start - begin) / CYCLES_PER_US,
                (end - begin) / CYCLES_PER_US,
            )
            for start, end, core, node in sorted(found)
        ),
        successors=successors,
    )


def _name(function: dict) -> str:
    """``"LOOP: OPERATION OPERATION"`` of a leaf function."""
    loop = re.sub(r"^TENSOR_(.*)_Unroll\d+_.*", r"\1", function["func_magicname"])
    silent = re.compile("VIEW|ASSEMBLE|PHASE|SYNC|BAR|ALLOC|RESHAPE|NOP")
    codes = (operation["opcode"] for operation in function["operations"])
    return f"{loop}: " + " ".join(dict.fromkeys(c for c in codes if not silent.search(c)))
