#!/usr/bin/env bash
# Runs the demo, the tests or the benchmarks, after installing and building what they need.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
environment="$(bash "$root/build_and_install.sh" --where)"
python="$environment/bin/python"
# torch_npu without CANN breaks `import torch`: its folder is on PYTHONPATH only on demand
torch_npu_folder="$root/build/torch_npu"

usage() {
  cat <<'TEXT'
usage: run.sh COMMAND, in the active environment, or in .venv; conda's base counts as none

Try
  run.sh [arguments of examples/generate.py]   the demo: text from a sparse-attention model; then
                                               graph mode, where torch_npu is installed
  run.sh setup [EXTRAS]                        installs this folder in editable mode; EXTRAS: models
                                               (the default), sim, npu, test, or models,sim
  run.sh env [--json]                          reports what works here, what is missing, the remedy;
                                               installs nothing
  run.sh serve [CHECKPOINT] [arguments of vLLM]
                                               serves a DeepSeek-V3.2 or V4, GLM-5 or Hy4, by folder
                                               or name, in an environment of its own, 3.5 GB

On an Atlas
  run.sh atlas [--simulator] [--only PART,...] runs all that needs an NPU, into one archive;
                                               --simulator: on the host simulator of CANN
  run.sh graph [arguments of compile_torchair] compiles the demo's model by torchair; without an NPU
                                               on that simulator, with torch_npu in build/

Develop
  run.sh test [--all] [arguments of pytest]    the tests, a few cases of each property, in several
                                               processes; --all: every case; -n 0: in one process
  run.sh test --pypto WHEEL|FOLDER [arguments of pytest]
                                               the NPU kernels on another PyPTO than the installed
                                               one: that of CANN, docs/pypto_versions.md
  run.sh test --serving [--vllm VERSION] [arguments of pytest]
                                               vLLM on the ops; VERSION: the one before the newest
  run.sh test --arch aarch64 [arguments of pytest]
                                               builds and tests for aarch64 in emulation, 10 GB,
                                               root; --compile-only: cross-compiles csrc
  run.sh bench [NAME...] [--check] [--write]   times all, or what --list names; --check: exit code
                                               1 below a floor; --write: into benchmarks/results,
                                               of which RESULTS.md is made
  run.sh bench --compare A B [NAME...]         figures of two commits, or of two folders of them
  run.sh fuzz [--minutes N] [--seed S]         fuzzes the ops on this CPU with random calls
  run.sh sanitize [address|thread]             up to 30000 fuzz calls and the tests of the ops,
                                               compiled with AddressSanitizer and UBSan, or TSan
  run.sh lint                                  checks format and style, changes nothing; needs
                                               run.sh setup models,sim,test
  run.sh docs                                  builds the documentation site into build/site, in an
                                               environment of its own; fails on a dead link
TEXT
}

# requirement NAME: a supported version, beside the installed torch
requirement() {
  "$python" "$root/custom_pypto/requirements.py" "$1" \
    $("$python" -I -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)
}

# If an installed torch_npu cannot load (no CANN), `import torch` fails.
keep_torch_importable() {
  "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch_npu") is None)' ||
    return 0
  "$python" -c 'import torch' 2>/dev/null && return
  export TORCH_DEVICE_BACKEND_AUTOLOAD=0
  echo "run.sh: transformers imports any installed torch_npu, and this one does not load: models are" \
    "unavailable, the ops work (run.sh env gives the reason)" >&2
}

# setup [EXTRAS]: installs this tree in editable mode, with these extras of pyproject.toml
setup() {
  bash "$root/build_and_install.sh" --editable "$@" >&2
  [[ "${1:-}" != *models* ]] && return
  local oldest
  oldest="$(requirement python_of_models)"
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, int(sys.argv[1])))' "${oldest#3.}"; then
    echo "run.sh: transformers needs Python $oldest, got an older one in $environment:" \
      "models are unavailable, the ops work" >&2
    exit 1
  fi
  keep_torch_importable
}

# setup_serving [VERSION of vLLM]
setup_serving() {
  bash "$root/build_and_install.sh" --serving "$@" >&2
  python="$root/build/serving${1:+-$1}/bin/python"
}

has_torch_npu() {
  "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch_npu") is None)'
}

