"""Defines `pergrad index`: build, query, show and change an index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from torch.utils.data import default_collate

import pergrad
from pergrad.audit import load_spec
from pergrad.audit.streaming.ranks import ranks_from
from pergrad.audit.subject.dtypes import Dtype
from pergrad.cli.progress import Progress
from pergrad.errors import IndexingError
from pergrad.index.attaching import options_of
from pergrad.index.options import IndexOptions
from pergrad.index.preconditioning.choosing import Kind
from pergrad.index.rows.projecting import Projection
from pergrad.index.store.numbers import StoredDtype
from pergrad.index.store.store import Store

__all__ = ["index"]

index = typer.Typer(
    name="index",
    no_args_is_help=True,
    help="Store every sample's gradient, and find the training samples behind a prediction.",
)

Folder = Annotated[Path, typer.Argument(help="Folder of the index.")]
Reference = Annotated[
    str,
    typer.Argument(
        help="A spec: package.module:attribute or file.py:attribute; hf:MODEL,DATASET[,SPLIT]; or a model, "
        "such as model.py, before its data.",
        metavar="REFERENCE",
    ),
]
Data = Annotated[
    str | None,
    typer.Argument(
        help="The data, if the reference is a model: a CSV, JSON or Parquet file, or a reference.",
        metavar="DATA",
    ),
]


def _choice(kind: Any, name: str, value: str) -> Any:
    if value not in get_args(kind):
        raise IndexingError(f"--{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
    return value


@index.command()
def build(
    reference: Reference,
    data: Data = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the index; new, or of the same build.")
    ] = Path("pergrad-index"),
    projection: Annotated[
        str, typer.Option(help="count, rademacher, normal, two_sided or none.")
    ] = "count",
    dim: Annotated[
        int | None,
        typer.Option(help="Length of a stored row; of each parameter's part if two_sided.", min=1),
    ] = None,
    preconditioner: Annotated[
        str, typer.Option(help="second_moment, ekfac, gauss_newton or none.")
    ] = "second_moment",
    damping: Annotated[
        float | None,
        typer.Option(help="Damping, in mean eigenvalues of the preconditioner.", min=0),
    ] = None,
    unit_norm: Annotated[
        bool, typer.Option(help="Divide scores by the lengths of both gradients.")
    ] = False,
    checkpoint: Annotated[
        list[Path] | None, typer.Option(help="File with an earlier state dict; may be repeated.")
    ] = None,
    store: Annotated[
        str, typer.Option("--store", help="Dtype of the stored rows: float16, bfloat16 or float32.")
    ] = "float16",
    norms: Annotated[
        str | None,
        typer.Option(
            help="Norms of gradients: exact, or estimated from the rows (default on a GPU)."
        ),
    ] = None,
    per: Annotated[
        str, typer.Option(help="sample or token: what has a row of its own.")
    ] = "sample",
    subset: Annotated[
        str | None,
        typer.Option(help="Samples: a number, drawn at random, or a range such as 100:600."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per batch; default: chosen by free memory.", min=1)
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Samples per file.", min=1)] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype to compute in; default: the model's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    seed: Annotated[int, typer.Option(help="Random seed for the projection and the subset.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that load the data.", min=0)] = 0,
    compile_: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the step; default: on a GPU, if there are many batches.",
        ),
    ] = None,
    strict: Annotated[bool, typer.Option(help="Stop at an item that cannot be read.")] = False,
    certify: Annotated[
        bool, typer.Option(help="Prove the gradients of the first samples before the build begins.")
    ] = True,
) -> None:
    """Compute and store the projected gradient of every sample.

    Run the same command again to resume. Under torchrun, as `torchrun --nproc-per-node 2 -m pergrad index
    build ...`, every process computes a part.
    """
    options = IndexOptions(
        projection=_choice(Projection, "projection", projection),
        dim=dim,
        seed=seed,
        dtype=_choice(StoredDtype, "store", store),
        norms=norms,  # type: ignore[arg-type]  # checked there
        per=per,  # type: ignore[arg-type]  # checked there
        subset=subset,
        batch_size=batch_size,
        chunk=chunk,
        compute_dtype=None if dtype is None else _choice(Dtype, "dtype", dtype),
        device=device,
        workers=workers,
        compile=compile_,
        strict=strict,
        certify=certify,
    )
    ranks = ranks_from(os.environ)
    progress = Progress(Console(stderr=True, quiet=not ranks.is_first), title="indexing")
    with progress:
        spec = load_spec(reference, data, say=progress.say)
        built = pergrad.Index.build(
            spec,
            path=output,
            preconditioner=_choice(Kind, "preconditioner", preconditioner),
            damping=damping,
            unit_norm=unit_norm,
            checkpoints=checkpoint or (),
            options=options,
            watch=progress,
            reference=(reference, data),
        )
    if ranks.is_first:
        print(built.info())


def _opened(folder: Path, reference: str | None, data: str | None) -> pergrad.Index:
    if reference is None:
        return pergrad.Index(folder)
    return pergrad.Index(folder, load_spec(reference, data))


@index.command()
def query(
    folder: Folder,
    item: Annotated[
        list[int] | None,
        typer.Option(help="Number of an item of the data to query by; may be repeated."),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text to query by; may be repeated.")
    ] = None,
    queries: Annotated[
        str | None, typer.Option(help="A data set of queries, as file.py:attribute.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The spec, if it has moved since the build.")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Samples of each kind.", min=1)] = 10,
    approximate: Annotated[
        bool, typer.Option(help="Search approximately; prints the measured recall.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Page to write.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Table to write.")] = None,
) -> None:
    """Show the samples that help and harm some queries most."""
    opened = _opened(folder, reference, None)
    spec = opened.subject.spec
    given = [bool(item), bool(text), queries is not None]
    if sum(given) != 1:
        raise IndexingError("pass the queries by one of --item, --text and --queries")
    batch: Any
    if text:
        batch = list(text)
    else:
        items = spec.dataset if item else load_spec(queries or "").dataset
        if item and not all(0 <= n < len(items) for n in item):
            raise IndexingError(f"the data has {len(items):,} items, from 0: got --item {item}")
        chosen = item if item else range(len(items))
        try:
            batch = (spec.collate or default_collate)([items[n] for n in chosen])
        except IndexError as error:
            raise IndexingError(f"the data has {len(items):,} items: {error}") from error
    found = opened.query(batch, k, approximate=approximate)
    Console().print(found)
    if found.recall is not None:
        print(f"approximate search, recall {found.recall:.3f}")
    if html is not None:
        print(f"page: {found.html(html)}")
    if csv is not None:
        found.frame.to_csv(csv, index=False)
        print(f"table: {csv}")


@index.command()
def info(folder: Folder) -> None:
    """Show what an index holds, and its bytes per sample."""
    print(pergrad.Index(folder).info())


@index.command()
def append(folder: Folder, reference: Reference, data: Data = None) -> None:
    """Add the samples of another data set; the spec must have the same model and loss."""
    store = Store(folder)
    progress = Progress(Console(stderr=True), title="appending")
    with progress:
        spec = load_spec(reference, data, say=progress.say)
        pergrad.Index.append_to(folder, spec, options_of(store.manifest), watch=progress)
    print(pergrad.Index(folder).info())


@index.command()
def abandon(folder: Folder) -> None:
    """Drop an append that was interrupted; the index is as it was before."""
    print(f"{pergrad.Index.abandon_append(folder):,} samples dropped")


@index.command()
def delete(
    folder: Folder,
    samples: Annotated[list[int], typer.Argument(help="Indices of the samples.")],
    compact: Annotated[bool, typer.Option(help="Free their space at once.")] = False,
) -> None:
    """Delete samples from an index."""
    opened = pergrad.Index(folder)
    gone = opened.delete(samples)
    if compact:
        opened.compact()
    print(f"{gone:,} rows deleted, {len(opened):,} left")
