#!/usr/bin/env bash
# The package on aarch64, from an x86_64 machine; called by `run.sh test --arch aarch64`.
#   aarch64.sh --compile-only        the sources through a cross compiler
#   aarch64.sh [arguments of pytest] built and tested under qemu's user emulation, in build/aarch64
# Emulation shows what is computed, not how fast.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${VIRTUAL_ENV:-${CONDA_PREFIX:-$root/.venv}}/bin/python"
work="$root/build/aarch64"
userland="$work/userland" venv="$work/venv" project="$work/project" installed="$work/installed"
DISK_GB=10
DEBIAN=bookworm # its Python is 3.11, its glibc 2.36
PYTHON=3.11
GLIBC_MINOR=36
# what is looked for, and the Debian package that has it
COMPILER=(aarch64-linux-gnu-g++ g++-aarch64-linux-gnu)
EMULATOR=(qemu-aarch64-static qemu-user-static)
BOOTSTRAP=(mmdebstrap mmdebstrap /usr/share/keyrings/debian-archive-keyring.gpg debian-archive-keyring)
LIBRARIES=libc6,libstdc++6,libgcc-s1,zlib1g,libssl3,libffi8,libsqlite3-0,libbz2-1.0,liblzma5
handler=/proc/sys/fs/binfmt_misc/custom_pypto_aarch64
# what depends on the CPU: the ops, and that their bits do not vary
TESTS=(tests/test_npu_{lightning_indexer,sparse_flash_attention,sparse_attention}_pto.py
  tests/test_npu_quant_{lightning_indexer,rows,index_update}_pto.py
  tests/test_npu_{ops,sequences,indexers,slots}.py
  tests/test_weight_only_linear.py tests/test_add_custom.py
  tests/test_determinism.py)

die() {
  printf 'run.sh test --arch aarch64: %s\n' "$1" >&2
  exit 1
}

