"""A cache in a file of safetensors: the rows of its tokens, the lengths of its sequences, and a
header that names model, layouts and formats. Rows are packed, so no block table is saved."""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from custom_pypto.files import save_tensors
from custom_pypto.rows.parts import write

from .recurrent import RecurrentLayer
from .sequence import Sequences
from .store import PagedLayer, Store, slots

VERSION = "custom_pypto.PagedCache 1"
LENGTHS = ("lengths", "seen", "written", "padding")  # of Sequences
HIDDEN = "hidden"  # of Sequences, for an MTP layer
STATES = ("conv_states", "recurrent_states")  # of RecurrentLayer


class Header(NamedTuple):
    made_for: dict  # properties of the model; see portable()
    options: dict  # arguments of PagedCache
    exchanged: bool  # of Sequences
    checksums: dict[str, int]  # by tensor

    def arguments(self, max_cache_len: int | None) -> dict:
        """Of PagedCache."""
        given = {} if max_cache_len is None else {"max_cache_len": max_cache_len}
        dtypes = {x: getattr(torch, self.options[x]) for x in ("index_dtype", "kv_dtype")}
        return self.options | dtypes | given


def write_file(path: Path, made_for: dict, options: dict, store: Store, seqs: Sequences) -> None:
    """Writes a cache, as :func:`save_tensors` does.

    Raises:
        OSError: of the system, with the remedy.
    """
    seqs.check_room(0, store.max_cache_len)
    tensors = {name: getattr(seqs, name) for name in LENGTHS}
    if seqs.hidden is not None:
        tensors[HIDDEN] = seqs.hidden
    for name, layer, pool, live in live_rows(store, seqs.lengths):
        rows = layer.pools[pool]
        tensors[name] = rows[tuple(live.T)] if live.ndim == 2 else rows.flatten(0, 1)[live]
    for name, layer, kind in recurrent_states(store):
        tensors |= {f"{name}.{i}": x for i, x in getattr(layer, kind).items() if x is not None}
    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    checksums = {name: checksum(x) for name, x in tensors.items()}
    header = Header(portable(made_for), portable(options), seqs.exchanged, checksums)
    text = json.dumps(header._asdict())
    metadata = {VERSION: text, "checksum": str(zlib.crc32(text.encode()))}
    try:
        save_tensors(path, tensors, metadata)
    except OSError as error:
        size = sum(x.nbytes for x in tensors.values())
        raise OSError(
            error.errno,
            f"PagedCache.save: path must be a file in a folder that exists, may be written and has "
            f"room for {size / 1e6:.1f} MB, got {path}: {error.strerror}; give another path, or "
            "make room or the folder. What was there before is unchanged",
        ) from error


def read_header(path: Path, file) -> Header:
    """
    Args:
        file: of :func:`opened`.
    Raises:
        ValueError: a damaged file, or none of :func:`write_file`.
    """
    metadata = file.metadata() or {}
    if VERSION not in metadata:
        raise ValueError(
            f"PagedCache.load: path must be a file that PagedCache.save wrote, got {path} without "
            f"the header {VERSION!r}; another version of this package may have written it"
        )
    text = metadata[VERSION]
    if str(zlib.crc32(text.encode())) != metadata.get("checksum"):
        raise damaged(path, "its header was changed")
    return Header(**json.loads(text))


def read_file(path: Path, file, header: Header, store: Store, seqs: Sequences) -> None:
    """Fills an empty cache with the same arguments.

    Raises:
        ValueError: a damaged file, or more tokens than the cache has room for.
    """

    def read(name: str) -> Tensor:
        x = file.get_tensor(name)
        if checksum(x) != header.checksums[name]:
            raise damaged(path, f"the bytes of {name} were changed")
        return x.to(seqs.lengths.device)

    for name in LENGTHS[:-1]:
        getattr(seqs, name).copy_(read(name))
    seqs.padding, seqs.exchanged = read("padding"), header.exchanged
    if seqs.hidden is not None:
        seqs.hidden.copy_(read(HIDDEN))
    if (seen := int(seqs.seen)) > store.max_cache_len:
        raise ValueError(
            f"PagedCache.load: max_cache_len must be at least {seen}, the tokens per sequence in "
            f"{path}, got room for {store.max_cache_len}; None takes that of the saved cache"
        )
    for name, layer, pool, live in live_rows(store, seqs.lengths):
        write(layer.pools[pool], live, read(name))
    for name, layer, kind in recurrent_states(store):
        for saved in header.checksums:
            if saved.startswith(f"{name}."):
                restore(layer, kind, int(saved.rpartition(".")[2]), read(saved))


def portable(properties: dict) -> dict:
    """As JSON has them, without the device, which may differ between processes."""
    kept = {name: x for name, x in properties.items() if name != "device"}
    return json.loads(json.dumps(kept, default=lambda dtype: str(dtype).removeprefix("torch.")))


@contextmanager
def opened(path: Path) -> Iterator:
    """The file, opened once for header and rows: another one may take its name meanwhile."""
    try:
        with path.open("rb"):
            pass  # the library names neither the file nor the kind of error
    except OSError as error:
        raise OSError(
            error.errno,
            f"PagedCache.load: path must be a file of PagedCache.save that this user may read, got "
            f"{path}: {error.strerror}; check the path, or save the cache there",
        ) from error
    try:
        with safe_open(path, "pt", backend="pread") as file:  # "mmap" opens it twice
            yield file
    except SafetensorError as error:
        raise damaged(path, str(error)) from error


def damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"PagedCache.load: {path} is damaged, or no file of PagedCache.save ({why}); save it again"
    )


def checksum(x: Tensor) -> int:
    """Of dtype, shape and bytes."""
    kind = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode())
    return zlib.crc32(x.detach().cpu().flatten().view(torch.uint8).numpy(), kind)


def live_rows(store: Store, lengths: Tensor) -> Iterator[tuple[str, PagedLayer, str, Tensor]]:
    """Of every pool its name in a file, layer, name, and the slots of rows with cached tokens."""
    of_layout = {}
    for layout, table in store.tables.items():
        rows = torch.arange(table.size(1) * layout.block, device=table.device)
        behind = lengths[:, None] // layout.ratio if layout.ratio else 0
        live = torch.where(rows < layout.ring, rows < lengths[:, None], rows - layout.ring < behind)
        found = slots(table, layout, rows.expand(len(lengths), -1), live)
        of_layout[layout] = found[live.flatten()]
    for i, layer in enumerate(store.layers):
        for pool, layout in layer.layouts.items():
            yield f"{i}.{pool}", layer, pool, of_layout[layout]


def recurrent_states(store: Store) -> Iterator[tuple[str, RecurrentLayer, str]]:
    """Of both kinds of states of every recurrent layer the name in a file, the layer, the kind."""
    for i, layer in enumerate(store.layers):
        if isinstance(layer, RecurrentLayer):
            yield from ((f"{i}.{kind}", layer, kind) for kind in STATES)


def restore(layer: RecurrentLayer, kind: str, i: int, state: Tensor) -> None:
    layer.lazy_initialization(**{kind: state}, state_idx=i)
    getattr(layer, kind)[i].copy_(state)
    layer.has_previous_state[i] = True
