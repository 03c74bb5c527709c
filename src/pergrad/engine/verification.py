"""`verify`: the per-sample gradients against a loop over a few samples and the ordinary gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pergrad.engine.journal import Journal
from pergrad.engine.options import LossReduction, Options
from pergrad.engine.scopes import recorded, reduced
from pergrad.engine.tables import text_table
from pergrad.errors import PergradError
from pergrad.quantities import Grads

__all__ = [
    "Verification",
    "VerifyReport",
    "noise_floor",
    "relative_error",
    "spread_out",
    "undisturbed",
    "verdict_on",
    "verify",
]

# An error is relative to the largest element of the parameter's gradient, but not to less than the
# rounding of the model's largest: a key's bias under a softmax has no gradient but noise.
_NOISE = 1e4  # times the precision of the dtype
_TOLERANCE = {
    torch.float64: 1e-7,
    torch.float32: 2e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.05,
}


@dataclass(frozen=True)
class Verification:
    """One parameter: how it is computed and how far off it is."""

    name: str
    shape: tuple[int, ...]
    how: str
    error: float  # largest relative error against the loop and against the ordinary gradient
    verdict: str  # "ok", "wrong" or "untouched": no sample has a gradient for it


@dataclass(frozen=True)
class VerifyReport:
    """A row for each recorded parameter, and what is wrong with the whole; printing it shows the table."""

    rows: tuple[Verification, ...]
    samples: tuple[int, ...]  # those that the loop was run for
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and all(row.verdict != "wrong" for row in self.rows)

    @property
    def untouched(self) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows if row.verdict == "untouched")

    def __str__(self) -> str:
        table = text_table(
            ["parameter", "shape", "how", "error", "verdict"],
            [[r.name, str(r.shape), r.how, f"{r.error:.1e}", r.verdict] for r in self.rows],
        )
        wrong = sum(row.verdict == "wrong" for row in self.rows)
        verdict = "all right" if self.ok else f"{wrong} parameters wrong" if wrong else "not right"
        samples = ", ".join(map(str, self.samples))
        lines = [
            table,
            *(f"problem: {p}" for p in self.problems),
            *(f"note: {n}" for n in self.notes),
        ]
        return "\n".join([*lines, f"{verdict}: {len(self.rows)} parameters, samples {samples}"])


def verify(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    samples: int = 4,
    batch_size: int | None = None,
    loss_reduction: LossReduction = "sum",
    batch_first: bool = True,
    quiet: bool = False,
) -> VerifyReport:
    """Checks the per-sample gradients of one batch, prints a table and returns it; see `report.ok`.

    A few samples are run alone, one forward and backward each, and compared; the sum over all samples is
    compared with the ordinary gradient of the batch; and one sample is made NaN, which must leave all
    others as they are. A model that draws random numbers (dropout) is checked in eval mode, since a
    sample alone would draw others. The model is left as it was.

    Args:
        model: the model.
        loss_fn: as for `pergrad.grads`.
        batch: what loss_fn takes beside the model; tensors in it are cut to one sample.
        samples: how many samples to run alone.
        batch_size: as for `pergrad.grads`.
        loss_reduction: as for `pergrad.grads`.
        batch_first: as for `pergrad.grads`.
        quiet: do not print.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1).double()
    >>> x = torch.ones(3, 2, dtype=torch.float64)
    >>> pergrad.verify(model, lambda model, x: model(x).sum(1), x, quiet=True).ok
    True
    """
    run = _Run(model, loss_fn, batch, batch_size, loss_reduction, batch_first)
    with undisturbed(model), run.repeatable() as notes:
        report = _report(run, samples, notes)
    if not quiet:
        print(report)
    return report


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever runs within, the random state and the model's buffers are as before at the end."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)


class _Run:
    """One batch through one model, whole, one sample of it, or with one sample spoilt."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        batch: tuple[Any, ...],
        batch_size: int | None,
        loss_reduction: LossReduction,
        batch_first: bool,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.batch = pytree.tree_map_only(
            Tensor, Tensor.detach, batch
        )  # no gradient for the caller's
        self.dim = 0 if batch_first else 1
        self.reduction: LossReduction = loss_reduction
        self.batch_size = batch_size
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}

    @contextmanager
    def repeatable(self) -> Iterator[list[str]]:
        """The model such that two runs give the same loss, in eval mode if need be."""
        if self._repeats():
            yield []
            return
        training = {m: m.training for m in self.model.modules()}
        self.model.eval()
        try:
            yield [
                "the model draws random numbers: checked in eval mode"
                if self._repeats()
                else "the model draws random numbers even in eval mode: samples alone draw others"
            ]
        finally:
            for m, was_training in training.items():
                m.training = was_training

    def _repeats(self) -> bool:
        losses = []
        for seed in range(2):
            with torch.no_grad(), undisturbed(self.model):
                torch.manual_seed(seed)
                losses.append(reduced(self.loss_fn(self.model, *self.batch), self.reduction))
        return torch.equal(*losses) or bool(losses[0].isnan())

    def per_sample(self, batch: tuple[Any, ...], journal: Journal | None = None) -> Grads:
        quantity = Grads()
        options = Options(self.batch_size, self.reduction, self.dim == 0)
        with recorded(self.model, [quantity], options, journal=journal):
            reduced(self.loss_fn(self.model, *batch), self.reduction).backward()
        return quantity

    def ordinary(self, batch: tuple[Any, ...]) -> dict[str, Tensor]:
        loss = reduced(self.loss_fn(self.model, *batch), self.reduction)
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        return {
            name: torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            for (name, p), g in zip(self.parameters.items(), found, strict=True)
        }

    def _map(self, size: int, change: Callable[[Tensor, int], Tensor]) -> tuple[Any, ...]:
        """The batch with `change` made to each tensor that has samples, in the dimension it has them in."""

        def apply(value: Any) -> Any:
            if isinstance(value, Tensor):
                for dim in dict.fromkeys([self.dim, 0] if value.dim() == 1 else [self.dim]):
                    if value.dim() > dim and value.shape[dim] == size:
                        return change(value, dim)
            return value

        mapped: tuple[Any, ...] = _opened(self.batch, apply)
        return mapped

    def sample(self, n: int, size: int) -> tuple[Any, ...]:
        return self._map(size, lambda t, dim: t.narrow(dim, n, 1))

    def with_copy(self, n: int, size: int) -> tuple[Any, ...] | None:
        """The batch with sample n a copy of one that differs from it; None where there is none."""
        for other in range(size):
            differs = False

            def copied(t: Tensor, dim: int, other: int = other) -> Tensor:
                nonlocal differs
                differs |= not torch.equal(t.select(dim, n), t.select(dim, other))
                t = t.clone()
                t.select(dim, n).copy_(t.select(dim, other))
                return t

            batch = self._map(size, copied)
            if differs:
                return batch
        return None

    def spoilt(self, n: int, size: int) -> tuple[Any, ...] | None:
        """The batch with sample n not a number; None where it holds no floating numbers."""
        touched = False

        def spoil(t: Tensor, dim: int) -> Tensor:
            nonlocal touched
            if not t.is_floating_point():
                return t
            touched = True
            t = t.detach().clone()
            t.select(dim, n).fill_(torch.nan)
            return t

        batch = self._map(size, spoil)
        return batch if touched else None


