"""Command lines of the examples: help with every default, values of options, errors in one line.

Every program imports it first: what follows takes seconds, in which a user may press Ctrl-C.
"""

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from custom_pypto_command import end_as_commands_do

end_as_commands_do()

import custom_pypto  # noqa: E402, F401  # before torch, so that its idle threads sleep

# isort: split
import torch  # noqa: E402

#: the options for arguments of models.load, of the programs that have them
OF_LOAD = {
    "num_hidden_layers": "--layers",
    "weights": "--weights",
    "memory": "--memory",
    "revision": "--revision",
    "dtype": "--dtype",
    "tensor_parallel": "--tp",
    "expert_parallel": "--ep",
    "mtp": "--drafts",
}


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one; a switch has none."""

    def _format_action(self, action):
        none = any(action.default is it for it in (None, False, argparse.SUPPRESS))
        if action.option_strings and not none and "%(default)s" not in (action.help or ""):
            action.help = f"{action.help or ''} (default: %(default)s)".strip()
        return super()._format_action(action)


def at_least(lowest: int, highest: int | None = None):
    """The type of an option: a number from ``lowest`` on, up to ``highest`` if there is one."""

    def number(text: str) -> int:
        value = int(text)
        if value < lowest or (highest is not None and value > highest):
            range_ = f"at least {lowest}" if highest is None else f"{lowest} to {highest}"
            raise argparse.ArgumentTypeError(f"must be {range_}, got {value}")
        return value

    return number


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0, got {value}")
    return value


def block_size(text: str) -> int:
    value = int(text)
    if value % 16 or not 16 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"must be a multiple of 16 up to 1024, got {value}")
    return value


def check_folder(parser: argparse.ArgumentParser, option: str, folder: Path) -> None:
    """Makes the folder that a program writes to, or ends the program, before its work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        parser.error(f"{option} needs a folder that can be written, got {folder}: {error.strerror}")


def parser_of(
    doc: str | None,
    *,
    output: str,
    tokens: int,
    seed: int = 0,
    parents: Sequence[argparse.ArgumentParser] = (),
    **counts: int,
) -> argparse.ArgumentParser:
    """Of a program that trains a checkpoint into a folder, or only measures one.

    Args:
        parents: with options of the program's own.
        counts: defaults of further options, by their names, such as the steps of each stage.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=Help, parents=parents)
    add = parser.add_argument
    to = parser.add_mutually_exclusive_group()
    to.add_argument("--output", type=Path, default=Path(output), help="folder of the checkpoint")
    to.add_argument(
        "--measure", type=Path, metavar="CHECKPOINT", help="only measure one that was trained"
    )
    add("--seed", type=int, default=seed)
    add("--threads", type=at_least(1), default=1, help="changes rounding, hence the weights")
    add("--tokens", type=at_least(1), default=tokens, help="tokens per step")
    for name, count in counts.items():
        add(f"--{name.replace('_', '-')}", type=at_least(1), default=count)
    return parser


def train_or_measure(
    parser: argparse.ArgumentParser,
    train: Callable[[argparse.Namespace], None],
    measure: Callable[[Path], None],
) -> None:
    """Does what the arguments of a :func:`parser_of` ask for."""
    args = parser.parse_args()
    if args.measure:
        with one_line_errors():
            measure(args.measure)
        return
    check_folder(parser, "--output", args.output)
    train(args)


@contextlib.contextmanager
def one_line_errors(*options: str) -> Iterator[None]:
    """Ends the program with the message of an error, in which arguments of ``models.load`` are
    named by these options of the program."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (MemoryError, OSError, TypeError, ValueError, torch.OutOfMemoryError) as error:
        end(in_options(str(error), options))


def end(message: object) -> None:
    """Ends the program, one of several ranks perhaps, with this line."""
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    sys.exit(f"{Path(sys.argv[0]).name}: {message}{rank}")


def in_options(message: str, options: tuple[str, ...]) -> str:
    """A message of ``models.load``, of which the program has these options."""
    for argument, option in OF_LOAD.items():
        if option in options:
            for pattern, text in {
                rf"^load: {argument} must be (False|None)\b": f"{option} must be omitted",
                rf"^load: {argument}\b|\b{argument}=True\b": option,
                rf"\b{argument}=None\b": f"no {option}",
                rf"\b{argument}=(?=')": f"{option} ",
                rf"\b{argument}={{'experts': ('\w+'), 'rest': \1}}": rf"{option} \1",
                rf"\bwith {argument}\b(?=,)": f"with {option}",
            }.items():
                message = re.sub(pattern, text, message)
    return message
