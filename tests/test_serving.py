"""vLLM on the ops: two engines and the plugin's start, if vLLM's own environment is there."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "build" / "serving" / "bin" / "python"


def test_engines_of_vllm_equal_transformers():
    if not PYTHON.exists():
        pytest.skip(
            "vLLM has an environment of its own, 3.5 GB: `bash run.sh test --serving` makes it "
            "and runs all its tests"
        )
    command = [PYTHON, "-m", "pytest", "-m", "not matrix", "-p", "no:cacheprovider"]
    command += ["tests/test_engines.py", "tests/test_plugin.py"]
    run = subprocess.run(
        command, cwd=ROOT / "integrations" / "vllm", capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
