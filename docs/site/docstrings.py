"""The docstrings' Sphinx markup as Markdown, and their sections as griffe looks for them."""

import re

import griffe
from latex2mathml.converter import convert


class Docstrings(griffe.Extension):
    def on_object(self, *, obj, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
            obj.docstring.parser = "google"


def markdown(text: str) -> str:
    text = re.sub(r"^(Args|Returns|Raises|Example):$", r"\n\g<0>", text, flags=re.M)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.M)
    text = re.sub(
        r"^\.\. math:: (.*?)$(?=\n\n|\n\S|\Z)",
        lambda found: convert(" ".join(found[1].split()), display="block"),
        text,
        flags=re.M | re.S,
    )
    # in a span: a line that begins with <math> would be a block to Markdown
    text = re.sub(
        r":math:`([^`]*)`",
        lambda found: f"<span>{convert(' '.join(found[1].split()))}</span>",
        text,
    )
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text)
    return re.sub(r"::$", ":", text, flags=re.M)
