"""Command lines of the examples: help with every default, and the values of their options."""

import argparse

MODES = ["max-autotune", "reduce-overhead", "npugraph_ex"]  # of torchair


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one; a switch has none."""

    def _format_action(self, action):
        none = any(action.default is it for it in (None, False, argparse.SUPPRESS))
        if action.option_strings and not none and "%(default)s" not in (action.help or ""):
            action.help = f"{action.help or ''} (default: %(default)s)".strip()
        return super()._format_action(action)


def at_least(lowest: int):
    """The type of an option: a number from ``lowest`` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, got {value}")
        return value

    return number


def block_size(text: str) -> int:
    value = int(text)
    if value % 16 or not 16 <= value <= 1024:
        raise argparse.ArgumentTypeError(f"must be a multiple of 16 up to 1024, got {value}")
    return value
