"""The tables of model_memory.py."""

from typing import NamedTuple

from estimates import Streamed, seconds_of_token

from custom_pypto.weight_formats import rounded_formats

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
#: GB/s that the cores of a machine read, for the estimated speed
BANDWIDTHS = (100, 200, 400, 800)


class Size(NamedTuple):
    weights: float  # bytes
    read: float  # bytes that one token reads
    experts: float  # bytes of weights that are of routed experts
    routed: float  # bytes of those that one token reads


class Model(NamedTuple):
    name: str
    layers: int
    parameters: int
    sizes: dict[str, Size]  # by format, the exact ones first


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
                weights, read = map(shown, model.sizes[label][:2])
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


def by_memory(found: list[Model], memory: int, disk: float, bandwidth: float) -> str:
    """A row for each model and format: what is in so many bytes, and what that does to a token."""
    rows = [
        [
            "model, format",
            "memory",
            "all other weights",
            "experts in memory",
            "hits",
            "read from files per token",
            "tokens per second",
            "prompt",
        ]
    ]
    for model in found:
        for label in useful(model):
            size = model.sizes[label]
            one = Streamed.of(size, model.layers, memory, disk * 1e9, bandwidth * 1e9)
            of_experts = ["too few", *["–"] * 4]
            if one is not None:
                all_fit = one.kept == size.experts
                of_experts = [
                    f"{'all' if all_fit else shown(one.kept)} of {shown(size.experts)} GB",
                    "–" if all_fit else f"{one.hits:.0%}",
                    "–" if all_fit else f"{shown(one.from_files)} GB",
                    str(one.speed),
                    "–" if all_fit else f"{one.prompt:.0f} s",
                ]
            other = f"{shown(size.weights - size.experts)} GB"
            cells = [f"{model.name}, {label}", f"{shown(memory)} GB", other, *of_experts]
            rows.append(cells)
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
