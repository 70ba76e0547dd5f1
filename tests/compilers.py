"""Headers of the library, compiled by themselves."""

import ctypes
import os
import shlex
import subprocess
from pathlib import Path


def compiled(folder: Path, source: str, headers: Path, *flags: str) -> ctypes.CDLL:
    """The library of a C++ source that includes ``headers``."""
    library = folder / f"compiled{len(flags)}.so"
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    command = [*compiler, "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{headers}", *flags]
    command += ["-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    return ctypes.CDLL(str(library))
