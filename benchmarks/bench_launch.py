"""Host time of an eager call on NPU tensors up to its launch, by PyPTO and through aclnn.

It runs on the host simulator of CANN, after the results of every call were compared with the CPU's.
What then is timed computes nothing: "contract" checks the arguments and allocates the outputs;
"PyPTO" is the whole wrapper without PyPTO's own launch, which needs a device; its views and copies
are the simulator's, which run through Python. "aclnn" is the whole call with a kernel package whose
two phases only note the call, without the work of CANN in them. These are times of the host, and
say nothing of an NPU.
"""

import ctypes
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from cases import inputs_of
from measure import Benchmark, interleaved

import custom_pypto
from custom_pypto import npu, schemas
from custom_pypto.eager import VARIABLE as EAGER
from custom_pypto.graph.prototypes import prototypes
from custom_pypto.simulation import ascend_host

CALLS = 500
OPS = (
    "add_custom",
    "npu_lightning_indexer_pto",
    "npu_sparse_flash_attention_pto",
    "npu_sparse_attention_pto",
)
NOTHING = """
long long plan(const char* type, const void* arguments, unsigned long count, unsigned long* size) {
  *size = 1024;
  return 0;
}
int launch(long long plan, const char* function, void* workspace, void* stream) { return 0; }
void drop(long long plan) {}
"""


def on_npu(inputs: dict) -> dict:
    return {k: v.npu() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def agree(op: str) -> bool:
    inputs = inputs_of(op, (1, 1), (30, 17), on_npu=True, dtype=torch.bfloat16)
    got = getattr(custom_pypto, op)(**on_npu(inputs)).cpu()
    return torch.equal(got, getattr(custom_pypto, op)(**inputs))


def calls_of(op: str) -> dict:
    """The three calls, each ``CALLS`` times, without their computation."""
    overload, function = schemas.overload(op), getattr(custom_pypto, op)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
    inputs = on_npu(inputs_of(op, (1, 1), (30, 17), on_npu=True, dtype=torch.bfloat16))

    def repeated(function, variable: str = ""):
        def run():
            os.environ[EAGER] = variable
            for _ in range(CALLS):
                function(**inputs)

        return run

    return {
        "contract": repeated(lambda **x: overload.redispatch(keys, **x)),
        "PyPTO": repeated(function, "pypto"),
        "aclnn": repeated(function, "aclnn"),
    }


def compute_nothing(folder: Path) -> torch.library.Library:
    """Replaces what launches compute from here on; the result must be kept."""
    path = folder / "nothing.so"
    command = ["gcc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=NOTHING, text=True, check=True)
    nothing = ctypes.CDLL(str(path))
    cann = ascend_host.libraries.load()
    cann.ascend_host_connect_packages(nothing.plan, nothing.launch, nothing.drop)
    library = torch.library.Library("custom_pypto", "IMPL")
    for op, function in npu.eager(lambda kernel, tensors: None).items():
        library.impl(schemas.overload(op), function, "PrivateUse1", allow_override=True)
    return library


def rows(repeats: int) -> Iterator[list[str]]:
    ascend_host.start()
    tensors = {p.op: len({*p.inputs, *p.outputs}) for p in prototypes()}
    with tempfile.TemporaryDirectory() as folder:
        package = ascend_host.kernel_package.build(Path(folder) / "package")
        os.environ["ASCEND_CUSTOM_OPP_PATH"] = str(package)
        os.environ[EAGER] = "aclnn"
        for op in OPS:
            if not agree(op):
                raise SystemExit(
                    f"{op}: the result through aclnn differs from the CPU's; not timed"
                )
        kept = compute_nothing(Path(folder))
        for op in OPS:
            seconds = interleaved(calls_of(op), repeats)
            each = [f"{1e6 / CALLS * statistics.median(s):.1f}" for s in seconds.values()]
            yield [op, str(tensors[op]), *each]
        del kept


BENCHMARKS = {
    "launch": Benchmark(["op", "tensors", "contract, us", "PyPTO, us", "aclnn, us"], rows)
}
