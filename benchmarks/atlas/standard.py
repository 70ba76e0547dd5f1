"""An op beside torch_npu's own: the same inputs, errors against the reference, then times.

    python benchmarks/atlas/standard.py OP [--quick]

Errors and their limit are those of ``verify``: of the indexers the largest score that was missed,
or is out of order, of attention the largest error relative to its row. torch_npu's op rounds
elsewhere (docs/<op>.md, "Compared with torch_npu"), so only our error decides the exit code.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch_npu
from torch import Tensor

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

from measure import table  # noqa: E402

from atlas.calls import Call, npu_cases, timed  # noqa: E402
from custom_pypto import reference  # noqa: E402

NOT_HERE = 77  # nothing to do here; the last line says why
NO_OPERATOR = "not in libopapi.so"  # torch_npu's message where CANN lacks the operator
CASES = {
    "npu_lightning_indexer_pto": npu_cases.indexer,
    "npu_sparse_flash_attention_pto": npu_cases.attention,
    "npu_quant_lightning_indexer_pto": npu_cases.int8_indexer,
    "npu_kv_quant_sparse_flash_attention_pto": npu_cases.int8_attention,
}
SIZES = [(1, 1, 8192), (4, 2, 8192), (1, 1, 65536)]
HEADER = [
    *("op", "B, S1, keys", "limit of error", "our error", "torch_npu's error", "positions apart"),
    *("ours alone µs", "torch_npu's alone µs", "ours in a row µs", "torch_npu's in a row µs"),
]


def inputs(op: str, size: tuple[int, int, int]) -> Call:
    call = Call(CASES[op](*size))
    x = call.case.arguments
    if "query_dequant_scale" in x:  # torch_npu's op takes no other weights
        x["weights"] = x["weights"].half()
    return call


def theirs(call: Call, arguments: dict) -> Callable[[], Tensor]:
    """torch_npu's op with the same arguments, and those whose defaults differ."""
    mine = {name: x for name, x in arguments.items() if name != "cmp_ratio"}  # of ours alone
    more = {"layout_key": "PA_BSND"}
    if "actual_seq_lengths_kv" in arguments:
        # value may be missing in CANN 9.2 and later only
        more = {"layout_kv": "PA_BSND", "attention_mode": 2, "value": arguments["key"]}
    op = getattr(torch_npu, call.case.op.removesuffix("_pto"))

    def run():
        out = op(**mine | more)
        return out if isinstance(out, Tensor) else out[0]

    return run


def error(call: Call, out: Tensor, expected: Tensor) -> tuple[float, float]:
    """Of a result, and its limit."""
    judge, x = reference.MODULES[call.case.op].error, call.case.arguments
    return judge(out.cpu(), expected, x, x)


def apart(one: Tensor, other: Tensor) -> str:
    """How many positions only one of two selections has."""
    if one.is_floating_point():
        return "-"
    pairs = zip(one.flatten(0, 2).tolist(), other.flatten(0, 2).tolist(), strict=True)
    return str(sum(len(set(a) - set(b)) for a, b in pairs))


def compared(call: Call, quick: bool) -> tuple[list[str], bool]:
    """The row of the table, and whether our result is within its limit."""
    ours = call.on("npu")
    sides = {"ours": ours, "torch_npu": theirs(call, ours.keywords)}
    expected = getattr(reference, call.case.op)(**call.case.arguments)
    out = {name: run() for name, run in sides.items()}
    errors = {name: error(call, result, expected) for name, result in out.items()}
    (mine, limit), (other, _) = errors["ours"], errors["torch_npu"]
    times = timed(sides, quick)
    pairs = zip(times["ours"], times["torch_npu"], strict=True)
    row = [call.case.op, call.case.shape, *(f"{x:.2g}" for x in (limit, mine, other))]
    row += [apart(out["ours"].cpu(), out["torch_npu"].cpu())]
    return row + [f"{x:.1f}" for pair in pairs for x in pair], mine <= limit


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("op", choices=list(CASES))
    parser.add_argument("--quick", action="store_true", help="the smallest size, two rounds")
    options = parser.parse_args()
    rows, failed = [], 0
    for size in SIZES[:1] if options.quick else SIZES:
        try:
            row, right = compared(inputs(options.op, size), options.quick)
        except Exception as problem:  # another size may work
            if NO_OPERATOR in str(problem):
                print(f"this CANN has no operator for torch_npu's: {str(problem).splitlines()[0]}")
                return NOT_HERE
            print(f"FAILED  {size}: {type(problem).__name__}: {problem}", flush=True)
            failed += 1
            continue
        rows.append(row)
        failed += not right
    if rows:
        print(table(HEADER, rows))
    print(f"{len(rows)} sizes compared, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
