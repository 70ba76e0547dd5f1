"""The estimates of PyPTO's cost model, from the tables of benchmarks/RESULTS.md."""

import re
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
TITLE = re.compile(r"^## NPU kernels, PyPTO(?: ([\d.]+\d))? .*estimates", re.MULTILINE)


def estimates(text: str, version: str | None) -> tuple[dict[tuple[str, str], str], str]:
    """µs by op and shape, as the cases have them, and where they are from.

    Args:
        text: of RESULTS.md, with a section for each version of PyPTO.
        version: of the installed PyPTO. If no section is of that version, the last one counts.
    """
    sections = {}
    for title in TITLE.finditer(text):
        sections[title[1]] = text[title.end() :].partition("\n## ")[0]
    if not sections:
        return {}, "no estimates in benchmarks/RESULTS.md"
    of = version if version in sections else list(sections)[-1]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in sections[of].splitlines()
        if line.startswith("|")
    ]
    op, shape, estimate = (rows[0].index(name) for name in ("op", "B, S1, keys", "estimate µs"))
    note = f"{' '.join(filter(None, ['PyPTO', of]))}'s cost model, no times of a device"
    if of != version:
        note += f"; the installed PyPTO is {version or 'none'}"
    return {(row[op], row[shape]): row[estimate] for row in rows[2:]}, note
