"""Child processes, and what the commands need, installed where it is missing.

Standard library only: commands answer before anything is installed.
"""

import contextlib
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
BUILD = ("bash", ROOT / "build_and_install.sh")
ENVIRONMENT = Path(subprocess.check_output([*BUILD, "--where"], text=True).strip())
PYTHON = ENVIRONMENT / "bin/python"
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
# torch_npu without CANN breaks `import torch`: its folder is on PYTHONPATH only on demand
TORCH_NPU = ROOT / "build/torch_npu"
# not imported: the package needs what is built and installed
requirements = SimpleNamespace(**runpy.run_path(str(ROOT / "custom_pypto/requirements.py")))


def call(*command, check: bool = True, **options) -> int:
    """The exit code of a command; ``check``: ends with that of one that fails."""
    process = subprocess.Popen(list(map(str, command)), **options)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # which the command got, too
        process.wait()
        raise
    code = code if code >= 0 else 128 - code
    if check and code:
        sys.exit(code)
    return code


def output(*command, **options) -> str | None:
    """What a command prints, without its errors; None: it fails."""
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def become(*command) -> NoReturn:
    """Ends as this command, whose signals and exit code are then its own."""
    os.execvp(command[0], list(map(str, command)))


def warn(text: str) -> None:
    print(f"run.sh: {text}", file=sys.stderr)


def put_on_path(*folders: Path) -> None:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, folders), *filter(None, [before])])


def version(python: str | Path) -> str | None:
    """``3.12``; None: it does not run."""
    return output(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")


def setup(extras: str) -> None:
    """Installs this tree in editable mode, with these extras of pyproject.toml."""
    call(*BUILD, "--editable", extras, stdout=sys.stderr)
    if "models" not in extras:
        return
    oldest = requirements.MODELS_PYTHON
    if requirements.numbers(version(PYTHON)) < requirements.numbers(oldest):
        sys.exit(
            f"run.sh: transformers needs Python {oldest}, got an older one in {ENVIRONMENT}: "
            "models are unavailable, the ops work"
        )
    # if an installed torch_npu cannot load (no CANN), `import torch` fails
    if has_torch_npu() and output(PYTHON, "-c", "import torch") is None:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        warn(
            "transformers imports any installed torch_npu, and this one does not load: models are "
            "unavailable, the ops work (run.sh env gives the reason)"
        )


def setup_serving(*version: str) -> Path:
    """The newest vLLM, or this version, in an environment of its own, whose Python this is."""
    call(*BUILD, "--serving", *version, stdout=sys.stderr)
    return ROOT / "build" / "-".join(["serving", *version]) / "bin/python"


def has_torch_npu() -> bool:
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('torch_npu') is None)"
    return output(PYTHON, "-c", code) is not None


def wanted_torch_npu() -> list[str]:
    """For the installed torch; none: no torch_npu is tested with it."""
    code = "from importlib.metadata import version; print(version('torch'))"
    return requirements.torch_npu_of_simulator(output(PYTHON, "-I", "-c", code))


def has_torch_npu_folder() -> bool:
    """With the torch_npu of the installed torch."""
    installed = TORCH_NPU / "installed"
    return installed.exists() and installed.read_text().split() == wanted_torch_npu()


def setup_torch_npu() -> bool:
    """For graph mode without an NPU, into its own folder; whether there is one now."""
    if has_torch_npu() or has_torch_npu_folder():
        return True
    if not (wanted := wanted_torch_npu()):
        warn(
            "graph mode is skipped: no torch_npu is tested with this torch; one is with torch "
            f"{requirements.DEFAULT_TORCH}"
        )
        return False
    print(f"installing {' '.join(wanted)} into {TORCH_NPU}, for graph mode only", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="torch_npu.", dir=ROOT / "build") as folder:
        part = Path(folder, "torch_npu")
        # no dependencies: torch_npu pins its own torch; besides torch, torchair lacks only protobuf
        if call(PYTHON, *PIP, "--no-deps", "--target", part, *wanted, check=False) == 0:
            (part / "installed").write_text(" ".join(wanted))
            shutil.rmtree(TORCH_NPU, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run was faster
                part.rename(TORCH_NPU)
    if not has_torch_npu_folder():
        warn("torch_npu could not be installed, see above; graph mode is skipped")
    return has_torch_npu_folder()


def use_torch_npu(*before: Path) -> None:
    """For programs that import it themselves."""
    if not has_torch_npu():
        put_on_path(*before, TORCH_NPU)
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
