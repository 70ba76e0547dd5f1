"""What tests of examples/convert_checkpoint.py share."""

import re
import subprocess
import sys

import pytest
import torch
from repository import REPOSITORY
from safetensors.torch import load_file

sys.path.append(str(REPOSITORY / "examples"))

import convert_checkpoint  # noqa: E402
from conversion.folder import alone  # noqa: E402, F401


@pytest.fixture(name="convert")
def convert_in_this_process(monkeypatch, capsys):
    def run(*arguments):
        """What the program prints, or says when it gives up."""
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *map(str, arguments)])
        try:
            convert_checkpoint.main()
        except SystemExit as failure:
            return str(failure)
        return capsys.readouterr().out

    return run


def tensors_of(path):
    return {n: it for file in path.glob("*.safetensors") for n, it in load_file(file).items()}


def assert_same_tensors(found, want):
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        other = want[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        both = (x.contiguous().view(-1).view(torch.uint8) for x in (tensor, other))
        assert torch.equal(*both), name


def assert_gives_up(said, message):
    assert re.match(f"convert_checkpoint.py: {message}", said), said


def assert_checksums_hold(path):
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    listed = {line.split("  ")[1] for line in (path / "SHA256SUMS").read_text().splitlines()}
    assert {file.name for file in path.iterdir()} - listed == {"SHA256SUMS", "conversion.json"}
