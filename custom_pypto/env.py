"""Reports installed versions and hardware, what works with them, what is missing and the remedy.

``custom-pypto env`` prints it, with ``--json`` for scripts; :func:`collect` returns it.

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
import sysconfig

from . import converter, eager, kernel_packages, requirements, threads
from .requirements import Problem, installed_version, pypto_copy, pypto_problem
from .version import __version__

NO_NPU = Problem(
    "an NPU: here are no /dev/davinci* and no CANN",
    "nothing to install on this machine; in the repository bash run.sh graph tries graph mode on a "
    "host simulator of CANN",
)
#: every ``CUSTOM_PYPTO_*`` of docs/settings.md
SETTINGS = {
    f"CUSTOM_PYPTO_{name}"
    for name in (
        "CHECK_RANKS CPU_ISA EAGER GE_CONVERTERS LOG READY_ON_HOST RECORD_SPACE SANITIZE "
        "TEST_PYPTO UNTESTED_TORCH WERROR"
    ).split()
}
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
    if "torch" not in sys.modules and _torch_npu_problem():
        os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def collect(load_error: Problem | None = None) -> dict:
    """The report as a dictionary that :mod:`json` can write.

    Args:
        load_error: why ``import custom_pypto`` failed, if it did.

    Returns:
        ``{"custom_pypto": …, "versions": …, "cpu": …, "npu": …, "settings": …, "ways": …}``.
        ``settings`` are the variables ``CUSTOM_PYPTO_*`` that are set. ``npu["eager"]`` is what
        runs eager calls: ``"PyPTO"``, ``"aclnn"`` or None. ``ways`` maps each way to
        use the package to ``{"works": bool, "missing": [{"what": …, "remedy": …}, …]}``.
    """
    versions = _versions()
    pypto, packages = pypto_problem(), _package_problem(load_error)
    runs, lacking = _eager(pypto, packages)
    npu = _npu() | {"eager": runs}
    error = None if load_error is None else load_error.what
    return {
        "custom_pypto": {
            "version": __version__,
            "commit": _commit(),
            "path": os.path.dirname(os.path.abspath(__file__)),
            "load_error": error,
        },
        "versions": versions,
        "cpu": _cpu(loaded=error is None),
        "npu": npu | {"problem": npu["problem"] and vars(npu["problem"])},
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("CUSTOM_PYPTO_")},
        "ways": _ways(load_error, versions, npu, pypto, packages, lacking),
    }


def render(report: dict) -> str:
    """The report of :func:`collect` as text."""
    package, cpu, npu = report["custom_pypto"], report["cpu"], report["npu"]
    gib = 1024**3
    lines = [f"{_named(report)} in {package['path']}", "", "Versions"]
    lines += [
        f"  {name:<13} {version or 'not installed'}" for name, version in report["versions"].items()
    ]
    lines += [
        "",
        "CPU",
        f"  model         {cpu['model']} ({cpu['architecture']})",
        f"  features      {' '.join(cpu['features']) or 'none that the kernels use'}",
        f"  kernels use   {cpu['kernels_isa'] or 'unknown: the ops do not load'}",
        f"  threads       {cpu['threads'] or 'unknown: torch does not load'} "
        f"on {cpu['cores']} cores, quota {cpu['quota'] or 'none'}",
    ]
    if crowded := cpu["oversubscribed"]:
        lines.append(f"                oversubscribed: {crowded['what']}; {crowded['remedy']}")
    if cpu["memory_bytes"]:
        free, total = cpu["memory_available_bytes"] / gib, cpu["memory_bytes"] / gib
        lines.append(f"  memory        {free:.1f} of {total:.1f} GiB available")
    settings = [
        f"{name}={value}{'' if name in SETTINGS else ' (unknown)'}"
        for name, value in report["settings"].items()
    ]
    lines += ["", "NPU", f"  devices       {', '.join(npu['devices']) or 'none usable'}"]
    lines += [
        f"  device nodes  {npu['device_nodes']} (/dev/davinci*)",
        f"  eager calls   {npu['eager'] or 'nothing runs them'}",
        f"  autoload      TORCH_DEVICE_BACKEND_AUTOLOAD={npu['autoload'] or 'not set'}",
        "",
        f"Settings        {' '.join(settings) or 'none'}",
        "",
        "What works here",
    ]
    numbers: dict[tuple[str, str], int] = {}
    for way, state in report["ways"].items():
        lacking = [(missing["what"], missing["remedy"]) for missing in state["missing"]]
        named = [str(numbers.setdefault(problem, len(numbers) + 1)) for problem in lacking]
        needs = f": needs {', '.join(named)}" if named else ""
        lines.append(f"  {'yes' if state['works'] else 'no ':<4} {way}{needs}")
    for (what, remedy), number in numbers.items():
        lines += [f"  {number}  missing: {what}", f"     remedy:  {remedy}"]
    return "\n".join(lines)


def summary(report: dict) -> str:
    """The versions and hardware behind a table of results, in one line."""
    versions = [f"{k} {v}" for k, v in report["versions"].items() if v and k != "compiler"]
    kernels = f"CPU kernels {report['cpu']['kernels_isa']}"
    npu = f"NPU {', '.join(report['npu']['devices']) or 'none usable'}"
    return ", ".join([_named(report), *versions, kernels, npu])


def _named(report: dict) -> str:
    package = report["custom_pypto"]
    return f"custom_pypto {package['version']} (commit {package['commit'] or 'unknown'})"


def _commit() -> str | None:
    """Of this clone, with ``-dirty`` if files differ from it; else of the clone that built this."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.exists(os.path.join(root, ".git")):
        return _printed(["git", "-C", root, *requirements.COMMIT]).strip() or None
    built = re.search(r"\.g(\w+?)(\.dirty)?$", installed_version("custom_pypto") or "")
    return built[1] + ("-dirty" if built[2] else "") if built else None


