"""Reports checks of per-sample gradients: a row for each parameter, a verdict, printed as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pergrad.errors import PergradError
from pergrad.quantities.base import counted

__all__ = [
    "Certified",
    "CertifyReport",
    "Verification",
    "VerifyReport",
    "shown_parameters",
    "text_table",
]

_SHOWN = 3  # parameters in a repr


class _Row(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def shown_parameters(rows: Sequence[_Row]) -> str:
    """Counts parameters and shows the first of them with their shapes."""
    names = [f"{row.name} {row.shape}" for row in rows[:_SHOWN]]
    more = ["..."] if len(rows) > _SHOWN else []
    return f"{counted(len(rows), 'parameter')} ({', '.join([*names, *more])})"


@dataclass(frozen=True)
class Verification:
    """One parameter: how its gradients were computed, and how far off they are."""

    name: str
    shape: tuple[int, ...]
    how: str
    error: float  # the largest relative error against single samples and the ordinary gradient
    verdict: str  # "ok", "wrong" or "untouched": no sample has a gradient for it


@dataclass(frozen=True)
class VerifyReport:
    """A row for each recorded parameter, and the problems of the whole model; prints as a table."""

    rows: tuple[Verification, ...]
    samples: tuple[int, ...]  # the samples that were run alone
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and all(row.verdict != "wrong" for row in self.rows)

    @property
    def untouched(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows if row.verdict == "untouched")

    @property
    def _verdict(self) -> str:
        wrong = sum(row.verdict == "wrong" for row in self.rows)
        return "all right" if self.ok else f"{wrong} parameters wrong" if wrong else "not right"

    def __repr__(self) -> str:
        """Shows the verdict, the parameters and how many samples were compared; print it for the table."""
        samples = f"{counted(len(self.samples), 'sample')} compared"
        return f"<VerifyReport: {self._verdict}, {shown_parameters(self.rows)}, {samples}>"

    def __str__(self) -> str:
        table = text_table(
            ["parameter", "shape", "how", "error", "verdict"],
            [[r.name, str(r.shape), r.how, f"{r.error:.1e}", r.verdict] for r in self.rows],
        )
        samples = ", ".join(map(str, self.samples))
        lines = [
            table,
            *(f"problem: {p}" for p in self.problems),
            *(f"note: {n}" for n in self.notes),
        ]
        return "\n".join(
            [*lines, f"{self._verdict}: {len(self.rows)} parameters, samples {samples}"]
        )


@dataclass(frozen=True)
class Certified:
    """One parameter: how its gradients were computed, and how far off their weighted sum is."""

    name: str
    shape: tuple[int, ...]
    how: str
    error: float  # relative, of the weighted sum over all samples
    precision: str  # in which it was proved
    verdict: str  # "ok", "wrong" or "untouched": no sample has a gradient for it


@dataclass(frozen=True)
class CertifyReport:
    """A row for each recorded parameter, the problems of the step, and the cost; prints as a table.

    `ok` says whether all samples of all parameters are proved. `samples` are those whose reported numbers
    were compared with their own gradients. The cost is in ordinary forward and backward passes, and seconds.
    """

    rows: tuple[Certified, ...]
    batch_size: int
    samples: tuple[int, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    forwards: int
    backwards: int
    seconds: float
    dtype: torch.dtype  # the coarsest that the step computed in

    @property
    def ok(self) -> bool:
        return not self.problems and all(row.verdict != "wrong" for row in self.rows)

    @property
    def untouched(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows if row.verdict == "untouched")

    def check(self) -> None:
        """Raises an error with the table, unless all is right."""
        if not self.ok:
            raise PergradError(f"the per-sample gradients of this step are wrong:\n{self}")

    @property
    def _verdict(self) -> str:
        wrong = sum(row.verdict == "wrong" for row in self.rows)
        return "certified" if self.ok else f"{wrong} parameters wrong" if wrong else "not right"

    def __repr__(self) -> str:
        """Shows the verdict, the parameters and the number of samples; print it for the table."""
        samples, why = counted(self.batch_size, "sample"), "".join(self.problems[:1])
        verdict = f"{self._verdict} ({why})" if why else self._verdict
        return f"<CertifyReport: {verdict}, {shown_parameters(self.rows)}, {samples}>"

    def __str__(self) -> str:
        table = text_table(
            ["parameter", "shape", "how", "error", "proved in", "verdict"],
            [
                [
                    *(row.name, str(row.shape), row.how, f"{row.error:.1e}"),
                    *(row.precision.removeprefix("torch."), row.verdict),
                ]
                for row in self.rows
            ],
        )
        cost = f"{self.forwards} forward and {self.backwards} backward passes"
        return "\n".join(
            [
                table,
                *(f"problem: {problem}" for problem in self.problems),
                *(f"note: {note}" for note in self.notes),
                f"{self._verdict}: {len(self.rows)} parameters, {self.batch_size} samples; "
                f"{cost}, {self.seconds:.2f} s",
            ]
        )


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes rows below a header, each column as wide as its longest cell, two spaces apart.

    >>> print(text_table(["name", "shape"], [["weight", "(3, 4)"]]))
    name    shape
    weight  (3, 4)
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(lines)
