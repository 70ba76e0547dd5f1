"""An op compared with torch_npu's own: the same inputs, errors against the reference, then times.

    python benchmarks/atlas/standard.py OP [--quick]

Errors and their limit are those of ``verify``: of the indexers the largest score that was missed,
or is out of order, of attention the largest error relative to its row. torch_npu's op rounds
elsewhere (docs/<op>.md, "Compared with torch_npu"), so only our error decides the exit code.
"""

import argparse
import sys
from pathlib import Path

import torch_npu  # noqa: F401
from torch import Tensor
from torch.utils._pytree import tree_leaves

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

import npu_cases  # noqa: E402
from measure import table  # noqa: E402

from atlas.calls import eager  # noqa: E402
from atlas.children import NOT_HERE  # noqa: E402
from custom_pypto import reference  # noqa: E402
from custom_pypto.verify_standard import call_of  # noqa: E402

NO_OPERATOR = "not in libopapi.so"  # torch_npu's message where CANN lacks the operator
CASES = {
    "npu_lightning_indexer_pto": npu_cases.indexer,
    "npu_sparse_flash_attention_pto": npu_cases.attention,
    "npu_quant_lightning_indexer_pto": npu_cases.int8_indexer,
    "npu_kv_quant_sparse_flash_attention_pto": npu_cases.int8_attention,
}
SIZES = [(1, 1, 8192), (4, 2, 8192), (1, 1, 65536)]
SIDES = ("ours", "torch_npu")
HEADER = [
    *("op", "B, S1, keys", "limit of error", "our error", "torch_npu's error", "positions apart"),
    *("ours alone µs", "torch_npu's alone µs", "ours in a row µs", "torch_npu's in a row µs"),
]


def inputs(op: str, size: tuple[int, int, int]) -> npu_cases.Case:
    case = CASES[op](*size)
    if "query_dequant_scale" in case.arguments:  # torch_npu's op takes no other weights
        case.arguments["weights"] = case.arguments["weights"].half()
    return case


def apart(one: Tensor, other: Tensor) -> str:
    """How many positions only one of two selections has."""
    if one.is_floating_point():
        return "-"
    pairs = zip(one.flatten(0, 2).tolist(), other.flatten(0, 2).tolist(), strict=True)
    return str(sum(len(set(a) - set(b)) for a, b in pairs))


def compared(case: npu_cases.Case, quick: bool) -> tuple[list[str], bool]:
    """The row of the table, and whether our result is within its limit."""
    x, ours = case.arguments, case.on("npu")
    sides = dict(zip(SIDES, (ours, call_of(case.op, ours.keywords)), strict=True))
    expected = getattr(reference, case.op)(**x)
    out = [tree_leaves(run())[0].cpu() for run in sides.values()]
    errors = [reference.MODULES[case.op].error(result, expected, x, x) for result in out]
    (mine, limit), (other, _) = errors
    row = [case.op, case.shape, *(f"{x:.2g}" for x in (limit, mine, other)), apart(*out)]
    times = eager(sides, quick).values()
    return row + [f"{each[side]:.1f}" for each in times for side in SIDES], mine <= limit


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
