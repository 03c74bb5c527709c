"""Results folders that a report must bear: tiny, empty, huge, hostile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from pergrad.attribution import Samples
from tests.reports.result_folders import clustered, doubted, write_folder

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


def changed(samples: Samples, **columns: np.ndarray) -> Samples:
    return Samples(**{**vars(samples), **columns})


def photo(index: int) -> Image.Image:
    generator = np.random.default_rng(index)
    return Image.fromarray(generator.integers(0, 255, size=(150, 200, 3), dtype=np.uint8))


def single(folder: Path) -> Path:
    return write_folder(folder, clustered(1, wrong=0), labels=["cat"], show=lambda _: "a text")


def without_pictures(folder: Path) -> Path:
    return write_folder(folder, clustered())


def not_finite(folder: Path) -> Path:
    samples = clustered()
    loss, norm = samples.loss.copy(), samples.norm.copy()
    loss[[3, 40]], norm[[3, 41]] = np.nan, np.inf
    return write_folder(folder, changed(samples, loss=loss, norm=norm), show=photo)


def huge_outliers(folder: Path) -> Path:
    samples = clustered()
    loss, norm = samples.loss.copy(), samples.norm.copy()
    loss[7], norm[7] = 1e30, 1e35
    loss[8], norm[8] = 0.0, 0.0
    return write_folder(folder, changed(samples, loss=loss, norm=norm), show=photo)


def all_equal(folder: Path) -> Path:
    ones, rows = np.ones(50), np.tile([[3.0, 4.0]], (50, 1))
    samples = Samples(np.arange(50), ones, 5 * ones, {"head": 5 * ones}, rows)
    return write_folder(folder, samples, labels=["dog"] * 50, show=photo)


def negative_losses(folder: Path) -> Path:
    samples = clustered()
    return write_folder(folder, changed(samples, loss=samples.loss - 100))


def long_names(folder: Path) -> Path:
    samples = clustered()
    groups = {
        f"encoder.layers.{n}.self_attention.output_projection.dense_with_a_long_name.{'x' * 40}": (
            samples.norm * (n + 1) / 12
        )
        for n in range(12)
    }
    return write_folder(
        folder,
        changed(samples, group_norms=groups),
        labels=[f"a_class_with_a_very_long_name_without_any_space_{n % 4}" for n in range(300)],
        show=lambda index: f"{'Wordswithoutspaces' * 40} {index}",
    )


def long_texts(folder: Path) -> Path:
    def show(index: int) -> str:
        return f"Review {index}: " + "it was neither good nor bad, and so on. " * 250

    labels = [("good", "bad", "mixed", "none")[n % 4] for n in range(300)]
    return write_folder(folder, clustered(), labels=labels, show=show)


def hostile(folder: Path) -> Path:
    return write_folder(
        folder,
        changed(clustered(), group_norms={HOSTILE: clustered().norm}),
        labels=[f"{HOSTILE}{n % 4}" for n in range(300)],
        show=lambda index: f"{HOSTILE}\x00\x1b[31m{index}",
        dataset={"name": HOSTILE, "size": 300, "fingerprint": HOSTILE, "subset": None},
        command=HOSTILE,
        notes=[HOSTILE],
    )


def duplicates(folder: Path) -> Path:
    samples = clustered()
    rows = samples.sketch.copy()
    rows[100:130] = rows[130:160]
    norm = np.linalg.norm(rows, axis=1)
    labels = [("zero", "one", "two", "three")[n % 4] for n in range(300)]
    return write_folder(folder, changed(samples, sketch=rows, norm=norm), labels=labels, show=photo)


def learning(folder: Path) -> Path:
    """A model that is still learning: the gradients have a mean, and the noise has a scale."""
    samples = clustered()
    rows = samples.sketch + 1.0
    norm = np.linalg.norm(rows, axis=1)
    return write_folder(
        folder, changed(samples, sketch=rows, norm=norm), known_wrong=range(15), show=photo
    )


def doubts(folder: Path) -> Path:
    return doubted(folder, show=photo)


def hostile_labels(folder: Path) -> Path:
    """Labels, suggestions and texts of a classifier that would break out of the page's data."""
    folder = doubted(folder, show=lambda index: f"</script>{HOSTILE}{index}")
    table = pq.read_table(folder / "samples.parquet")
    for name in ("label", "suggested", "predicted"):
        changed_ = pa.array([f"</script>{HOSTILE}{text}" for text in table[name].to_pylist()])
        table = table.set_column(table.column_names.index(name), name, changed_)
    pq.write_table(table, folder / "samples.parquet")
    return folder


CASES: dict[str, Callable[[Path], Path]] = {
    case.__name__: case
    for case in (
        single,
        without_pictures,
        not_finite,
        huge_outliers,
        all_equal,
        negative_losses,
        long_names,
        long_texts,
        hostile,
        duplicates,
        learning,
        doubts,
        hostile_labels,
    )
}
