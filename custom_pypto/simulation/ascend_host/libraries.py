"""Stub libraries in place of CANN's: compiled once, loaded before torch_npu.

torch_npu's libraries need every symbol at load time. The list of CANN's symbols is read from these
libraries; ``cann.cpp`` implements a few, and the others are generated stubs, which do nothing or
fail when called. One library holds all symbols; each other library that torch_npu names is empty
and links to it.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from ... import requirements
from ...requirements import TORCH_NPU, installed_version, listed, minor
from ..compiler import SimulationError, built_once

NEEDED = ("protobuf", "numpy", "PyYAML", "packaging")  # torchair's dependencies besides torch
SOURCE = Path(__file__).with_name("cann.cpp")
NNOPBASE = Path(__file__).with_name("nnopbase.cpp")
TORCH_SETTINGS = Path(__file__).with_name("torch_settings.cpp")
OTHERS = [Path(__file__).with_name(name) for name in ("annex_k.cpp", "core_limits.cpp")]
SOURCES = (SOURCE, NNOPBASE, TORCH_SETTINGS, *OTHERS)
# c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys(), and its static variable: an
# older torch has the function in a header
KEYS = "N3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"
KEYS_FUNCTION, KEYS_VARIABLE, KEYS_GUARD = f"_Z{KEYS}", f"_ZZ{KEYS}E4keys", f"_ZGVZ{KEYS}E4keys"
MAIN = "libascendcl.so"
# do nothing and report success
SUCCEED = (
    "aclInit aclFinalize aclrtResetDevice aclrtResetDeviceForce aclrtSetDeviceSatMode "
    "aclrtSetCurrentContext aclrtDestroyContext aclSetCompileopt aclrtSetOpExecuteTimeOut "
    "aclrtSetStreamFailureMode aclrtResetEvent MsprofRegisterCallback MsprofReportApi "
    "MsprofReportCompactInfo MsprofReportAdditionalInfo MsprofSysCycleTime MsprofGetHashId "
    "aclAppLog HcclSetConfig"
).split()


class AscendHostError(SimulationError):
    """The simulator failed, or does not support a call that needs an NPU."""


class AscendHostUnavailable(AscendHostError):
    """The simulator cannot run on this machine as it is; the message says why, and the remedy."""


@functools.cache
def load() -> ctypes.CDLL:
    """Compiles the libraries if the cache has none and loads them into this process.

    Raises:
        AscendHostUnavailable: next to a real CANN, or without the torch_npu of the installed torch,
            its dependencies, a compiler or binutils.
        AscendHostError: the libraries do not compile.
    """
    if found := cann():  # the simulator would hide the NPU, or CANN parts of the simulator
        raise AscendHostUnavailable(
            f"ascend_host: the host simulator must not run beside a real CANN, and {found}; "
            "use the NPU, or a machine or container without CANN"
        )
    folder = built_once("the host simulator of CANN", _name(), _build)
    # the loader later resolves these names to the libraries that are already loaded
    others = sorted(path for path in folder.glob("*.so") if path.name != MAIN)
    main, *_ = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in (folder / MAIN, *others)]
    _clear_allocator_keys(main)
    return main


def _clear_allocator_keys(main: ctypes.CDLL) -> None:
    """Clears the allocator settings that torch registered for the accelerator of its build."""
    libc10 = ctypes.CDLL(str(_folder_of("torch") / "lib/libc10.so"))
    if hasattr(libc10, KEYS_FUNCTION):
        function = getattr(libc10, KEYS_FUNCTION)
        function.restype = ctypes.c_void_p
        main.ascend_host_clear_keys(ctypes.c_void_p(function()))
    # constructed once something is registered
    elif hasattr(libc10, KEYS_GUARD) and ctypes.c_char.in_dll(libc10, KEYS_GUARD).value != b"\0":
        main.ascend_host_clear_keys(ctypes.byref(ctypes.c_char.in_dll(libc10, KEYS_VARIABLE)))


def cann() -> str | None:
    """The evidence of a real CANN on this machine; None if there is none."""
    if is_loadable(MAIN):
        return f"{MAIN} can be loaded"
    home = requirements.cann()
    return f"it is in {home}" if home else None


def _name() -> str:
    """Name of the library folder, a hash of everything that the libraries are built from."""
    facts = hashlib.sha256()
    for path in (Path(__file__), *SOURCES, NNOPBASE.with_suffix(".h")):
        facts.update(path.read_bytes())
    compiler = _run([*_compiler(), "--version"])
    machine = (platform.machine(), sys.version)
    facts.update(repr((_torch_npu(), installed_version("torch"), machine, compiler)).encode())
    return f"ascend_host-{facts.hexdigest()[:16]}"


def _torch_npu() -> str:
    """The installed version; validates it and its dependencies."""
    torch, version = installed_version("torch"), installed_version("torch_npu")
    wanted = minor(torch)
    if wanted not in TORCH_NPU:
        raise AscendHostUnavailable(
            f"ascend_host: needs torch {listed(TORCH_NPU)} with its torch_npu, found torch "
            f"{torch}; install one of them, and custom_pypto for it"
        )
    missing = [name for name in NEEDED if installed_version(name) is None]
    if version is None or minor(version) != wanted or missing:
        raise AscendHostUnavailable(
            f"ascend_host: needs torch_npu {wanted} for torch {torch}, {', '.join(NEEDED)}; found "
            f"torch_npu {version or 'none'}{''.join(f', no {name}' for name in missing)}; in the "
            "repository `bash run.sh graph` installs it into build/torch_npu, elsewhere `pip "
            f"install --no-deps --target FOLDER 'torch_npu=={wanted}.*' "
            f"{' '.join(missing or ['protobuf'])}`; put that folder on PYTHONPATH of this program "
            "only"
        )
    return version


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX") or "g++")
    missing = ["g++, or $CXX"] if shutil.which(command[0]) is None else []
    missing += [tool for tool in ("nm", "readelf") if shutil.which(tool) is None]
    if missing:
        raise AscendHostUnavailable(
            f"ascend_host: must compile libraries once, found no {', no '.join(missing)}; install "
            "g++ and binutils"
        )
    return command


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode:
        raise AscendHostError(
            f"ascend_host: {command[0]} failed:\n{(done.stderr or done.stdout)[-2000:]}"
        )
    return done.stdout


def _symbols(library: Path, which: str) -> set[str]:
    """Names of dynamic symbols; ``name@VERSION`` comes from system libraries such as the C
    library."""
    lines = _run(["nm", "-D", "--format=posix", which, str(library)]).splitlines()
    # w: weak, which may stay undefined
    return {name for name, kind, *_ in map(str.split, lines) if kind != "w"}


def _wanted() -> tuple[set[str], set[str]]:
    """The symbols and the libraries that torch_npu and torchair expect of CANN."""
    npu, torch = _folder_of("torch_npu"), _folder_of("torch")
    modules = [*npu.glob("*.so"), *npu.glob("lib/*.so"), *npu.glob("dynamo/torchair/core/*.so")]
    present = [*modules, *torch.glob("lib/*.so*")]
    undefined = set().union(*(_symbols(path, "--undefined-only") for path in modules))
    defined = set().union(*(_symbols(path, "--defined-only") for path in present))
    process = ctypes.CDLL(None)  # Python itself and the C library
    symbols = {
        name
        for name in undefined - {symbol.partition("@")[0] for symbol in defined}
        if "@" not in name and not hasattr(process, name)
    }
    needed = set()
    for path in modules:
        for line in _run(["readelf", "-d", str(path)]).splitlines():
            if "(NEEDED)" in line:
                needed.add(line.partition("[")[2].partition("]")[0])
    return symbols, {
        name for name in needed - {path.name for path in present} if not is_loadable(name)
    }


def _folder_of(package: str) -> Path:
    return Path(importlib.util.find_spec(package).origin).parent


def is_loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _build(folder: Path) -> None:
    compiler = _compiler()
    symbols, libraries = _wanted()
    folder.mkdir()
    flags, rest = ["-O1", "-fPIC"], folder / "rest.c"
    compiled, defined = [], set()
    for source in SOURCES:
        compiled.append(str(folder / source.with_suffix(".o").name))
        _run([*compiler, "-std=c++17", *flags, "-c", str(source), "-o", compiled[-1]])
        lines = _run(["nm", "--defined-only", "--format=posix", compiled[-1]]).splitlines()
        defined |= {line.split()[0] for line in lines}
    rest.write_text(_generated(symbols - defined))

    def link(name: str, *parts: str) -> None:
        soname = f"-Wl,-soname,{name}"
        _run([*compiler, "-shared", *flags, soname, *parts, "-o", str(folder / name)])

    link(MAIN, *compiled, "-x", "c", str(rest))
    for name in sorted((libraries | {"libnnopbase.so"}) - {MAIN}):
        link(name, "-Wl,--no-as-needed", f"-L{folder}", "-lascendcl")


def compile_library(source: Path, library: Path) -> None:
    """Compiles a library of a kernel package, whose undefined symbols are the simulator's."""
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{NNOPBASE.parent}"]
    _run([*_compiler(), *flags, str(source), "-o", str(library)])


def _generated(symbols: set[str]) -> str:
    """C stubs, most of which report their name and fail."""
    lines = [
        "int ascend_host_missing(const char*);",
        "void ascend_host_missing_cpp(const char*);",
    ]
    for i, symbol in enumerate(sorted(symbols.union(SUCCEED))):
        lines.append(f'long function{i}(void) __asm__("{symbol}");')
        if symbol in SUCCEED:
            body = "return 0;"
        elif symbol.startswith("_Z"):
            body = f'ascend_host_missing_cpp("{symbol}"); return 0;'
        else:
            body = f'return ascend_host_missing("{symbol}");'
        lines.append(f"long function{i}(void) {{ {body} }}")
    return "\n".join(lines) + "\n"
