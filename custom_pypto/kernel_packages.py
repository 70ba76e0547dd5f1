"""Installed kernel packages: whether they have the operators of our GE prototypes.

A kernel package is what CANN calls a custom operator package: a folder, named by
``ASCEND_CUSTOM_OPP_PATH`` or by ``load_priority`` in ``$ASCEND_OPP_PATH/vendors/config.ini``, with

- ``op_impl``: kernels, and a list of the operators for each SoC, which graph mode needs;
- ``op_api/lib/libcust_opapi.so``: the functions ``aclnn<Operator>GetWorkspaceSize`` and
  ``aclnn<Operator>``, which eager calls through aclnn need as well.

CANN takes an operator from the first package that lists it, so that one decides here too. It must
list the inputs, outputs and attributes of our prototype: the published recipe has operators of the
same names with other inputs, and a call with ours would read wrong memory.
The lists and functions are what CANN's ``opbuild`` generates from an operator's definition
(https://gitcode.com/cann/asc-devkit, tools/build/opbuild). Not verified on hardware.

This module can be imported without torch; :func:`problem` needs it, for the prototypes.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .requirements import Problem

if TYPE_CHECKING:
    from .graph.prototypes import Prototype

LISTS = "op_impl/ai_core/tbe/config/*/aic-*-ops-info.json"
LIBRARY = "op_api/lib/libcust_opapi.so"
PLACES = "ASCEND_CUSTOM_OPP_PATH or ASCEND_OPP_PATH/vendors"


class Functions(NamedTuple):
    """The two phases of an operator's single-operator call."""

    library: str
    first: ctypes._CFuncPtr  # type: ignore[name-defined]
    second: ctypes._CFuncPtr  # type: ignore[name-defined]


def places() -> tuple[str, str]:
    """The variables that name packages, which are a key for caches of what is found there."""
    return os.environ.get("ASCEND_CUSTOM_OPP_PATH", ""), os.environ.get("ASCEND_OPP_PATH", "")