def _opened(value: Any, apply: Callable[[Any], Any]) -> Any:
    """`apply` to all leaves, also to those in mappings that pytrees do not open (tokenizers give such)."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Mapping):
            return type(value)({k: _opened(v, apply) for k, v in value.items()})  # type: ignore[call-arg]
        return apply(value)

    return pytree.tree_map(leaf, value)


def _report(run: _Run, samples: int, notes: list[str]) -> VerifyReport:
    journal = Journal()
    if not run.parameters:
        return VerifyReport(
            (), (), ("the model has no parameter that requires grad",), tuple(notes)
        )
    try:
        recorded_grads = run.per_sample(run.batch, journal)
    except PergradError as error:
        return VerifyReport((), (), (str(error),), tuple(notes))
    found = recorded_grads.result
    size = len(next(iter(found.values())))
    chosen = spread_out(samples, size)
    expected = [run.ordinary(run.sample(n, size)) for n in chosen]
    whole = run.ordinary(run.batch)
    parts = size if run.reduction == "mean" else 1
    floor = noise_floor(found)

    rows = []
    for name, grads in found.items():
        errors = [
            relative_error(grads[n], e[name], floor) for n, e in zip(chosen, expected, strict=True)
        ]
        errors.append(relative_error(grads.sum(0) / parts, whole[name], floor))
        precision = recorded_grads.precision.get(name, grads.dtype)
        rows.append(verdict_on(name, grads, journal.rung_of(name) or "-", errors, precision))
    problems = _mixing(run, found, size, notes)
    return VerifyReport(tuple(rows), chosen, tuple(problems), tuple(notes))


def noise_floor(grads: Mapping[str, Tensor]) -> float:
    """The size below which a gradient is rounding."""
    largest = max((float(g.abs().max()) for g in grads.values() if g.numel()), default=0.0)
    precision = max(torch.finfo(g.dtype).eps for g in grads.values())
    return _NOISE * precision * largest


def relative_error(actual: Tensor, wanted: Tensor, floor: float) -> float:
    """The largest difference, relative to the largest element."""
    if not wanted.numel():
        return 0.0
    scale = max(float(wanted.abs().max()), floor)
    return float((actual - wanted).abs().max()) / scale if scale else 0.0


def verdict_on(
    name: str, grads: Tensor, how: str, errors: list[float], precision: torch.dtype
) -> Verification:
    worst = max(errors) if all(e == e for e in errors) else float("nan")
    tolerance = max(_TOLERANCE.get(dtype, 1e-2) for dtype in (grads.dtype, precision))
    is_ok = worst <= tolerance
    untouched = is_ok and not bool(grads.any())
    verdict = "untouched" if untouched else "ok" if is_ok else "wrong"
    return Verification(name, tuple(grads.shape[1:]), how, worst, verdict)


def spread_out(samples: int, size: int) -> tuple[int, ...]:
    """Samples to look at, from the first to the last."""
    return tuple(sorted({round(k * (size - 1) / max(samples - 1, 1)) for k in range(samples)}))


def _mixing(run: _Run, clean: Mapping[str, Tensor], size: int, notes: list[str]) -> list[str]:
    """What a sample that is not a number does to the others; `notes` gets why that was not tried."""
    if size == 1:
        return []
    tokens = {
        t.data_ptr()
        for t in pytree.tree_leaves(run.batch)
        if isinstance(t, Tensor) and t.dim() > run.dim and t.shape[run.dim] == size
    }
    with _poisoned_embeddings(run.model, size, run.dim, tokens) as hooked:
        spoilt = run.spoilt(0, size)
        if spoilt is None and not hooked.layers:
            return _changing(run, clean, size, notes)
        try:
            found = run.per_sample(run.batch if spoilt is None else spoilt).result
        except PergradError as error:
            return [f"with one sample NaN: {error}"]
        except (RuntimeError, ValueError):  # the model itself refuses what is not a number
            notes.append("whether samples mix was not tried: the model fails where one is NaN")
            return []
    if spoilt is None and not hooked.was_called:
        return _changing(run, clean, size, notes)
    reached = [
        n for n in range(1, size) if any(_is_spoilt(found[k][n], clean[k][n]) for k in clean)
    ]
    if not reached:
        return []
    return [
        f"the model mixes samples: making sample 0 NaN spoils the gradients of {reached[:8]}; look for "
        "normalisation, attention or sorting over the batch"
    ]


def _changing(run: _Run, clean: Mapping[str, Tensor], size: int, notes: list[str]) -> list[str]:
    """The same for a batch of integers, which cannot be NaN: sample 0 becomes a copy of another one."""
    changed = run.with_copy(0, size)
    if changed is None:
        notes.append("whether samples mix was not tried: the batch has none, or all are the same")
        return []
    found = run.per_sample(changed).result
    floor = noise_floor(clean)
    limit = {name: _TOLERANCE.get(rows.dtype, 1e-2) for name, rows in clean.items()}
    reached = [
        n
        for n in range(1, size)
        if any(relative_error(found[k][n], clean[k][n], floor) > limit[k] for k in clean)
    ]
    if not reached:
        return []
    return [
        f"the model mixes samples: another sample 0 changes the gradients of {reached[:8]}; look for "
        "normalisation, attention or sorting over the batch"
    ]


def _is_spoilt(grads: Tensor, clean: Tensor) -> bool:
    return bool((grads.isnan() & ~clean.isnan()).any())


@dataclass
class _Hooked:
    layers: int
    was_called: bool = False


@contextmanager
def _poisoned_embeddings(
    model: nn.Module, size: int, dim: int, tokens: set[int]
) -> Iterator[_Hooked]:
    """Within, what embeddings look up for sample 0 is not a number: tokens themselves cannot be NaN."""

    def spoil(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        index = args[0] if args else None
        if not isinstance(index, Tensor) or index.data_ptr() not in tokens:
            return output
        if index.dim() <= dim or index.shape[dim] != size:
            return output
        hooked.was_called = True
        keep = torch.ones(size, dtype=output.dtype, device=output.device)
        keep[0] = torch.nan
        shape = [1] * output.dim()
        shape[dim] = size
        return output * keep.view(shape)

    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    hooks = [m.register_forward_hook(spoil) for m in embeddings]
    hooked = _Hooked(len(hooks))
    try:
        yield hooked
    finally:
        for hook in hooks:
            hook.remove()
