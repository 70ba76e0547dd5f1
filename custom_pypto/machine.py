"""What is installed and which hardware there is, for the report of :mod:`.env`.

Imports the standard library only, so that the report works even if torch does not load.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys

from . import requirements, threads
from .requirements import Problem, installed_version, pypto_copy

NO_NPU = Problem(
    "an NPU: here are no /dev/davinci* and no CANN",
    "nothing to install on this machine; in the repository bash run.sh graph tries graph mode on a "
    "host simulator of CANN",
)
LARGE_PAGES = "/sys/kernel/mm/transparent_hugepage"  # of a kernel that has them
# CPU features that kernels use or could use: x86, then Arm
CPU_FEATURES = (
    "fma f16c avx2 avx_vnni avx512f avx512bw avx512_vnni avx512_bf16 avx512_fp16 "
    "amx_tile amx_int8 amx_bf16 amx_fp16 asimd asimdhp asimddp asimdfhm bf16 i8mm sve sve2 svebf16 "
    "svei8mm"
).split()


def disable_broken_autoload() -> None:
    """Keeps ``import torch`` working with an installed torch_npu that cannot be loaded.

    ``import torch`` also imports an installed torch_npu and fails if that fails, for instance
    without CANN. This has no effect after torch is imported: start a program that imports torch
    first with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
    """
    if "torch" not in sys.modules and torch_npu_problem():
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def ask_for_large_pages() -> None:
    """Lets torch ask Linux for pages of 2 MiB for tensors that are as large.

    torch reads the variable when it first allocates one. What the user has set is left alone.
    """
    if os.path.exists(LARGE_PAGES):
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def commit() -> str | None:
    """Of this clone, with ``-dirty`` if files differ from it; else of the clone that built this."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.exists(os.path.join(root, ".git")):
        return _printed(["git", "-C", root, *requirements.COMMIT]).strip() or None
    built = re.search(r"\.g(\w+?)(\.dirty)?$", installed_version("custom_pypto") or "")
    return built[1] + ("-dirty" if built[2] else "") if built else None


