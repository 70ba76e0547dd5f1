"""Computes how large the weights of a model are in each format, how much of them a token reads, and
which machine holds them. Nothing is measured, and no weight is read or allocated.

    python examples/model_memory.py                 # the default configurations of transformers
    python examples/model_memory.py DIR --layers 4  # a checkpoint, or a name on the Hub: only its
                                                    # config.json is read
    python examples/model_memory.py --mtp           # with the layer that drafts (docs/drafts.md)
    python examples/model_memory.py --ranks 8       # what each of 8 ranks holds that share a model
    python examples/model_memory.py --speed         # tokens per second by the read bandwidth
    python examples/model_memory.py --memory 64GB --disk 7    # tokens per second where experts stay
                                                    # in files, read at 7 GB/s

Formats are those of models.load: "bfloat16" is weights=None, "stored" the published format. A token
reads the weights of its layers and the head, of the routed experts only those it is sent to. Caches
are not counted: docs/dsa.md has their bytes. Ranks share a model by tensor_parallel,
expert_parallel or both of models.load (docs/many_machines.md).
"""

from options import Help, at_least, one_line_errors, positive  # first; options.py says why

# isort: split
import argparse
import copy
import sys
from collections.abc import Iterator

import torch
import transformers
from estimates import FIXED, SHARE
from memory_tables import (
    COLUMNS,
    LABELS,
    Model,
    Size,
    by_bandwidth,
    by_machine,
    by_memory,
    by_model,
    by_ranks,
    shown,
)
from transformers import AutoConfig, PreTrainedConfig

from custom_pypto import models
from custom_pypto.models.architectures import ARCHITECTURES, available
from custom_pypto.models.loading.checkpoint import first_layers
from custom_pypto.models.loading.parameters import dtypes_of
from custom_pypto.models.loading.request import check_memory_option
from custom_pypto.models.mtp.layer import check_mtp, mtp_layer, with_mtp
from custom_pypto.models.patched import patched_attentions, text_model
from custom_pypto.models.sharing import (
    check_heads,
    plan_of,
    possible_sizes,
    share_experts_alone,
    shared_parameters,
)
from custom_pypto.models.weights.choice import kinds_of
from custom_pypto.models.weights.modules import EXPERT_WEIGHTS, SCALE, is_experts, layout
from custom_pypto.models.weights.published import CONFIG, FP4, blocks_of
from custom_pypto.weight_formats import rounded_formats

#: names of the default configurations, and the format in which the weights are published, where
#: that is not bfloat16
NAMES = {
    "DeepseekV32ForCausalLM": ("DeepSeek-V3.2", {"experts": "fp8", "rest": "fp8"}),
    "DeepseekV4ForCausalLM": ("DeepSeek-V4-Flash", {"experts": "fp4", "rest": "fp8"}),
    "GlmMoeDsaForCausalLM": ("GLM-5", {"experts": "fp8", "rest": "fp8"}),
    "Glm5NextForConditionalGeneration": ("GLM-5.3-Flash", None),
    "AXK2ForCausalLM": ("A.X-K2", None),
    "HYV4ForCausalLM": ("Hy4", None),
    "Dots3NoteForCausalLM": ("Dots 3 Note, text", None),
    "MistralLarge4ForConditionalGeneration": ("Mistral Large 4", None),
}
#: whether ranks share heads, and whole experts
WAYS = {
    "tensor_parallel": (True, False),
    "both": (True, True),
    "expert_parallel": (False, True),
}
BANDWIDTH = 80  # GB/s, of two channels of DDR5-5200 about
DISK = 7  # GB/s, of one NVMe SSD with four lanes of PCIe 4.0
#: what the estimate of --memory rests on
ASSUMED = f"""\
Estimated, not measured, for one sequence with a short context. Computed from {{source}}.
Memory is read at {SHARE} of {{bandwidth:g}} GB/s, with {FIXED * 1e3} ms for each layer; files at
{{disk:g}} GB/s. The low speed is for both in turns, the high one for both at once. Hits are the
share of a token's experts that is in memory, an assumption: what is published for GLM-5.2, in
mlx-lm's discussion 1438 and colibri's benchmarks. prompt: seconds to read the experts that are not
in memory, once for each chunk of a prompt."""
VERSION = transformers.__version__


def build(config, layers: int | None, heads: bool = True, mtp: bool = False):
    """The patched model without memory for its weights.

    Args:
        heads: False: with transformers' plan for ranks that share no heads.
        mtp: with the layer that drafts.
    """
    name = next((name for name in config.architectures or [] if name in available()), None)
    if name is None:
        raise ValueError(
            f"config.json: architectures must be one of {', '.join(available())}, "
            f"got {config.architectures}"
        )
    if layers is not None:
        config = type(config).from_dict(first_layers(config.to_dict(), layers))
    for key in CONFIG & vars(config).keys():
        delattr(config, key)
    if not heads:
        share_experts_alone(config.get_text_config())
    model_class = getattr(transformers, name)
    if not isinstance(config, model_class.config_class):  # of a model whose text alone runs
        config = config.get_text_config()
    if mtp:
        model_class = with_mtp(model_class)
    with torch.device("meta"):
        return models.use_custom_pypto(model_class._from_config(config))


