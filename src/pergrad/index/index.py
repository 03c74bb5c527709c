"""Defines `Index`: which training samples made the model do this?"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from pergrad.audit.streaming.stream import Watch
from pergrad.audit.subject.spec import Spec
from pergrad.index.asking import Asking
from pergrad.index.attaching import options_of, remember, with_stored_states
from pergrad.index.building import append_rows, build_rows
from pergrad.index.curating import chosen_for, deduplicated, without
from pergrad.index.info import Info, data_frame, info_of
from pergrad.index.options import IndexOptions, Printing, split_options
from pergrad.index.preconditioning.choosing import (
    Preconditioning,
    fit_preconditioners,
    refuse_unfit,
)
from pergrad.index.preconditioning.fitting import FitData, Labels
from pergrad.index.querying.matches import Matches
from pergrad.index.querying.scoring import score_blocks
from pergrad.index.store.numbers import unscaled
from pergrad.index.store.store import Store
from pergrad.index.subject import Subject, made_subject

__all__ = ["Index"]


class Index:
    """Projected gradients of every training sample, on disk: finds those that made a model do what it does.

    `Index.build` makes one, `Index(path)` opens one. A score is the inner product of a sample's gradient with
    the preconditioned gradient of a query: positive if training on the sample lowers the loss of the query,
    and negative if it raises it.

    Args:
        path: the folder of the index.
        model: the model that it was built with; needed for queries, unless the index was built in this
            process or by a command with a reference. A `Spec` gives model, loss and data at once.
        dataset: the data set, to show the samples that a query finds.
        loss: called as loss(model, *batch), returns (B,) losses; inferred if it was when building.
        checkpoints: earlier states of the model, if the index does not hold them.
        tokenizer: called as tokenizer(texts, return_tensors="pt", padding=True), for queries that are texts.
        spec: other fields of `pergrad.audit.Spec`.

    >>> import torch, pergrad
    >>> from torch.utils.data import TensorDataset
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(60, 2) + 4 * (y := torch.arange(60) % 2)[:, None]
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    >>> index = pergrad.Index.build(model, TensorDataset(x, y), quiet=True)
    >>> index.scores((x[:3], y[:3])).shape
    torch.Size([3, 60])
    """

    def __init__(
        self,
        path: str | Path,
        model: Spec | nn.Module | None = None,
        dataset: Any = None,
        loss: Any = None,
        *,
        checkpoints: Sequence[Any] = (),
        tokenizer: Callable[..., Any] | None = None,
        **spec: Any,
    ) -> None:
        self.path = Path(path)
        self._asking = Asking(Store(self.path))
        if model is not None:
            self._asking.subject = made_subject(
                model, dataset, loss, checkpoints=checkpoints, tokenizer=tokenizer, **spec
            )

    @classmethod
    def build(
        cls,
        model: Spec | nn.Module,
        dataset: Any = None,
        path: str | Path | None = None,
        loss: Any = None,
        *,
        preconditioner: Any = "second_moment",
        damping: float | None = None,
        ridge: float = 0.0,
        labels: Labels = "given",
        unit_norm: bool = False,
        optimizer: Any = None,
        checkpoints: Sequence[Any] = (),
        tokens: Callable[..., Tensor] | None = None,
        tokenizer: Callable[..., Any] | None = None,
        options: IndexOptions | None = None,
        watch: Watch | None = None,
        quiet: bool = False,
        reference: tuple[str, str | None] | None = None,
        **more: Any,
    ) -> Self:
        """Computes and stores the projected gradient of every sample; resumes what was interrupted.

        The model is put into eval mode while its gradients are computed, and is not changed. Under torchrun
        every process computes a part. Called as build(spec, path) or build(model, dataset, path).

        Args:
            model: any module, or a `pergrad.audit.Spec`.
            dataset: a data set of (input, target), dicts, or inputs alone; map-style or iterable.
            path: the folder of the index: new, or of the same build. By default a folder that is removed with
                this object.
            loss: called as loss(model, *batch), returns (B,) losses; or a module such as CrossEntropyLoss. By
                default inferred, as `pergrad.Audit` does.
            preconditioner: what a query's gradient is divided by. "second_moment" of the rows; "ekfac", a
                Kronecker product for each layer; "adam", the root of the optimizer's second moment;
                "gauss_newton", the exact matrix of a small model; or "none". It may change in a later build
                of the same index, which computes no row again.
            damping: how much of the mean eigenvalue is added to the preconditioner's matrix. By default 1 of
                the mean eigenvalue of 512 numbers for "second_moment", and 0.1 for "ekfac" and
                "gauss_newton". It matters more than the kind: try some on queries of your own.
            ridge: what is added on top of it, such as the weight decay of the training.
            labels: "given", or "sampled" from the model's predictions, for the matrix of "ekfac".
            unit_norm: divide scores by the lengths of both gradients, as a cosine does. It helps early in
                training and hurts late: on digits, cosines have a linear datamodeling score of .57 after 15
                epochs and .27 after 60, where preconditioned products have .66 and .60.
            optimizer: the Adam that trained the model, for "adam"; or a list, one for each checkpoint.
            checkpoints: earlier states of the model: state dicts, paths of files with one, or modules. Scores
                are averaged over them and the model; five of one run beat any single one.
            tokens: called as tokens(*batch), for per="token"; returns a mask of the tokens that get a row,
                (n, t). By default the attention mask.
            tokenizer: called as tokenizer(texts, return_tensors="pt", padding=True), for queries that are
                texts.
            options: options of the index; or its fields as keywords, such as `projection`, `dim` or `dtype`.
            watch: receives progress.
            quiet: print nothing.
            reference: the spec as `pergrad.audit.load_spec` takes it, to find it again when this index is
                opened.
            more: other options of the index, and fields of the spec, such as `show`, `label` or `collate`.
        """
        if isinstance(model, Spec) and isinstance(dataset, str | Path) and path is None:
            dataset, path = None, dataset  # Index.build(spec, path)
        chosen, of_spec = split_options(options, more)
        preconditioning = Preconditioning(
            preconditioner or "none", damping, ridge, labels, unit_norm
        )
        watch = watch or Printing(quiet=quiet)
        subject = made_subject(
            model,
            dataset,
            loss,
            checkpoints=checkpoints,
            tokens=tokens,
            tokenizer=tokenizer,
            say=watch.say,
            **of_spec,
        )
        is_kept = path is not None
        folder = Path(tempfile.mkdtemp(prefix="pergrad-index-") if path is None else path)

        refuse_unfit(folder, preconditioning, subject.spec.model, optimizer)

        def finish(store: Store, data: FitData) -> None:
            fit_preconditioners(folder, preconditioning, data, optimizer)
            about = dict(store.manifest.about)
            if reference is not None:
                about["reference"] = list(reference)
            changed = {"preconditioner": preconditioning.as_json(), "about": about}
            if any(getattr(store.manifest, name) != value for name, value in changed.items()):
                store.change(**changed)

        build_rows(subject, folder, chosen, watch, finish)
        index = cls(folder)
        index._asking.subject = subject
        if is_kept:
            remember(folder, subject)
        else:
            weakref.finalize(index, shutil.rmtree, folder, ignore_errors=True)
        return index

    # -- what it holds

    @property
    def _store(self) -> Store:
        return self._asking.store

    @property
    def indices(self) -> np.ndarray:
        """Returns the index of each row's sample in the data set, or in all data sets joined."""
        return self._store.facts.index

    @property
    def tokens(self) -> np.ndarray | None:
        """Returns the position of each row's token; None in an index of samples."""
        return self._store.facts.token

    @property
    def samples(self) -> Any:
        """Returns a data frame with a row for each row of the index: index, loss, norm, label."""
        facts = self._store.facts
        columns: dict[str, Any] = {"index": facts.index}
        if facts.token is not None:
            columns["token"] = facts.token
        columns |= {"loss": facts.loss[:, -1], "norm": facts.norm[:, -1]}
        if facts.labels is not None:
            columns["label"] = facts.labels
        return data_frame(columns)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Returns rows at each checkpoint, (n, c, k), in float32 or wider, all in memory."""
        stop = len(self) if stop is None else min(stop, len(self))
        found = []
        for block in self._store.blocks():
            a, b = max(start, block.start), min(stop, block.start + len(block))
            if a < b:
                kept = np.arange(len(block)) if block.kept is None else block.kept
                some = kept[a - block.start : b - block.start]
                found.append(unscaled(block.rows[some], block.facts.scale[some], self._store.dtype))
        if not found:
            return torch.zeros(0, self._store.manifest.checkpoints, self._store.manifest.width)
        return torch.cat(found)

    def __len__(self) -> int:
        return len(self._store)

    def info(self) -> Info:
        """Returns what the index holds and what it takes on disk; prints as a table."""
        return info_of(self._store)

    def __repr__(self) -> str:
        return str(self.info())

    # -- queries

    def scores(self, batch: Any) -> Tensor:
        """Returns the scores of all rows for each query, (queries, rows), in the order of `indices`."""
        found = [scores for _, scores in self.iter_scores(batch)]
        return torch.cat(found, 1)

    def iter_scores(self, batch: Any) -> Iterator[tuple[slice, Tensor]]:
        """Yields which rows, and the scores of each query with them, (queries, n), block by block."""
        queries, lengths = self._asking.queries(batch)
        for block, scores in score_blocks(self._store, queries, lengths):
            yield slice(block.start, block.start + len(block)), scores

    def query(
        self, batch: Any, k: int = 10, *, approximate: bool = False, rerank: int | None = None
    ) -> Matches:
        """Returns the k most helpful and the k most harmful rows of each query, by exact products.

        Rows are read block by block: the memory does not grow with the index.

        Args:
            batch: the queries, as the loss takes them, such as (x, y). Inputs alone, where the data has
                classes as targets, are queried by the class that the model predicts. A text, or a list of
                them, is tokenized.
            k: the number of rows of each kind.
            approximate: search the principal directions of the rows, computed once and stored, and multiply
                some candidates exactly; for repeated queries of a large index. The first queries with a
                preconditioner are also searched exactly: the recall that this measures is in the result.
            rerank: compute whole gradients of so many candidates of each kind again, and rank these by exact
                products; for preconditioners that act on whole gradients, and "none".
        """
        return self._asking.query(batch, k, approximate=approximate, rerank=rerank)

    # -- curation

    def select(self, targets: Any, count: int, *, groups: Sequence[Any] | None = None) -> list[int]:
        """Returns the indices of the `count` samples that help some targets most, for a `Subset`.

        As in LESS, scores are averaged over the targets of each group, and a sample counts by its best group.

        Args:
            targets: a batch of the target set, as the loss takes it.
            count: the number of samples.
            groups: the group of each target, such as the name of its task; by default all are in one.
        """
        return chosen_for(self.scores(targets), self.indices, count, groups)

    def without_harmful(self, targets: Any, count: int) -> list[int]:
        """Returns the indices of all samples but at most `count` that harm some targets most."""
        return without(self.scores(targets), self.indices, count)

    def deduplicate(self, cosine: float = 0.99, *, quiet: bool = False) -> list[int]:
        """Returns the indices of all samples, of each group of near-duplicates only the first.

        Beyond 20,000 samples only those in near buckets are compared, and the recall of this is printed.

        Args:
            cosine: the smallest cosine of the rows of near-duplicates.
            quiet: print nothing.
        """
        kept, _, recall = deduplicated(self._store, cosine)
        if recall is not None:
            Printing(quiet=quiet).say(f"near-duplicates were searched in buckets: {recall}")
        return kept

    # -- changes

    @property
    def subject(self) -> Subject:
        """Returns the model, data and loss of this index."""
        return self._asking.attached().subject

    @staticmethod
    def append_to(
        path: str | Path, spec: Spec, options: IndexOptions, *, watch: Watch | None = None
    ) -> None:
        """Adds the data set of a spec to an index, also one whose last append was interrupted."""
        folder = Path(path)
        subject = with_stored_states(Store(folder), made_subject(spec))
        append_rows(subject, folder, options, watch or Printing(quiet=True))

    def append(self, dataset: Any, *, watch: Watch | None = None, quiet: bool = False) -> None:
        """Adds the samples of another data set; their indices continue those that are there.

        An append that was interrupted resumes when it is called again.
        """
        subject = self._asking.attached().subject
        more = replace(subject, spec=replace(subject.spec, dataset=dataset))
        options = replace(options_of(self._store.manifest), workers=0)
        append_rows(more, self.path, options, watch or Printing(quiet=quiet))
        self._asking = Asking(Store(self.path), self._asking.subject)

    @staticmethod
    def abandon_append(path: str | Path) -> int:
        """Drops an append that was interrupted, such as one of data that cannot be computed.

        Returns how many of its samples had been written. The index is as it was before, and can be queried.
        """
        return Store(Path(path)).abandon_append()

    def delete(self, indices: Iterable[int]) -> int:
        """Deletes samples by their indices; returns how many rows are gone. `compact` frees their space."""
        with self._store.changed():
            return self._store.delete(indices)

    def compact(self) -> None:
        """Rewrites the rows into files of equal size, without those that were deleted."""
        with self._store.changed():
            self._store.compact()
