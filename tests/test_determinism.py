"""The same call gives the same bits: 20 times, on 1, 2, 3 and 7 threads, by each set of kernels.

Run as a program, this file prints what its process computes: a set of kernels is for a process.
"""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from cases import DTYPES, copied, inputs_of, of

import custom_pypto
from custom_pypto.reference.weight_only_linear import FORMATS

SETS = ["generic", "avx2", "avx512", "avx512_bf16", "amx_emulated", "amx"]
THREADS = (1, 2, 3, 7)
RUNS = 20
INDEXERS = {
    "indexer": "npu_lightning_indexer_pto",
    "int8 indexer": "npu_quant_lightning_indexer_pto",
}
ATTENTION, FUSED = "npu_sparse_flash_attention_pto", "npu_sparse_attention_pto"
LINEAR = "weight_only_linear"
# one call for each way in which the kernels share work between threads
CALLS = {
    **{f"{name}, keys split": (op, [1], [3000], {}) for name, op in INDEXERS.items()},
    **{f"{name}, tokens split": (op, [30], [90], {}) for name, op in INDEXERS.items()},
    **{
        f"{name}, exact": (op, [2, 1], [1500, 90], dict(integers=True))
        for name, op in INDEXERS.items()
    },
    "attention, indices split": (ATTENTION, [1], [1200], dict(sparse_count=1100)),
    "attention, dense": (ATTENTION, [40], [60], dict(sparse_count=50)),
    "attention, gathered": (ATTENTION, [10], [300], dict(sparse_count=20)),
    "fused": (FUSED, [3, 3], [70, 50], dict(sparse_count=8)),
    **{
        f"{kind} weight, {way}": (LINEAR, [tokens], [rows], dict(kind=kind, experts=experts))
        for kind in FORMATS
        for way, tokens, rows, experts in (
            ("few rows", 3, 300, 0),
            ("one part", 40, 70, 0),
            ("experts", 40, 70, 3),
        )
    },
}
# fill tile registers, where a CPU has them
SIZES = {
    **dict.fromkeys(INDEXERS.values(), dict(heads=4, dim=32)),
    ATTENTION: dict(heads=4, latent=64, rope=32),
    FUSED: dict(latent=64, rope=32, index_dim=64),
    LINEAR: dict(dim=192),
}


def run(op: str, x: dict) -> list[torch.Tensor]:
    """The output and the caches of a call on copies."""
    x = copied(x)
    return [getattr(custom_pypto, op)(**x), *(x[name] for name in getattr(of(op), "CACHES", ()))]


def digest(results: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for x in results:
        found.update(x.contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def digests() -> dict[str, list[str]]:
    """Of each call, the different results it has had."""
    found = {}
    for dtype in DTYPES:
        for name, (op, *lengths, arguments) in CALLS.items():
            x, results = inputs_of(op, *lengths, **SIZES[op], **arguments, dtype=dtype), set()
            for threads in THREADS:
                torch.set_num_threads(threads)
                results |= {digest(run(op, x)) for _ in range(RUNS)}
            found[f"{name}, {dtype}"] = sorted(results)
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    """By set of kernels that this CPU has."""
    found = {}
    for isa in SETS:
        environment = os.environ | dict(
            CUSTOM_PYPTO_CPU_ISA=isa,
            OMP_WAIT_POLICY="PASSIVE",  # 7 threads on fewer cores
            # otherwise torch.mm itself, float32, depends on the number of threads
            MKL_CBWR="COMPATIBLE",
        )
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        ran = subprocess.run(
            [sys.executable, __file__], env=environment, capture_output=True, text=True
        )
        if "CUSTOM_PYPTO_CPU_ISA must be one of" in ran.stderr:
            continue
        assert ran.returncode == 0, ran.stderr
        found[isa] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("isa", SETS)
def test_bits_depend_neither_on_the_run_nor_on_the_number_of_threads(results, isa):
    if isa not in results:
        pytest.skip(f"this CPU does not have {isa}")
    different = {name: len(bits) for name, bits in results[isa].items() if len(bits) != 1}
    assert not different, f"results of {RUNS} runs on {THREADS} threads: {different}"


def test_amx_and_its_emulation_give_the_same_bits(results):
    if "amx" not in results:
        pytest.skip("this CPU has no AMX, or the system does not grant it")
    different = [
        name for name, bits in results["amx"].items() if bits != results["amx_emulated"][name]
    ]
    assert not different


@pytest.mark.parametrize("op", INDEXERS)
def test_every_set_of_kernels_selects_the_same_where_arithmetic_is_exact(results, op):
    exact = {
        bit
        for found in results.values()
        for name, bits in found.items()
        for bit in bits
        if name.startswith(f"{op}, exact")  # small integers, the same in each dtype
    }
    assert len(exact) == 1


def test_fused_op_repeats_its_bits_on_as_many_threads():
    # without a setting of MKL
    x = inputs_of(FUSED, [3, 3], [70, 50], sparse_count=8)
    for threads in THREADS[:3]:
        torch.set_num_threads(threads)
        assert len({digest(run(FUSED, x)) for _ in range(RUNS)}) == 1


if __name__ == "__main__":
    print(json.dumps(digests()))
