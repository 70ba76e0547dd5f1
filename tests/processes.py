"""Python processes on machines that are not as they should be."""

import os
import subprocess
import sys

from repository import REPOSITORY


def variables_of(path, changes: dict) -> dict:
    """The environment with ``path`` before everything else, and no CANN."""
    inherited = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    path = os.pathsep.join(map(str, path))
    return inherited | {"PYTHONPATH": path, "LD_LIBRARY_PATH": ""} | changes


def python(*arguments, path=(), cwd=REPOSITORY, **variables) -> subprocess.CompletedProcess:
    """Runs Python."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=variables_of(path, variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def install(site, name, version, init, entry_points=""):
    """A package as pip would leave it in ``site``."""
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(init)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    return site