def size(model, weights: dict[str, str | None] | None, shared=frozenset(), ranks: int = 1) -> Size:
    """The bytes of ``model`` with weights in these formats for experts and for the rest.

    Args:
        shared: names of the parameters of which each of so many ranks has a part.
    """
    dtypes, state = dtypes_of(model, torch.bfloat16), model.state_dict()
    kinds = kinds_of(model, weights, {}, dtypes) if weights else {}
    shares, of_experts = shares_read(model), expert_weights(model)
    found = dict.fromkeys(Size._fields, 0.0)
    for name, tensor in state.items():
        module, _, weight = name.rpartition(".")
        stored = weight in ("weight", *EXPERT_WEIGHTS) and module in kinds
        one = stored_bytes(kinds[module], tensor) if stored else tensor.numel()
        one *= 1 if stored else dtypes[name].itemsize
        one /= ranks if name in shared else 1
        found["weights"] += one
        found["read"] += one * shares[name]
        if name in of_experts:
            found["experts"] += one
            found["routed"] += one * shares[name]
    return Size(**found)


def expert_weights(model) -> set[str]:
    """Names of the weights of routed experts, with their scales."""
    modules = {name for name, module in model.named_modules() if is_experts(module)}
    found = set()
    for name in model.state_dict():
        module, _, weight = name.rpartition(".")
        if module in modules and weight.removesuffix(SCALE) in EXPERT_WEIGHTS:
            found.add(name)
    return found


def shares_read(model) -> dict[str, float]:
    """How much of each weight of ``model`` one token reads."""
    text = text_model(model)
    inside = next(name for name, module in model.named_modules() if module is text)
    experts, chosen = expert_weights(model), text.config.num_experts_per_tok
    # of layers that share a selection, by index_topk_freq or index_topk_pattern of the config
    idle = {
        id(weight)
        for attention in patched_attentions(text).values()
        if attention.shares_selection and attention.indexer is not None
        for weight in attention.indexer.parameters()
    }
    if (drafting := mtp_layer(text)) is not None:
        # a draft reads it, not a token
        idle |= {id(weight) for weight in drafting.state_dict(keep_vars=True).values()}
    shares = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in experts and id(tensor) not in idle:
            shares[name] = chosen / tensor.size(0)
        else:
            inner = name.startswith(inside) or "lm_head" in name
            shares[name] = float(inner and "embed_tokens" not in name and id(tensor) not in idle)
    return shares


def stored_bytes(kind: str, tensor: torch.Tensor) -> int:
    stored = layout(kind, list(tensor.shape))
    count = torch.Size(stored.shape).numel() * stored.dtype.itemsize
    if stored.scale_shape is not None:
        count += torch.Size(stored.scale_shape).numel() * stored.scale_dtype.itemsize
    return count


def formats_of(published: dict[str, str] | None) -> dict[str, dict[str, str | None] | None]:
    """The option ``weights`` of ``models.load`` by its label in the tables."""
    formats: dict[str, dict[str, str | None] | None] = {"bfloat16": None}
    if published:
        formats["stored"] = {**published}
    formats |= {kind: dict.fromkeys(("experts", "rest"), kind) for kind in rounded_formats()}
    return formats | {"experts int4": {"experts": "int4", "rest": None}}


def measure(
    name: str,
    config,
    published: dict[str, str] | None,
    layers: int | None = None,
    mtp: bool = False,
) -> Model:
    model = build(config, layers, mtp=mtp)
    sizes = {
        label: size(model, weights)
        for label, weights in formats_of(published).items()
        if label in LABELS
    }
    layers = model.config.get_text_config().num_hidden_layers
    return Model(name, layers, sum(one.numel() for one in model.parameters()), sizes)


def of_ranks(
    name: str, config, published: dict[str, str] | None, layers: int | None, ranks: int
) -> list[str]:
    """A row of :func:`by_ranks`."""
    cells, text, formats = [name], config.get_text_config(), formats_of(published)
    for way, (heads, whole) in WAYS.items():
        if not can_share(text, ranks, heads, whole):
            cells += ["–"] * len(COLUMNS[way])
            continue
        model = build(copy.deepcopy(config), layers, heads)
        shared = shared_parameters(model, plan_of(model, ranks, whole))
        for label in COLUMNS[way]:
            of_rank = "–"
            if label in formats:
                of_rank = shown(size(model, formats[label], shared, ranks).weights)
            cells.append(of_rank)
    return cells


def can_share(config, ranks: int, heads: bool, experts: bool) -> bool:
    try:
        if heads:
            check_heads(config)
    except ValueError:
        return False
    return ranks in possible_sizes(config, "cpu", heads, experts)