def _torch_npu_problem() -> Problem | None:
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
    return _build_problem()


def _device_nodes() -> int:
    return len(glob.glob("/dev/davinci[0-9]*"))


def _npu_expected() -> bool:
    """Whether this machine has an NPU, or what only a machine with one has."""
    return bool(_device_nodes() or requirements.cann())


def _build_problem() -> Problem | None:
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


def _versions() -> dict[str, str | None]:
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


def _cpu(*, loaded: bool) -> dict:
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


def _npu() -> dict:
    torch = sys.modules.get("torch")
    devices, problem = [], None
    if not hasattr(torch, "npu") and not _npu_expected():
        problem = NO_NPU
    elif importlib.util.find_spec("torch_npu") is None:
        problem = Problem("torch_npu", requirements.torch_npu_remedy(_torch()))
    elif not hasattr(torch, "npu"):
        problem = _torch_npu_problem() or Problem(
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


def _package_problem(error: Problem | None) -> Problem | None:
    """Why eager calls through aclnn would fail."""
    if error is not None:  # what a package must offer follows from the schemas of the loaded ops
        return Problem("the ops, which do not load", error.remedy)
    return kernel_packages.problem(library=True)


def _eager(pypto: Problem | None, packages: Problem | None) -> tuple[str | None, list[Problem]]:
    """What runs eager calls on an NPU, and what is missing if nothing does."""
    try:
        asked = eager.asked()
    except ValueError as error:
        return None, [Problem(str(error), f"unset {eager.VARIABLE}")]
    if asked != "aclnn" and pypto is None:
        return "PyPTO", []
    if asked != "pypto" and packages is None:
        return "aclnn", []
    if asked != "auto":
        return None, [pypto if asked == "pypto" else packages]
    return None, [Problem(f"{pypto.what}, or {packages.what}", pypto.remedy)]


def _ways(
    error: Problem | None,
    versions: dict,
    npu: dict,
    pypto_missing: Problem | None,
    package_missing: Problem | None,
    eager_missing: list[Problem],
) -> dict[str, dict]:
    torch = sys.modules.get("torch")

    load = [] if error is None else [error]
    models = [problem] if (problem := requirements.transformers_problem()) else []
    if versions["safetensors"] is None and not models:
        models.append(Problem("safetensors", "pip install safetensors"))
    oldest = requirements.MODELS_PYTHON
    if sys.version_info < requirements.numbers(oldest):
        models.append(Problem(f"Python {oldest} for transformers", f"use Python {oldest}"))
    torch_npu = _torch_npu_problem()
    if torch_npu and not hasattr(torch, "npu"):
        models.append(
            Problem(
                f"transformers imports the installed torch_npu; {torch_npu.what}",
                torch_npu.remedy,
            )
        )
    compiler = []
    if versions["compiler"] is None:
        gcc = requirements.gcc(versions["torch"] or requirements.DEFAULT_TORCH)
        compiler = [Problem("a C++ compiler", f"install g++ {gcc} or later, or set CXX")]
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    python = []
    if not os.path.exists(header):
        python = [Problem(header, "install Python's headers (Debian, Ubuntu: python3-dev)")]
    pypto = [pypto_missing] if pypto_missing else []
    packages = [package_missing] if package_missing else []
    converters = [problem] if error is None and (problem := converter.problem()) else []
    on_npu = {
        "ops on the NPU": eager_missing,
        "ops on the NPU through aclnn": packages,
        "graph mode npugraph_ex, by capture": eager_missing,
        "graph mode max-autotune, by a callback of PyPTO": pypto + _callback_problem(),
        "graph mode max-autotune, by a kernel package": converters,
    }
    device = [npu["problem"]] if npu["problem"] else []
    if NO_NPU in device:  # nothing else is to be installed for a machine without one
        on_npu = dict.fromkeys(on_npu, [])
    elif versions["torch_npu"] is None and (problem := _build_problem()):
        device.append(problem)
    ways = {
        "ops on the CPU": load,
        "models of transformers on the CPU": load + models,
        "torch.compile on the CPU": load + compiler,
        "building from source": compiler + python,
        "NPU kernels in PyPTO's interpreter and cost model": load + pypto,
        "NPU kernels as PyPTO's generated code": load + pypto + compiler,
    } | {way: load + lacking + device for way, lacking in on_npu.items()}
    return {
        way: {"works": not missing, "missing": [vars(problem) for problem in missing]}
        for way, missing in ways.items()
    }


def _callback_problem() -> list[Problem]:
    """Why torchair does not compile a callback from a GE graph."""
    if (home := requirements.cann()) is None:
        return [Problem("CANN, against which torchair compiles", "source its set_env.sh")]
    header = f"{home}/include/graph/custom_op.h"
    if not os.path.exists(header):
        return [Problem(f"{header}, which newer versions of CANN have", "use npugraph_ex")]
    if converter.problem() is None:  # a converter keeps torchair from the callback
        return [Problem("no converters: GE has kernels", f"set {converter.VARIABLE}=0")]
    return []