def torch_npu_problem() -> Problem | None:
    """Why an installed torch_npu cannot load, as far as known without importing it."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    for library in ("libascendcl.so", "libhccl.so"):
        try:
            ctypes.CDLL(library)
        except OSError as error:
            return Problem(
                f"CANN cannot be loaded: {error}",
                "source the set_env.sh of CANN before Python starts"
                if _npu_expected()
                else "pip uninstall torch_npu, which needs CANN",
            )
    torch, torch_npu = _torch(), installed_version("torch_npu")
    # torch_npu links to torch's C++ symbols, which differ from one minor version to the next
    if torch and torch_npu and requirements.minor(torch) != requirements.minor(torch_npu):
        return Problem(
            f"torch_npu {torch_npu} does not match torch {torch}",
            requirements.torch_npu_remedy(torch),
        )
    return build_problem()


def _device_nodes() -> int:
    return len(glob.glob("/dev/davinci[0-9]*"))


def _npu_expected() -> bool:
    """Whether this machine has an NPU, or what only a machine with one has."""
    return bool(_device_nodes() or requirements.cann())


def build_problem() -> Problem | None:
    """Why no torch_npu can load with the installed build of torch."""
    torch = _torch()
    # both register allocator settings under the same keys, which torch accepts only once
    if torch is None or "+cu" not in torch:
        return None
    return Problem(
        f"torch_npu cannot be loaded with torch {torch}, a CUDA build",
        f"pip install torch=={torch.partition('+')[0]}+cpu "
        "--extra-index-url https://download.pytorch.org/whl/cpu",
    )


def _torch() -> str | None:
    """The version of torch; only this file names the build, ``+cu130``, of the default wheel."""
    spec = importlib.util.find_spec("torch")
    path = os.path.join(os.path.dirname(spec.origin), "version.py") if spec and spec.origin else ""
    version = re.search(r"^__version__ = '(.+)'$", _read(path), re.MULTILINE)
    return version[1] if version else installed_version("torch")


def versions() -> dict[str, str | None]:
    recipe = requirements.recipe()
    return {
        "python": platform.python_version(),
        "torch": _torch(),
        "torch_npu": installed_version("torch_npu"),
        "CANN": _cann(),
        "pypto": _pypto(),
        **({"recipe": f"its custom_pypto, of the same name, in {recipe}"} if recipe else {}),
        "transformers": installed_version("transformers"),
        "safetensors": installed_version("safetensors"),
        "compiler": _compiler(),
    }


def _pypto() -> str | None:
    copy = pypto_copy()
    return f"{copy}, untested" if copy and requirements.untested_pypto() else copy


def _cann() -> str | None:
    home = requirements.cann()
    if home is None:
        return None
    places = f"{home}/ascend_*_install.info", f"{home}/*/ascend_*_install.info"
    for path in sorted(path for place in places for path in glob.glob(place)):
        if version := re.search(r"^version=(.+)$", _read(path), re.MULTILINE):
            return f"{version[1].strip()} in {home}"
    return f"unknown version in {home}"


def _compiler() -> str | None:
    command = shlex.split(os.environ.get("CXX") or "g++")
    return _printed([*command, "--version"]).partition("\n")[0] or None


def _printed(command: list[str]) -> str:
    """The output of a program, in English; empty if the program is missing or fails."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def cpu(*, loaded: bool) -> dict:
    # util-linux knows the names of Arm servers, which /proc/cpuinfo has as numbers only
    listed = dict(re.findall(r"^ *([\w ]+): +(.+)$", _printed(["lscpu"]), re.MULTILINE))
    model = listed.get("Model name", "unknown")
    if {"CPU family", "Model"} <= listed.keys():  # a name like "AMD EPYC" covers generations
        model += f" (family {listed['CPU family']}, model {listed['Model']})"
    kib = dict(re.findall(r"(\w+):\s+(\d+) kB", _read("/proc/meminfo")))
    torch = sys.modules.get("torch")
    crowded = threads.oversubscription(torch.get_num_threads()) if torch else None
    return {
        "model": model,
        "architecture": platform.machine(),
        "features": [name for name in CPU_FEATURES if name in listed.get("Flags", "").split()],
        "kernels_isa": torch.ops.custom_pypto.cpu_isa() if loaded else None,
        "threads": torch.get_num_threads() if torch else None,
        "cores": len(os.sched_getaffinity(0)),
        "quota": threads.cpu_quota(),
        "oversubscribed": crowded and vars(crowded),
        "memory_bytes": int(kib["MemTotal"]) * 1024 if kib else None,
        "memory_available_bytes": int(kib["MemAvailable"]) * 1024 if kib else None,
    }


def npu() -> dict:
    torch = sys.modules.get("torch")
    devices, problem = [], None
    if not hasattr(torch, "npu") and not _npu_expected():
        problem = NO_NPU
    elif importlib.util.find_spec("torch_npu") is None:
        problem = Problem("torch_npu", requirements.torch_npu_remedy(_torch()))
    elif not hasattr(torch, "npu"):
        problem = torch_npu_problem() or Problem(
            "torch_npu is installed, but not loaded into torch",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or import torch_npu first",
        )
    else:
        try:
            devices = [torch.npu.get_device_name(i) for i in range(torch.npu.device_count())]
            answer = "sees no device"
        except RuntimeError as error:
            answer = f"reports: {error}".partition("\n")[0]
        if not devices:
            problem = Problem(
                f"an NPU: torch_npu {answer}",
                "npu-smi info must list one; a container needs /dev/davinci* and the driver",
            )
    return {
        "devices": devices,
        "problem": problem,
        "device_nodes": _device_nodes(),
        "autoload": os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"),
    }
