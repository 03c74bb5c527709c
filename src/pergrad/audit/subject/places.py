"""Says where in the user's own code an error was raised."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

import torch

__all__ = ["told"]

_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(inspect.getfile(torch)).parent)


def told(error: BaseException) -> str:
    """Returns the kind and the message of an error, with the file and line of the user's code.

    The innermost line outside of pergrad and torch counts.

    >>> try:
    ...     1 / 0
    ... except ZeroDivisionError as error:
    ...     told(error)
    'ZeroDivisionError: division by zero (...'
    """
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OURS, _TORCH)):
            return f"{message} ({frame.filename}, line {frame.lineno})"
    return message
