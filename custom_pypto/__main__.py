"""``python -m custom_pypto <command>``."""

import argparse
import json
import sys

from . import env


def verify(device: str | None) -> int:
    report = env.collect()
    device = device or ("npu" if report["npu"]["devices"] else "cpu")
    way = {
        "npu": "ops on the NPU",
        "cpu": "ops on the CPU",
        "interpreter": "NPU kernels in PyPTO's interpreter and cost model",
    }[device]
    if not report["ways"][way]["works"]:
        for missing in report["ways"][way]["missing"]:
            print(f"missing: {missing['what']}\nremedy:  {missing['remedy']}", file=sys.stderr)
        return 1
    from .verify import verify

    return 0 if verify(device) else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m custom_pypto")
    commands = parser.add_subparsers(dest="command", required=True)
    env_parser = commands.add_parser(
        "env", help="what is installed, what works here, what is missing and the remedy"
    )
    env_parser.add_argument("--json", action="store_true", help="for scripts and bug reports")
    verify_parser = commands.add_parser(
        "verify", help="compare every op on a device with its definition in plain torch"
    )
    verify_parser.add_argument(
        "--device",
        choices=["npu", "cpu", "interpreter"],
        help="interpreter: the NPU programs on the CPU, in PyPTO's interpreter; "
        "default: npu where there is one, else cpu",
    )
    options = parser.parse_args(arguments)
    if options.command == "verify":
        return verify(options.device)

    report = env.collect()
    print(json.dumps(report, indent=2) if options.json else env.render(report))
    return 0 if report["ways"]["ops on the CPU"]["works"] else 1


if __name__ == "__main__":
    sys.exit(main())