# has_torch_npu_folder: with the torch_npu of the installed torch
has_torch_npu_folder() {
  local wanted
  wanted="$(requirement torch_npu)"
  [[ -n "$wanted" && "$(cat "$torch_npu_folder/installed" 2>/dev/null)" == "$wanted" ]]
}

# Installs torch_npu for graph mode without an NPU into its own folder, unless already installed.
setup_torch_npu() {
  if has_torch_npu || has_torch_npu_folder; then return; fi
  local part wanted
  wanted="$(requirement torch_npu)"
  if [[ -z "$wanted" ]]; then
    echo "run.sh: graph mode is skipped: no torch_npu is tested with this torch; one is with torch" \
      "$(requirement torch)" >&2
    return 1
  fi
  echo "installing $wanted into $torch_npu_folder, for graph mode only" >&2
  part="$(mktemp -d "$torch_npu_folder.XXXXXX")"
  # no dependencies: torch_npu pins its own torch; besides torch, torchair lacks only protobuf
  # shellcheck disable=SC2086
  if "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$part" \
    $wanted; then
    echo "$wanted" >"$part/installed"
    rm -rf "$torch_npu_folder"
    mv -T "$part" "$torch_npu_folder" 2>/dev/null || has_torch_npu_folder && return
  fi
  rm -rf "$part"
  echo "run.sh: torch_npu could not be installed, see above; graph mode is skipped" >&2
  return 1
}

# Puts another PyPTO before the installed one, as CANN's set_env.sh does.
use_pypto() {
  local given="$1"
  [[ -e "$given" ]] || { echo "run.sh test: --pypto needs a wheel or a folder, got '$given'" >&2; exit 2; }
  if [[ -f "$given" ]]; then
    given="$root/build/pypto/$(basename "$1" .whl)"
    rm -rf "$given"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$given" "$1"
  fi
  given="$(cd "$given" && pwd)"
  export PYTHONPATH="$given${PYTHONPATH:+:$PYTHONPATH}"
}

