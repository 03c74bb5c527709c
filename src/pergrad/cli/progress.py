"""Shows the progress of an audit on the terminal: samples, rate and time left."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from pergrad.audit.subject.texts import as_line

__all__ = ["Progress"]


class _Rate(ProgressColumn):
    """Samples per second of this run, without rows from earlier runs."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} samples/s", style="progress.data.speed")


class Progress:
    """A progress bar on stderr, so that stdout has only results; without a terminal, messages only."""

    def __init__(self, console: Console, *, title: str = "auditing") -> None:
        self._console = console
        self._title = title
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self.samples = 0
        self.done = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, samples: int, done: int) -> None:
        self.samples, self.done = samples, done
        self._task = self._bar.add_task(self._title, total=samples, completed=done)
        if done:
            self.say(f"resuming: {done:,} of {samples:,} samples are already computed")

    def advance(self, samples: int) -> None:
        self.done += samples
        if self._task is not None:
            self._bar.advance(self._task, samples)

    def say(self, message: str) -> None:
        self._console.print(as_line(message), highlight=False, soft_wrap=True, markup=False)
