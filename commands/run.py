"""The commands of run.sh, which starts this by a Python from 3.10 on that may have no package."""

import argparse
import glob
import inspect
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import prepare
from prepare import ENVIRONMENT, PIP, PYTHON, ROOT, become, call, output, warn

EXAMPLES = ROOT / "examples"


def demo(arguments: list[str]) -> None:
    """Without a command, the demo: text from a sparse-attention model; then graph mode, where
    torch_npu is installed. Commands install what they need into the active environment, or into
    .venv if none is active; conda's base counts as none. COMMAND --help has the arguments.
    """
    prepare.setup("models")
    call(PYTHON, EXAMPLES / "generate.py", *arguments)
    if arguments:
        return
    if prepare.has_torch_npu() or prepare.has_torch_npu_folder():
        prepare.setup("sim")
        print()
        if run_graph_examples([]):
            warn("graph mode does not run here, see above")
    tell_activation()


def tell_activation() -> None:
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if active != str(ENVIRONMENT):
        print(f"to use it: . {ENVIRONMENT}/bin/activate")


def run_graph_examples(arguments: list[str]) -> int:
    prepare.use_torch_npu()  # the examples import it themselves
    exported = ("--folder", ROOT / "build/ge_graph")
    return call(PYTHON, EXAMPLES / "compile_torchair.py", *arguments, check=False) or call(
        PYTHON, EXAMPLES / "export_graph.py", *exported, check=False
    )


def setup(options: Namespace, others: list[str]) -> None:
    """Installs this folder in editable mode, into the active environment or .venv."""
    prepare.setup(options.extras)
    print(f"custom_pypto is installed in {ENVIRONMENT}")
    tell_activation()


def env(options: Namespace, others: list[str]) -> None:
    """Reports what works here, what is missing and the remedy; installs nothing.

    --json: for programs.
    """
    python = PYTHON if os.access(PYTHON, os.X_OK) else Path(sys.executable)
    if (found := prepare.version(python)) not in prepare.requirements.newest_first():
        wanted = prepare.requirements.span(prepare.requirements.PYTHON)
        sys.exit(f"run.sh env: Python must be {wanted}, got {found} ({python})")
    prepare.put_on_path(ROOT)  # the source tree works even if it is not built
    become(python, "-m", "custom_pypto_command", "env", *others)


def serve(options: Namespace, others: list[str]) -> None:
    """Serves a DeepSeek-V3.2 or V4, GLM-5 or Hy4 by vLLM, in an environment of its own, 3.5 GB.

    run.sh serve [CHECKPOINT] [arguments of vLLM]; CHECKPOINT: a folder, or owner/name on the Hub;
    default: examples/checkpoints/lookup. --port N; --revision: branch, tag or commit of a name.
    """
    if not others or others[0].startswith("-"):
        others = [str(EXAMPLES / "checkpoints/lookup"), *others]
    name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", others[0]) and not os.path.exists(others[0])
    if not name and not Path(others[0], "config.json").is_file():
        options.parser.error(
            "CHECKPOINT must be a folder with config.json, or owner/name of a repository on the "
            f"Hub, got {others[0]!r}"
        )
    become(prepare.setup_serving(), "-m", "custom_pypto_vllm.serve", *others)


def atlas(options: Namespace, others: list[str]) -> int:
    """Runs all that needs an NPU, into one archive; --simulator: on the host simulator of CANN."""
    if runpy.run_path(str(ROOT / "benchmarks/atlas"))["parse"](others).simulator:
        prepare.setup("models,sim")
        if not prepare.setup_torch_npu():
            return 1
        prepare.use_torch_npu()  # the simulator imports torch_npu itself
    else:
        prepare.setup("models")
    become(PYTHON, ROOT / "benchmarks/atlas", *others)


def graph(options: Namespace, others: list[str]) -> int:
    """Compiles the demo's model by torchair; without an NPU on that simulator.

    Installs torch_npu into build/torch_npu, if there is none. Other arguments are those of
    examples/compile_torchair.py: --mode MODE, --cache FOLDER.
    """
    prepare.setup("models,sim")
    return run_graph_examples(others) if prepare.setup_torch_npu() else 1


