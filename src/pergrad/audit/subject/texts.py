"""Makes texts of what users return that every file can hold, and that a terminal shows as they are."""

from __future__ import annotations

from typing import Any

__all__ = ["as_line", "as_text"]


def as_text(value: Any) -> str:
    r"""Returns the value as a string; escapes what is no character, as in names of files of other encodings.

    >>> as_text(3), as_text("caf\udce9.png")
    ('3', 'caf\\udce9.png')
    """
    text = str(value)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def as_line(text: str) -> str:
    r"""Returns a text on one line, for a terminal: leaves out what is not printable, such as its codes.

    >>> as_line("a\nb \x1b[31mc")
    'a b [31mc'
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
