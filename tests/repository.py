"""The files of the repository."""

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def tracked_files() -> list[str]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    files = [name for name in done.stdout.splitlines() if (REPOSITORY / name).is_file()]
    if not files:
        pytest.skip("git ignores this folder")
    return files