def sources() -> Iterator[tuple[str, PreTrainedConfig, dict[str, str] | None]]:
    """Name, default configuration and published format of each of ``NAMES`` that the installed
    transformers has."""
    for architecture in filter(NAMES.__contains__, available()):
        config = getattr(transformers, architecture).config_class()
        config.architectures = [architecture]
        name, published = NAMES[architecture]
        yield name, config, published


def defaults() -> list[Model]:
    return [measure(*source) for source in sources()]


def of_checkpoint(path: str, layers: int | None) -> Model:
    return measure(*source_of(path, layers), layers)


def source_of(path: str, layers: int | None):
    """As :func:`sources`, of a checkpoint."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    have = config.get_text_config().num_hidden_layers
    if layers is not None and not 1 <= layers <= have:
        raise ValueError(f"--layers must be 1 to {have}, got {layers}")
    blocks = blocks_of(config.to_dict())
    published = None
    if blocks:
        four_bits = FP4 in blocks
        published = {"experts": "fp4" if four_bits else "fp8", "rest": "fp8"}
    return path, config, published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "checkpoint",
        nargs="?",
        help="a directory with a config.json, or a name on the Hub; without it: the default "
        "configurations of transformers",
    )
    parser.add_argument("--layers", type=int, help="the first layers of the checkpoint only")
    parser.add_argument(
        "--mtp",
        action="store_true",
        help="with the layer for multi-token prediction, as models.load(mtp=True): its weights; "
        "what a token reads is without it",
    )
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument(
        "--ranks",
        type=at_least(2),
        metavar="N",
        help="only what each of N ranks holds",
    )
    tables.add_argument(
        "--speed",
        action="store_true",
        help="only the tokens per second that the read bandwidth of a machine allows",
    )
    tables.add_argument(
        "--memory",
        metavar="SIZE",
        help="only what models.load(memory=SIZE) keeps in memory, such as 64GB, and the tokens per "
        "second with the other experts in files",
    )
    for option, default, of in (
        ("--disk", DISK, "the disk reads"),
        ("--bandwidth", BANDWIDTH, "the cores read memory"),
    ):
        parser.add_argument(
            option,
            type=positive,
            metavar="GB/s",
            help=f"at which {of}, for --memory (default: {default})",
        )
    arguments = parser.parse_args()
    if arguments.memory is None and (arguments.disk or arguments.bandwidth):
        parser.error("--disk and --bandwidth need --memory")
    if arguments.layers is not None and arguments.checkpoint is None:
        parser.error("--layers needs a checkpoint")
    for option in ("layers", "ranks", "memory"):
        if arguments.mtp and getattr(arguments, option) is not None:
            parser.error(f"--mtp is not for --{option}: it counts the layer of a whole model")
    with one_line_errors("--layers", "--memory", "--mtp"):
        compute(arguments)


def compute(arguments: argparse.Namespace) -> None:
    transformers.logging.set_verbosity_error()  # it reports what default configurations leave out
    layers, ranks = arguments.layers, arguments.ranks
    memory = check_memory_option(arguments.memory)
    if arguments.checkpoint is None:
        found, source = list(sources()), f"the default configurations of transformers {VERSION}"
    else:
        source = "config.json"
        found = [source_of(arguments.checkpoint, layers)]
    if arguments.mtp:
        if arguments.checkpoint is None:
            found = [one for one in found if ARCHITECTURES[one[1].architectures[0]].mtp]
        else:
            config = found[0][1]
            check_mtp("--mtp", config, getattr(transformers, config.architectures[0]))
    if ranks is not None:
        rows = [of_ranks(*one, layers, ranks) for one in announced(found)]
        show(f"GB of weights on each rank. Computed from {source}, not measured.")
        show("", by_ranks(rows, ranks))
        return
    sizes = [measure(*one, layers, arguments.mtp) for one in announced(found)]
    if arguments.speed:
        show(
            f"Tokens per second of one sequence, estimated, not measured: weights read at {SHARE} "
            f"of the bandwidth, and {FIXED * 1e3} ms for each layer. Computed from {source}."
        )
        show("", by_bandwidth(sizes))
        return
    if memory is not None:
        disk, bandwidth = arguments.disk or DISK, arguments.bandwidth or BANDWIDTH
        show(ASSUMED.format(source=source, bandwidth=bandwidth, disk=disk))
        show("", by_memory(sizes, memory, disk, bandwidth))
        return
    show(f"GB of weights; GB of them that a token reads. Computed from {source}, not measured.")
    show("", by_model(sizes), "", by_machine(sizes))


def announced(found: list) -> Iterator:
    """Each model, and on standard error which one: it takes seconds."""
    for i, one in enumerate(found, 1):
        print(f"{i} of {len(found)}: {one[0]}", file=sys.stderr, flush=True)
        yield one


def show(*lines: str) -> None:
    """In ASCII where the encoding of the output lacks a dash or a dot."""
    text = "\n".join(lines)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        text = text.replace("–", "-").replace("·", "/")
    print(text)


if __name__ == "__main__":
    main()
