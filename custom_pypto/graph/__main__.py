"""``python -m custom_pypto.graph``: writes the GE prototypes beside this file."""

import argparse
import sys
from pathlib import Path

from ..files import replacing
from . import headers
from .prototypes import PrototypeError, prototypes

FOLDER = Path(__file__).parent


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m custom_pypto.graph",
        description="writes the prototypes of the GE operators (<op>.h) from the schemas and "
        "descriptions of the ops",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file would change"
    )
    options = parser.parse_args(arguments)
    try:
        found = prototypes()
    except PrototypeError as error:
        print(error, file=sys.stderr)
        return 1
    texts = {FOLDER / f"{prototype.op}.h": headers.source(prototype) for prototype in found}
    stale = [path for path in texts if not path.exists() or path.read_text() != texts[path]]
    if options.check:
        for path in stale:
            print(f"{path} is out of date; run `python -m custom_pypto.graph`", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        with replacing(path) as part:
            part.write_text(texts[path])
    for path in texts:
        print(f"{path}: {'written' if path in stale else 'unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
