"""The next thing to try after a failure, by how the child ended and what its log says."""

import re

# the first that matches decides; \1 is what the pattern found
KNOWN = [
    (
        r"(\w+) in (\S+) is another operator",
        r"\2 has an operator \1 that is not ours, and CANN takes the first one: put a package "
        "built from custom_pypto/graph/*.h before it in ASCEND_CUSTOM_OPP_PATH",
    ),
    (
        r"has no function (aclnn\w+)",
        r"the package has no \1: build it again, with op_api and with this operator",
    ),
    (
        r"(aclnn\w+) failed with (\d+)",
        r"the message after `\1 failed with \2` is CANN's; `ASCEND_GLOBAL_LOG_LEVEL=1 "
        "ASCEND_SLOG_PRINT_TO_STDOUT=1` says more",
    ),
    (
        r"(aclnn\w+) .*not in libopapi\.so",
        r"this CANN has no \1: install a newer one that matches torch_npu",
    ),
    (
        r"(?i)PTO_TILE_LIB_CODE_PATH|pto/\S+: No such file|pto-inst\.hpp",
        "PyPTO lacks the headers of pto-isa: install CANN's package of them, or set "
        "PTO_TILE_LIB_CODE_PATH to a checkout (docs/npu.md)",
    ),
    (
        r"(bisheng|ccec|bishengir-compile)\b.*(?:not found|No such file)",
        r"the device's compiler \1 is not on PATH: source CANN's set_env.sh before Python",
    ),
    (
        r"graph/custom_op\.h|before compiling custom ops",
        "this CANN has no custom-op callbacks for GE: use `npugraph_ex`, a newer CANN, or a kernel "
        "package",
    ),
    (
        r"(?i)out of memory|alloc\w* .*fail\w* .*device",
        "another process may hold the device: `npu-smi info`, then another device by "
        "`ASCEND_RT_VISIBLE_DEVICES=1`",
    ),
    (
        r"(lib\w+\.so)[.\d]*: cannot open shared object file",
        r"\1 is not found: source CANN's set_env.sh before Python; `ldd` names what it lacks",
    ),
    (
        r"undefined symbol: (\w+)",
        r"the library that lacks \1 is of another release: `custom-pypto env` and torch_npu's "
        "release notes name the versions that fit",
    ),
    (
        r"(?i)\b507\d{3}\b|\b(?:aicore|vector core|mte)\b.*(?:exception|error)",
        "the device reports an exception: repeat with `ASCEND_LAUNCH_BLOCKING=1`, which names the "
        "launch, and send the newest file of ~/ascend/log/debug/plog with the archive",
    ),
    (
        r"Run pass failed|Errcode: F\w+|SimulationError",
        "PyPTO's compiler rejects the kernel: repeat with `ASCEND_GLOBAL_LOG_LEVEL=1 "
        "ASCEND_SLOG_PRINT_TO_STDOUT=1`, and compare the PyPTO in env.json with the one of "
        "`custom-pypto env` elsewhere",
    ),
    (
        r"\Astopped after",
        "`npu-smi info` says whether the device still answers. The traceback in the log says where "
        "it waited: in a compilation, allow more with `--limit 4`; in a launch, repeat with "
        "`ASCEND_LAUNCH_BLOCKING=1`",
    ),
    (
        r"\Adied of SIGKILL",
        "the system killed it, most often for want of memory: `dmesg | tail`, `free -g`",
    ),
    (
        r"\Adied of (SIG\w+)",
        r"the log has the traceback at \1: its first line that is not PyPTO's or torch_npu's is "
        "the call; `CUSTOM_PYPTO_LOG=2` logs its shapes",
    ),
]


def next_step(how: str, log: str, otherwise: str) -> str:
    """The next thing to try.

    Args:
        how: the end of the child, as ``children.Ended`` has it; log: its output.
        otherwise: the advice of the part.
    """
    text = f"{how}\n{log}"
    for pattern, advice in KNOWN:
        if match := re.search(pattern, text):
            return match.expand(advice)
    return otherwise
