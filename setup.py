"""Builds ``custom_pypto._C`` for the installed torch, and says so in the metadata.

Everything else about the package is in pyproject.toml.
"""

import glob
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from setuptools import setup

# the build needs no backend; one installed without its driver would break the import
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ModuleNotFoundError as error:
    # an isolated build, which pip makes by default, sees no torch of the environment
    raise SystemExit(
        f"setup.py: {error}: the ops are compiled for the torch that is installed; in the "
        "repository run bash build_and_install.sh, or pip install torch 'setuptools>=77.0.3' ninja "
        "and then pip install --no-build-isolation with what you passed"
    ) from error

# neither can be imported, since the package needs what is built here
requirements = SimpleNamespace(**runpy.run_path("custom_pypto/requirements.py"))
if problem := requirements.recipe_problem():
    raise SystemExit(f"setup.py: {problem}")
VERSION = runpy.run_path("custom_pypto/version.py")["__version__"]
if os.path.exists(".git"):  # the commit, which `custom-pypto env` reports
    asked = subprocess.run(["git", *requirements.COMMIT], capture_output=True, text=True)
    COMMIT = f".g{asked.stdout.strip().replace('-', '.')}" if asked.returncode == 0 else ""
else:
    COMMIT = ""
CSRC = "custom_pypto/csrc"
# that most sources outside of csrc/cpu need, parsed once for all
HEADERS = [
    "ATen/Parallel.h",
    "ATen/core/Tensor.h",
    "ATen/core/dispatch/Dispatcher.h",
    "torch/csrc/autograd/autograd_not_implemented_fallback.h",
    "torch/library.h",
]
TORCH = str(torch.__version__)
if problem := requirements.torch_problem(TORCH):
    raise SystemExit(f"setup.py: {problem}")

# exact, so that every desk and every server formats and tests alike
TEST_TOOLS = [
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",
    "hypothesis==6.168.5",
    "ruff==0.17.5",
    "clang-format==23.1.5",
    "import-linter==2.15",
    "mypy==2.4.1",
    f"peft==0.21.2; python_version >= '{requirements.MODELS_PYTHON}'",
]

# for `run.sh sanitize`; -g1 adds line numbers to reports
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}
sanitizer = os.environ.get("CUSTOM_PYPTO_SANITIZE")
if sanitizer and sanitizer not in SANITIZERS:
    raise SystemExit(
        f"setup.py: CUSTOM_PYPTO_SANITIZE must be one of {', '.join(SANITIZERS)}, got {sanitizer!r}"
    )
sanitize = SANITIZERS[sanitizer] if sanitizer else []

ALL = ["-O3", "-Wall", "-Wextra"]
if sanitize:
    ALL += ["-O1", "-g1", "-fno-omit-frame-pointer", *sanitize]
if requirements.switched_on("CUSTOM_PYPTO_WERROR"):
    ALL.append("-Werror")
# without those of the interpreter, so that they are the same for each
KERNEL_FLAGS = ["-std=c++17", "-fPIC", "-fwrapv", *ALL]
# without -fopenmp at::parallel_for compiles to a serial loop, silently; -g0 because the
# interpreter's own flags may ask for debug information, most of it about torch's headers
FLAGS = ["-DPy_LIMITED_API=0x030A0000", "-fopenmp", "-g0", "-Winvalid-pch", *ALL]
FLAGS.append(f"-std=c++{requirements.cxx_standard(TORCH)}")

# What ninja compiles before torch's own plan: the kernels, once for all versions of torch and of
# Python, and torch's headers.
KERNELS_FOLDER = "build/temp/kernels"
KERNELS = {
    file: f"{KERNELS_FOLDER}/{os.path.basename(file)}.o"
    for file in sorted(glob.glob(f"{CSRC}/cpu/*.cpp"))
}
# what a CPU may lack, as /proc/cpuinfo calls it
INSTRUCTIONS = {
    "amx.cpp": "amx_bf16",
    "amx_emulated.cpp": "avx512_bf16",
    "avx2.cpp": "avx2",
    "avx2_int8.cpp": "avx2",
    "avx512.cpp": "avx512bw",
    "avx512_bf16.cpp": "avx512_bf16",
    "avx512_bf16_weights.cpp": "avx512_bf16",
    "avx512_vnni.cpp": "avx512_vnni",
}
PLAN = f"""
builddir = {KERNELS_FOLDER}
rule kernel
  command = {{cxx}} {{kernel_flags}} -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule headers
  command = {{cxx}} {{header_flags}} -x c++-header $in -o $out
{{kernels}}
build {{headers}}.gch: headers {{headers}}
"""


