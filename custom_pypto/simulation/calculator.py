"""The library behind PyPTO's interpreter, compiled from the sources in PyPTO's wheel.

PyPTO compiles it anew in every process, 25 s each. Here it is compiled once per user, torch and
PyPTO, and loaded from the cache afterwards.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from ..requirements import PYPTO_GCC, cxx_standard, gcc
from .compiler import SimulationError, built_once, pypto_versions

SOURCES, *_ = FOLDERS = [pypto_versions.LIB / folder for folder in pypto_versions.CALCULATOR]


@functools.cache
def load() -> None:
    """Compiles the library if the cache has none and loads it into this process."""
    facts = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode())
    for path in sorted({path for folder in FOLDERS for path in folder.rglob("*")}):
        if path.is_file():
            facts.update(path.read_bytes())
    name = f"libtile_fwk_calculator-{facts.hexdigest()[:16]}.so"
    library = built_once("PyPTO's interpreter", name, _build)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    pypto_versions.calculator_is_loaded()


def _cmake() -> str:
    try:
        import cmake  # from PyPI
    except ImportError:
        found = shutil.which("cmake")
    else:
        found = os.path.join(cmake.CMAKE_BIN_DIR, "cmake")
    if found is None:
        raise SimulationError(
            "custom_pypto.simulation: PyPTO's interpreter needs cmake to compile a library once, "
            "found none; pip install cmake"
        )
    return found


def _build(library: Path) -> None:
    folder = library.parent / "build"
    configure = [
        *(_cmake(), "-S", str(SOURCES), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"),
        f"-DPY3_MOD_TORCH_VERSION={torch.__version__}",
        f"-DPY3_MOD_TORCH_ROOT_PATH={Path(torch.__file__).parent}",
        f"-DPY3_MOD_TORCH_C_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    if (standard := cxx_standard(torch.__version__)) != 17:
        # PyPTO sets 17 after this file is read, over any -D
        changed = folder.with_name("standard.cmake")
        options = [f"CMAKE_CXX17_{kind}_COMPILE_OPTION" for kind in ("STANDARD", "EXTENSION")]
        changed.write_text("".join(f"set({name} -std=c++{standard})\n" for name in options))
        configure.append(f"-DCMAKE_PROJECT_INCLUDE={changed}")
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    for command in (configure, [_cmake(), "--build", str(folder), "--parallel", "2"]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            oldest = max(PYPTO_GCC, str(gcc(torch.__version__)), key=float)
            raise SimulationError(
                "custom_pypto.simulation: PyPTO's interpreter library does not compile, "
                f"g++ {oldest} or later, make or ninja are needed:\n" + done.stdout[-2000:]
            )
    (folder / "libtile_fwk_calculator.so").rename(library)
