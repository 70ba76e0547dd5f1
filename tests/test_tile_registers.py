"""The emulation of AMX tile registers, compared with AMX where the CPU has it."""

import ctypes
from pathlib import Path

import processes
import pytest
import torch
from torch import Tensor

import custom_pypto

HEADERS = Path(custom_pypto.__file__).parent / "csrc/cpu"
SOURCE = """
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,prefer-vector-width=512")
#define VECTOR_BYTES 64
#include "tile_registers.h"

// c += a times b, of 16 x 32 and 16 pairs of rows
extern "C" void dot(const void* a, const void* b, void* c) {
  namespace tile = custom_pypto::cpu::tile;
  tile::enter();
  tile::load<0>(c, 64);
  tile::load<1>(a, 64);
  tile::load<2>(b, 64);
  tile::dot<0, 1, 2>();
  tile::store<0>(c, 64);
  tile::leave();
}
"""


def compiled(folder: Path, *flags: str):
    dot = processes.compiled(folder, SOURCE, HEADERS, *flags).dot
    dot.argtypes = [ctypes.c_void_p] * 3

    def call(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        c = c.clone()
        dot(a.data_ptr(), b.data_ptr(), c.data_ptr())
        return c

    return call


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the emulation needs a CPU with AVX512-BF16")
    return compiled(tmp_path_factory.mktemp("emulated"), "-DEMULATED_TILES")


def operands(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of small integers, whose sums are exact."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-8, 9, (n, 32), generator=g).bfloat16() for n in (16, 16))
    return a, b, torch.randint(-99, 99, (16, 16), generator=g).float()


def test_dot_adds_the_product_of_rows_and_pairs_of_rows(emulated):
    a, b, c = operands(0)
    rows = b.view(16, 16, 2).transpose(1, 2).reshape(32, 16)  # [pair][column][of the pair]
    torch.testing.assert_close(emulated(a, b, c), c + a.float() @ rows.float(), rtol=0, atol=0)


@pytest.mark.parametrize("bits", ["all", "normal"])
def test_emulation_equals_the_instruction_bit_for_bit(emulated, bits, tmp_path):
    """But for sign and payload of a NaN: where several meet, the instruction keeps another one."""
    if torch.ops.custom_pypto.cpu_isa() != "amx":
        pytest.skip("this process has no AMX: the CPU, the system or CUSTOM_PYPTO_CPU_ISA")
    instruction = compiled(tmp_path)
    g = torch.Generator().manual_seed(1)
    for _ in range(200):
        if bits == "all":  # Inf, NaN and subnormal numbers among them
            a, b = torch.randint(-(2**15), 2**15, (2, 16, 32), generator=g).to(torch.int16)
            c = torch.randint(-(2**31), 2**31, (16, 16), generator=g).to(torch.int32)
        else:
            a, b = torch.randn(2, 16, 32, generator=g).bfloat16()
            c = torch.randn(16, 16, generator=g)
        got, expected = emulated(a, b, c), instruction(a, b, c)
        assert torch.equal(
            *(
                x.view(torch.int32).masked_fill(x.view(torch.float32).isnan(), 0)
                for x in (got, expected)
            )
        )
        assert torch.equal(*(x.view(torch.float32).isnan() for x in (got, expected)))
