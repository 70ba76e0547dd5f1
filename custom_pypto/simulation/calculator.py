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

import pypto
import torch
from pypto._utils import BuildOnlineManager

from .compiler import SimulationError, built_once

SOURCES = Path(pypto.__file__).parent / "lib" / "calculator"


@functools.cache
def load() -> None:
    """Compiles the library if the cache has none and loads it into this process."""
    facts = hashlib.sha256(f"{torch.__version__} {torch.__file__}".encode())
    for path in sorted(SOURCES.rglob("*")):
        if path.is_file():
            facts.update(path.read_bytes())
    name = f"libtile_fwk_calculator-{facts.hexdigest()[:16]}.so"
    library = built_once("PyPTO's interpreter", name, _build)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    BuildOnlineManager().calculator_loaded = True


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
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    for command in (configure, [_cmake(), "--build", str(folder), "--parallel", "2"]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SimulationError(
                "custom_pypto.simulation: PyPTO's interpreter library does not compile, "
                "g++ 9.4 or later, make or ninja are needed:\n" + done.stdout[-2000:]
            )
    (folder / "libtile_fwk_calculator.so").rename(library)
