"""What :func:`models.load` is about to do: planned from config and headers, checked, then done.

:mod:`.checkpoint` finds the tensors of a model on disk, :mod:`.reader` reads them,
:mod:`.parameters` makes them the parameters of the model. transformers creates the model and asks
for each parameter.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import GLOBAL_WORKERS
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from custom_pypto.hub import Directory
from custom_pypto.weight_formats import rounded_formats

from ..architectures import supported_model
from ..memory import free_memory
from ..mtp.layer import check_mtp, with_mtp
from ..patch import use_custom_pypto
from ..sharing import (
    LOAD_ALIKE,
    check_agreement,
    check_sharing,
    facts_of_config,
    facts_of_files,
    facts_of_weights,
    own_device,
    part_of_rank,
    plan_of,
    share_experts_alone,
    shared_parameters,
)
from ..streaming.model import Group, check_budget, groups_of, slots_of
from ..streaming.model import start as stream
from ..weights import published
from ..weights.choice import PARTS, STORED, check_stored, kinds_of
from ..weights.in_transformers import StoredWeights, stored_kinds
from ..weights.modules import (
    ROUNDING,
    SCALE,
    convert,
    drop_experts,
    round_activations,
    stored_parameters,
)
from ..weights.on_disk import OnDisk
from .checkpoint import Checkpoint, check_shards, first_layers
from .parameters import Parameter, dtypes_of, parameters
from .reader import Reader
from .request import Request, check_device

PROGRESS = "Loading weights"  # transformers' description of its bar


@dataclass
class Plan:
    """A model that was found complete on disk, and how it is read."""

    request: Request
    source: Directory
    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    generation_config: GenerationConfig | None
    skeleton: PreTrainedModel  # on the meta device, in its formats
    checkpoint: Checkpoint
    reader: Reader
    parameters: dict[str, Parameter | OnDisk]
    dtype: torch.dtype
    kinds: dict[str, str]  # formats of modules with stored weights
    streamed: dict[str, Group]  # modules whose experts stay in their files
    sharing: DistributedConfig | None  # None: one process has the model

    def check(self) -> None:
        """Compares the ranks, and the memory.

        Raises:
            ConnectionError: a rank has ended or hangs.
            ValueError: ranks load different things.
            MemoryError: the model does not fit.
        """
        asked, place = self.request, check_device(self.request.device)
        if self.sharing:
            place = own_device()
            facts = facts_of_files(self.config, self.checkpoint.tensors)
            facts |= {"dtype": self.dtype, "weights": asked.weights}
            facts["activations"] = asked.activations
            if self.generation_config is not None:
                facts |= facts_of_config(self.generation_config, "generation_config.json")
            facts |= {
                "tensor_parallel": asked.tensor_parallel,
                "expert_parallel": asked.expert_parallel,
            }
            check_agreement("load", facts, LOAD_ALIKE)
        check_memory(self, place)

    def files(self) -> set[str]:
        """Names of those with a tensor that this rank reads."""
        return {tensor.file.name for tensor in self.reader.tensors.values()}

    def resident(self) -> set[str]:
        """Names of the tensors that this rank reads now, as it does not those of experts that stay
        in their files."""
        streamed = {
            part
            for parameter, parts in self.checkpoint.parts.items()
            if parameter.rpartition(".")[0] in self.streamed
            for part in parts
        }
        return {
            name
            for name in self.reader.tensors
            if name not in streamed and published.weight_name(name) not in streamed
        }

    def nbytes(self) -> int:
        """What this rank reads now takes in the model."""
        return bytes_of_rank(self.skeleton, dtypes_of(self.skeleton, self.dtype), self.sharing)

    def read(self, name: str | Path) -> PreTrainedModel:
        """The model.

        Args:
            name: of the checkpoint, for the model's config.
        """
        names = self.resident()
        check_scale_values(self.skeleton, self.checkpoint, self.reader, names, self.sharing)
        with reading(self.reader, names):
            model = self.model_class.from_pretrained(
                None,
                config=self.config,
                generation_config=self.generation_config,
                state_dict=self.parameters,
                dtype=self.dtype,
                distributed_config=self.sharing,
            )
        model.config.name_or_path = model.name_or_path = str(name)
        if self.kinds:  # saved as they are in the model: transformers cannot split stored experts
            model._weight_conversions = []
            model.hf_quantizer.shared = self.sharing is not None
        else:  # else transformers would save the experts stacked, as it got them here
            del model._weight_conversions
        if self.sharing:
            check_agreement("load", facts_of_weights(model), LOAD_ALIKE)
        if self.streamed:
            counts = slots_of(self.streamed, self.request.memory - self.nbytes())
            stream(model, self.reader, self.checkpoint.parts, self.streamed, counts)
        if self.request.activations is not None:
            round_activations(model)
        return model if self.sharing else model.to(check_device(self.request.device))


def plan_for(source: Directory, asked: Request) -> Plan:
    """The plan of a checkpoint, from its config and the headers of its files.

    Raises:
        ValueError, TypeError, FileNotFoundError: as ``load``.
    """
    config, model_class = supported_model("load", source.folder)
    ranks, ways = 1, (asked.tensor_parallel, asked.expert_parallel)
    if asked.shared:
        ranks = check_sharing(config.get_text_config(), asked.device, *ways)
    saved = stored_kinds(config)
    if asked.memory is not None and not saved and asked.weights["experts"] is None:
        asked = replace(asked, weights=asked.weights | {"experts": STORED})
    check_stored(asked.weights, saved, asked.device, *ways)
    blocks = published.blocks_of(config.to_dict())
    if (layers := asked.num_hidden_layers) is not None:
        config = type(config).from_dict(first_layers(config.to_dict(), layers))
    for name in published.CONFIG & vars(config).keys():
        delattr(config, name)  # describes the files; the model is not quantized
    if asked.shared and not asked.tensor_parallel:
        share_experts_alone(config.get_text_config())
    if asked.mtp:
        check_mtp("load", config, model_class)
        model_class = with_mtp(model_class)
    with torch.device("meta"):
        skeleton = use_custom_pypto(model_class._from_config(config))
    names = {name for name, _ in skeleton.named_modules()}
    saved = {name: kind for name, kind in saved.items() if name in names}  # of the first layers
    checkpoint = check_shards(source, skeleton, blocks, saved)
    dtype = resolve_dtype(asked.dtype, config, checkpoint)
    tensors = checkpoint.tensors
    if asked.expert_parallel:
        tensors = checkpoint.of_rank(dist.get_rank(), ranks)
    reader = Reader(tensors, blocks, mapped=bool(saved))
    dtypes = dtypes_of(skeleton, dtype)
    # a checkpoint that has stored weights keeps its own
    chosen = {} if saved else kinds_of(skeleton, asked.weights, checkpoint.dtypes(), dtypes)
    own = parameters(skeleton, checkpoint, reader, dtypes, chosen)
    kinds = saved or chosen
    if asked.activations is not None and not any(kind in ROUNDING for kind in kinds.values()):
        raise ValueError(
            "load: activations must be None for a model without weights in "
            f"{' or '.join(ROUNDING)}, got {asked.activations!r}; pass weights='int8' or 'int4'"
        )
    own_experts = part_of_rank if asked.expert_parallel else lambda count: slice(None)
    groups, streamed, in_files = groups_of(skeleton, kinds, own_experts), {}, {}
    convert(skeleton, kinds)
    sharing = plan_of(skeleton, ranks, asked.expert_parallel) if asked.shared else None
    if asked.memory is not None and asked.memory < bytes_of_rank(
        skeleton, dtypes_of(skeleton, dtype), sharing
    ):
        streamed, in_files = groups, {name: len(group.own) for name, group in groups.items()}
        drop_experts(skeleton, in_files)
        sharing = plan_of(skeleton, ranks, asked.expert_parallel) if asked.shared else None
        own = {name: own[name] for name in own if name.rpartition(".")[0] not in streamed}
    if kinds:
        config.quantization_config = StoredWeights.of(kinds, in_files).to_dict()
    generation_config = None
    if (source.folder / "generation_config.json").is_file():
        generation_config = GenerationConfig.from_pretrained(source.folder)
    return Plan(
        asked,
        source,
        config,
        model_class,
        generation_config,
        skeleton,
        checkpoint,
        reader,
        own,
        dtype,
        kinds,
        streamed,
        sharing,
    )


@contextlib.contextmanager
def reading(reader: Reader, names: Iterable[str]) -> Iterator[None]:
    """While transformers reads: a progress bar of bytes in place of its own of parameters, and a
    share of torch's threads for each of its threads.

    Else each of these would wait after every operation for as many threads as there are cores.
    """

    def hide(bar, args, kwargs):
        return args[0] if kwargs.get("desc") == PROGRESS else bar(*args, **kwargs)

    options = {"desc": PROGRESS, "unit": "B", "unit_scale": True}
    threads = torch.get_num_threads()
    with logging.tqdm(total=reader.nbytes(names), **options) as reader.progress:
        hook = logging.set_tqdm_hook(hide)
        torch.set_num_threads(max(1, threads // GLOBAL_WORKERS))
        try:
            yield
            reader.progress.total = reader.progress.n  # a rank reads parts of some tensors
        finally:
            torch.set_num_threads(threads)
            logging.set_tqdm_hook(hook)


def resolve_dtype(dtype: torch.dtype | None, config, checkpoint: Checkpoint) -> torch.dtype:
    """``dtype``, or for None that of the config, else of the embedding on disk."""
    if dtype is not None:
        return dtype
    name = next(name for name in checkpoint.parts if name.endswith("embed_tokens.weight"))
    [embedding] = checkpoint.parts[name]
    return config.dtype or published.FLOATS[checkpoint.tensors[embedding].dtype]


def check_scale_values(
    model,
    checkpoint: Checkpoint,
    reader: Reader,
    names: Iterable[str],
    plan: DistributedConfig | None,
) -> None:
    """Rejects scales that are infinite or NaN, of the weights of these names.

    Raises:
        ValueError: names file and tensor.
    """
    weights = filter(reader.is_quantized, names)
    scales = {published.scale_name(name, reader.tensors): slice(None) for name in weights}
    shared = shared_parameters(model, plan) if plan else set()
    for name in stored_parameters(model):
        # of a module that is stored in another format than on disk, there is none to read
        if name.endswith(SCALE) and name in checkpoint.parts:
            count = model.get_parameter(name).size(0)
            first = part_of_rank(count) if name in shared else slice(None)
            scales[checkpoint.parts[name][0]] = first
    for name, first in scales.items():
        if not bool(reader.stored(name, first).float().isfinite().all()):
            file = reader.tensors[name].file
            raise ValueError(
                f"load: {file}: {name} must be finite, got an infinity or NaN; download it again"
            )


def bytes_of_rank(
    model, dtypes: dict[str, torch.dtype], plan: DistributedConfig | None = None
) -> int:
    """What ``model`` takes on each rank, on average.

    Args:
        plan: how ranks share it; None: one process has it all.
    """
    parts = dict.fromkeys(shared_parameters(model, plan), plan.tp_size) if plan else {}
    state = model.state_dict(keep_vars=True)
    once = {id(tensor): name for name, tensor in reversed(state.items())}  # a tied head
    return sum(
        state[name].numel() * dtypes[name].itemsize // parts.get(name, 1) for name in once.values()
    )


def check_memory(plan: Plan, device: torch.device) -> None:
    """Rejects a model that does not fit in memory; ranks on one machine share it.

    Raises:
        MemoryError: names the required and the available memory, and the remedy.
    """
    ranks = plan.sharing.tp_size if plan.sharing else 1
    needed = plan.nbytes()
    if plan.streamed or (plan.request.memory or needed) < needed:
        asked, per_token = plan.request, plan.config.get_text_config().num_experts_per_tok
        check_budget(plan.streamed, asked.memory, asked.weights, per_token, needed)
        needed = asked.memory
    here = 1 if ranks == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    available = {}
    if device.type != "cpu":
        available[str(device)] = free_memory(device)
    if device.type == "cpu" or ranks == 1:  # a whole model passes through host memory
        available["this machine"] = free_memory(torch.device("cpu")) // here
    each = "" if ranks == 1 else f" on each of {ranks} ranks"
    kinds = sorted({*plan.kinds.values()})
    form = f"weights in {', '.join(kinds)}" if kinds else str(plan.dtype).removeprefix("torch.")
    for place, free in available.items():
        if needed > free:
            if plan.streamed:
                raise MemoryError(
                    f"load: memory must be at most what {place} has free{each}, "
                    f"{tqdm.format_sizeof(free, 'B')}, got {tqdm.format_sizeof(needed, 'B')}; "
                    "pass less"
                )
            smaller = ""
            # a model saved with weights keeps its own
            if (
                device.type == "cpu"
                and ranks == 1
                and (any(plan.request.weights.values()) or not kinds)
            ):
                smaller = advice_on_weights(plan, free)
            raise MemoryError(
                f"load: out of memory: the model needs {tqdm.format_sizeof(needed, 'B')} in "
                f"{form}{each}, {place} has {tqdm.format_sizeof(free, 'B')} free; "
                f"load fewer layers with num_hidden_layers, or use more devices{smaller}"
            )


def advice_on_weights(plan: Plan, free: int) -> str:
    """The values of ``weights`` with which the model takes at most ``free`` bytes, for an error;
    the one that rounds nothing first."""
    fitting = []
    for kind in (STORED, *rounded_formats()):
        other = plan_for(plan.source, replace(plan.request, weights=dict.fromkeys(PARTS, kind)))
        if bytes_of_rank(other.skeleton, dtypes_of(other.skeleton, plan.dtype)) <= free:
            fitting.append(repr(kind) + " (as in the files, without rounding)" * (kind == STORED))
    if not fitting:
        return " or machines (tensor_parallel, expert_parallel): no format of weights fits here"
    return f", or pass weights={' or '.join(fitting)}"
