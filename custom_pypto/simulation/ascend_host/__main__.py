"""Runs a Python program on the host simulator of CANN; without a program, only builds it.

python -m custom_pypto.simulation.ascend_host program.py arguments
python -m custom_pypto.simulation.ascend_host -m module arguments
"""

import os
import runpy
import sys

from . import AscendHostUnavailable, start

UNAVAILABLE = 3


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]) or arguments == ["-m"]:
        print(__doc__)
        return 0 if arguments != ["-m"] else 2
    try:
        start()
    except AscendHostUnavailable as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE
    if not arguments:
        return 0
    # as Python does: argv and the first entry of sys.path are the program's
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