# provide FILE PACKAGE ...: installs the packages whose commands or files are not there. Where it may
# not, it fails and says what to do.
provide() {
  local missing=()
  while [[ $# -gt 0 ]]; do
    command -v "$1" >/dev/null || [[ -e "$1" ]] || missing+=("$2")
    shift 2
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  if [[ "$EUID" -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "${missing[*]} not installed, which takes root and apt (Debian, Ubuntu: apt install ${missing[*]})"
    return 1
  fi
  echo "installing ${missing[*]}" >&2
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
    --no-install-recommends "${missing[@]}"; } >&2 || { echo "apt-get failed, see above"; return 1; }
}

# Compiled with the flags of setup.py and the headers of this machine's torch, which are the same
# for every CPU; not linked, as its libraries are not.
compile_only() {
  local lacks
  if [[ "$(uname -m)" == aarch64 ]]; then
    echo "cross compilation skipped: this machine is aarch64, where every build compiles csrc for it"
    return
  fi
  lacks="$(provide "${COMPILER[@]}")" || {
    echo "cross compilation for aarch64 skipped: $lacks"
    return
  }
  bash "$root/build_and_install.sh" --editable
  cd "$root"
  mkdir -p "$work/objects"
  CUSTOM_PYPTO_WERROR=1 "$python" - "$work/objects" <<'PY'
import glob
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

import setuptools  # noqa: F401  brings distutils where Python has none
from distutils.core import run_setup

folder = sys.argv[1]
include = sysconfig.get_paths()["include"]
# Debian's pyconfig.h includes that of the architecture. All that are 64 bits wide are as good here.
own, wanted = sysconfig.get_config_var("MULTIARCH"), os.path.join(folder, "aarch64-linux-gnu")
if own and os.path.exists(found := os.path.join(os.path.dirname(include), own)):
    if not os.path.islink(wanted):
        os.symlink(found, wanted)
(extension,) = run_setup("setup.py", stop_after="init").ext_modules
sources = sorted(glob.glob("custom_pypto/csrc/**/*.cpp", recursive=True))
flags = ["-fPIC", *extension.extra_compile_args, f"-isystem{include}", f"-isystem{folder}"]


def compile(source):
    output = os.path.join(folder, os.path.basename(source) + ".o")
    command = ["aarch64-linux-gnu-g++", *flags, "-c", source, "-o", output]
    return subprocess.run(command).returncode


with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
    failed = sum(map(bool, pool.map(compile, sources)))
print(f"compiled for aarch64: {len(sources) - failed} of {len(sources)} files")
sys.exit(bool(failed))
PY
}

# Everything that could stop the run later and can be known now.
check_machine() {
  local free_gb
  [[ "$(uname -m)" == x86_64 ]] ||
    die "emulates aarch64 on x86_64, this machine is $(uname -m)$(
      [[ "$(uname -m)" != aarch64 ]] || echo ': bash run.sh test')"
  [[ "$EUID" -eq 0 ]] ||
    die "needs root, to install Debian packages and to register qemu in binfmt_misc"
  command -v apt-get >/dev/null || die "needs apt: Debian or Ubuntu"
  if [[ ! -e "$venv/made_from" ]]; then
    free_gb=$(($(df -Pk "$root" | awk 'NR == 2 {print $4}') / 1024 / 1024))
    [[ "$free_gb" -ge "$DISK_GB" ]] ||
      die "needs $DISK_GB GB for torch and the libraries it loads, $root has $free_gb GB free"
  fi
}

mount_binfmt() {
  [[ ! -e /proc/sys/fs/binfmt_misc/register ]] || return 0
  [[ -d /proc/sys/fs/binfmt_misc ]] || modprobe binfmt_misc 2>/dev/null || true
  mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc 2>/dev/null ||
    die "cannot mount binfmt_misc, through which qemu runs: start the container with --privileged"
  mounted=yes
}

# made_from FOLDER TEXT: whether FOLDER was made from TEXT, or from something else or not at all
made_from() { [[ "$(cat "$1/made_from" 2>/dev/null)" == "$2" ]]; }

# Debian's Python with its libraries, unpacked and not installed: nothing in it has run.
make_userland() {
  local recipe="$DEBIAN $PYTHON $LIBRARIES"
  if made_from "$userland" "$recipe"; then return; fi
  echo "unpacking Debian $DEBIAN for arm64 into $userland"
  rm -rf "$userland" "$venv"
  mmdebstrap --quiet --arch=arm64 --variant=extract --mode=root \
    --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --include="$LIBRARIES,python$PYTHON,python$PYTHON-venv,libpython$PYTHON-dev,python$PYTHON-dev" \
    "$DEBIAN" "$userland" || die "mmdebstrap failed, see above"
  # Python.h asks for the architecture's pyconfig.h; see CPATH below
  ln -s ../aarch64-linux-gnu "$userland/usr/include/python$PYTHON/aarch64-linux-gnu"
  # torch asks these which CPU this is, and crashes on the answers of an x86 machine. qemu opens
  # files of the userland in place of those of this machine.
  local cpu
  mkdir -p "$userland/proc"
  for cpu in $(seq 0 $(($(nproc) - 1))); do
    mkdir -p "$userland/sys/devices/system/cpu/cpu$cpu/regs/identification"
    echo 0x00000000414fd0b1 >"$userland/sys/devices/system/cpu/cpu$cpu/regs/identification/midr_el1"
    printf '%s\t: %s\n' processor "$cpu" BogoMIPS 200.00 Features "fp asimd evtstrm aes pmull sha1 \
sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs" "CPU implementer" 0x41 \
      "CPU architecture" 8 "CPU variant" 0x4 "CPU part" 0xd0b "CPU revision" 1
    echo
  done >"$userland/proc/cpuinfo"
  echo "$recipe" >"$userland/made_from"
}

# torch as this environment has it, and what the extras of pyproject.toml name for models and tests
requirements() {
  "$python" -I - <<'PY'
import re
from importlib.metadata import requires, version

print("torch==" + version("torch").partition("+")[0], "numpy", "pip", "setuptools", "wheel", "ninja")
for requirement in requires("custom_pypto"):
    if match := re.match(r"(.*); extra == .(models|test)\b", requirement):
        print(match[1].replace(" ", ""))
PY
}

# pip of this machine, with the index it is configured for, installs what is for the other one: the
# emulated pip would take an hour.
make_environment() {
  local wanted platforms=(--platform manylinux2014_aarch64) minor
  wanted="$(requirements)"
  if made_from "$venv" "$wanted"; then return; fi
  echo "installing for aarch64 into $venv: $(echo "$wanted" | tr '\n' ' ')"
  rm -rf "$venv" "$work/tmp"
  mkdir -p "$work/tmp"
  "$userland/usr/bin/python$PYTHON" -m venv --without-pip "$venv"
  for minor in $(seq 17 "$GLIBC_MINOR"); do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
  # shellcheck disable=SC2086
  TMPDIR="$work/tmp" "$python" -m pip install --quiet --disable-pip-version-check --no-cache-dir \
    --target "$venv/lib/python$PYTHON/site-packages" --only-binary=:all: "${platforms[@]}" \
    --python-version "$PYTHON" --implementation cp --abi "cp${PYTHON/./}" --abi abi3 --abi none \
    $wanted || die "pip failed, see above; an index is chosen with PIP_INDEX_URL"
  rm -rf "$work/tmp"
  ln -s "../lib/python$PYTHON/site-packages/bin/ninja" "$venv/bin/ninja"
  echo "$wanted" >"$venv/made_from"
}

# Programs for aarch64 run through qemu until this script ends; a handler that is there is used.
register_qemu() {
  if "$userland/usr/bin/python$PYTHON" -c '' 2>/dev/null; then return; fi
  # an ELF header: 64 bits, little-endian, executable or shared, machine 183
  printf '%s%s:' ':custom_pypto_aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:' \
    "$(command -v "${EMULATOR[0]}")" \
    >/proc/sys/fs/binfmt_misc/register || die "binfmt_misc cannot register ${EMULATOR[0]}"
  "$userland/usr/bin/python$PYTHON" -c '' || die "${EMULATOR[0]} does not run $userland"
}

undo() {
  [[ ! -e "$handler" ]] || echo -1 >"$handler"
  [[ -z "$mounted" ]] || umount /proc/sys/fs/binfmt_misc
}

# A copy, so that the library of this machine stays as it is. With times: only what has changed is
# compiled again.
copy_sources() {
  mkdir -p "$project"
  find "$project" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
  (cd "$root" && git ls-files -z --cached --others --exclude-standard |
    xargs -0 cp --no-dereference --preserve=timestamps --parents -t "$project")
}

# The scripts of the project as on any machine, but for a compiler that need not be emulated.
build() {
  echo "building for aarch64 in $project"
  VIRTUAL_ENV="$venv" bash "$project/build_and_install.sh" --wheel
  rm -rf "$installed"
  "$python" -m zipfile -e "$project"/dist/custom_pypto-*-manylinux_*_aarch64.whl "$installed"
  cp "$installed/custom_pypto/_C.abi3.so" "$project/custom_pypto/" # the tests import the tree
}

run_all() {
  local status=0
  cd "$project"
  "$venv/bin/python" -m custom_pypto env
  "$venv/bin/python" -m pytest -q "${TESTS[@]}" || status=1
  "$venv/bin/python" examples/generate.py --max-new-tokens 6 \
    --prompt "the old sailor otter=red slowly crossed a wide harbour , otter?" || status=1
  # the wheel as it is handed out, and no tree beside it
  (cd / && PYTHONPATH="$installed" "$venv/bin/python" -m custom_pypto verify) || status=1
  [[ "$status" -eq 0 ]] && echo "aarch64: passed" || echo "aarch64: FAILED, see above" >&2
  return "$status"
}

if [[ "${1:-}" == --compile-only ]]; then
  compile_only
  exit
fi
check_machine
mkdir -p "$work"
exec 8>"$work/lock"
flock --nonblock 8 || die "another run works in $work"
mounted=
trap undo EXIT
trap 'exit 130' INT # pytest ends in order, and then so does this
mount_binfmt
lacks="$(provide "${COMPILER[@]}" "${EMULATOR[@]}" "${BOOTSTRAP[@]}")" || die "$lacks"
bash "$root/build_and_install.sh" --editable # whose torch and requirements are taken
unset PYTHONPATH
make_userland
export QEMU_LD_PREFIX="$userland" QEMU_CPU="${QEMU_CPU:-cortex-a76}"
register_qemu
make_environment
# The compiler is a program of this machine and reads its files; Python names /usr/include/python3.11
# and means that of the userland.
export CXX=aarch64-linux-gnu-g++ CPATH="$userland/usr/include/python$PYTHON" CUSTOM_PYPTO_WERROR=1
copy_sources
build
if [[ $# -eq 0 ]]; then
  run_all
else
  cd "$project"
  "$venv/bin/python" -m pytest "$@"
fi
