"""Audits a model and a data set in one line, and holds the results as an object."""

from __future__ import annotations

import dataclasses
import difflib
import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from torch import nn

from pergrad.audit import AuditOptions, Spec, Watch, run_audit
from pergrad.audit.streaming.ranks import ranks_from
from pergrad.audit.subject.inferring import inferred_spec
from pergrad.audit.subject.sharding import is_sharded_model, refuse_index
from pergrad.audit.subject.texts import as_line
from pergrad.errors import AuditError
from pergrad.index import Index
from pergrad.index.attaching import remember
from pergrad.index.from_audit import index_of_audit
from pergrad.reports import headline, html_of, kept_words, read_results, write_report

__all__ = ["Audit"]

_ISSUES = ("index", "kind", "score", "label", "suggested", "confidence", "why")


class _Printing:
    """Prints inferences and messages on stderr; shows no bar."""

    def begin(self, samples: int, done: int) -> None: ...
    def advance(self, samples: int) -> None: ...
    def say(self, message: str) -> None:
        print(f"pergrad: {as_line(message)}", file=sys.stderr)


class Audit:
    """A finished audit: its findings as tables, and its report.

    `Audit.run` makes one, `Audit(path)` opens one. Tables are pandas data frames.

    >>> import torch, pergrad
    >>> from torch.utils.data import TensorDataset
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(200, 2) + 4 * (y := torch.arange(200) % 2)[:, None]
    >>> y[:5] = 1 - y[:5]
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    >>> audit = pergrad.Audit.run(model, TensorDataset(x, y), quiet=True)
    >>> sorted(audit.issues["index"].head(5))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._results = read_results(self.path)

    @classmethod
    def run(
        cls,
        model: nn.Module,
        dataset: Any,
        path: str | Path | None = None,
        loss: Any = None,
        *,
        options: AuditOptions | None = None,
        watch: Watch | None = None,
        tokenizer: Any = None,
        quiet: bool = False,
        force: bool = False,
        keep_index: bool | int = False,
        **spec: Any,
    ) -> Self:
        """Audits a data set by the gradients of a model; infers what is not given, and prints it.

        Inferred are the loss (cross-entropy, squared error, next token, multi-label), the labels from a
        target of whole numbers, and how to show an item: pictures, rows, texts.

        Args:
            model: any module. It is audited in eval mode, and not changed.
            dataset: a data set of (input, target), dicts, texts, or inputs alone, map-style or iterable; a
                DataLoader, a tuple of columns (tensors, arrays, data frames), a data frame, or the path of a
                file of rows.
            path: the results folder; an audit that was interrupted resumes there. By default a folder that
                is removed with this object; several processes need one that all of them see.
            loss: called as loss(model, *batch), returns (B,) losses; or a loss of outputs and targets, such
                as CrossEntropyLoss() or F.cross_entropy.
            options: options of the audit.
            watch: receives progress.
            tokenizer: makes inputs of texts, and texts of tokens to show.
            quiet: print nothing.
            force: compute again what the folder holds.
            keep_index: leave the sketches as a `pergrad.Index` in the folder `index` of the results; a number
                is their length, `sketch_dim`.
            spec: other fields of `pergrad.audit.Spec`, such as `label`, `show` or `checkpoints`; and
                options of the audit, such as `seed`, `subset` or `batch_size`.
        """
        _refuse_other_arguments(path, options, watch)
        chosen, fields = _split(options, spec)
        if keep_index and keep_index is not True:
            chosen = dataclasses.replace(chosen, sketch_dim=int(keep_index))
        if keep_index:
            refuse_index(model)
        if path is None and (ranks_from(os.environ).count > 1 or is_sharded_model(model)):
            raise AuditError(
                "several processes run this audit together: pass path=, a folder that all of them see"
            )
        watch = watch or (_Silent() if quiet else _Printing())
        made = inferred_spec(model, dataset, loss, tokenizer=tokenizer, say=watch.say, **fields)
        is_kept = path is not None
        path = Path(tempfile.mkdtemp(prefix="pergrad-audit-") if path is None else path)
        modes = [module.training for module in model.modules()]
        try:
            if any(modes):
                watch.say("mode: eval, as for predictions (the model is in training mode)")
                model.eval()
            run_audit(made, path, chosen, watch=watch, force=force)
            if keep_index:
                remember(path / "index", index_of_audit(path, made, chosen, path / "index"))
            audit = cls(path)
            write_report(path)
        except BaseException:
            if not is_kept:  # nobody knows its name to resume there
                shutil.rmtree(path, ignore_errors=True)
            raise
        finally:
            for module, training in zip(model.modules(), modes, strict=True):
                module.training = training
        if not is_kept:
            weakref.finalize(audit, shutil.rmtree, path, ignore_errors=True)
        for line in headline(audit._results):
            watch.say(line)
        for line in [f"report: {path / 'report.html'}", *kept_words(path)] if is_kept else []:
            watch.say(line)
        return audit

    @property
    def summary(self) -> dict[str, Any]:
        """Returns the contents of summary.json."""
        return dict(self._results.summary)

    @property
    def samples(self) -> Any:
        """Returns a row for each sample, in order of rank; the columns are those of samples.parquet."""
        return _frame(self._results.table).sort_values("rank", ignore_index=True)

    @property
    def duplicates(self) -> Any:
        """Returns the pairs of near-duplicates, with the number of their group, the closest first."""
        samples = _frame(self._results.table)
        pairs = _frame(pa.table(dict(self._results.duplicates)))
        group = samples.set_index("index")["duplicate_group"]
        pairs["group"] = pairs["index_a"].map(group)
        return pairs

    @property
    def issues(self) -> Any:
        """Returns what to look at, a row each: kind, score, label, suggested label, and why.

        Kinds are "not finite", "label" (doubted labels, as many as are expected to be wrong), "outlier" and
        "duplicate", whose score is the cosine with the nearest one. If labels are not judged, "loss" has the
        samples that hold half of all suspicion.
        """
        return _frame(self._results.issues())[list(_ISSUES)]

    @property
    def index(self) -> Index:
        """Returns the index of the audit's sketches, if it was run with `keep_index`."""
        if not (self.path / "index").exists():
            raise AuditError(f"the audit {self.path} left no index: run it with keep_index=True")
        return Index(self.path / "index")

    def report(
        self, path: str | Path | None = None, *, before: Audit | str | Path | None = None
    ) -> Path:
        """Writes the report and returns its path; `before` compares with an earlier audit of the same data.

        Args:
            path: the file to write; by default report.html in the results folder.
            before: an audit, or its folder, from before labels were changed.
        """
        earlier = before if isinstance(before, Audit) or before is None else Audit(before)
        text = html_of(self._results, before=None if earlier is None else earlier._results)
        target = self.path / "report.html" if path is None else Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise AuditError(f"cannot write the report {target}: {error.strerror}") from error
        return target

    def save(self, path: str | Path) -> Path:
        """Copies the results folder, which is removed with this object if `run` was given no path."""
        target = Path(path)
        if target.exists() and any(target.iterdir()):
            raise AuditError(f"{target} is not empty: choose another folder")
        shutil.copytree(self.path, target, dirs_exist_ok=True)
        return target

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        return "\n".join([f"Audit of {self.path}", *headline(self._results)])

    def _repr_html_(self) -> str:
        """Shows the report in a notebook, within a frame of its own."""
        text = html_of(self._results).replace("&", "&amp;").replace('"', "&quot;")
        return f'<iframe srcdoc="{text}" width="100%" height="720" style="border:0"></iframe>'


