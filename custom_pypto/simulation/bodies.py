"""Compiles the C++ that PyPTO generates for each task, for the host instead of an AI core.

A body includes PyPTO's tile operations, from its wheel, and these name the instructions of the PTO
ISA, which are in ``isa/``. Results are cached by the text of the body.
"""

import concurrent.futures
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pypto

from ..requirements import PYPTO_GCC
from .compiler import SimulationError, built_once

ISA = Path(__file__).parent / "isa"
INCLUDE = Path(pypto.__file__).parent / "lib" / "include"
HEADERS = ("tilefwk", "tileop")  # of INCLUDE

LIBRARY_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared")
# PyPTO's macros for Atlas A2/A3; the sanitizer's calls, which the library implements, report every
# load and store of the scalar unit; not optimized, as that takes longer than a body runs
BODY_FLAGS = (
    *("-std=c++17", "-O0", "-fPIC", "-w", "-DSUPPORT_TILE_TENSOR", "-D__DAV_V220", "-DMEMORY_BASE"),
    *("-fsanitize=kernel-address", "--param", "asan-instrumentation-with-call-threshold=0"),
    *("--param", "asan-stack=0", "--param", "asan-globals=0"),
)
CORES = {
    "aic": ("-D__AIC__", "-D__DAV_C220_CUBE__"),
    "aiv": ("-D__AIV__", "-D__DAV_C220_VEC__"),
}


@dataclass(frozen=True)
class Body:
    """The code of a kind of tasks, compiled for the host."""

    hash: int  # PyPTO's name of the body
    function: str
    title: str  # for messages: loop, path, number and kind of core
    library: Path


@functools.cache
def _compiler() -> tuple[str, str]:
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        raise SimulationError(
            "custom_pypto.simulation: generated code needs g++ to be compiled, found none; "
            f"install g++ {PYPTO_GCC} or later"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return path, version


def _compile(what: str, *arguments: str) -> None:
    done = subprocess.run([_compiler()[0], *arguments], capture_output=True, text=True)
    if done.returncode:
        errors = re.findall(r"error: (.*)", done.stderr) or [done.stderr[-500:]]
        unknown = [error for error in errors if "modelled" in error or "ISA" in error] or errors
        raise SimulationError(
            f"{what} does not compile for the host: " + "; ".join(dict.fromkeys(unknown[:3]))
        )


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".hpp", ".cpp"))


@functools.cache
def toolchain() -> Path:
    """The folder with the library of instructions, the headers and a cache of bodies."""
    facts = hashlib.sha256(repr((_compiler(), LIBRARY_FLAGS, BODY_FLAGS)).encode())
    for path in [*_files(ISA), *(p for name in HEADERS for p in _files(INCLUDE / name))]:
        facts.update(path.name.encode() + path.read_bytes())
    name = f"generated-{facts.hexdigest()[:16]}"
    return built_once("the instructions for PyPTO's generated code", name, _build)


def _build(folder: Path) -> None:
    for path in (p for name in HEADERS for p in _files(INCLUDE / name)):
        copy = folder / path.relative_to(INCLUDE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # an attribute of the device's compiler, which others do not parse
        copy.write_text(re.sub(r"\[ *(host, *)?aicore *\]", "", path.read_text(errors="replace")))
    sources = [str(path) for path in _files(ISA / "library") if path.suffix == ".cpp"]
    output = str(folder / "libisa.so")
    _compile("isa/library", *LIBRARY_FLAGS, f"-I{folder}", "-o", output, *sources)
    for core in CORES:
        (folder / core).mkdir()
        header = str(folder / core / "TileOpImpl.h.gch")
        _compile(
            "isa/TileOpImpl.h",
            *(*_body_flags(folder, core), "-x", "c++-header", "-o", header),
            str(ISA / "TileOpImpl.h"),
        )
    (folder / "bodies").mkdir()


def _body_flags(folder: Path, core: str) -> list[str]:
    # the compiled header, in the first folder, must be found first
    include = [folder / core, ISA, folder, folder / "tileop"]
    return [*BODY_FLAGS, *CORES[core], *(f"-I{path}" for path in include)]


def _for_host(text: str) -> str:
    """The text of a body with host addresses of the buffers, without includes and build command."""
    text = text.split("// kernel compilation command")[0]
    text = re.sub(r"#include .*\n", "", text).replace("[aicore]", "")
    text = re.sub(
        r"((UB|L1|L0A|L0B|L0C)_S\d+_E\d+(?:_T)? = \([^()]*\))get_imm\(",
        r"\1isa::buffer_address(isa::Buffer::\2, ",
        text,
    )
    return f"{text}\n"


def _body(source: Path) -> tuple[Body, str]:
    """The body of a file from PyPTO, ``<function>_<number>_<aic or aiv>.cpp``, and its code."""
    text = source.read_text()
    code = _for_host(text)
    name = f"{hashlib.sha256(code.encode()).hexdigest()[:24]}.so"
    title = re.sub(
        r"^TENSOR_(.*)_Unroll(\d+)_PATH(\d+)_.*_(\d+)_(aic|aiv)$", r"\1 path \3 \5 \4", source.stem
    )
    body = Body(
        hash=int(re.search(r"// funcHash: (\d+)", text)[1]),
        function=re.search(r"void (\w+)\(CoreFuncParam", text)[1],
        title=title,
        library=toolchain() / "bodies" / name,
    )
    return body, code


def _compile_bodies(core: str, bodies: dict[Body, str]) -> None:
    """In one library: templates that several bodies use are compiled once."""
    folder = toolchain()
    first = next(iter(bodies))
    # beside the libraries, to link them; other threads and hosts may compile the same ones
    with tempfile.TemporaryDirectory(prefix="part-", dir=first.library.parent) as part:
        source, output, link = (Path(part) / name for name in ("bodies.cpp", "bodies.so", "link"))
        source.write_text('#include "TileOpImpl.h"\n' + "".join(bodies.values()))
        flags = [*_body_flags(folder, core), "-shared", "-o", str(output)]
        try:
            _compile(f"the generated code of {first.title}", *flags, str(source))
        except SimulationError:
            if len(bodies) == 1:
                raise
            for body, code in bodies.items():  # one of them does not compile
                _compile_bodies(core, {body: code})
            return
        for body in bodies:
            os.link(output, link)
            link.replace(body.library)


def compiled_bodies(folder: Path) -> list[Body]:
    """The bodies of PyPTO's folder ``kernel_aicore``."""
    toolchain()
    found = {core: dict(map(_body, sorted(folder.glob(f"*_{core}.cpp")))) for core in CORES}
    missing = {
        core: {body: code for body, code in bodies.items() if not body.library.exists()}
        for core, bodies in found.items()
    }
    with concurrent.futures.ThreadPoolExecutor(len(CORES)) as pool:
        jobs = [pool.submit(_compile_bodies, *job) for job in missing.items() if job[1]]
    for job in jobs:
        job.result()
    return [body for bodies in found.values() for body in bodies]
