"""Command lines of the examples: help with every default, and numbers with a lower bound."""

import argparse


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one; a switch has none."""

    def _get_help_string(self, action):
        text = action.help or ""
        shown = action.option_strings and action.default not in (None, False, argparse.SUPPRESS)
        return f"{text} (default: %(default)s)".strip() if shown else text

    def _format_action(self, action):
        # argparse prints no second column for an option without help
        action.help = action.help or " " * bool(action.option_strings)
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
