"""Builds ``custom_pypto._C``; everything else about the package is in pyproject.toml."""

import glob
import os

from setuptools import setup

# the build needs no backend, and one that is installed without its driver would break the import
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

CSRC = "custom_pypto/csrc"

# what `run.sh sanitize` asks for; -g1 names the lines of a report
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

# without -fopenmp at::parallel_for compiles to a serial loop, silently; -g0 because the
# interpreter's own flags may ask for debug information, most of it about torch's headers
FLAGS = ["-DPy_LIMITED_API=0x030A0000", "-O3", "-std=c++17", "-fopenmp", "-g0", "-Wall", "-Wextra"]
if sanitize:
    FLAGS += ["-O1", "-g1", "-fno-omit-frame-pointer", *sanitize]
if os.environ.get("CUSTOM_PYPTO_WERROR") == "1":
    FLAGS.append("-Werror")


class Incremental(BuildExtension):
    """An editable build would compile everything anew, in a temporary folder."""

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = "build/temp"


extension = CppExtension(
    "custom_pypto._C",
    sources=sorted(glob.glob(f"{CSRC}/*.cpp") + glob.glob(f"{CSRC}/cpu/*.cpp")),
    depends=sorted(glob.glob(f"{CSRC}/**/*.h", recursive=True)),
    # not -fopenmp: libgomp is what libtorch_cpu brings, a second one would have threads of its own
    extra_link_args=sanitize,
    py_limited_api=True,  # of Python's C API the limited part: one library for every Python
)
# as system headers torch's do not warn: -Werror judges our sources only
extension.extra_compile_args = FLAGS + [f"-isystem{path}" for path in extension.include_dirs]
extension.include_dirs = []

setup(
    ext_modules=[extension],
    cmdclass={"build_ext": Incremental},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
