"""Converts docstrings to markdown for the reference: doctests become code blocks, < is escaped.

The docstrings are written for a terminal. Markdown would turn their examples into block quotes, and read <g,
h> as a tag.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Docstrings", "as_markdown"]


def as_markdown(text: str) -> str:
    r"""Returns the docstring with each doctest in a code block and no tags in its prose.

    >>> print(as_markdown("<a, b> by `<c>`:\n\n>>> 1 + 1\n2\n\nDone."))
    &lt;a, b> by `<c>`:
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    Done.
    """
    paragraphs = [
        f"```pycon\n{part}\n```"
        if part.lstrip().startswith(">>>")
        else _without_tags(part)
        for part in re.split(r"\n\s*\n", text.strip())
    ]
    return "\n\n".join(paragraphs).replace("\n<BLANKLINE>\n", "\n\n")


def _without_tags(prose: str) -> str:
    """Escapes less-than signs outside of code."""
    parts = prose.split("`")
    return "`".join(
        part if k % 2 else part.replace("<", "&lt;") for k, part in enumerate(parts)
    )


class Docstrings(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Applies `as_markdown` to every docstring."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
