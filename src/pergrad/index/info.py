"""Tells what an index holds: samples, checkpoints, projection, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pergrad.index.store.store import Store

__all__ = ["Info", "data_frame", "info_of"]


@dataclass(frozen=True)
class Info:
    """What an index holds."""

    path: str
    model: str
    parameters: int
    data: list[str]
    samples: int
    rows: int
    deleted: int
    skipped: int
    per: str
    checkpoints: int
    projection: str
    dim: int
    dtype: str
    preconditioner: str
    bytes: int
    bytes_per_sample: float
    certified: bool

    def __str__(self) -> str:
        rows = self._lines()
        width = max(len(name) for name, _ in rows)
        return "\n".join([f"Index of {self.path}", *(f"  {n:<{width}}  {v}" for n, v in rows)])

    def _lines(self) -> list[tuple[str, str]]:
        held = f"{self.samples:,}" + (f" ({self.rows:,} tokens)" if self.per == "token" else "")
        held += f", {self.deleted:,} deleted" if self.deleted else ""
        held += f", {self.skipped:,} could not be read" if self.skipped else ""
        return [
            ("model", f"{self.model}, {self.parameters:,} parameters"),
            ("data", ", ".join(self.data)),
            ("samples", held),
            ("checkpoints", f"{self.checkpoints}"),
            ("rows", f"{self.projection}, {self.dim:,} x {self.dtype} for each checkpoint"),
            ("preconditioner", self.preconditioner),
            (
                "on disk",
                f"{self.bytes / 1e6:,.1f} MB, {self.bytes_per_sample:,.0f} bytes per sample",
            ),
            ("certified", "yes" if self.certified else "no"),
        ]


def info_of(store: Store) -> Info:
    """Reads the facts of an index."""
    manifest, facts = store.manifest, store.facts
    identity, about = manifest.identity, manifest.about
    samples = len(set(facts.index.tolist())) if facts.token is not None else len(facts)
    size = store.bytes_on_disk()
    chosen = dict(manifest.preconditioner)
    return Info(
        path=str(store.path),
        model=str(about.get("model")),
        parameters=int(about.get("parameters", 0)),
        data=[part.name for part in manifest.parts],
        samples=samples,
        rows=len(facts),
        deleted=len(store.deleted),
        skipped=len(facts.skipped),
        per=identity["per"],
        checkpoints=manifest.checkpoints,
        projection=identity["projection"],
        dim=manifest.width,
        dtype=identity["dtype"],
        preconditioner=str(chosen.get("kind", "none")),
        bytes=size,
        bytes_per_sample=size / max(1, samples),
        certified=bool(about.get("certificate", {}).get("ok")),
    )


def data_frame(columns: dict[str, Any]) -> Any:
    """Returns a pandas data frame."""
    try:
        import pandas  # noqa: PLC0415  # an extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tables of an index need pandas: pip install 'pergrad[audit]'", name="pandas"
        ) from error
    return pandas.DataFrame(columns)