def packages() -> list[str]:
    """The folders of the packages, in the order in which CANN looks."""
    custom, opp = places()
    folders = [path for path in custom.split(":") if path]
    if not opp:
        return folders
    vendors = os.path.join(opp, "vendors")
    try:
        with open(os.path.join(vendors, "config.ini"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError):  # CANN takes no vendor then
        return folders
    for line in lines:
        key, _, names = line.partition("=")
        if key.strip() == "load_priority":
            folders += [os.path.join(vendors, name.strip()) for name in names.split(",") if name]
    return folders


def problem(wanted: Sequence[Prototype] | None = None, *, library: bool = False) -> Problem | None:
    """Why the installed packages do not offer the operators.

    Args:
        wanted: the prototypes, by default all.
        library: whether eager calls are wanted as well, not graph mode alone.
    """
    if wanted is None:
        if not packages():
            # no list of all names, which would help nobody
            return _absent(["the operators of the ops"])
        from .graph.prototypes import prototypes

        wanted = prototypes()
    absent = [prototype.type for prototype in wanted if not listed(prototype.type)]
    found = _absent(absent) if absent else None
    for prototype in wanted:
        if prototype.type in absent:
            continue
        try:
            functions(prototype) if library else package(prototype)
        except Problem as missing:
            if found is None:
                return missing
            return Problem(f"{found.what}; {missing.what}", found.remedy)
    return found


def foreign() -> Problem | None:
    """The first operator of ours that a package lists with other inputs, outputs or attributes."""
    if not packages():
        return None
    from .graph.prototypes import prototypes

    for prototype in prototypes():
        if listed(prototype.type):
            try:
                package(prototype)
            except Problem as other:
                return other
    return None


def package(prototype: Prototype) -> str:
    """The folder of the package that offers the operator.

    Raises:
        Problem: there is none, or the first one lists another operator of that type.
    """
    if not (found := listed(prototype.type)):
        raise _absent([prototype.type])
    folder = found[0][0]
    for _, path, description in found:
        if difference := _difference(prototype, description):
            raise Problem(
                f"{prototype.type} in {path} is another operator: {difference}",
                f"put a package built from custom_pypto/graph/{prototype.op}.h before {folder} "
                "in ASCEND_CUSTOM_OPP_PATH",
            )
    return folder


def functions(prototype: Prototype) -> Functions:
    """The operator's functions for eager calls.

    Raises:
        Problem: as :func:`package`; or the package lacks them, or its library does not load.
    """
    path = os.path.join(package(prototype), LIBRARY)
    if not os.path.exists(path):
        raise Problem(
            f"{path}, with aclnn{prototype.type}",
            "install the package with op_api, as CANN's build of an operator project makes it",
        )
    try:
        library = _loaded(path)
    except OSError as error:
        raise Problem(f"{path} cannot be loaded: {error}", "source CANN's set_env.sh") from error
    phases = f"aclnn{prototype.type}GetWorkspaceSize", f"aclnn{prototype.type}"
    for phase in phases:
        if not hasattr(library, phase):
            raise Problem(
                f"{path} has no function {phase}",
                f"build the package from custom_pypto/graph/{prototype.op}.h with its op_api",
            )
    return Functions(path, *(getattr(library, phase) for phase in phases))


@functools.cache  # a library is loaded for good
def _loaded(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


def _absent(types: Sequence[str]) -> Problem:
    return Problem(
        f"a kernel package with {', '.join(types)} in {PLACES}",
        "this package ships no kernels for CANN, and PyPTO needs none; one of your own is built "
        "from custom_pypto/graph/*.h",
    )


def listed(type: str) -> list[tuple[str, str, dict]]:
    """Folder, list and description of an operator in the lists of the first package with it.

    Args:
        type: its name in GE, ours or not.
    """
    for folder in packages():
        found = [
            (folder, path, operators[type])
            for path, operators in _lists(folder)
            if isinstance(operators.get(type), dict)
        ]
        if found:
            return found
    return []


def _lists(folder: str) -> Iterator[tuple[str, dict]]:
    for name in sorted(glob.glob(LISTS, root_dir=folder)):
        path = os.path.join(folder, name)
        try:
            yield path, _operators(path, os.stat(path).st_mtime_ns)
        except (OSError, ValueError):  # another vendor's file
            continue


@functools.lru_cache(maxsize=32)  # CANN's own lists are megabytes
def _operators(path: str, _modified: int) -> dict:
    with open(path, encoding="utf-8") as file:
        operators = json.load(file)
    return operators if isinstance(operators, dict) else {}


def _difference(prototype: Prototype, description: dict) -> str | None:
    """The first difference of a list's description to the prototype."""
    own = _description(prototype)
    for what, read in _PARTS.items():
        expected, got = read(own), read(description)
        if got != expected:
            return f"its {what} must be {_joined(expected)}, got {_joined(got)}"
    return None


def listing(prototypes: Iterable[Prototype]) -> dict[str, dict]:
    """What CANN's build writes into a list, for :mod:`json`: operator -> its description."""
    return {prototype.type: _description(prototype) for prototype in prototypes}


def _description(prototype: Prototype) -> dict[str, dict]:
    found = {"opFile": {"value": prototype.op}}
    for part, tensors in (("input", prototype.inputs), ("output", prototype.outputs)):
        for i, tensor in enumerate(tensors):
            found[f"{part}{i}"] = {
                "name": tensor.name,
                "dtype": ",".join(tensor.dtypes),
                "paramType": tensor.kind if part == "input" else "required",
            }
    if prototype.attributes:
        names = ",".join(attribute.name for attribute in prototype.attributes)
        found["attr"] = {"list": names}
    for attribute in prototype.attributes:
        kind = "required" if attribute.required else "optional"
        found[f"attr_{attribute.name}"] = {"type": attribute.type, "paramType": kind}
    return found


def _joined(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _tensors(description: dict, part: str) -> list[str]:
    """The names, with the kinds that change the type of a function's argument."""
    found: list[str] = []
    while isinstance(entry := description.get(f"{part}{len(found)}"), dict):
        kinds = [kind] if (kind := entry.get("paramType", "required")) != "required" else []
        if "valueDepend" in entry:  # a list of numbers on the host, not a tensor
            kinds.append("by value")
        found.append(
            f"{entry.get('name')} ({', '.join(kinds)})" if kinds else f"{entry.get('name')}"
        )
    return found


def _attributes(description: dict) -> list[str]:
    listed = description.get("attr")
    names = str(listed.get("list", "")).split(",") if isinstance(listed, dict) else []
    types = [description.get(f"attr_{name}") for name in names]
    return [
        f"{name} ({type.get('type') if isinstance(type, dict) else 'unknown'})"
        for name, type in zip(names, types, strict=True)
        if name
    ]


_PARTS: dict[str, Callable[[dict], list[str]]] = {
    "inputs": functools.partial(_tensors, part="input"),
    "outputs": functools.partial(_tensors, part="output"),
    "attributes": _attributes,
}
