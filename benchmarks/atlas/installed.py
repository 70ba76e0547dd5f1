"""Prints what is installed and what works here, and writes it into the file of the argument."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import torch  # noqa: F401  # with torch_npu, which it imports

from custom_pypto import env, kernel_packages, requirements
from custom_pypto.descriptions import KERNELS, OPS, ge_type

RELATED = re.compile(
    r"torch|npu|ascend|cann|pypto|pto|triton|vllm|transformers|safetensors|accelerate|numpy|"
    r"protobuf|psutil|te$|op.*compile|hccl",
    re.IGNORECASE,
)


def printed(*command: str) -> str:
    """What a command prints, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout or done.stderr).strip()


def main(file: str) -> None:
    report = env.collect()
    distributions = {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions()
        if RELATED.search(distribution.metadata["Name"] or "")
    }
    found = {
        "env": report,
        "ops": list(KERNELS),
        "pypto_copy": requirements.pypto_copy(),
        "kernel_packages": kernel_packages.packages(),
        "packaged": [op for op in OPS if kernel_packages.listed(ge_type(op))],
        "distributions": dict(sorted(distributions.items())),
    }
    Path(file).write_text(json.dumps(found, ensure_ascii=False), "utf-8")
    print(env.render(report))
    print("\nPyPTO", found["pypto_copy"] or "not installed", sep="\n  ")
    print("\nKernel packages", *found["kernel_packages"] or ["none"], sep="\n  ")
    print("  with our operators:", ", ".join(found["packaged"]) or "none")
    print("\nDistributions", *(f"{k} {v}" for k, v in found["distributions"].items()), sep="\n  ")
    print("\nnpu-smi info", printed("npu-smi", "info"), sep="\n")
    print(env.summary(report))


if __name__ == "__main__":
    main(sys.argv[1])
