"""Computes how large the weights of a model are in each format, how much of them a token reads, and
which machine holds them. Nothing is measured, and no weight is read or allocated.

    python examples/model_memory.py                 # the default configurations of transformers
    python examples/model_memory.py DIR --layers 4  # a checkpoint, or a name on the Hub: only its
                                                    # config.json is read
    python examples/model_memory.py --ranks 8       # what each of 8 ranks holds that share a model
    python examples/model_memory.py --speed         # tokens per second by the read bandwidth

Formats are those of models.load: "bfloat16" is weights=None, "stored" the published format. A token
reads the weights of its layers and the head, of the routed experts only those it is sent to. Caches
are not counted: docs/dsa.md has their bytes. Ranks share a model by tensor_parallel,
expert_parallel or both of models.load (docs/many_machines.md).
"""

from options import Help, at_least, one_line_errors  # first; options.py says why

# isort: split
import argparse
import copy
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from custom_pypto import models
from custom_pypto.models.architectures import available
from custom_pypto.models.loading.checkpoint import first_layers
from custom_pypto.models.loading.parameters import dtypes_of
from custom_pypto.models.patched import text_model
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
# GB
MACHINES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536)
FREE = 0.1  # of the memory, for caches, activations and other programs
LABELS = ("bfloat16", "stored", *rounded_formats())
#: of the table of ranks, by the way to share: formats
COLUMNS = {
    "tensor_parallel": ("bfloat16",),
    "both": ("experts int4",),  # in bfloat16 as much as tensor_parallel
    "expert_parallel": LABELS,
}
#: whether ranks share heads, and whole experts
WAYS = {
    "tensor_parallel": (True, False),
    "both": (True, True),
    "expert_parallel": (False, True),
}
#: GB/s that the cores of a machine read, for the estimated speed
BANDWIDTHS = (100, 200, 400, 800)
#: of a layer with experts on one thread (benchmarks/RESULTS.md): the share of the read bandwidth at
#: which it reads its weights, and the seconds that it takes besides
SHARE, FIXED = 0.75, 0.6e-3
VERSION = transformers.__version__


class Size(NamedTuple):
    weights: float  # bytes
    read: float  # bytes that one token reads


class Model(NamedTuple):
    name: str
    layers: int
    parameters: int
    sizes: dict[str, Size]  # by format, the exact ones first


