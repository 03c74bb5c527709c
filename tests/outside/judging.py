"""Judges a case: is its answer that of the loop over the samples, and is its refusal right?"""

from __future__ import annotations

import inspect
import time
import traceback
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

import pergrad
from pergrad.engine.recording.arguments import map_leaves
from pergrad.errors import BatchSizeError, PergradError
from tests.outside.case import BATCHES, Case, Subject
from tests.zoo.comparing import WrongGradientsError, compare
from tests.zoo.precision import InDouble, default_dtype

__all__ = ["BAD", "VERDICTS", "Row", "judge", "time_of"]

# From the best to the worst; `rendering` says what each means.
VERDICTS = (
    "exact",
    "sized",
    "fallback",
    "of the batch",
    "refused",
    "unrun",
    "over-refused",
    "wrong",
    "crash",
)
BAD = VERDICTS[VERDICTS.index("unrun") :]
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
# Biases before a normalisation have no gradient but for rounding, which is relative to the model's largest.
_LEAST = 1e-5
_SAME_LOSS = {torch.float64: 1e-9, torch.float32: 1e-4}
HAS_FALLBACK = "fallback" in inspect.signature(pergrad.grads).parameters


@dataclass
class Row:
    """What came of a case; texts and numbers only: it travels between processes."""

    library: str
    name: str
    version: str = ""  # of the library, and of torch
    torch: str = ""
    is_timed: bool = False
    verdict: str = "unrun"
    reason: str = ""
    meets: bool | None = None  # as the losses of samples run alone say
    error: float | None = None  # relative to the largest element of a parameter's gradient
    dtype: str = ""
    parameters: int = 0
    certificate: str = ""
    note: str = ""
    fallback: str = ""  # what fallback="loop" gives where the call without it is refused
    seconds: float = 0.0
    plain: float | None = None  # seconds of a plain step, and of one with the norms recorded
    recorded: float | None = None
    rungs: dict[str, int] = field(default_factory=dict)
    trace: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields that are stored: all that differ from their defaults, without the traceback."""
        bare = asdict(Row(self.library, self.name))
        found = {key: value for key, value in asdict(self).items() if value != bare[key]}
        found.pop("trace", None)
        return {"library": self.library, "name": self.name, **found}


def judge(case: Case) -> Row:
    """The worst row over the batch sizes."""
    began = time.perf_counter()
    rows = []
    for batch in BATCHES:
        rows.append(_judge_batch(case, batch))
        if rows[-1].verdict == "unrun":
            break
    worst = max(rows, key=lambda row: VERDICTS.index(row.verdict))
    errors = [row.error for row in rows if row.error is not None]
    worst.error = max(errors) if errors else None
    worst.seconds = time.perf_counter() - began
    return worst


def _judge_batch(case: Case, batch: int) -> Row:
    row = Row(case.library, case.name)
    dtypes = (case.dtype,) if case.dtype == torch.float32 else (torch.float64, torch.float32)
    for dtype in dtypes:
        with default_dtype(dtype), _mode(dtype):
            try:
                subject = _built(case, batch)
                losses = _losses(subject)
                if losses.shape != (batch,) or not losses.isfinite().all():
                    raise ValueError(f"losses {losses}")
                if not torch.equal(losses, _losses(subject)):
                    raise ValueError("the losses are others in a second run")
                expected = _meeting(row, subject, losses, batch, _SAME_LOSS[dtype])
            except Exception as error:
                row.reason = _said(error)
                row.trace = traceback.format_exc()
                continue
            row.dtype = str(dtype).removeprefix("torch.")
            row.parameters = sum(p.numel() for p in subject.model.parameters())
            _judge_answer(row, subject, expected, batch, _TOLERANCE[dtype])
            return row
    return row


def _mode(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return InDouble() if dtype == torch.float64 else nullcontext()


def _built(case: Case, batch: int) -> Subject:
    torch.manual_seed(0)
    return case.build(batch)


def _dim(subject: Subject) -> int:
    return 0 if subject.options.get("batch_first", True) else 1


def _losses(subject: Subject) -> Tensor:
    torch.manual_seed(1)
    return subject.loss_fn(subject.model, *subject.batch).detach()


def _alone(subject: Subject, batch: int) -> list[tuple[Any, ...]]:
    """The arguments of the loss for each sample alone."""
    if subject.alone is not None:
        return [subject.alone(n) for n in range(batch)]
    dim = _dim(subject)

    def one(value: Any, n: int) -> Any:
        is_batched = isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == batch
        return value.narrow(dim, n, 1) if is_batched else value

    return [map_leaves(lambda value, n=n: one(value, n), subject.batch) for n in range(batch)]


def _meeting(
    row: Row, subject: Subject, together: Tensor, batch: int, tolerance: float
) -> dict[str, Tensor]:
    """The gradients of the loop; notes whether samples meet: alone, a loss is another, or there is none."""
    alone = []
    try:
        for sample in _alone(subject, batch):
            torch.manual_seed(1)
            alone.append(subject.loss_fn(subject.model, *sample).detach().sum())
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):  # batch norm in training mode
            raise
        row.meets = True
        return {}
    off = (torch.stack(alone) - together).abs().max()
    row.meets = not bool(off <= tolerance * together.abs().max())
    return _looped(subject, batch)


def _looped(subject: Subject, batch: int) -> dict[str, Tensor]:
    samples = [_backward(subject, sample) for sample in _alone(subject, batch)]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def _backward(subject: Subject, sample: tuple[Any, ...]) -> dict[str, Tensor]:
    """One sample's gradients by `backward()`, the only way that reentrant checkpoints know."""
    subject.model.zero_grad()
    torch.manual_seed(1)
    subject.loss_fn(subject.model, *sample).sum().backward()
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        for name, p in subject.model.named_parameters()
        if p.requires_grad
    }
    subject.model.zero_grad()
    return found


