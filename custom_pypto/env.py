"""Reports installed versions and hardware, what works with them, what is missing and the remedy.

``custom-pypto env`` prints it, with ``--json`` for scripts; :func:`collect` returns it.

Imports the standard library only, so that the report works even if torch does not load.
"""

from __future__ import annotations

import os
import sys
import sysconfig

from . import converter, eager, kernel_packages, machine, requirements
from .requirements import Problem, pypto_problem
from .version import __version__

#: every ``CUSTOM_PYPTO_*`` of docs/settings.md
SETTINGS = {
    f"CUSTOM_PYPTO_{name}"
    for name in (
        "CHECK_RANKS CPU_ISA EAGER GE_CONVERTERS LOG READY_ON_HOST RECORD_SPACE SANITIZE "
        "TEST_PYPTO UNTESTED_TORCH WERROR"
    ).split()
}


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
    versions = machine.versions()
    pypto, packages = pypto_problem(), _package_problem(load_error)
    runs, lacking = _eager(pypto, packages)
    npu = machine.npu() | {"eager": runs}
    error = None if load_error is None else load_error.what
    return {
        "custom_pypto": {
            "version": __version__,
            "commit": machine.commit(),
            "path": os.path.dirname(os.path.abspath(__file__)),
            "load_error": error,
        },
        "versions": versions,
        "cpu": machine.cpu(loaded=error is None),
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
    torch_npu = machine.torch_npu_problem()
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
    if machine.NO_NPU in device:  # nothing else is to be installed for a machine without one
        on_npu = dict.fromkeys(on_npu, [])
    elif versions["torch_npu"] is None and (problem := machine.build_problem()):
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
