"""The floors of ``--check`` by set of CPU kernels: the least figures, on one thread, in bfloat16.

``avx512_bf16``: measured on AMD EPYC; ``avx2``: on one of Zen 3. ``amx``: from a prototype on one
Intel CPU, with slack; these kernels themselves have not run on AMX yet.
"""

from typing import Any

import torch

import custom_pypto  # noqa: F401  loads the op that names the set

# share of the rate of torch.mm 2048^3: ("indexer", S1, S2) or ("attention", S1, N1, S2)
OPS = {
    "avx512_bf16": {
        ("indexer", 1, 8192): 0.60,
        ("indexer", 1, 65536): 0.90,
        ("indexer", 1, 131072): 0.90,
        ("indexer", 4, 65536): 0.95,
        ("indexer", 256, 8192): 1.00,
        ("attention", 64, 128, 8192): 0.93,
        ("attention", 4, 128, 65536): 0.83,
        ("attention", 1, 128, 65536): 0.78,
        ("attention", 4, 64, 65536): 0.78,
        ("attention", 4, 32, 65536): 0.67,
        ("attention", 4, 16, 65536): 0.42,
    },
    "amx": {
        ("indexer", 1, 8192): 0.30,
        ("indexer", 1, 65536): 0.45,
        ("indexer", 1, 131072): 0.42,
        ("indexer", 4, 65536): 0.85,
        ("indexer", 256, 8192): 0.85,
        ("attention", 64, 128, 8192): 0.75,
        ("attention", 4, 128, 65536): 0.48,
        ("attention", 1, 128, 65536): 0.30,
        ("attention", 4, 64, 65536): 0.33,
        ("attention", 4, 32, 65536): 0.19,
        ("attention", 4, 16, 65536): 0.10,
    },
}

# speedup over the bfloat16 op on the same rows in int8, in one run. No floor with AMX: only the
# bfloat16 op has tiles there
INT8 = {
    "avx2": {
        ("indexer", 1, 8192): 1.3,
        ("indexer", 1, 65536): 1.3,
        ("indexer", 1, 131072): 1.3,
        ("indexer", 4, 65536): 1.3,
        ("indexer", 256, 8192): 1.3,
        ("attention", 1, 128, 65536): 0.9,
        ("attention", 4, 128, 65536): 0.9,
        ("attention", 4, 16, 65536): 0.9,
        ("attention", 64, 128, 8192): 0.9,
    },
    "avx512_bf16": {
        ("indexer", 1, 8192): 1.6,
        ("indexer", 1, 65536): 1.6,
        ("indexer", 1, 131072): 1.6,
        ("indexer", 4, 65536): 1.7,
        ("indexer", 256, 8192): 1.7,
        # not slower: what int8 saves is memory
        ("attention", 1, 128, 65536): 0.9,
        ("attention", 4, 128, 65536): 0.9,
        ("attention", 4, 16, 65536): 0.9,
        ("attention", 64, 128, 8192): 0.9,
    },
}

# targets above the floor; memory and cold caches take the rest
AIMS = {
    "avx512_bf16": {("indexer", 1, 8192): 0.75, ("attention", 4, 16, 65536): 0.50},
    "amx": {
        ("indexer", 1, 8192): 0.40,
        ("indexer", 1, 65536): 0.65,
        ("indexer", 1, 131072): 0.65,
        ("indexer", 4, 65536): 1.10,
        ("indexer", 256, 8192): 1.30,
        ("attention", 64, 128, 8192): 1.10,
        ("attention", 4, 128, 65536): 0.75,
        ("attention", 1, 128, 65536): 0.50,
        ("attention", 4, 64, 65536): 0.45,
        ("attention", 4, 32, 65536): 0.25,
        ("attention", 4, 16, 65536): 0.14,
    },
}

# speedup over a peer: (peer, floor) of an indexer and of an attention row; None: no floor
PEERS = {
    "avx512_bf16": {
        ("indexer", 1, 8192): ("eager", 5.0),
        ("indexer", 1, 65536): ("eager", 5.0),
        ("indexer", 1, 131072): ("eager", 5.0),
        ("indexer", 4, 65536): None,
        ("indexer", 16, 8192): None,
        ("attention", 1, 128, 65536): ("inductor", 1.6),
        ("attention", 4, 128, 65536): ("inductor", 1.6),
        ("attention", 16, 128, 8192): ("inductor", 1.6),
        ("attention", 4, 16, 65536): ("inductor", 1.6),
    },
    "amx": {
        ("indexer", 1, 8192): ("inductor", 3.0),
        ("indexer", 1, 65536): ("inductor", 3.0),
        ("indexer", 1, 131072): ("inductor", 3.0),
        ("indexer", 4, 65536): ("inductor", 3.0),
        ("indexer", 16, 8192): ("inductor", 3.0),
        ("attention", 1, 128, 65536): ("inductor", 1.6),
        ("attention", 4, 128, 65536): ("inductor", 1.6),
        ("attention", 16, 128, 8192): ("inductor", 1.6),
        ("attention", 4, 16, 65536): ("inductor", 1.6),
    },
}

# of the layer, by context, over upstream: decode in user time, a tenth below the least measured
LAYER_DECODE = {
    "avx512_bf16": {4096: 16.0, 8192: 33.0, 16384: 64.0},
    "amx": {4096: 16.0, 8192: 33.0, 16384: 64.0},
}


def here(floors: dict[str, dict]) -> dict[Any, Any]:
    """The part of a table for the kernels of this process.

    Raises:
        SystemExit: the table has none for them.
    """
    used = torch.ops.custom_pypto.cpu_isa()
    if used not in floors:
        raise SystemExit(f"there are floors for the kernels {', '.join(floors)}, got {used}")
    return floors[used]
