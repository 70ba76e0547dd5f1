"""The floors of ``--check`` by case, most also by set of CPU kernels: the least figures, on one
thread, in bfloat16.

``avx512_bf16``: measured on AMD EPYC; ``avx2``: on one of Zen 3; ``amx``: on one Xeon.
"""

from typing import Any

import torch

import custom_pypto  # noqa: F401  loads the op that names the set

# what torch takes for the same operations and bytes, over the op's time: ("indexer", S1, S2),
# ("attention", S1, N1, S2), of PROMPTS ("prompt", S1, N1). Both sides wait for the same memory and
# clock, so that the kernel set has no part in it: two thirds of the least that a Xeon gave with the
# kernels amx and avx512_bf16 while its memory read 4 to 9 GB/s; in a quiet hour amx gave 1.06 to
# 1.23 where they are 1. A Zen 4, whose memory read 28 to 33 GB/s, gave 0.81 to 1.35, each above
# its limit
OPS = {
    ("indexer", 1, 8192): 0.45,
    ("indexer", 1, 65536): 0.8,
    ("indexer", 1, 131072): 0.85,
    ("indexer", 4, 65536): 1.0,
    ("indexer", 256, 8192): 0.8,
    ("attention", 64, 128, 8192): 0.7,
    ("attention", 4, 128, 65536): 1.0,
    ("attention", 1, 128, 65536): 0.55,
    ("attention", 4, 64, 65536): 1.0,
    ("attention", 4, 32, 65536): 1.0,
    ("attention", 4, 16, 65536): 1.0,
}

# as OPS; a Zen 4 (avx512_bf16) gave 0.76 and 0.82, of which these are two thirds
PROMPTS: dict[tuple, dict[str, float]] = {
    ("prompt", 512, 128): dict(avx512_bf16=0.50, amx=0.40),
    ("prompt", 2048, 128): dict(avx512_bf16=0.55, amx=0.45),
}

# at most, of torch.topk's time, of random and of ascending scores: a Zen 5 (avx512_bf16) took up to
# 0.033 beside other work, a Xeon (amx) 0.09 to 0.19 while its memory was busy
TOP_K = 0.2

# speedup over the bfloat16 op on the same rows in int8, in one run; attention is not slower, what
# int8 saves is memory. No floor with AMX: only the bfloat16 op has tiles there
INT8 = {
    ("indexer", 1, 8192): dict(avx2=1.3, avx512_bf16=1.6),
    ("indexer", 1, 65536): dict(avx2=1.3, avx512_bf16=1.6),
    ("indexer", 1, 131072): dict(avx2=1.3, avx512_bf16=1.6),
    ("indexer", 4, 65536): dict(avx2=1.3, avx512_bf16=1.7),
    ("indexer", 256, 8192): dict(avx2=1.3, avx512_bf16=1.7),
    ("attention", 1, 128, 65536): dict(avx2=0.9, avx512_bf16=0.9),
    ("attention", 4, 128, 65536): dict(avx2=0.9, avx512_bf16=0.9),
    ("attention", 4, 16, 65536): dict(avx2=0.9, avx512_bf16=0.9),
    ("attention", 64, 128, 8192): dict(avx2=0.9, avx512_bf16=0.9),
}

# a peer, and the speedup over it; with AVX2 alone torch multiplies bfloat16 slowly
INDEXER: dict[str, Any] = dict(avx2=("inductor", 8.0), amx=("inductor", 3.0))
ATTENTION = INDEXER | dict(avx512_bf16=("inductor", 1.6), amx=("inductor", 1.6))
PEERS: dict[tuple, dict[str, Any]] = {
    ("indexer", 1, 8192): INDEXER | dict(avx512_bf16=("eager", 5.0)),
    ("indexer", 1, 65536): INDEXER | dict(avx512_bf16=("eager", 5.0)),
    ("indexer", 1, 131072): INDEXER | dict(avx512_bf16=("eager", 5.0)),
    ("indexer", 4, 65536): INDEXER,
    ("indexer", 16, 8192): INDEXER,
    ("attention", 1, 128, 65536): ATTENTION,
    ("attention", 4, 128, 65536): ATTENTION,
    ("attention", 16, 128, 8192): ATTENTION,
    ("attention", 4, 16, 65536): ATTENTION,
}

# shares of the read bandwidth at which a weight meets one token. What unpacks fp8 and fp4 with
# AVX2, and 4 bits with AVX-512, takes longer than memory: a Zen 4 that reads 28 to 35 GB/s gave
# 0.8 to 0.9, 0.72 to 0.78, 0.78 to 0.87, 0.6 to 0.77, 0.59 to 0.72, 0.72 to 0.87 and 0.68 to 0.84
# in this order. No AMX has been measured with x in int8
WEIGHTS: dict[str, dict[str, float]] = {
    "bfloat16": dict(avx2=0.75, avx512_bf16=0.8, amx=0.8),
    "int8": dict(avx2=0.65, avx512_bf16=0.7, amx=0.8),
    "fp8": dict(avx2=0.45, avx512_bf16=0.7, amx=0.8),
    "int4": dict(avx2=0.57, avx512_bf16=0.55, amx=0.75),
    "fp4": dict(avx2=0.48, avx512_bf16=0.56, amx=0.75),
    "int4, x in int8": dict(avx512_bf16=0.65),
    "fp4, x in int8": dict(avx512_bf16=0.62),
}

# tokens from which both sides multiply at the rate of the CPU, and ours alone unpacks: a twentieth
# of the time with AMX and 2048 tokens, on a Zen 4 up to 0.035 with 64 and 2048
UNPACKING = dict(amx=2048, avx512_bf16=64)

# where rows of x in int8 are multiplied as integers, at twice the rate of bfloat16; with 4 bits a
# fifth of the multiplications are by scales
ROUNDED = {64: dict(avx512_bf16=1.2), 2048: dict(avx512_bf16=1.15)}

# at most, of ik_llama.cpp's time; the aim is 1. Medians of some calls in a virtual machine differ
# by a tenth. Theirs has no kernels for AMX
LLAMA = {
    "tokens": dict(avx512_bf16=1.2, amx=1.2),
    "prompts": dict(avx512_bf16=1.2, amx=0.6),
}

# at most, of the time of transformers' layer in the same run, since µs differ by half between two
# runs on one machine. A Xeon (amx) gave 0.57, 0.34, 0.49 and 0.30, a Zen 4 0.59, 0.38, 0.57 and
# 0.31, without the op of routers; the aims are 500 µs, and 300 compiled
FIXED = {
    ("dense MLP", "weights=None"): 0.65,
    ("dense MLP", "weights=None, compiled layers"): 0.42,
    ("experts", "weights=None"): 0.55,
    ("experts", "weights=None, compiled layers"): 0.34,
}

# of the layer, by context, over upstream: decode in user time, a tenth below the least measured
LAYER_DECODE = {
    4096: dict(avx512_bf16=16.0, amx=16.0),
    8192: dict(avx512_bf16=33.0, amx=33.0),
    16384: dict(avx512_bf16=64.0, amx=64.0),
}


def here(floors: dict[Any, dict[str, Any]]) -> dict[Any, Any]:
    """The floor of each case for the kernels of this process, or None."""
    used = torch.ops.custom_pypto.cpu_isa()
    return {case: row.get(used) for case, row in floors.items()}
