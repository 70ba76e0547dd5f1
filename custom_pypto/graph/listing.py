"""The list of operators in a kernel package, ``aic-<soc>-ops-info.json``, from the prototypes.

CANN's build of a package writes one; here it is made for the package of the host
simulator and for tests.
"""

from collections.abc import Iterable

from .prototypes import Prototype


def listing(prototypes: Iterable[Prototype]) -> dict[str, dict]:
    """What the list holds, for :mod:`json`: operator -> its description."""
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
