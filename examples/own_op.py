"""Ops of your own in one Python file: a PyPTO program, torch's registrations, torchair's converter.

    python examples/own_op.py             # on the CPU: the program in PyPTO's interpreter
    python examples/own_op.py --npu       # on an NPU, eager and in torchair's three modes; without
                                          # an NPU on the host simulator of CANN (run.sh graph)

It needs nothing of this package but the interpreter and the simulator. The program doubles a
vector: once into a new tensor, once in place.
"""

from options import Help, end  # first; options.py says why

# isort: split
import argparse

from compile_torchair import backend, start_npu
from modes import MODES

from custom_pypto import simulation  # before pypto, for its full error messages

# isort: split
import pypto
import torch
from torch import Tensor

TILE = (
    8192  # numbers of a task: both tiles and the copies of the next ones fit in the 192 KiB of UB
)
NPU = "privateuseone"  # torch's name of it, with and without torch_npu


@pypto.frontend.jit
def double_kernel(
    x: pypto.Tensor([pypto.DYNAMIC], pypto.DT_FP32), z: pypto.Tensor([pypto.DYNAMIC], pypto.DT_FP32)
):
    n = x.shape[0]
    for i in pypto.loop(0, (n + TILE - 1) // TILE, 1, name="DOUBLE", idx_name="tile"):
        pypto.set_vec_tile_shapes(TILE)
        part = pypto.view(x, [TILE], [i * TILE], valid_shape=[(n - i * TILE).min(TILE)])
        pypto.assemble(pypto.mul(part, 2.0), [i * TILE], z)


# ---- a new tensor


@torch.library.custom_op("own_op::double", mutates_args=(), device_types="cpu")
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake  # shape and dtype, for torch.compile
def _(x):
    return torch.empty_like(x)


double.register_autograd(lambda ctx, grad: double(grad))


@double.register_kernel(NPU)
def _(x):
    z = torch.empty_like(x, memory_format=torch.contiguous_format)
    double_kernel(x.contiguous().view(-1), z.view(-1))
    return z


# ---- in place: torch.compile makes it a function and copies nothing that it need not


@torch.library.custom_op("own_op::double_", mutates_args=("x",), device_types="cpu")
def double_(x: Tensor) -> None:
    x.mul_(2)


@double_.register_kernel(NPU)
def _(x):
    double_kernel(x.view(-1), x.view(-1))  # raises for a view that is not contiguous


def register_converters():
    """For max-autotune, by operators that GE has; your own come from a kernel package."""
    import torchair
    from torchair._ge_concrete_graph import ge_apis as ge

    def muls(x, meta_outputs=None):
        return ge.Muls(x, value=2.0)

    def assign_add(x, meta_outputs=None):
        ge.AssignAdd(x, x)  # writes its input: torchair goes on with its output of that name

    torchair.register_fx_node_ge_converter(torch.ops.own_op.double.default)(muls)
    torchair.register_fx_node_ge_converter(torch.ops.own_op.double_.default)(assign_add)


def twice(x):
    y = double(x)
    double_(y)
    return y


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--npu", action="store_true", help="NPU tensors and torchair")
    args = parser.parse_args()
    ways = {"eager": twice, "torch.compile": torch.compile(twice, backend="aot_eager")}
    x = torch.randn(3, 5000)
    if args.npu:
        start_npu()
        register_converters()
        for mode in MODES:
            ways[mode] = torch.compile(twice, backend=backend(mode), fullgraph=True, dynamic=False)
    results = {way: function(x.npu() if args.npu else x).cpu() for way, function in ways.items()}
    if not args.npu:
        _, z = simulation.interpret(double_kernel, x.view(-1), torch.empty(x.numel()))
        results["interpreter"] = double(z).view_as(x)
    for way, result in results.items():
        print(f"{way:24} {'equal' if result.equal(x * 4) else 'DIFFERENT'}")
    if not all(result.equal(x * 4) for result in results.values()):
        end("a result is not four times the input")


if __name__ == "__main__":
    main()