def build(config, layers: int | None, heads: bool = True):
    """The patched model without memory for its weights.

    Args:
        heads: False: with transformers' plan for ranks that share no heads.
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
    with torch.device("meta"):
        return models.use_custom_pypto(getattr(transformers, name)._from_config(config))


def size(model, weights: dict[str, str | None] | None, shared=frozenset(), ranks: int = 1) -> Size:
    """The bytes of ``model`` with weights in these formats for experts and for the rest.

    Args:
        shared: names of the parameters of which each of so many ranks has a part.
    """
    dtypes, state = dtypes_of(model, torch.bfloat16), model.state_dict()
    kinds = kinds_of(model, weights, {}, dtypes) if weights else {}
    shares = shares_read(model)
    total = read = 0.0
    for name, tensor in state.items():
        module, _, weight = name.rpartition(".")
        stored = weight in ("weight", *EXPERT_WEIGHTS) and module in kinds
        one = stored_bytes(kinds[module], tensor) if stored else tensor.numel()
        one *= 1 if stored else dtypes[name].itemsize
        one /= ranks if name in shared else 1
        total += one
        read += one * shares[name]
    return Size(total, read)


def shares_read(model) -> dict[str, float]:
    """How much of each weight of ``model`` one token reads."""
    text = text_model(model)
    inside = next(name for name, module in model.named_modules() if module is text)
    experts = {name for name, module in model.named_modules() if is_experts(module)}
    chosen = text.config.num_experts_per_tok
    shares = {}
    for name, tensor in model.state_dict().items():
        module, _, weight = name.rpartition(".")
        if module in experts and weight.removesuffix(SCALE) in EXPERT_WEIGHTS:
            shares[name] = chosen / tensor.size(0)
        else:
            inner = name.startswith(inside) or "lm_head" in name
            shares[name] = float(inner and "embed_tokens" not in name)
    return shares


def seconds_of_token(read: float, layers: int, bandwidth: float) -> float:
    """An estimate for one sequence with a short context, from bytes and bytes per second."""
    return read / (SHARE * bandwidth) + layers * FIXED


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
    name: str, config, published: dict[str, str] | None, layers: int | None = None
) -> Model:
    model = build(config, layers)
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


def by_model(found: list[Model]) -> str:
    """A row for each model: GB of weights, GB that a token reads."""
    rows = [["model", "weights, billions", *LABELS]]
    for model in found:
        cells = [
            f"{shown(model.sizes[label].weights)}; {shown(model.sizes[label].read)}"
            if label in model.sizes
            else "–"
            for label in LABELS
        ]
        rows.append([model.name, shown(model.parameters), *cells])
    return table(rows)


def by_machine(found: list[Model], machines: tuple[int, ...] = MACHINES) -> str:
    """A row for each size of memory: the models that it holds in a format that a smaller one of
    these machines does not hold."""
    rows = [["memory", "what also fits: model, format: GB of weights; GB read per token"]]
    best: dict[str, int] = {}  # place of the format in the model's sizes
    for machine in machines:
        cells = []
        for model in found:
            labels = useful(model)
            fits = [
                i
                for i, label in enumerate(labels)
                if model.sizes[label].weights <= machine * 1e9 * (1 - FREE)
            ]
            if fits and fits[0] < best.get(model.name, len(labels)):
                best[model.name] = fits[0]
                label = labels[fits[0]]
                weights, read = map(shown, model.sizes[label])
                cells.append(f"{model.name} {label}, {weights}; {read}")
        if cells:
            rows.append([f"{machine} GB", " · ".join(cells)])
    return table(rows)


def by_ranks(rows: list[list[str]], ranks: int) -> str:
    """A row for each model: GB of weights on each of so many ranks."""
    columns = [f"{way}, {label}" for way, labels in COLUMNS.items() for label in labels]
    return table([[f"{ranks} ranks", *columns], *rows])


def by_bandwidth(found: list[Model]) -> str:
    """A row for each model and format: tokens per second of one sequence with a short context."""
    rows = [["tokens per second, estimated", *(f"{speed} GB/s" for speed in BANDWIDTHS)]]
    for model in found:
        for label in useful(model):
            read = model.sizes[label].read
            seconds = (seconds_of_token(read, model.layers, speed * 1e9) for speed in BANDWIDTHS)
            rows.append([f"{model.name}, {label}", *(f"{1 / one:.2g}" for one in seconds)])
    return table(rows)


def shown(count: float) -> str:
    """Billions, two digits at least."""
    billions = count / 1e9
    return f"{billions:.0f}" if billions >= 10 else f"{billions:.2g}"


def useful(model: Model) -> list[str]:
    """Formats of a model, the exact one first: the published one, where there is one. Of the others
    those that are smaller by 1 % at least."""
    labels = ["stored" if "stored" in model.sizes else "bfloat16"]
    for label in rounded_formats():
        if model.sizes[label].weights < 0.99 * model.sizes[labels[-1]].weights:
            labels.append(label)
    return labels


def table(rows: list[list[str]]) -> str:
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "checkpoint",
        nargs="?",
        help="a directory with a config.json, or a name on the Hub; without it: the default "
        "configurations of transformers",
    )
    parser.add_argument("--layers", type=int, help="the first layers of the checkpoint only")
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
    arguments = parser.parse_args()
    if arguments.layers is not None and arguments.checkpoint is None:
        parser.error("--layers needs a checkpoint")
    with one_line_errors("--layers"):
        compute(arguments)


def compute(arguments: argparse.Namespace) -> None:
    transformers.logging.set_verbosity_error()  # it reports what default configurations leave out
    layers, ranks = arguments.layers, arguments.ranks
    if arguments.checkpoint is None:
        found, source = list(sources()), f"the default configurations of transformers {VERSION}"
    else:
        source = "config.json"
        found = [source_of(arguments.checkpoint, layers)]
    if ranks is not None:
        rows = [of_ranks(*one, layers, ranks) for one in announced(found)]
        show(f"GB of weights on each rank. Computed from {source}, not measured.")
        show("", by_ranks(rows, ranks))
        return
    sizes = [measure(*one, layers) for one in announced(found)]
    if arguments.speed:
        show(
            f"Tokens per second of one sequence, estimated, not measured: weights read at {SHARE} "
            f"of the bandwidth, and {FIXED * 1e3} ms for each layer. Computed from {source}."
        )
        show("", by_bandwidth(sizes))
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
