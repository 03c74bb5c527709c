"""The command `pergrad`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pergrad

__all__ = ["main"]

# What the commands need beside torch, as modules.
_EXTRA = ("jinja2", "numpy", "PIL", "pyarrow", "rich", "typer")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `pergrad` and ends the process.

    Exit codes: 0 done; 1 a check has failed; 2 wrong usage or input; 3 no space or memory left, the same
    command goes on from there; 130 interrupted by Ctrl-C, likewise.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["--version"], ["-V"]):  # with torch alone
        print(f"pergrad {pergrad.__version__}")
        sys.exit(0)
    try:
        from pergrad.cli.app import run  # noqa: PLC0415  # needs the extra
    except KeyboardInterrupt:  # which loading torch leaves time for
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