class Incremental(BuildExtension):
    """Keeps the build folder: an editable build in a temporary one would compile everything."""

    def finalize_options(self):
        super().finalize_options()
        # one for each torch: ninja does not see that system headers changed
        self.build_temp = f"build/temp/{TORCH}"

    @staticmethod
    def kernels_of(cpuinfo):
        """What a build for development compiles: the kernels that this CPU can run, and those that
        another one has compiled here before, which a folder that moves between two keeps.
        """
        if not (flags := re.search(r"^flags\s*:(.*)", cpuinfo, re.MULTILINE)):
            return KERNELS
        runs = {None, *flags.group(1).split()}
        return {
            file: to
            for file, to in KERNELS.items()
            if INSTRUCTIONS.get(os.path.basename(file)) in runs or os.path.exists(to)
        }

    def build_extensions(self):
        kernels = KERNELS
        if self.inplace or self.editable_mode:
            kernels = self.kernels_of(Path("/proc/cpuinfo").read_text())
        extension.extra_objects = list(kernels.values())
        extension.depends += extension.extra_objects  # one that is new is linked
        headers = f"{self.build_temp}/torch.h"
        plan = f"{KERNELS_FOLDER}/build.ninja"
        flags = [*self.compiler.compiler_so[1:], *extension.extra_compile_args]
        texts = {
            headers: "".join(f"#include <{name}>\n" for name in HEADERS),
            plan: PLAN.format(
                cxx=os.environ.get("CXX") or "c++",
                kernel_flags=" ".join(KERNEL_FLAGS),
                kernels="".join(f"build {to}: kernel {file}\n" for file, to in kernels.items()),
                headers=headers,
                header_flags=" ".join(flags),
            ),
        }
        for name, text in texts.items():
            file = Path(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            if not file.exists() or file.read_text() != text:  # ninja goes by its time
                file.write_text(text)
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []  # as torch
        subprocess.run([sys.executable, "-m", "ninja", "-f", plan, *jobs], check=True)
        extension.extra_compile_args += ["-include", os.path.abspath(headers)]
        super().build_extensions()

    def run(self):
        super().run()
        library = self.get_ext_fullpath("custom_pypto._C")
        with open(f"{os.path.dirname(library)}/_C.torch", "w", encoding="ascii") as file:
            file.write(requirements.minor(TORCH))  # read before the library is loaded


extension = CppExtension(
    "custom_pypto._C",
    sources=sorted({*glob.glob(f"{CSRC}/**/*.cpp", recursive=True)} - {*KERNELS}),
    depends=sorted({*glob.glob(f"{CSRC}/**/*.h", recursive=True), *KERNELS}),
    # not -fopenmp: libtorch_cpu brings libgomp, and a second one would have its own threads
    extra_link_args=sanitize,
    py_limited_api=True,  # Python's limited API: one library for every Python version
)
# torch's headers are system headers, without warnings: -Werror applies to our sources only
extension.extra_compile_args = FLAGS + [f"-isystem{path}" for path in extension.include_dirs]
extension.include_dirs = []

setup(
    version=f"{VERSION}+torch{requirements.minor(TORCH)}{COMMIT}",
    install_requires=requirements.dependencies(TORCH),
    extras_require={**requirements.extras(TORCH), "test": TEST_TOOLS},
    ext_modules=[extension],
    cmdclass={"build_ext": Incremental},
    # compat: a path that type checkers follow, too
    options={"bdist_wheel": {"py_limited_api": "cp310"}, "editable_wheel": {"mode": "compat"}},
)