# All that runs the NPU kernels without an NPU, or these tests of it.
test_programs() {
  local status=0 device running=()
  if [[ $# -eq 0 ]]; then
    for device in interpreter generated; do # each takes one core, for minutes
      "$python" -m custom_pypto verify --device "$device" >"$root/build/verify-$device.txt" 2>&1 &
      running+=($!)
    done
    wait "${running[0]}" || status=1
    wait "${running[1]}" || status=1
    cat "$root"/build/verify-{interpreter,generated}.txt
  fi
  cd "$root"
  run_pytest -m sim "$@" || status=1
  return "$status"
}

run_graph_examples() {
  has_torch_npu || export PYTHONPATH="$torch_npu_folder${PYTHONPATH:+:$PYTHONPATH}"
  export TORCH_DEVICE_BACKEND_AUTOLOAD=0 # the examples import torch_npu themselves
  "$python" "$root/examples/compile_torchair.py" "$@" &&
    "$python" "$root/examples/export_graph.py" --folder "$root/build/ge_graph"
}

lint() {
  cd "$root"
  local failed=0 large
  "$python" -m ruff check --quiet . || failed=1
  "$python" -m ruff format --check . || failed=1
  "$python" -m mypy || failed=1
  git ls-files -z --cached --others --exclude-standard '*.cpp' '*.h' |
    xargs -0 -r "$environment/bin/clang-format" --dry-run -Werror || failed=1
  # against the empty tree: checks every line, not only changed ones
  git diff --check "$(git hash-object -t tree /dev/null)" || failed=1
  large="$(git ls-files -z --cached --others --exclude-standard | xargs -0 -r stat -c '%s %n' |
    awk '$1 > 8 * 1024 * 1024')"
  if [[ -n "$large" ]]; then
    printf 'larger than 8 MB:\n%s\n' "$large" >&2
    failed=1
  fi
  return "$failed"
}

# In a separate environment; reads the sources, needs neither torch nor the built package.
build_docs() {
  local own="$root/build/docs"
  [[ -x "$python" ]] || python=python3
  [[ -x "$own/bin/python" ]] || "$python" -m venv "$own"
  "$own/bin/python" -m pip install --quiet --disable-pip-version-check "pip>=25.1" # knows groups
  "$own/bin/python" -m pip install --quiet --group "$root/pyproject.toml:docs"
  # silences the theme's notice about its successor
  export NO_MKDOCS_2_WARNING=1
  "$own/bin/python" -m mkdocs build --config-file "$root/docs/site/mkdocs.yml"
  echo "$root/build/site/index.html"
}

run_pytest() {
  # passive: waiting threads leave the core to the other processes. No limit on the whole, which a
  # busy machine would exceed; pyproject.toml has one for each test.
  OMP_WAIT_POLICY=passive "$python" -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal "$@"
}

# Runs the tests; those on the host simulator of CANN, which changes torch, in separate processes.
run_tests() {
  local here=0 simulator=0 none=5 # pytest's status if it selected no tests
  cd "$root"
  run_pytest "$@" || here=$?
  has_torch_npu || export PYTHONPATH="$root:$torch_npu_folder${PYTHONPATH:+:$PYTHONPATH}"
  # unraisableexception collects garbage after each test: most of a second on the simulator
  TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
    run_pytest --ascend-host -p no:unraisableexception "$@" || simulator=$?
  if [[ "$here" -eq "$none" || "$here" -eq 0 && "$simulator" -ne "$none" ]]; then
    return "$simulator"
  fi
  return "$here"
}

# Installs what the named benchmarks need, then runs them.
run_benchmarks() {
  local needs
  setup models,test # the tests make the inputs
  needs="$("$python" "$root/benchmarks" "$@" --needs)"
  [[ "$needs" != *sim* ]] || setup models,sim,test
  [[ "$needs" != *torch_npu* ]] || setup_torch_npu
  [[ "$needs" != *serving* ]] || (setup_serving)
  [[ "$needs" != *llama* ]] || "$python" -m pip install -q gguf
  exec "$python" "$root/benchmarks" "$@"
}

# Compiles the library with a sanitizer in a copy of the sources; the installed one stays unchanged.
sanitize() {
  local kind="$1" folder="$root/build/sanitize-$1" runtime
  mkdir -p "$folder"
  rm -rf "$folder"/{custom_pypto,docs,models,tests}
  cd "$root"
  # keeps timestamps, so that only changed files are compiled again
  git ls-files -z --cached --others --exclude-standard setup.py pyproject.toml README.md LICENSE NOTICE \
    custom_pypto docs models tests | xargs -0 cp --no-dereference --preserve=timestamps --parents -t "$folder"
  cd "$folder"
  CUSTOM_PYPTO_SANITIZE="$kind" "$python" setup.py -q build_ext --inplace >build.log 2>&1 ||
    { cat build.log >&2; exit 1; }

  # Python is built without a sanitizer, so the sanitizer's runtime must be loaded first;
  # libstdc++ too, in which the runtime looks up the throwing function
  runtime="$(g++ -print-file-name="lib${kind:0:1}san.so"):$(g++ -print-file-name=libstdc++.so)"
  export PYTHONPATH="$folder" TORCH_DEVICE_BACKEND_AUTOLOAD=0
  # leaks off: Python and torch keep memory until the process ends, which would fill the report;
  # null: torch itself reports a failed allocation
  export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
  export UBSAN_OPTIONS=print_stacktrace=1
  # TSan cannot see synchronisation inside uninstrumented modules, torch and its libgomp
  export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:second_deadlock_stack=1
  local isa sets=("") # this CPU's preferred kernels
  # no sanitizer sees what a tile register reads or writes, unless it is emulated
  if LD_PRELOAD="$runtime" CUSTOM_PYPTO_CPU_ISA=amx_emulated "$python" -c \
    'import torch, custom_pypto; torch.ops.custom_pypto.cpu_isa()' 2>/dev/null; then
    sets+=(amx_emulated)
  else
    echo "run.sh sanitize: amx_emulated is left out, it needs a CPU with AVX512-BF16" >&2
  fi
  for isa in "${sets[@]}" generic; do
    LD_PRELOAD="$runtime" CUSTOM_PYPTO_CPU_ISA="$isa" \
      "$python" tests/fuzz --cases 10000 --seed 1 --threads 3
  done
  local files=(tests/test_{add_custom,weight_only_linear,convert_weight,layer_ops,one_op,stream_ops}.py
    tests/test_npu_*.py)
  for isa in "${sets[@]}"; do # torch.compile tests are left out: they call the same functions
    LD_PRELOAD="$runtime" CUSTOM_PYPTO_CPU_ISA="$isa" "$python" -m pytest -q -p no:cacheprovider \
      "${files[@]}" -k "not compile and not registered"
    # the next set differs in the kernels of these ops alone
    files=(tests/test_npu_{lightning_indexer,sparse_flash_attention,sparse_attention}_pto.py
      tests/test_npu_{ops,sequences,indexers}.py)
  done
}

report_environment() {
  [[ -x "$python" ]] || python=python3
  if [[ "$(requirement python_supported)" != True ]]; then
    echo "run.sh env: Python must be $(requirement python | tr ' ' - | sed 's/-/ to /'), got" \
      "$("$python" --version 2>&1) ($python)" >&2
    exit 1
  fi
  # the source tree works even if it is not built
  PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m custom_pypto_command env "$@"
}

case "${1:-}" in
  test)
    shift
    if [[ "${1:-}" == --arch ]]; then
      [[ "${2:-}" == aarch64 ]] || { usage >&2; exit 2; }
      exec bash "$root/tests/aarch64.sh" "${@:3}"
    fi
    if [[ "${1:-}" == --serving ]]; then
      shift
      if [[ "${1:-}" == --vllm ]]; then
        setup_serving "${2:?run.sh: --vllm needs a version}"
        shift 2
      else
        setup_serving
      fi
      cd "$root/integrations/vllm"
      exec "$python" -m pytest "$@"
    fi
    setup models,sim,test
    if [[ "${1:-}" == --pypto ]]; then
      use_pypto "${2:-}"
      test_programs "${@:3}"
      exit
    fi
    setup_torch_npu || true # the tests report what they skip
    run_tests "$@"
    ;;
  bench)
    shift
    run_benchmarks "$@"
    ;;
  serve)
    shift
    checkpoint="$root/examples/checkpoints/lookup"
    if [[ $# -gt 0 && "$1" != -* ]]; then
      checkpoint="$1"
      shift
    fi
    setup_serving
    exec "$python" -m custom_pypto_vllm.serve "$checkpoint" "$@"
    ;;
  fuzz)
    shift
    setup test
    exec "$python" "$root/tests/fuzz" "$@"
    ;;
  sanitize)
    [[ $# -le 2 && "${2:-address}" =~ ^(address|thread)$ ]] || { usage >&2; exit 2; }
    setup models,test
    sanitize "${2:-address}"
    ;;
  env)
    shift
    report_environment "$@"
    ;;
  atlas)
    shift
    if [[ " $* " == *" --simulator "* ]]; then
      setup models,sim
      setup_torch_npu
      has_torch_npu || export PYTHONPATH="$torch_npu_folder${PYTHONPATH:+:$PYTHONPATH}"
      export TORCH_DEVICE_BACKEND_AUTOLOAD=0 # the simulator imports torch_npu itself
    else
      setup models
    fi
    exec "$python" "$root/benchmarks/atlas" "$@"
    ;;
  lint)
    [[ $# -eq 1 ]] || { usage >&2; exit 2; }
    "$python" -c 'import mypy, ruff, torch, transformers' 2>/dev/null ||
      { echo "run.sh lint: its tools are not in $environment: bash run.sh setup models,sim,test" >&2; exit 1; }
    lint
    ;;
  docs)
    [[ $# -eq 1 ]] || { usage >&2; exit 2; }
    build_docs
    ;;
  setup)
    [[ $# -le 2 ]] || { usage >&2; exit 2; }
    setup "${2:-models}"
    echo "custom_pypto is installed in $environment"
    [[ "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" == "$environment" ]] || echo "to use it: . $environment/bin/activate"
    ;;
  -h | --help) usage ;;
  graph)
    shift
    setup models,sim
    setup_torch_npu
    run_graph_examples "$@"
    ;;
  "" | -*)
    setup models
    "$python" "$root/examples/generate.py" "$@"
    if [[ $# -eq 0 ]] && { has_torch_npu || has_torch_npu_folder; }; then
      setup sim
      echo
      run_graph_examples || echo "run.sh: graph mode does not run here, see above" >&2
    fi
    ;;
  *)
    echo "run.sh: unknown command '$1'" >&2
    usage >&2
    exit 2
    ;;
esac
