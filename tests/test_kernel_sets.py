"""The sets of CPU kernels: which of them a build compiles, and what one says that lacks some."""

import platform
import subprocess
from pathlib import Path

import pytest
import torch
from repository import REPOSITORY

import custom_pypto  # noqa: F401  loads the op that names the set

X86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other CPUs run every set that is compiled for them"
)

CHOOSES = """
import os, pathlib, sys
from distutils.core import run_setup
import setuptools
package = run_setup("setup.py", stop_after="init")
os.chdir(sys.argv[1])  # nothing is compiled there
for name in sys.argv[3:]:
    pathlib.Path("build/temp/kernels").mkdir(parents=True)
    pathlib.Path(f"build/temp/kernels/{name}.cpp.o").touch()
chosen = package.get_command_class("build_ext").kernels_of(sys.argv[2])
print(*(pathlib.Path(file).stem for file in chosen))
"""
ANY = {"generic", "neon_dotprod"}  # the second is empty on x86-64
ZEN_3 = ANY | {"avx2", "avx2_int8"}
SKYLAKE = ZEN_3 | {"avx512"}
ICE_LAKE = SKYLAKE | {"avx512_vnni"}
ZEN_4 = ICE_LAKE | {"avx512_bf16", "avx512_bf16_weights", "amx_emulated"}
SAPPHIRE_RAPIDS = ZEN_4 | {"amx"}


@pytest.mark.parametrize(
    "flags, compiled",
    [
        ("sse4_2", ANY),
        ("avx avx2 fma", ZEN_3),
        ("avx2 avx512f avx512bw", SKYLAKE),
        ("avx2 avx512bw avx512_vnni", ICE_LAKE),
        ("avx2 avx512bw avx512_vnni avx512_bf16", ZEN_4),
        ("avx2 avx512bw avx512_vnni avx512_bf16 amx_bf16 amx_tile", SAPPHIRE_RAPIDS),
    ],
)
def test_a_build_for_development_compiles_what_its_cpu_runs(flags, compiled, tmp_path, with_torch):
    cpuinfo = f"processor\t: 0\nflags\t\t: fpu {flags}\nbugs\t\t: spectre\n"
    done = with_torch(CHOOSES, str(tmp_path), cpuinfo)
    assert set(done.stdout.split()) == compiled, done.stderr


def test_a_folder_that_moves_between_two_cpus_keeps_the_kernels_of_both(tmp_path, with_torch):
    done = with_torch(CHOOSES, str(tmp_path), "flags : avx2", "avx512")
    assert set(done.stdout.split()) == SKYLAKE, done.stderr


def test_a_system_that_names_no_instructions_compiles_every_set(tmp_path, with_torch):
    done = with_torch(CHOOSES, str(tmp_path), "CPU architecture: 8\nFeatures : asimddp\n")
    assert set(done.stdout.split()) == SAPPHIRE_RAPIDS, done.stderr


@pytest.fixture(scope="module")
def of_an_old_cpu(tmp_path_factory):
    """This library, linked as on a CPU that has no set but the last one."""
    objects = REPOSITORY / "build/temp" / torch.__version__ / "custom_pypto"
    files = [*objects.rglob("*.o"), *(REPOSITORY / "build/temp/kernels").glob("generic.cpp.o")]
    library = tmp_path_factory.mktemp("old") / "library.so"
    libraries = Path(torch.__file__).parent / "lib"
    flags = ["-shared", f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch"]
    subprocess.run(["g++", *files, *flags, "-o", library], check=True)
    return library


def isa_of(library, with_torch, **environment):
    program = f"torch.ops.load_library({str(library)!r}); print(torch.ops.custom_pypto.cpu_isa())"
    return with_torch(f"import torch; {program}", **environment)


@X86
def test_a_library_of_an_older_cpu_says_what_it_lacks(of_an_old_cpu, with_torch):
    best = torch.ops.custom_pypto.cpu_isa()
    done = isa_of(of_an_old_cpu, with_torch, CUSTOM_PYPTO_CPU_ISA="")
    assert done.stdout.split() == ["generic"], done.stderr
    told = (
        "custom_pypto: the ops use the kernels generic; the library was compiled on another CPU, "
    )
    assert done.stderr.count(told) == 1
    [line] = [line for line in done.stderr.splitlines() if told in line]
    lacking = line.partition("without the kernels ")[2].partition(" of this one")[0].split(", ")
    assert "avx2" in lacking and {best} <= {*lacking, "amx_emulated", "generic"}
    assert "run bash build_and_install.sh --editable" in line


@X86
def test_a_set_that_is_left_out_is_rejected_with_the_remedy(of_an_old_cpu, with_torch):
    done = isa_of(of_an_old_cpu, with_torch, CUSTOM_PYPTO_CPU_ISA="avx2")
    assert done.returncode == 1
    assert (
        "CUSTOM_PYPTO_CPU_ISA must be one of generic on this machine, got 'avx2'; " in done.stderr
    )
    assert "run bash build_and_install.sh --editable" in done.stderr
