"""Holds what a query finds: the samples that help it and those that harm it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pergrad.audit.streaming.loading import item_of
from pergrad.audit.writing.previews import picture_of
from pergrad.index.info import data_frame
from pergrad.index.querying.page import Card, Section, write_page, written_page
from pergrad.index.store.chunks import Facts
from pergrad.reports.numbers import number
from pergrad.reports.pictures import Shown, shown

__all__ = ["Matches", "Preview"]

_PIXELS = 160
_WIDE = 60  # characters of a text in the terminal

Preview = Callable[[int], Shown]


@dataclass(frozen=True)
class Matches:
    """The samples with the highest and the lowest scores of each query, best first.

    `frame` is a data frame; `html(path)` writes a page; printing it shows a table.
    """

    helpful: np.ndarray  # (q, k) numbers of rows
    helpful_scores: np.ndarray  # (q, k)
    harmful: np.ndarray
    harmful_scores: np.ndarray
    facts: Facts
    preview: Preview | None = field(default=None, repr=False)
    queries: tuple[Shown, ...] = field(default=(), repr=False)
    recall: float | None = None  # of an approximate search, measured against the exact one
    title: str = "index"

    def __len__(self) -> int:
        return len(self.helpful)

    @property
    def frame(self) -> Any:
        """Returns a data frame with a row for each match: query, kind, rank, index, score, label, loss."""
        columns: dict[str, list[Any]] = {}
        for row in self._rows():
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
        return data_frame(columns)

    def _rows(self) -> list[dict[str, Any]]:
        return [row for query in range(len(self)) for row in self._of_query(query)]

    def _of_query(self, query: int) -> list[dict[str, Any]]:
        facts, found = self.facts, []
        for kind in ("helpful", "harmful"):
            rows, scores = getattr(self, kind)[query], getattr(self, f"{kind}_scores")[query]
            for rank, (row, score) in enumerate(
                zip(rows.tolist(), scores.tolist(), strict=True), 1
            ):
                if not np.isfinite(score):
                    continue
                own = {"query": query, "kind": kind, "rank": rank, "index": int(facts.index[row])}
                if facts.token is not None:
                    own["token"] = int(facts.token[row])
                own["score"] = score
                if facts.labels is not None:
                    own["label"] = facts.labels[row]
                found.append({**own, "loss": float(facts.loss[row, -1])})
        return found

    def html(self, path: str | Path) -> Path:
        """Writes a page with a picture or text of each match, and returns its path."""
        return write_page(Path(path), self._page())

    def _page(self) -> str:
        sections = []
        for query in range(len(self)):
            own = self.queries[query] if query < len(self.queries) else Shown()
            cards: dict[str, list[Card]] = {"helpful": [], "harmful": []}
            for row in self._of_query(query):
                about = [
                    (name, _told(row[name])) for name in ("token", "label", "loss") if name in row
                ]
                cards[row["kind"]].append(
                    Card(
                        row["index"], number(row["score"]), self._shown(row["index"]), tuple(about)
                    )
                )
            sections.append(Section(query, own, tuple(cards["helpful"]), tuple(cards["harmful"])))
        return written_page(self.title, sections, self.recall)

    def _shown(self, index: int) -> Shown:
        return Shown() if self.preview is None else self.preview(index)

    def _repr_html_(self) -> str:
        text = self._page().replace("&", "&amp;").replace('"', "&quot;")
        return f'<iframe srcdoc="{text}" width="100%" height="600" style="border:0"></iframe>'

    def __rich__(self) -> Table:
        table = Table(box=None, header_style="bold", title_justify="left")
        rows = self._rows()
        names = [name for name in rows[0] if name != "rank"] if rows else ["query"]
        for name in names:
            is_number = name not in ("kind", "label")
            table.add_column(name, justify="right" if is_number else "left")
        table.add_column("sample")
        for row in rows:
            text = (self._shown(row["index"]).excerpt or "")[:_WIDE]
            table.add_row(*(Text(_told(row[name])) for name in names), Text(text))
        return table

    def __str__(self) -> str:
        held = io.StringIO()
        Console(file=held, width=120).print(self)
        note = "" if self.recall is None else f"approximate search, recall {self.recall:.3f}\n"
        return note + held.getvalue()


def _told(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def previews_of(dataset: Any, show: Callable[[Any], Any] | None) -> Preview | None:
    """Returns what shows an item of a data set by its index; None if there is nothing to show it by."""
    if show is None:
        return None

    def preview(index: int) -> Shown:
        try:
            return shown_item(show(item_of(dataset, index)))
        except Exception:  # a sample without a preview is still a match
            return Shown()

    return preview


def shown_item(found: Any) -> Shown:
    """Prepares a string, a PIL image or an array for the page."""
    if isinstance(found, str):
        return shown({"text": found}, size=_PIXELS)
    mode, width, height, pixels = picture_of(found)
    row: Mapping[str, Any] = {
        "text": None,
        "mode": mode,
        "width": width,
        "height": height,
        "pixels": pixels,
    }
    return shown(row, size=_PIXELS)
