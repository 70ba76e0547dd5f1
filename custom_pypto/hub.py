"""Checkpoints by directory, or by the name of a repository on the Hugging Face Hub.

Needs ``huggingface_hub``, which transformers and vLLM bring: its cache, logins, progress bars and
variables (``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``, ``HF_HOME``) are those of the models.
"""

from __future__ import annotations

import functools
import glob
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, RepoFile, constants, errors, snapshot_download
from huggingface_hub.utils import HFValidationError, validate_repo_id

# what says which shards are needed
FIRST = ["config.json", "generation_config.json", "model.safetensors.index.json"]

CLIENT_ERRORS = (
    errors.HTTPError,  # of the client's HTTP library, and all answers of the Hub
    errors.EntryNotFoundError,
    errors.OfflineModeIsEnabled,
    getattr(errors, "XetDownloadError", errors.HTTPError),  # older clients have none
)
#: dtype and shape of each tensor of a safetensors file
Header = dict[str, tuple[str, list[int]]]


class Directory:
    """A checkpoint in a directory: all files that exist are here."""

    def __init__(self, folder: Path):
        self.folder = folder

    def header(self, file: str) -> Header | None:
        """The header of a file that is not here; None: there is no such file."""
        return None

    def files(self) -> list[str]:
        """All files at the top of the checkpoint, here or not."""
        return sorted(file.name for file in self.folder.iterdir() if file.is_file())

    def lacking(self, files: Iterable[str]) -> dict[str, int]:
        """Files that are not here yet, and their bytes."""
        return {}

    def fetch(self, files: Iterable[str]) -> None:
        """Brings files into the folder."""


