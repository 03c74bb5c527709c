"""Defines the commands; reports an error as one line and an exit code."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

import pergrad
from pergrad.audit import AuditOptions, load_spec, run_audit
from pergrad.audit.streaming.ranks import ranks_from
from pergrad.audit.streaming.trial import first_batch
from pergrad.audit.subject.dtypes import Dtype
from pergrad.audit.subject.sharding import refuse_index
from pergrad.audit.subject.texts import as_line
from pergrad.cli.evaluating import evaluate
from pergrad.cli.index import index
from pergrad.cli.malloc import keep_freed_memory
from pergrad.cli.privacy import privacy
from pergrad.cli.progress import Progress
from pergrad.errors import InterruptedAuditError, PergradError, ToldElsewhereError
from pergrad.index.from_audit import index_of_audit
from pergrad.reports import kept_words, overview, read_results, write_report

__all__ = ["app", "run"]

FAILED_CHECK, BAD_INPUT, STOPPED, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143

app = typer.Typer(
    name="pergrad",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done; 1 a check failed; 2 wrong usage or input; 3 out of disk space or memory "
    "(run the same command to resume); 130 interrupted (also resumable).",
)

Reference = Annotated[
    str,
    typer.Argument(
        help="The spec: package.module:attribute, a pergrad.audit.Spec or a function that returns one; or "
        "hf:MODEL,DATASET[,SPLIT], a Hugging Face model and data set on this machine.",
        metavar="REFERENCE",
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU if there is one.")
]
Type = Annotated[
    Dtype | None, typer.Option("--dtype", help="Dtype to compute in; default: the model's.")
]
Subset = Annotated[
    str | None,
    typer.Option(help="Samples to audit: a number, drawn at random, or a range such as 100:600."),
]
Seed = Annotated[
    int, typer.Option(help="Random seed for the subset, the sketches, the model and the data.")
]
Samples = Annotated[int, typer.Option(help="Samples in the batch.", min=1)]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"pergrad {pergrad.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """Per-sample gradients of PyTorch models: find the samples of a data set that need a look."""


@app.command()
def audit(
    reference: Reference,
    data: Annotated[
        str | None,
        typer.Argument(
            help="The data, if the reference is a model, such as model.py: a CSV, JSON or Parquet file, or "
            "package.module:attribute.",
            metavar="DATA",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Results folder; new, or of the same audit.")
    ] = Path("pergrad-audit"),
    device: Device = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per batch; default: chosen by free memory.", min=1)
    ] = None,
    dtype: Type = None,
    subset: Subset = None,
    seed: Seed = AuditOptions.seed,
    sketch_dim: Annotated[
        int, typer.Option(help="Length of the sketch of each gradient.", min=1)
    ] = AuditOptions.sketch_dim,
    workers: Annotated[
        int, typer.Option(help="Processes that load the data.", min=0)
    ] = AuditOptions.workers,
    save_every: Annotated[
        float, typer.Option(help="Seconds between saves: a crash loses no more.", min=0)
    ] = AuditOptions.save_every,
    shown: Annotated[
        int, typer.Option(help="Number of suspicious samples in the report.", min=0)
    ] = AuditOptions.shown,
    certify: Annotated[
        bool, typer.Option(help="Prove the gradients of the first samples before the audit begins.")
    ] = AuditOptions.certify,
    tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens per batch, instead of --batch-size.", min=1),
    ] = None,
    free_dim: Annotated[
        int, typer.Option(help="Length of the sketch of each label-free gradient.", min=1)
    ] = AuditOptions.free_dim,
    strict: Annotated[
        bool, typer.Option(help="Stop at an item that cannot be read, instead of skipping it.")
    ] = AuditOptions.strict,
    duplicates: Annotated[
        float | None, typer.Option(help="Smallest cosine of near-duplicates.", min=0, max=1)
    ] = None,
    force: Annotated[
        bool, typer.Option(help="Compute again what the results folder holds.")
    ] = False,
    before: Annotated[
        Path | None, typer.Option(help="Results folder of an earlier audit to compare with.")
    ] = None,
    download: Annotated[bool, typer.Option(help="Let hf: references use the network.")] = False,
    keep_index: Annotated[
        bool, typer.Option(help="Keep the sketches as an index, for `pergrad index query`.")
    ] = False,
) -> None:
    """Audit a data set by every sample's gradient: suspicious samples, near-duplicates, noise scale.

    Writes samples.parquet, duplicates.parquet, summary.json and report.html. Run the same command again to
    resume an interrupted audit. Under torchrun, as `torchrun --nproc-per-node 2 -m pergrad audit ...`, every
    process computes a part.
    """
    options = AuditOptions(
        device=device,
        batch_size=batch_size,
        dtype=dtype,
        subset=subset,
        seed=seed,
        sketch_dim=sketch_dim,
        workers=workers,
        save_every=save_every,
        shown=shown,
        certify=certify,
        free_dim=free_dim,
        strict=strict,
        duplicates=duplicates,
        tokens=tokens,
    )
    keep_freed_memory()
    ranks = ranks_from(os.environ)
    console = Console(stderr=True, quiet=not ranks.is_first)
    title = "auditing" if ranks.count == 1 else f"auditing, part 1 of {ranks.count}"
    command = shlex.join(["pergrad", *sys.argv[1:]])
    progress = Progress(console, title=title)
    if before is not None:
        read_results(before)  # refuses what is no audit before hours are spent
    try:
        with progress, _terminable():
            spec = load_spec(reference, data, say=progress.say, download=download)
            if keep_index:
                refuse_index(spec.model)
            run_audit(spec, output, options, command=command, watch=progress, force=force)
            if keep_index and ranks.is_first:
                index_of_audit(output, spec, options, output / "index", (reference, data))
    except SystemExit as error:
        if error.code == TERMINATED:
            _complain(_where_it_stands(progress, output, "terminated"))
        raise
    except KeyboardInterrupt:
        if ranks.is_first:
            _complain(_where_it_stands(progress, output))
        raise typer.Exit(INTERRUPTED) from None
    if ranks.is_first:
        _report(output, before)


def _where_it_stands(progress: Progress, output: Path, how: str = "interrupted") -> str:
    kept = (
        f"{progress.done:,} of {progress.samples:,} samples" if progress.samples else "nothing yet"
    )
    return f"{how}; {kept} in {output}: run the same command to resume"


@contextmanager
def _terminable() -> Iterator[None]:
    """Turns SIGTERM into SystemExit within the block, so that computed rows are saved."""

    def end(*_: Any) -> NoReturn:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Results folder of an audit.")],
    before: Annotated[
        Path | None, typer.Option(help="Results folder of an earlier audit to compare with.")
    ] = None,
) -> None:
    """Rewrite the report of an audit, and print its headline."""
    _report(folder, before)


def _report(folder: Path, before: Path | None = None) -> None:
    path = write_report(folder, before=before)
    console = Console(soft_wrap=False)
    console.print(overview(folder))
    for line in (f"report: {path}", *kept_words(folder)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _one_batch(reference: str, options: AuditOptions) -> tuple[Any, ...]:
    """Returns (model, loss, *arguments) of the first samples."""
    spec = load_spec(reference)
    model, arguments = first_batch(spec, options)
    return (model, spec.loss, *arguments)


@app.command()
def verify(
    reference: Reference,
    samples: Samples = 8,
    device: Device = None,
    dtype: Type = None,
    seed: Seed = AuditOptions.seed,
) -> None:
    """Check the per-sample gradients of one batch against samples run alone; exit code 1 if one is wrong."""
    options = AuditOptions(device=device, batch_size=samples, dtype=dtype, seed=seed)
    found = pergrad.verify(*_one_batch(reference, options), quiet=True)
    print(found)
    if not found.ok:
        raise typer.Exit(FAILED_CHECK)


@app.command()
def explain(
    reference: Reference,
    samples: Samples = 8,
    device: Device = None,
    dtype: Type = None,
    seed: Seed = AuditOptions.seed,
) -> None:
    """Show how the gradients of each parameter are computed, and what they cost."""
    options = AuditOptions(device=device, batch_size=samples, dtype=dtype, seed=seed)
    print(pergrad.explain(*_one_batch(reference, options)))


app.command()(evaluate)
app.command()(privacy)
app.add_typer(index)


def _complain(message: str) -> None:
    """Prints the message as one line on stderr."""
    print(f"pergrad: {as_line(message)}", file=sys.stderr)


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code; PERGRAD_TRACEBACK adds tracebacks to the one-line errors."""
    try:
        code = app(list(arguments), prog_name="pergrad", standalone_mode=False)
    except PergradError as error:
        if os.environ.get("PERGRAD_TRACEBACK"):
            traceback.print_exc()
        if isinstance(error, ToldElsewhereError):
            time.sleep(
                1
            )  # torchrun kills the others once one exits: let the failing rank report first
        else:
            _complain(str(error))
        return STOPPED if isinstance(error, InterruptedAuditError) else BAD_INPUT
    except OSError as error:
        if error.filename is None:
            raise
        _complain(f"{error.filename}: {error.strerror}")
        return STOPPED
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a usage error: a bug, so show the traceback
            raise
        _complain(f"{error.format_message()} (see pergrad --help)")
        return BAD_INPUT
    return code if isinstance(code, int) else 0
