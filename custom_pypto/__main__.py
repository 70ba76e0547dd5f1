"""``python -m custom_pypto <command>``."""

import argparse
import json
import sys

from . import env


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m custom_pypto")
    commands = parser.add_subparsers(dest="command", required=True)
    env_parser = commands.add_parser(
        "env", help="what is installed, what works here, what is missing and the remedy"
    )
    env_parser.add_argument("--json", action="store_true", help="for scripts and bug reports")
    options = parser.parse_args(arguments)

    report = env.collect()
    print(json.dumps(report, indent=2) if options.json else env.render(report))
    return 0 if report["ways"]["ops on the CPU"]["works"] else 1


if __name__ == "__main__":
    sys.exit(main())
