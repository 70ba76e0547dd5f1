"""Builds ``custom_pypto._C``; everything else about the package is in pyproject.toml."""

import glob
import os

from setuptools import setup

# the build needs no backend; one installed without its driver would break the import
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

CSRC = "custom_pypto/csrc"

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

# without -fopenmp at::parallel_for compiles to a serial loop, silently; -g0 because the
# interpreter's own flags may ask for debug information, most of it about torch's headers
FLAGS = ["-DPy_LIMITED_API=0x030A0000", "-O3", "-std=c++17", "-fopenmp", "-g0", "-Wall", "-Wextra"]
if sanitize:
    FLAGS += ["-O1", "-g1", "-fno-omit-frame-pointer", *sanitize]
if os.environ.get("CUSTOM_PYPTO_WERROR") == "1":
    FLAGS.append("-Werror")


class Incremental(BuildExtension):
    """Keeps the build folder: an editable build in a temporary one would compile everything."""

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = "build/temp"


extension = CppExtension(
    "custom_pypto._C",
    sources=sorted(glob.glob(f"{CSRC}/*.cpp") + glob.glob(f"{CSRC}/cpu/*.cpp")),
    depends=sorted(glob.glob(f"{CSRC}/**/*.h", recursive=True)),
    # not -fopenmp: libtorch_cpu brings libgomp, and a second one would have its own threads
    extra_link_args=sanitize,
    py_limited_api=True,  # Python's limited API: one library for every Python version
)
# torch's headers are system headers, without warnings: -Werror applies to our sources only
extension.extra_compile_args = FLAGS + [f"-isystem{path}" for path in extension.include_dirs]
extension.include_dirs = []

setup(
    ext_modules=[extension],
    cmdclass={"build_ext": Incremental},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