def run_pytest(*arguments: str) -> int:
    # passive: waiting threads leave the core to the other processes. No limit on the whole, which a
    # busy machine would exceed; pyproject.toml has one for each test.
    processes = ("--numprocesses", "auto", "--maxprocesses", "4", "--dist", "worksteal")
    # Bytecode is kept: hundreds of processes would compile the same sources.
    variables = os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": ""}
    command = (PYTHON, "-m", "pytest", *processes, *arguments)
    return call(*command, check=False, cwd=ROOT, env=variables)


def test(options: Namespace, others: list[str]) -> int:
    """Runs the tests, a few cases of each property, in several processes.

    Other arguments are pytest's: -k indexer, or -n 0 for one process; and --all, for every case.
    """
    if options.arch:
        become("bash", ROOT / "tests/aarch64.sh", *others)
    if options.serving:
        serving = prepare.setup_serving(*filter(None, [options.vllm]))
        os.chdir(ROOT / "integrations/vllm")
        become(serving, "-m", "pytest", *others)
    if options.vllm:
        options.parser.error("--vllm needs --serving")
    if options.pypto is not None:
        return test_programs(Path(options.pypto), options, others)
    prepare.setup("models,sim,test")
    prepare.setup_torch_npu()  # the tests report what they skip
    here, none = run_pytest(*others), 5  # pytest's status if it selected no tests
    # those on the host simulator of CANN, which changes torch, in separate processes
    prepare.use_torch_npu(ROOT)
    # unraisableexception collects garbage after each test: most of a second on the simulator
    simulator = run_pytest("--ascend-host", "-p", "no:unraisableexception", *others)
    return simulator if here == none or here == 0 and simulator != none else here


def test_programs(pypto: Path, options: Namespace, others: list[str]) -> int:
    """All that runs the NPU kernels without an NPU, or these tests of it, on another PyPTO."""
    if not pypto.exists():
        options.parser.error(f"--pypto needs a wheel or a folder, got {options.pypto!r}")
    prepare.setup("models,sim,test")
    if pypto.is_file():
        wheel, pypto = pypto, ROOT / "build/pypto" / pypto.stem
        shutil.rmtree(pypto, ignore_errors=True)
        call(PYTHON, *PIP, "--no-deps", "--target", pypto, wheel)
    prepare.put_on_path(pypto.absolute())  # before the installed one, as CANN's set_env.sh does
    devices = () if others else ("interpreter", "generated")  # each takes one core, for minutes
    files = {device: ROOT / f"build/verify-{device}.txt" for device in devices}
    running = []
    for device, file in files.items():
        verify = [PYTHON, "-m", "custom_pypto", "verify", "--device", device]
        with open(file, "w") as said:
            running.append(subprocess.Popen(verify, stdout=said, stderr=subprocess.STDOUT))
    failed = [process.wait() for process in running]
    print(*(file.read_text() for file in files.values()), sep="", end="")
    return int(run_pytest("-m", "sim", *others) != 0 or any(failed))


def bench(options: Namespace, others: list[str]) -> int:
    """Times the ops, the models and the NPU kernels in PyPTO's cost model, and compares figures."""
    program = runpy.run_path(str(ROOT / "benchmarks"))
    chosen = program["parse"](others)
    if not (needs := chosen.needs):  # nothing is measured
        return program["main"](chosen)
    prepare.setup("models,test")  # the tests make the inputs
    if "sim" in needs:
        prepare.setup("models,sim,test")
    if "torch_npu" in needs and not prepare.setup_torch_npu():
        return 1
    if "serving" in needs:
        prepare.setup_serving()
    if "llama" in needs:
        call(PYTHON, *PIP, "gguf")
    become(PYTHON, ROOT / "benchmarks", *others)


def fuzz(options: Namespace, others: list[str]) -> None:
    """Fuzzes the ops on this CPU with random calls."""
    runpy.run_path(str(ROOT / "tests/fuzz/__init__.py"))["parse"](others)
    prepare.setup("test")
    become(PYTHON, ROOT / "tests/fuzz", *others)