class _Silent(_Printing):
    def say(self, message: str) -> None: ...


def _refuse_other_arguments(path: Any, options: Any, watch: Any) -> None:
    if path is not None and not isinstance(path, str | os.PathLike):
        hint = ": did you mean loss=?" if callable(path) else ""
        raise AuditError(f"path must be a folder, got {type(path).__name__}{hint}")
    if options is not None and not isinstance(options, AuditOptions):
        raise AuditError(f"options must be AuditOptions, got {type(options).__name__}")
    if watch is not None and not all(
        callable(getattr(watch, name, None)) for name in ("begin", "advance", "say")
    ):
        raise AuditError(
            f"watch must have begin, advance and say, got {type(watch).__name__}: see pergrad.audit.Watch"
        )


def _split(
    options: AuditOptions | None, given: dict[str, Any]
) -> tuple[AuditOptions, dict[str, Any]]:
    """Splits keywords into options of the audit and fields of the spec; suggests a name for a typo."""
    of_options = {field.name for field in dataclasses.fields(AuditOptions)}
    of_spec = {field.name for field in dataclasses.fields(Spec)} - {"model", "dataset", "loss"}
    for name in given:
        if name not in of_options | of_spec:
            near = difflib.get_close_matches(name, [*of_options, *of_spec], 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise AuditError(f"an audit has no option {name!r}{hint}")
    chosen = {name: value for name, value in given.items() if name in of_options}
    made = dataclasses.replace(options or AuditOptions(), **chosen)
    return made, {name: value for name, value in given.items() if name in of_spec}


def _frame(table: Any) -> Any:
    try:
        import pandas  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tables of an audit need pandas: pip install 'pergrad[audit]'", name="pandas"
        ) from error
    return table.to_pandas()
