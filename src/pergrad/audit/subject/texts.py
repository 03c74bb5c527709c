"""Makes texts of what users return that every file can hold."""

from __future__ import annotations

from typing import Any

__all__ = ["as_text"]


def as_text(value: Any) -> str:
    r"""Returns the value as a string; escapes what is no character, as in names of files of other encodings.

    >>> as_text(3), as_text("caf\udce9.png")
    ('3', 'caf\\udce9.png')
    """
    return str(value).encode(errors="backslashreplace").decode()
