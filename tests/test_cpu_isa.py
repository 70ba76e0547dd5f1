"""The other tests run the kernels this CPU prefers; users run the rest as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import custom_pypto  # noqa: F401  loads the ops

TESTS = Path(__file__).parent
NAMES = (
    "(equals_the_reference or selects_what_the_reference or nan_ or infinite or rounds_as)"
    " and not (real_sizes and (hostile or ties))"
)


FILES = (
    "npu_lightning_indexer_pto",
    "npu_quant_lightning_indexer_pto",
    "npu_sparse_flash_attention_pto",
    "npu_sparse_attention_pto",
    "weight_only_linear",
)


@pytest.mark.parametrize(
    ("isa", "names"),
    [
        pytest.param("generic", NAMES, marks=pytest.mark.slow),
        ("avx2", NAMES),
        ("avx512", NAMES),
        ("avx512_bf16", NAMES),
        ("amx_emulated", NAMES),
        pytest.param("amx_emulated", "test", marks=pytest.mark.slow),  # all
    ],
)
def test_kernels_of_every_instruction_set_equal_the_reference(isa, names):
    if isa == torch.ops.custom_pypto.cpu_isa():
        pytest.skip(f"{isa} is what the other tests run")
    environment = os.environ | dict(CUSTOM_PYPTO_CPU_ISA=isa)
    probe = [sys.executable, "-c", "import torch, custom_pypto; torch.ops.custom_pypto.cpu_isa()"]
    found = subprocess.run(probe, env=environment, cwd=TESTS.parent, capture_output=True, text=True)
    if "CUSTOM_PYPTO_CPU_ISA must be one of" in found.stderr:
        pytest.skip(f"this CPU does not have {isa}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", names]
    ran = subprocess.run(
        [*command, *(str(TESTS / f"test_{op}.py") for op in FILES)],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
