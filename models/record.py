"""What a model chose for each token, as tensors: in memory, and in a file of safetensors."""

import json
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import custom_pypto
from custom_pypto.files import save_tensors

VERSION = "custom_pypto.Record 1"
KINDS = ("indices", "experts")
# of a config: what a replay by another model must not silently differ in
FACTS = ("num_hidden_layers", "index_topk", "index_kpool", "compress_rates")
FACTS += ("num_local_experts", "num_experts_per_tok")


@dataclass
class Record:
    """What a model chose for each of T tokens of B sequences: :func:`models.record_indices` makes
    it, :func:`models.replay_indices` repeats it::

        record.save("rollout.safetensors")
        record = models.Record.load("rollout.safetensors")
        first = record[:1]            # of one sequence
        unpadded = record[1:2, 9:]    # of the next one, without its 9 tokens of padding

    Args:
        indices: of each layer that selects, by its number: the positions that a token attends
            to, int32 ``[B, T, K]``.
        experts: of each layer with routed experts: those of a token, in the order of its router,
            int32 ``[B, T, k]``. Empty: none were recorded.
        made_for: properties of the model that made it, which a replay compares. Empty: unknown,
            as of records from a server.
    """

    indices: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)
    made_for: dict = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """By their names in a file and in messages."""
        return {f"{kind}.{i}": x for kind in KINDS for i, x in getattr(self, kind).items()}

    def __getitem__(self, part: slice | tuple[slice, slice]) -> "Record":
        """The record of some sequences, and of some of their tokens.

        Raises:
            TypeError: not of slices.
        """
        slices = part if isinstance(part, tuple) else (part,)
        if not all(isinstance(x, slice) for x in slices) or len(slices) > 2:
            raise TypeError(
                f"Record: a part must be slices of sequences and of tokens, got {part!r}; "
                "record.indices[layer] and record.experts[layer] are the tensors of a layer"
            )
        of_kind = ({i: x[slices] for i, x in getattr(self, kind).items()} for kind in KINDS)
        return Record(*of_kind, self.made_for)

    def save(self, path: str | Path) -> None:
        """Writes a file of safetensors, with the versions that made it.

        Raises:
            OSError: of the system; what was there before is unchanged.
        """
        facts = {
            "made_for": self.made_for,
            "versions": {
                "custom_pypto": custom_pypto.__version__,
                "transformers": version("transformers"),
            },
        }
        save_tensors(Path(path), self.tensors(), {VERSION: json.dumps(facts)})

    @classmethod
    def load(cls, path: str | Path) -> "Record":
        """Reads a file of :meth:`save`, to the CPU; :func:`models.replay_indices` brings it to the
        model.

        Raises:
            OSError: of the system.
            ValueError: a damaged file, or none of this version of the format.
        """
        with Path(path).open("rb"):
            pass  # the library names neither the file nor the kind of error
        try:
            with safe_open(path, "pt") as file:
                header = (file.metadata() or {}).get(VERSION)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if header is not None:
                record = cls(made_for=dict(json.loads(header)["made_for"]))
                for name, x in sorted(tensors.items()):
                    kind, _, layer = name.partition(".")
                    {key: getattr(record, key) for key in KINDS}[kind][int(layer)] = x
                return record
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"Record.load: {path} is damaged, or no file of Record.save ({error!r}); save it "
                "again"
            ) from error
        raise ValueError(
            f"Record.load: path must be a file that Record.save wrote, got {path} without the "
            f"header {VERSION!r}; another version of this package may have written it"
        )


def made_for(text) -> dict:
    """The properties of a text model on which its records depend, as JSON has them."""
    config = text.config
    facts = {name: getattr(config, name) for name in FACTS if hasattr(config, name)}
    return json.loads(json.dumps({"model_type": config.model_type} | facts))


def check_tensors(
    kind: str, tensors: dict[int, Tensor], widths: dict[int, int], shape: torch.Size | None
) -> None:
    """Rejects those of another model.

    Args:
        kind: ``"indices"`` or ``"experts"``.
        widths: the last size of the tensor of each layer.
        shape: of the sequences and tokens of a record.
    Raises:
        ValueError: names the tensor, what was expected and what came.
    """
    what = {"indices": "those that select", "experts": "those with routed experts"}[kind]
    if sorted(tensors) != list(widths):
        raise ValueError(
            f"replay_indices: record.{kind} must have layers {list(widths)} ({what}), got "
            f"{sorted(tensors)}; record with the same model"
        )
    for layer, x in tensors.items():
        if x.dtype != torch.int32 or x.shape != (*shape, widths[layer]):
            raise ValueError(
                f"replay_indices: record.{kind}[{layer}] must be int32 [B, T, {widths[layer]}] ("
                f"{kind} of a token in this model) with [B, T] = {list(shape)}, got {x.dtype} "
                f"{list(x.shape)}"
            )
