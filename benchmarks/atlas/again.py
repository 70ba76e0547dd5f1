"""Whether an op gives the same bits again: in repeated calls, and in a process of its own.

    python benchmarks/atlas/again.py OP

The calls are those of ``verify``; what an op writes in place counts as a result.
"""

import hashlib
import subprocess
import sys

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import custom_pypto
from custom_pypto import layer_ops, reference
from custom_pypto.descriptions import LAYER_KERNELS

CALLS = 3
ONCE = "--once"
SIMULATOR = "custom_pypto.simulation.ascend_host"


def digest(op: str, arguments: dict) -> str:
    """Of the results of a call on an NPU, and of its arguments afterwards."""
    copies = {k: v.npu() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    out = getattr(layer_ops if op in LAYER_KERNELS else custom_pypto, op)(**copies)
    found = hashlib.sha256()
    for tensor in tree_leaves([out, list(copies.values())]):
        if isinstance(tensor, Tensor):
            found.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def digests(op: str, calls: int) -> dict[str, list[str]]:
    """Of each check of ``verify``: those of so many calls."""
    found = {}
    for dtype, shape, arguments in reference.MODULES[op].checks([torch.bfloat16, torch.float16]):
        name = f"{str(dtype).removeprefix('torch.')}, {shape}"
        found[name] = [digest(op, arguments) for _ in range(calls)]
    return found


def of_another_process(op: str) -> dict[str, str]:
    # not imported for its name: that would load PyPTO's internals beside a real CANN
    simulator = ["-m", SIMULATOR] if SIMULATOR in sys.modules else []
    command = [sys.executable, *simulator, __file__, op, ONCE]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    return {name: value for value, name in rows}


def main(op: str) -> int:
    mine, theirs = digests(op, CALLS), of_another_process(op)
    differing = 0
    for name, values in mine.items():
        all_values = [*values, theirs.get(name, "none")]
        same = len(set(all_values)) == 1
        differing += not same
        print(f"{'ok' if same else 'FAILED':7} {op} {name}: {' '.join(dict.fromkeys(all_values))}")
    print(f"{len(mine) - differing} of {len(mine)} calls give the same bits again")
    return int(differing > 0)


if __name__ == "__main__":
    if ONCE in sys.argv:
        for name, (value,) in digests(sys.argv[1], 1).items():
            print(value, name, sep="\t")
    else:
        sys.exit(main(sys.argv[1]))