def listed(*paths: str) -> list[str]:
    """Files of the tree: tracked, or new and not ignored."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *paths)
    if (said := output(*command, cwd=ROOT)) is None:
        sys.exit(f"run.sh: git cannot list the files of {ROOT}, which must be a checkout")
    return said.split("\0")[:-1]


def sanitize(options: Namespace, others: list[str]) -> None:
    """Runs up to 30000 fuzz calls and the tests of the ops, compiled with a sanitizer.

    address: AddressSanitizer and UBSan, thread: ThreadSanitizer. Compiles in a copy of the sources;
    the installed library stays unchanged.
    """
    prepare.setup("models,test")
    folder = ROOT / f"build/sanitize-{options.kind}"
    copy_sources(folder)
    os.chdir(folder)
    build = (PYTHON, "setup.py", "-q", "build_ext", "--inplace")
    variables = os.environ | {"CUSTOM_PYPTO_SANITIZE": options.kind}
    with open("build.log", "w") as log:
        if call(*build, check=False, env=variables, stdout=log, stderr=subprocess.STDOUT):
            sys.exit(Path("build.log").read_text())
    # Python is built without a sanitizer, so the sanitizer's runtime must be loaded first;
    # libstdc++ too, in which the runtime looks up the throwing function
    runtime = (f"lib{options.kind[0]}san.so", "libstdc++.so")
    variables = os.environ | {
        "LD_PRELOAD": ":".join(output("g++", f"-print-file-name={name}") for name in runtime),
        "PYTHONPATH": str(folder),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # leaks off: Python and torch keep memory until the process ends, which would fill the
        # report; null: torch itself reports a failed allocation
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # TSan cannot see synchronisation inside uninstrumented modules, torch and its libgomp
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:second_deadlock_stack=1",
    }

    def run(kernels: str, *arguments: str, how=call):
        return how(PYTHON, *arguments, env=variables | {"CUSTOM_PYPTO_CPU_ISA": kernels})

    sets = [""]  # this CPU's preferred kernels
    # no sanitizer sees what a tile register reads or writes, unless it is emulated
    probe = "import torch, custom_pypto; torch.ops.custom_pypto.cpu_isa()"
    if run("amx_emulated", "-c", probe, how=output) is not None:
        sets.append("amx_emulated")
    else:
        warn("sanitize: amx_emulated is left out, it needs a CPU with AVX512-BF16")
    for kernels in (*sets, "generic"):
        run(kernels, "tests/fuzz", "--cases", "10000", "--seed", "1", "--threads", "3")
    names = "add_custom weight_only_linear convert_weight layer_ops one_op stream_ops".split()
    tests = [f"tests/test_{name}.py" for name in names] + sorted(glob.glob("tests/test_npu_*.py"))
    for kernels in sets:  # torch.compile tests are left out: they call the same functions
        chosen = ("-p", "no:cacheprovider", "-k", "not compile and not registered")
        run(kernels, "-m", "pytest", "-q", *chosen, *tests)
        # the next set differs in the kernels of these ops alone
        names = "lightning_indexer_pto sparse_flash_attention_pto sparse_attention_pto".split()
        names += ["ops", "sequences", "indexers"]
        tests = [f"tests/test_npu_{name}.py" for name in names]


def copy_sources(folder: Path) -> None:
    copied = ("custom_pypto", "docs", "models", "tests")
    for name in copied:
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    files = listed("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE", *copied)
    # keeps timestamps, so that only changed files are compiled again
    how = ("--no-dereference", "--preserve=timestamps", "--parents", "-t", folder)
    call("cp", *how, *files, cwd=ROOT)


def lint(options: Namespace, others: list[str]) -> int:
    """Checks format, style and types, changes nothing; needs run.sh setup models,sim,test."""
    if output(PYTHON, "-c", "import mypy, ruff, torch, transformers") is None:
        remedy = "bash run.sh setup models,sim,test"
        sys.exit(f"run.sh lint: its tools are not in {ENVIRONMENT}: {remedy}")
    os.chdir(ROOT)
    checks = [
        (PYTHON, "-m", "ruff", "check", "--quiet", "."),
        (PYTHON, "-m", "ruff", "format", "--check", "."),
        (PYTHON, "-m", "mypy"),
        (PYTHON.with_name("clang-format"), "--dry-run", "-Werror", *listed("*.cpp", "*.h")),
        # against the empty tree: checks every line, not only changed ones
        ("git", "diff", "--check", output("git", "hash-object", "-t", "tree", os.devnull)),
    ]
    failed = [call(*check, check=False) for check in checks]
    if large := [name for name in listed() if os.lstat(name).st_size > 8 << 20]:
        print("larger than 8 MB:", *large, sep="\n", file=sys.stderr)
    return int(any(failed) or bool(large))


def docs(options: Namespace, others: list[str]) -> None:
    """Builds the documentation site into build/site; fails on a dead link.

    In an environment of its own; reads the sources, needs neither torch nor the built package.
    """
    python = ROOT / "build/docs/bin/python"
    if not os.access(python, os.X_OK):
        call(sys.executable, "-m", "venv", ROOT / "build/docs")
    call(python, *PIP, "pip>=25.1")  # knows groups
    call(python, *PIP, "--group", f"{ROOT}/pyproject.toml:docs")
    # silences the theme's notice about its successor
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    call(python, "-m", "mkdocs", "build", "--config-file", ROOT / "docs/site/mkdocs.yml")
    print(ROOT / "build/site/index.html")


GROUPS = {
    "Try": (setup, env, serve),
    "On an Atlas": (atlas, graph),
    "Develop": (test, bench, fuzz, sanitize, lint, docs),
}
OWN_HELP = (atlas, bench, fuzz)  # of programs that need no package for it
COMPLETE = (setup, sanitize, lint, docs)  # other arguments go to no program


def make_parser() -> argparse.ArgumentParser:
    usage = "run.sh [arguments of examples/generate.py] | run.sh COMMAND [arguments]"
    raw = dict(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser = argparse.ArgumentParser("run.sh", usage, inspect.getdoc(demo), "", **raw)
    commands = parser.add_subparsers(metavar="COMMAND", prog="run.sh", help=argparse.SUPPRESS)
    for group, functions in GROUPS.items():
        parser.epilog += f"\n{group}\n"
        for run in functions:
            about = inspect.getdoc(run)
            parser.epilog += f"  {run.__name__:<9} {about.splitlines()[0]}\n"
            options = raw | dict(description=about, add_help=run not in OWN_HELP)
            command = commands.add_parser(run.__name__, **options)
            command.set_defaults(run=run, parser=command)
    add = commands.choices["setup"].add_argument
    add("extras", nargs="?", default="models", metavar="EXTRAS", help="models,sim,npu,test or some")
    add = commands.choices["sanitize"].add_argument
    add("kind", nargs="?", default="address", choices=["address", "thread"])
    add = commands.choices["test"].add_mutually_exclusive_group().add_argument
    add("--pypto", metavar="WHEEL|FOLDER", help="on this PyPTO: docs/pypto_versions.md")
    add("--serving", action="store_true", help="vLLM on the ops; --vllm VERSION: not the newest")
    add("--arch", choices=["aarch64"], help="in emulation, 10 GB, root; --compile-only: csrc alone")
    commands.choices["test"].add_argument("--vllm", help=argparse.SUPPRESS)
    return parser


def main(arguments: list[str]) -> int | None:
    if not arguments or arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
        return demo(arguments)
    options, others = make_parser().parse_known_args(arguments)
    if others and options.run in COMPLETE:
        options.parser.error(f"unrecognized arguments: {' '.join(others)}")
    return options.run(options, others)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe ends quietly
    try:
        sys.exit(main(sys.argv[1:]))
    except OSError as error:  # of a command that does not start
        sys.exit(f"run.sh: {error}")
    except KeyboardInterrupt:
        warn("interrupted")
        sys.exit(130)
