"""add_custom in eager mode, compiled and with its backward, compared with a sum on the CPU.

python examples/add_custom.py             # on the CPU
python examples/add_custom.py --npu       # on an NPU, with torchair's three modes; without an
                                          # NPU on the host simulator of CANN (run.sh graph)
"""

from options import Help, end  # first; options.py says why

# isort: split
import argparse

from compile_torchair import backend, start_npu
from modes import MODES

# isort: split
import torch

import custom_pypto
from custom_pypto import converter


def compare(way, add, x, y):
    """Forward and backward of ``add``; the gradient of a sum is 1 for each operand."""
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    z = add(x, y)
    z.sum().backward()
    ones = torch.ones_like(x)
    right = torch.equal(z.cpu(), x.cpu() + y.cpu())
    right &= torch.equal(x.grad, ones) and torch.equal(y.grad, ones)
    print(f"{way:24} {'equal' if right else 'DIFFERENT'}")
    return right


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--npu", action="store_true", help="NPU tensors and torchair")
    args = parser.parse_args()
    add = custom_pypto.add_custom
    ways = {"eager": add, "torch.compile": torch.compile(add, backend="aot_eager", fullgraph=True)}
    if args.npu:
        start_npu()
        converter.register()  # for max-autotune: GE's operator AddCustom, of a kernel package
        for mode in MODES:
            ways[mode] = torch.compile(add, backend=backend(mode), fullgraph=True, dynamic=False)
    x, y = torch.randn(2, 5, 300).to("npu" if args.npu else "cpu")
    if not all([compare(way, function, x, y) for way, function in ways.items()]):
        end("a result differs from the sum on the CPU")


if __name__ == "__main__":
    main()
