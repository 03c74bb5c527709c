"""Docstrings as the reference shows them: their doctests as code, their inner products as text.

The docstrings are written to be read in a terminal. Markdown would make quotations of their examples and
take ⟨g, h⟩, written with the signs of a keyboard, for a tag.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Docstrings", "as_markdown"]


def as_markdown(text: str) -> str:
    r"""The docstring with each doctest in a block of code and no tags in its prose.

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
    """Less-than signs outside of code, so that they are shown."""
    parts = prose.split("`")
    return "`".join(
        part if k % 2 else part.replace("<", "&lt;") for k, part in enumerate(parts)
    )


class Docstrings(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Puts `as_markdown` between the source and the pages."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
