"""Runs the models of other libraries and writes the results: `python -m tests.outside.table --write`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

from tests.outside.case import Case
from tests.outside.judging import BAD, Row
from tests.outside.registry import LIBRARIES
from tests.outside.rendering import RESULTS, markdown
from tests.outside.rows import all_cases, store, stored
from tests.outside.running import prepare_process, rows_of

__all__ = ["main"]


def _chosen(names: Sequence[str], only: str) -> list[Case]:
    """The cases of libraries ("timm") and single cases ("timm/resnet18")."""
    known = {f"{case.library}/{case.name}" for case in all_cases()} | {*LIBRARIES}
    unknown = {*names} - known
    if unknown:
        raise SystemExit(f"no such library or case: {', '.join(sorted(unknown))}")
    return [
        case
        for case in all_cases()
        if (not names or case.library in names or f"{case.library}/{case.name}" in names)
        and (only == "all" or (only == "times") == case.is_timed)
    ]


def _of_library(sender: Connection, distribution: str, names: Sequence[str]) -> None:
    prepare_process()
    library = LIBRARIES[distribution]
    for row in rows_of(library, [case for case in library.cases if case.name in names]):
        sender.send(row)
    sender.send(None)


def _run(cases: Sequence[Case]) -> Iterator[Row]:
    """The rows of all; a process for each library imports it alone."""
    context = get_context("spawn")
    for distribution in dict.fromkeys(case.library for case in cases):
        names = [case.name for case in cases if case.library == distribution]
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_of_library, args=(sender, distribution, names))
        process.start()
        sender.close()
        missing = dict.fromkeys(names)
        try:
            while (row := receiver.recv()) is not None:
                del missing[row.name]
                yield row
        except EOFError:
            for name in missing:
                yield Row(distribution, name, reason="the process of the library ended early")
        finally:
            if process.is_alive():
                process.join(10)
            if process.is_alive():
                process.kill()


def _shown(row: Row) -> str:
    if row.plain is not None and row.recorded is not None:
        return (
            f"{row.plain * 1e3:.0f} ms, recorded {row.recorded / row.plain:.2f} times; {row.rungs}"
        )
    error = "" if row.error is None else f" {row.error:.0e}"
    rest = f" [{row.certificate}]" if row.certificate not in ("", "proved") else ""
    fallback = f" [fallback: {row.fallback}]" if row.fallback else ""
    return f"{row.verdict}{error}{rest} {row.reason}{fallback}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.outside.table", description=__doc__)
    parser.add_argument("names", nargs="*", help="libraries, or library/case; by default all")
    parser.add_argument(
        "--write",
        action="store_true",
        help="store each row as it comes, and write the table at the end",
    )
    parser.add_argument("--render", action="store_true", help="write the table of the stored rows")
    parser.add_argument("--only", choices=("all", "cases", "times"), default="all")
    parser.add_argument("--missing", action="store_true", help="only cases without a stored row")
    parser.add_argument("--traceback", action="store_true", help="print those of failures")
    options = parser.parse_args(arguments)
    cases = _chosen(options.names, options.only)
    if options.missing:
        known = stored()
        cases = [case for case in cases if (case.library, case.name) not in known]
    surprises = []
    for row in () if options.render else _run(cases):
        print(f"{row.seconds:5.1f} s  {row.library}/{row.name}: {_shown(row)}", flush=True)
        if options.traceback and row.trace:
            print(row.trace)
        if row.verdict in BAD:
            surprises.append(f"{row.library}/{row.name}")
        if options.write:
            store(row)
    if options.write or options.render:
        RESULTS.write_text(markdown(list(stored().values())))
    print(f"not as they should be: {', '.join(surprises) or 'none'}")
    return int(bool(surprises))


if __name__ == "__main__":
    sys.exit(main())
