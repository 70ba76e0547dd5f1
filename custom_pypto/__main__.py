"""``custom-pypto <command>``."""

import argparse
import json
import sys

from . import env
from .descriptions import ALL_OPS, LAYER_KERNELS
from .requirements import Problem
from .version import __version__

WAYS = {
    "npu": "ops on the NPU",
    "cpu": "ops on the CPU",
    "interpreter": "NPU kernels in PyPTO's interpreter and cost model",
    "generated": "NPU kernels as PyPTO's generated code",
}


def verify(device: str | None, op: str, load_error: Problem | None) -> int:
    report = env.collect(load_error)
    npu = report["npu"]
    print(env.summary(report))
    # this command must report a device node whose device does not work
    here = ["cpu"] + ["npu"] * bool(npu["devices"] or npu["device_nodes"])
    failed = 0
    for one in [device] if device else here:
        state = report["ways"][WAYS[one]]
        if not state["works"]:
            failed = 1
            print(f"FAILED  {WAYS[one]}")
            for missing in state["missing"]:
                print(f"        missing: {missing['what']}\n        remedy:  {missing['remedy']}")
            continue
        from .verify import verify

        failed |= not verify(one, op)
    if device is None and "npu" not in here:
        print("no NPU found; verify --device interpreter checks the NPU kernels without one")
    return int(failed)


def replay(file: str, device: str) -> int:
    from . import log

    try:
        return 0 if log.replay(file, device) else 1
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def main(arguments: list[str] | None = None, load_error: Problem | None = None) -> int:
    parser = argparse.ArgumentParser(prog="custom-pypto")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    env_parser = commands.add_parser(
        "env", help="report versions, what works here, what is missing and the remedy"
    )
    env_parser.add_argument("--json", action="store_true", help="JSON, for scripts and bug reports")
    verify_parser = commands.add_parser(
        "verify", help="compare every op on a device with its plain torch reference"
    )
    verify_parser.add_argument(
        "--device",
        choices=["npu", "cpu", "interpreter", "generated"],
        help="the NPU kernels on the CPU: interpreter, in PyPTO's interpreter; generated, as the "
        "C++ that PyPTO generates; default: cpu, then npu if there is one",
    )
    verify_parser.add_argument(
        "--op",
        choices=[*ALL_OPS, *LAYER_KERNELS],
        default="",
        metavar="OP",
        help="one op; default: all of them",
    )
    replay_parser = commands.add_parser(
        "replay", help="repeat a failed call from a file written by CUSTOM_PYPTO_LOG=3"
    )
    replay_parser.add_argument("file")
    replay_parser.add_argument(
        "--device", default="cpu", help="torch device to run on; default: cpu"
    )
    options = parser.parse_args(arguments)
    if options.command == "verify":
        return verify(options.device, options.op, load_error)
    if options.command == "replay":
        return replay(options.file, options.device)

    report = env.collect(load_error)
    print(json.dumps(report, indent=2) if options.json else env.render(report))
    return 0 if report["ways"]["ops on the CPU"]["works"] else 1


if __name__ == "__main__":
    sys.exit(main())
