"""Keeps what g++ makes of PyPTO's control flow, which PyPTO compiles in every process."""

import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pypto

from .compiler import built_once

INCLUDE = Path(pypto.__file__).parent / "lib" / "include"
# what PyPTO's text includes, and how PyPTO compiles it
HEADERS = (
    *("stdint.h", "tilefwk/aikernel_data.h", "tilefwk/aicpu_runtime.h"),
    "tilefwk/aicpu_distributed.h",
)
FLAGS = ("-fPIC", "-fno-stack-protector", "-O2", "-mno-sse2", "-mno-sse")
# definitions in PyPTO's headers have another order in every process
COMPILER = """#!/bin/sh
for output; do :; done
source=${output%.s}
case $output in *.cpp.s) ;; *) exec GXX "$@" ;; esac
key=$({ cat "$source"; LC_ALL=C sort "${source%/*}"/*.h; } | sha256sum | cut -c-24)
kept=FOLDER/$key.s
if [ ! -e "$kept" ]; then
  GXX -include FOLDER/headers.h "$@" || exit
  cp "$output" "$kept.$$" && mv "$kept.$$" "$kept"
else
  cp "$kept" "$output"
fi
"""


@functools.cache
def folder() -> Path | None:
    """The folder of the assembly, if there is a g++."""
    if (gxx := shutil.which("g++")) is None:
        return None
    version = subprocess.run([gxx, "--version"], capture_output=True).stdout
    facts = hashlib.sha256(repr((gxx, version, HEADERS, FLAGS, COMPILER)).encode())
    for path in sorted((INCLUDE / "tilefwk").rglob("*.h")):
        facts.update(path.read_bytes())

    def build(folder: Path) -> None:
        folder.mkdir()
        includes = (f'#if __has_include("{h}")\n#include "{h}"\n#endif\n' for h in HEADERS)
        headers = folder / "headers.h"
        headers.write_text("#define __TILE_FWK_AICPU__ 1\n" + "".join(includes))
        command = [gxx, *FLAGS, f"-I{INCLUDE}", "-x", "c++-header", str(headers)]
        subprocess.run(command, capture_output=True)  # without the result g++ reads the text

    return built_once(
        "the headers of control flow", f"control_flow-{facts.hexdigest()[:16]}", build
    )


def keep() -> None:
    """Runs in the child process, in a folder of its own: PyPTO calls a g++ that keeps results."""
    if kept := folder():
        tools = Path.cwd() / "kept"
        tools.mkdir()
        text = COMPILER.replace("GXX", str(shutil.which("g++"))).replace("FOLDER", str(kept))
        (tools / "g++").write_text(text)
        (tools / "g++").chmod(0o755)
        os.environ["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"