def _of_the_batch(subject: Subject, batch: int) -> dict[str, Tensor]:
    """Each loss's gradient in the graph of the whole batch; where no samples meet, an oracle as well.

    A batch of one sample takes other kernels in torch, one of which is wrong: an eval-mode batch norm of
    torch 2.13 on a CPU, for a gradient with unusual strides.
    """
    torch.manual_seed(1)
    losses = subject.loss_fn(subject.model, *subject.batch)
    parameters = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(
            losses[n],
            list(parameters.values()),
            retain_graph=True,
            materialize_grads=True,
            allow_unused=True,
        )
        for n in range(batch)
    ]
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(parameters)}


def _judge_answer(
    row: Row, subject: Subject, expected: dict[str, Tensor], batch: int, tolerance: float
) -> None:
    def compared(**options: Any) -> None:
        torch.manual_seed(1)
        found = pergrad.grads(
            subject.model, subject.loss_fn, *subject.batch, **subject.options, **options
        )
        if row.meets:
            row.error = compare(found, _of_the_batch(subject, batch), tolerance, _LEAST)
            row.verdict = "of the batch"
            return
        try:
            row.error = compare(found, expected, tolerance, _LEAST)
        except WrongGradientsError:
            row.error = compare(found, _of_the_batch(subject, batch), tolerance, _LEAST)
            row.note = (
                "the loop's gradients differ from torch's own of the batch, which are the same"
            )

    row.verdict = "exact"
    try:
        try:
            compared()
        except BatchSizeError as error:
            row.verdict, row.reason = "sized", _said(error)
            compared(batch_size=batch)
    except PergradError as error:
        row.verdict, row.reason = "refused" if row.meets else "over-refused", _said(error)
        row.trace = traceback.format_exc()
        if HAS_FALLBACK:
            _judge_fallback(row, compared)
    except WrongGradientsError as error:
        row.verdict, row.reason = "wrong", _said(error)
    except Exception as error:
        row.verdict, row.reason = "crash", _said(error)
        row.trace = traceback.format_exc()
    if row.verdict in ("exact", "sized", "of the batch", "wrong"):
        options = {**subject.options, **({"batch_size": batch} if row.verdict == "sized" else {})}
        row.certificate = _certificate(subject, options)
    if row.verdict == "of the batch" and "mixes samples" not in row.certificate:
        row.verdict, row.reason = (
            "wrong",
            "an answer, although the samples meet, which certify does not see",
        )


def _judge_fallback(row: Row, compared: Any) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compared(fallback="loop")
    except PergradError as error:
        row.fallback = f"refused: {_said(error)}"
    except Exception as error:
        row.verdict, row.fallback = "crash", _said(error)
        row.trace = traceback.format_exc()
    else:
        row.verdict, row.fallback = "fallback", "exact"


def _certificate(subject: Subject, options: dict[str, Any]) -> str:
    try:
        torch.manual_seed(1)
        report = pergrad.certify(
            subject.model, subject.loss_fn, *subject.batch, quiet=True, seed=0, **options
        )
    except PergradError as error:
        return f"none: {_said(error)}"
    except Exception as error:
        return f"crash: {_said(error)}"
    return "proved" if report.ok else f"denied: {'; '.join(report.problems) or 'a parameter'}"


def _said(error: BaseException) -> str:
    kind = (
        "" if isinstance(error, PergradError | WrongGradientsError) else f"{type(error).__name__}: "
    )
    return f"{kind}{' '.join(str(error).split())}"[:600]


# -- time


def time_of(case: Case, batch: int = 16, repeats: int = 7) -> Row:
    """The medians of plain and of recorded steps in float32, one after the other in turn."""
    row = Row(case.library, case.name, is_timed=True, verdict="timed", dtype="float32")
    try:
        subject = _built(case, batch)
        parameters = [p for p in subject.model.parameters() if p.requires_grad]
        row.parameters = sum(p.numel() for p in parameters)
        plain, recorded = [], []
        for turn in range(repeats + 2):
            seconds = _plain_step(subject, parameters), _recorded_step(subject, batch)
            if turn >= 2:
                plain.append(seconds[0])
                recorded.append(seconds[1])
        row.plain, row.recorded = median(plain), median(recorded)
        report = pergrad.explain(subject.model, subject.loss_fn, *subject.batch, batch_size=batch)
        for line in report.rows:
            row.rungs[line.rung or "-"] = row.rungs.get(line.rung or "-", 0) + 1
    except Exception as error:
        row.verdict, row.reason, row.trace = "unrun", _said(error), traceback.format_exc()
    return row


def _plain_step(subject: Subject, parameters: list[Tensor]) -> float:
    began = time.perf_counter()
    loss = subject.loss_fn(subject.model, *subject.batch).sum()
    torch.autograd.grad(loss, parameters, allow_unused=True)
    return time.perf_counter() - began


def _recorded_step(subject: Subject, batch: int) -> float:
    began = time.perf_counter()
    with pergrad.record(subject.model, pergrad.Norms(), batch_size=batch, **subject.options):
        subject.loss_fn(subject.model, *subject.batch).sum().backward()
    return time.perf_counter() - began
