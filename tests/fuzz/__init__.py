"""Fuzzing of the ops on the CPU: every call is rejected or equals the reference.

``python tests/fuzz --minutes 10 --seed 7`` runs them; a case is a seed and a number.
"""

import argparse

THREADED = 16  # one case in this many runs with three threads


def parse(arguments: list[str]) -> argparse.Namespace:
    about = "Runs random calls of the ops until a time limit, a number of cases or a failure."
    parser = argparse.ArgumentParser(prog="run.sh fuzz", description=about)
    parser.add_argument("--minutes", type=float, default=1.0, help="duration; default 1")
    parser.add_argument("--cases", type=int, help="number of cases, instead of a duration")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases; default 0")
    parser.add_argument("--threads", type=int, help=f"default 1, and 3 in one case of {THREADED}")
    parser.add_argument("--case", metavar="SEED:NUMBER", help="run one case, print its arguments")
    return parser.parse_args(arguments)
