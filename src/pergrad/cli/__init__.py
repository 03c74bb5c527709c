"""Implements the command `pergrad`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pergrad

__all__ = ["main"]

# Modules that the commands need beside torch.
_EXTRA = ("jinja2", "numpy", "PIL", "pyarrow", "rich", "typer")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `pergrad` and exits.

    Exit codes: 0 done; 1 a check failed; 2 wrong usage or input; 3 out of disk space or memory, run the same
    command to resume; 130 interrupted by Ctrl-C, also resumable.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["--version"], ["-V"]):  # works without the extra
        print(f"pergrad {pergrad.__version__}")
        sys.exit(0)
    try:
        from pergrad.cli.app import run  # noqa: PLC0415  # needs the extra
    except KeyboardInterrupt:  # importing torch takes seconds
        sys.exit(130)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRA:
            raise
        print(
            f"pergrad: the commands need {name}, which is not installed: pip install 'pergrad[audit]'",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(run(given))
