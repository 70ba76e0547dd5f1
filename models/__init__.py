"""Patches transformers' models with DeepSeek sparse attention to use the ops of
:mod:`custom_pypto`::

    from custom_pypto import models

    model = models.load("path/to/checkpoint")           # or, for an existing model:
    model = models.use_custom_pypto(model)
    model.generate(input_ids, max_new_tokens=100)

The patch changes the class of the model's attention modules, norms, routers and experts: same
parameters, same state dict, no copies. transformers and other models are unchanged.
"""

import sys

if __name__ == "models":  # in the repository's root: the same modules under both names
    import custom_pypto.models  # noqa: F401

    for name in [name for name in sys.modules if name.startswith("custom_pypto.models")]:
        sys.modules[name.removeprefix("custom_pypto.")] = sys.modules[name]

from custom_pypto.requirements import transformers_problem

if _problem := transformers_problem():
    raise ImportError(f"custom_pypto.models: {_problem}")

from pathlib import Path  # noqa: E402
from typing import Literal, NoReturn  # noqa: E402

import torch  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from custom_pypto import hub  # noqa: E402

from .cache import PagedCache  # noqa: E402
from .loading.keywords import check_keywords  # noqa: E402
from .loading.plan import plan_for  # noqa: E402
from .loading.request import Request  # noqa: E402
from .patch import use_custom_pypto, use_transformers  # noqa: E402
from .patched import CACHE  # noqa: E402
from .record import Record  # noqa: E402
from .replay import record_indices, replay_indices  # noqa: E402
from .weights.choice import Weights  # noqa: E402

__all__ = [
    "CACHE",
    "PagedCache",
    "Record",
    "load",
    "record_indices",
    "replay_indices",
    "use_custom_pypto",
    "use_transformers",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    num_hidden_layers: int | None = None,
    device: torch.device | str | None = None,
    tensor_parallel: bool = False,
    expert_parallel: bool = False,
    weights: Weights = None,
    memory: str | int | None = None,
    mtp: bool = False,
    activations: Literal["int8"] | None = None,
    revision: str | None = None,
    **others: NoReturn,
) -> PreTrainedModel:
    """Loads a checkpoint, patched by :func:`models.use_custom_pypto`.

    Of a repository on the Hub, config and index are downloaded first, then the headers of the files
    that the layers need, and these files last, if the disk and the memory are large enough.

    The header of every file is validated first. Upstream ``from_pretrained`` does not name a
    truncated or mismatched file, and fills missing tensors with random numbers after a warning.
    Weights in the published fp8 (e4m3, a scale per 128x128 block) and fp4 (e2m1, a scale per 32
    values of a row) are dequantized, unless ``weights`` says otherwise. Files without a requested
    tensor are not opened and may be missing.

    Args:
        path: a directory with ``config.json`` and safetensors, sharded or not; or the name of a
            repository on the Hugging Face Hub, as ``"deepseek-ai/DeepSeek-V3.2"``.
        dtype: a ``torch.dtype`` or its name, or ``"auto"``: the dtype in ``config.json``, else of
            the embedding. Upstream keeps some parameters of some architectures in float32.
        num_hidden_layers: number of layers, from the first on; None: all.
        device: target device; None: CPU.
        tensor_parallel: share attention heads, the widths of MLPs and experts, and the vocabulary
            among all ranks of torch's process group, which the caller initialises; each rank uses
            its own accelerator, or the CPU if there is none.
        expert_parallel: share experts, whole ones, and the vocabulary among all ranks; each reads
            its own experts alone. With ``tensor_parallel`` the heads and other widths, too.
        weights: the format of linear layers and experts, which compute with it on the CPU
            (:func:`custom_pypto.weight_only_linear`): ``"stored"``, bfloat16, fp8 and fp4 as on
            disk; ``"int8"``, rounded with a scale for each row; ``"int4"``, rounded with scale and
            zero for each 128 values; or a dict of these for ``"experts"`` and ``"rest"``. Such a
            model has no gradients. Embedding, head, norms, routers, ``kv_b_proj`` and the indexers'
            ``weights_proj`` are in ``dtype`` in any case. None: ``dtype``, or the formats of a
            model that was saved with them, whose files are then mapped and must stay as they are.
        memory: what the weights may take of this machine's, in bytes or as ``"64GB"`` or
            ``"60GiB"``; caches and what a forward needs come on top. If the model takes more, its
            routed experts stay in their files, which must stay as they are, and are read when a
            token needs them: of a published checkpoint in its fp8, fp4 or bfloat16, which
            ``weights`` then leaves as they are, or of a model that was saved in its own formats.
            Outputs equal those of the model in memory to the bit. Of ranks, each may take as
            much. None: the whole model is in memory.
        mtp: also load the layer for multi-token prediction, with which
            ``model.generate(ids, use_mtp=True)`` drafts tokens: docs/drafts.md. Not for a part of
            the layers.
        activations: ``"int8"``: layers and experts round what they multiply to int8: with weights
            in int8 each row, where there are more than 16 tokens, as in a prompt (W8A8); with
            weights in int4 or fp4 each 32 values (W4A8). The first takes less time with AMX, the
            second with AVX2, both with VNNI. docs/weight_only_linear.md has times and errors.
            None: not.
        revision: branch, tag or commit of a repository; None: its main branch.
        others: none; those of transformers' ``from_pretrained`` are rejected with what to pass
            instead.
    Returns:
        The model in evaluation mode, of its class in transformers, on ``device``; with ranks that
        share it, this rank's part.
    Raises:
        FileNotFoundError: no such directory, repository, revision, config, index or shard.
        OSError: the Hub does not answer, or refuses; or the disk is too small.
        ConnectionError: a rank that this one waits for has ended or hangs.
        RuntimeError: ``tensor_parallel`` or ``expert_parallel`` without a process group.
        ValueError: a damaged or mismatched file; the message names the file, the expected and the
            actual value. Or invalid ``num_hidden_layers``, unsupported quantization, unsupported
            number of ranks, ``dtype`` or ``device``, ``device`` with ranks that share a model, or
            ranks that load different things.
        TypeError: unsupported model class in the config, an argument of another type, or a keyword
            that is none.
        MemoryError: the model does not fit; nothing was read or, of a repository, downloaded.

    Example::

        model = models.load("deepseek-ai/DeepSeek-V3.2", weights="int4")
        ids = torch.tensor([[0, 1, 2]])
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10)
    """
    if others:
        check_keywords(load.__kwdefaults__ or (), others)
    ways = tensor_parallel, expert_parallel
    asked = Request.of(dtype, num_hidden_layers, device, *ways, weights, memory, mtp, activations)
    source = hub.find("load: path", path, revision)
    plan = plan_for(source, asked)
    plan.check()
    source.fetch(plan.files())
    return use_custom_pypto(plan.read(path))
