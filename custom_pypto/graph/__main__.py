"""``python -m custom_pypto.graph``: writes ``ops.py`` from the prototypes beside it."""

import argparse
import os
import sys

from .constructors import source
from .prototypes import FOLDER, PrototypeError, read

GENERATED = FOLDER / "ops.py"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m custom_pypto.graph",
        description="writes constructors of the GE operators from their prototypes",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the file would change"
    )
    options = parser.parse_args(arguments)
    try:
        text = source(read())
    except PrototypeError as error:
        print(error, file=sys.stderr)
        return 1
    same = GENERATED.exists() and GENERATED.read_text() == text
    if options.check and not same:
        print(
            f"{GENERATED} is not what the prototypes give; run `python -m custom_pypto.graph`",
            file=sys.stderr,
        )
        return 1
    if not same:
        part = GENERATED.with_suffix(f".{os.getpid()}")
        part.write_text(text)
        part.replace(GENERATED)  # whole, even if this process is interrupted
    print(f"{GENERATED}: {'unchanged' if same else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