class Snapshot(Directory):
    """One commit of a repository on the Hub, whose files come into the cache when they are needed.

    Args:
        what: the argument that named the repository, for errors.
    Raises:
        OSError: not found, gated, no network, no space; one sentence with the remedy.
    """

    def __init__(self, what: str, name: str, revision: str | None):
        self.what, self.name, self.revision = what, name, revision
        self.folder = None
        with self._explained():
            self.folder = Path(snapshot_download(name, revision=revision, allow_patterns=FIRST))
        if not (self.folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{what}: {name} must have a config.json to be a checkpoint of transformers; see "
                f"{self._page}"
            )

    @functools.cached_property
    def _page(self) -> str:
        return f"{constants.ENDPOINT}/{self.name}"

    @property
    def commit(self) -> str:
        return self.folder.name

    @functools.cache  # noqa: B019  # as many as a checkpoint has files
    def header(self, file: str) -> Header | None:
        with self._explained():
            try:
                found = HfApi().parse_safetensors_file_metadata(
                    self.name, file, revision=self.commit
                )
            except errors.EntryNotFoundError:
                return None
            except errors.SafetensorsParsingError as error:
                raise ValueError(
                    f"{self.what}: {file} of {self.name} is no safetensors file; see {self._page}"
                ) from error
        return {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()}

    def files(self) -> list[str]:
        if constants.HF_HUB_OFFLINE:
            return super().files()
        with self._explained():
            found = HfApi().list_repo_files(self.name, revision=self.commit)
        return [file for file in found if "/" not in file]

    def lacking(self, files: Iterable[str]) -> dict[str, int]:
        names = sorted(file for file in files if not (self.folder / file).is_file())
        if not names:
            return {}
        with self._explained():
            found = HfApi().get_paths_info(self.name, names, revision=self.commit)
        return {file.path: file.size for file in found if isinstance(file, RepoFile)}

    def fetch(self, files: Iterable[str]) -> None:
        """Downloads the files that the cache lacks, if they fit on its disk."""
        lacking = self.lacking(files)
        if not lacking:
            return
        needed, free = sum(lacking.values()), shutil.disk_usage(self.folder).free
        if needed > free:
            raise OSError(
                f"{self.what}: {self.name} needs {needed / 1e9:.1f} GB in "
                f"{constants.HF_HUB_CACHE}, which has {free / 1e9:.1f} GB free; set HF_HOME to "
                "a larger disk",
            )
        with self._explained():
            snapshot_download(
                self.name, revision=self.commit, allow_patterns=list(map(glob.escape, lacking))
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """The errors of the client, each as one sentence with the remedy."""
        try:
            yield
        except CLIENT_ERRORS as error:
            raise self._sentence(error) from error

    def _sentence(self, error: BaseException) -> OSError:
        name, endpoint, page = self.name, constants.ENDPOINT, self._page
        login = "hf auth login, or set HF_TOKEN"
        if isinstance(error, errors.GatedRepoError):
            return PermissionError(
                f"{self.what}: {name} is gated: accept its conditions at {page}, then {login}"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return FileNotFoundError(
                f"{self.what}: {name} has no revision {self.revision!r}; see {page}"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return FileNotFoundError(
                f"{self.what}: {name} is no directory here and no repository at {endpoint} that "
                f"this login may read; check the name, or, if it is private: {login}"
            )
        if constants.HF_HUB_OFFLINE:
            return FileNotFoundError(
                f"{self.what}: HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} lacks files of "
                f"{name}; unset it to download them"
            )
        if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
            return self._sentence(error.__cause__)  # the client looked into its cache in vain
        happened, remedy = f"the download of {name} broke off", "run the same again"
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
            if status in (401, 403):
                return PermissionError(
                    f"{self.what}: {endpoint} refuses this login for {name} ({status}); {login}"
                )
            happened = f"{endpoint} answers {status}"
        elif not self.folder:
            happened = f"{name} is no directory here, and {endpoint} does not answer"
            remedy = f"hf download {name} --local-dir DIR on another machine, and pass DIR"
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return ConnectionError(
            f"{self.what}: {happened} ({why}); check the network and HF_ENDPOINT, then {remedy}"
        )


def is_name(path: str | Path) -> bool:
    """Whether this can only be the name of a repository, ``owner/name``."""
    if not isinstance(path, str) or path.count("/") != 1 or Path(path).exists():
        return False
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return True


def other_format(path: Path) -> str:
    """What a path without safetensors has instead, and the remedy; empty: nothing known."""
    files = sorted(file.name for file in path.iterdir()) if path.is_dir() else [path.name]
    if "adapter_config.json" in files:
        base = json.loads((path / "adapter_config.json").read_text()).get("base_model_name_or_path")
        return (
            f": it is an adapter of {base}; load that, and then the adapter with "
            "peft.PeftModel.from_pretrained"
        )
    if any(file.endswith(".gguf") for file in files):
        return (
            ": GGUF is not read; load the published safetensors, with "
            "weights='int4' for as few bytes"
        )
    if any(re.fullmatch(r"pytorch_model.*\.bin", file) for file in files):
        return (
            ": pytorch_model.bin is not read; load safetensors of this model, "
            "or make them with from_pretrained and save_pretrained of transformers"
        )
    return ""


def find(what: str, path: str | Path, revision: str | None = None) -> Directory:
    """The checkpoint in this directory or, of a name that is none, in this repository of the Hub.

    Args:
        what: the argument that ``path`` is, for errors: ``"load: path"``.
        revision: branch, tag or commit of a repository; None: its main branch.
    Raises:
        FileNotFoundError: neither.
        OSError: the Hub does not give it; see :class:`Snapshot`.
        ValueError: ``revision`` for a directory.
        TypeError: ``path`` is no path.
    """
    if not isinstance(path, (str, Path)):
        raise TypeError(
            f"{what} must be a directory or the name of a repository of the Hugging Face Hub, as "
            f"str or Path, got {type(path).__name__} {path!r}"
        )
    if is_name(path):
        return Snapshot(what, str(path), revision)
    folder = Path(path).expanduser()
    if not folder.exists():
        raise FileNotFoundError(
            f"{what} must be a directory, or the name of a repository of the Hugging Face Hub such "
            f"as deepseek-ai/DeepSeek-V3.2, got {path}"
        )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{what} must be a checkpoint directory with a config.json, got {path}"
            f"{other_format(folder)}"
        )
    if revision is not None:
        raise ValueError(
            f"{what} must be the name of a repository of the Hub with revision={revision!r}, got "
            f"the directory {path}"
        )
    return Directory(folder)
