"""The GE prototypes beside this file, read by compiling them against a header of our own.

They are C++, of which a compiler is the only true reader: it takes about a second.
"""

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
READER = FOLDER / "reader"


class PrototypeError(RuntimeError):
    """A prototype is wrong, or nothing here can read it."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input or an output; of a dynamic one, a list of tensors."""

    name: str
    kind: str  # required, optional or dynamic
    dtypes: tuple[str, ...]  # DT_BF16, ...


@dataclasses.dataclass(frozen=True)
class Attribute:
    name: str
    kind: str  # as in the prototype: Int, Float, String, ListInt, ...
    vt: str  # GE's name of the same: VT_INT, ...
    required: bool
    default: object  # None if required


@dataclasses.dataclass(frozen=True)
class Prototype:
    type: str
    header: Path
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]

    @property
    def op(self) -> str:
        """The name in the schema, which is that of the header."""
        return self.header.stem

    @property
    def written(self) -> tuple[str, ...]:
        """The inputs that are written in place: those that are outputs too."""
        outputs = {output.name for output in self.outputs}
        return tuple(tensor.name for tensor in self.inputs if tensor.name in outputs)


def compiler() -> list[str] | None:
    """The command of the C++ compiler, ``$CXX`` or g++; None if it is not installed."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    return command if shutil.which(command[0]) else None


def read(headers: Sequence[Path] | None = None) -> list[Prototype]:
    """The prototypes of ``headers``, by default of all beside this file, in the order of names.

    Raises:
        PrototypeError: there is no compiler, a header does not compile, or a prototype is wrong;
            the message names the header and the operator.
    """
    if headers is None:
        headers = sorted(FOLDER.glob("*.h"))
    if not headers:
        raise PrototypeError(f"custom_pypto.graph: {FOLDER} must hold prototypes (*.h), got none")
    if (command := compiler()) is None:
        raise PrototypeError(
            f"custom_pypto.graph: a C++ compiler must read the prototypes, found no "
            f"{os.environ.get('CXX') or 'g++'}; install g++, or set CXX"
        )
    with tempfile.TemporaryDirectory(prefix="custom-pypto-graph-") as folder:
        program = Path(folder) / "print"
        included = [part for header in headers for part in ("-include", str(header.resolve()))]
        build = [*command, "-std=c++17", "-O0", f"-I{READER}", *included]
        _run([*build, str(READER / "print.cpp"), "-o", str(program)], "do not compile")
        found = json.loads(_run([str(program)], "are wrong"))
    return [_prototype(**entry) for entry in found]


def _run(command: list[str], failure: str) -> str:
    # the compiler's messages are quoted, and in English: LC_ALL
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        # of a compiler the first error, which is the cause of the others
        said = [line for line in lines if " error: " in line][:1] or lines[:20]
        raise PrototypeError("\n".join([f"custom_pypto.graph: prototypes {failure}:", *said]))
    return done.stdout


def _prototype(type, header, inputs, outputs, attributes) -> Prototype:
    def tensors(entries):
        return tuple(Tensor(e["name"], e["kind"], tuple(e["dtypes"])) for e in entries)

    return Prototype(
        type,
        Path(header),
        tensors(inputs),
        tensors(outputs),
        tuple(Attribute(**entry) for entry in attributes),
    )
