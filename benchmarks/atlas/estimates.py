"""The estimates of PyPTO's cost model, as ``bash run.sh bench npu --write`` stored them."""

from results import Run


def estimates(runs: list[Run], version: str | None) -> tuple[dict[tuple[str, str], str], str]:
    """µs by op and shape, as the cases have them, and where they are from.

    Args:
        runs: one of each version of PyPTO.
        version: of the installed PyPTO. If no run is of that version, the last one counts.
    """
    if not runs:
        return {}, "no estimates in benchmarks/results"
    named = {run["variant"]: run for run in runs}
    of = version if version in named else runs[-1]["variant"]
    at = len(named[of]["case"]) + named[of]["figures"].index("estimate µs")
    note = f"PyPTO {of}'s cost model, no times of a device"
    if of != version:
        note += f"; the installed PyPTO is {version or 'none'}"
    return {(row[0], row[1]): str(row[at]) for row in named[of]["rows"]}, note
