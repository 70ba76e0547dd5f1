"""Each set of kernels of this CPU computes what the reference does, the same call the same bits:
20 times, on 1, 2, 3 and 20 threads, in each dtype. By default 3 times, in one of the dtypes.

Run as a program, this file checks what its process computes: a set of kernels is for a process. The
other tests run the set that this CPU prefers.
"""

import hashlib
import json
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from cases import DTYPES, copied, inputs_of, of
from fuzz.generate import Case, generate
from fuzz.judge import judge

import custom_pypto
from custom_pypto.weight_formats import WEIGHT_FORMATS

SETS = ["generic", "avx2", "avx512", "avx512_bf16", "amx_emulated"]
THREADS = (1, 2, 3, 20)
INDEXERS = {
    "indexer": "npu_lightning_indexer_pto",
    "int8 indexer": "npu_quant_lightning_indexer_pto",
}
ATTENTION, FUSED = "npu_sparse_flash_attention_pto", "npu_sparse_attention_pto"
GRADIENT, INDEX_GRADIENT = "npu_sparse_flash_attention_grad_pto", "npu_lightning_indexer_grad_pto"
LOSSES = {
    "loss over a selection": "npu_sparse_lightning_indexer_grad_kl_loss_pto",
    "loss over all keys": "npu_dense_lightning_indexer_grad_kl_loss_pto",
}
LINEAR = "weight_only_linear"
BFLOAT16 = dict(dtype=torch.bfloat16)  # by default, too
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
    "gradients with values": (GRADIENT, [20, 3], [60, 40], dict(own_value=True, sinks=True)),
    "gradients of attention": (GRADIENT, [20], [300], dict(sparse_count=150, **BFLOAT16)),
    "gradients of the indexer": (INDEX_GRADIENT, [20], [600], dict(sparse_count=300, **BFLOAT16)),
    **{name: (op, [5, 2], [300, 40], BFLOAT16) for name, op in LOSSES.items()},
    "fused": (FUSED, [3, 3], [70, 50], dict(sparse_count=8)),
    **{
        f"{kind} weight, {way}": (LINEAR, [tokens], [rows], dict(kind=kind, experts=experts))
        for kind in WEIGHT_FORMATS
        for way, tokens, rows, experts in (
            ("few rows", 3, 300, 0),
            ("one part", 40, 70, 0),
            ("experts", 40, 70, 3),
        )
    },
}
# fill tile registers, where a CPU has them
SIZES = {
    "npu_lightning_indexer_pto": dict(heads=4, dim=32),
    "npu_quant_lightning_indexer_pto": dict(heads=4, dim=64),  # fills tiles
    ATTENTION: dict(heads=4, latent=64, rope=32),
    GRADIENT: dict(heads=20, latent=64, rope=32),
    INDEX_GRADIENT: dict(heads=20, dim=32),
    **dict.fromkeys(LOSSES.values(), dict(heads=20, latent=64, rope=32, index_heads=20, dim=32)),
    FUSED: dict(latent=64, rope=32, index_dim=64),
    LINEAR: dict(dim=192),
}


def run(op: str, x: dict) -> list[torch.Tensor]:
    """The outputs and the caches of a call on copies."""
    x = copied(x)
    outputs = getattr(custom_pypto, op)(**x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *(x[name] for name in getattr(of(op), "CACHES", ()))]


def digest(results: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for x in results:
        found.update(x.contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def digests(everything: bool) -> dict[str, list[str]]:
    """Of each call, which must equal the reference, the different results it has had."""
    found = {}
    for number, (name, (op, *lengths, arguments)) in enumerate(CALLS.items()):
        for dtype in DTYPES if everything else [arguments.get("dtype", DTYPES[number % 3])]:
            x = inputs_of(op, *lengths, **SIZES[op] | arguments | dict(dtype=dtype))
            judge(Case(op, x, "integers" if "integers" in arguments else "random"))
            results = set()
            for threads in THREADS:
                torch.set_num_threads(threads)
                results |= {digest(run(op, x)) for _ in range(20 if everything else 3)}
            found[f"{name}, {dtype}"] = sorted(results)
    return found


@pytest.fixture
def digests_of(with_torch, request):
    """What this program prints of a set of kernels; skips the test where the CPU has it not."""
    program = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"

    def digests(isa: str) -> dict[str, list[str]]:
        everything = ["--all"] * request.config.getoption("all")
        # without MKL_CBWR torch.mm itself, float32, depends on the number of threads
        variables = dict(CUSTOM_PYPTO_CPU_ISA=isa, MKL_CBWR="COMPATIBLE")
        done = with_torch(program, *everything, path=[Path(__file__).parent], **variables)
        if "CUSTOM_PYPTO_CPU_ISA must be one of" in done.stderr:
            pytest.skip(f"this CPU, or the system, does not grant {isa}")
        assert done.returncode == 0, done.stderr
        used, found = json.loads(done.stdout)
        assert used == isa
        return found

    return digests


@pytest.mark.parametrize("isa", SETS)
def test_bits_are_right_and_depend_neither_on_the_run_nor_on_the_number_of_threads(isa, digests_of):
    different = {name: len(bits) for name, bits in digests_of(isa).items() if len(bits) != 1}
    assert not different, f"different results of repeated runs on {THREADS} threads: {different}"


def test_amx_and_its_emulation_give_the_same_bits(digests_of):
    found = digests_of("amx")
    assert found == digests_of("amx_emulated") and {*map(len, found.values())} == {1}


def test_int8_keys_give_the_same_bits_in_tiles_and_in_vectors(digests_of):
    tiles, vectors = digests_of("amx_emulated"), digests_of("avx512_bf16")
    int8 = [name for name in tiles if name.startswith("int8 indexer")]
    assert int8 and all(tiles[name] == vectors[name] for name in int8)


def test_fused_op_repeats_its_bits_on_as_many_threads():
    # without a setting of MKL
    x = inputs_of(FUSED, [3, 3], [70, 50], sparse_count=8)
    for threads in THREADS[:3]:
        torch.set_num_threads(threads)
        assert len({digest(run(FUSED, x)) for _ in range(20)}) == 1


if __name__ == "__main__":
    isa = torch.ops.custom_pypto.cpu_isa()
    everything = "--all" in sys.argv
    torch.set_num_threads(1)
    for number in range(1000 if everything else 100):
        judge(generate(Random(f"5:{number}")))
    print(json.dumps([isa, digests("--all" in sys.argv)]))
