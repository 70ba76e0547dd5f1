"""A worker of vLLM with a further format of cache rows, for ``--kv-cache-dtype fp8``."""

import sys
from pathlib import Path

from custom_pypto_vllm import config
from custom_pypto_vllm.attention import backend

from custom_pypto import rows

sys.path.append(str(Path(__file__).parents[3] / "tests"))

from float8_rows import FP8, Float8LatentRows  # noqa: E402

rows.LATENT_FORMATS[FP8] = Float8LatentRows
config.FORMATS["fp8"] = FP8
backend.SparseAttentionBackend.supported_kv_cache_dtypes.append("fp8")


class Worker:
    """Mixed into vLLM's, which imports this file before it makes the model."""
