"""`explain`: reports how the per-sample gradients of each parameter are computed, and their cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pergrad.engine.checking.reports import shown_parameters, text_table
from pergrad.engine.collecting.journal import Journal, Rung
from pergrad.engine.recording.options import LossReduction, Options
from pergrad.engine.recording.running import run_recorded
from pergrad.quantities import Batch, Quantity
from pergrad.quantities.base import counted
from pergrad.reductions import SampleGradients
from pergrad.runtime.eagerness import uncompiled

__all__ = ["ExplainReport", "Explanation", "explain"]

_COST: dict[Rung | None, str] = {
    "rule": "as the ordinary gradient",
    "derived": "as the ordinary gradient, and one pull-back",
    "broadcast": "as the ordinary gradient",
    "expanded": "as the ordinary gradient",
    "vmap": "the function three times over",
    "masked VJP": "{count} backward passes of the function",
    "loop": "{count} forward and backward passes of the model",
    None: "nothing: the loss does not reach it",
}


@dataclass(frozen=True)
class Explanation:
    """One parameter: the functions that use it, the rung, the kinds of factors, and the cost."""

    name: str
    shape: tuple[int, ...]
    functions: tuple[str, ...]
    rung: Rung | None
    factors: tuple[str, ...]
    cost: str
    memory: int  # bytes of the full gradients, (B, *shape)


@dataclass(frozen=True)
class ExplainReport:
    """A row for each recorded parameter; prints as a table."""

    rows: tuple[Explanation, ...]
    batch_size: int

    def __repr__(self) -> str:
        """Shows the parameters and the number of samples; print it for the table."""
        samples = counted(self.batch_size, "sample")
        return f"<ExplainReport: {shown_parameters(self.rows)}, {samples}>"

    def __str__(self) -> str:
        header = ["parameter", "shape", "functions", "rung", "factors", "cost", "memory"]
        table = text_table(
            header,
            [
                [
                    row.name,
                    str(row.shape),
                    ", ".join(row.functions) or "-",
                    row.rung or "-",
                    ", ".join(row.factors) or "-",
                    row.cost,
                    f"{row.memory / 2**20:.2f} MiB",
                ]
                for row in self.rows
            ],
        )
        total = sum(row.memory for row in self.rows) / 2**20
        return (
            f"{table}\n{len(self.rows)} parameters, {total:.1f} MiB for {self.batch_size} samples"
        )


class _FactorKinds(Quantity):
    """Notes the kinds of factors of each parameter, and computes nothing from them."""

    is_linear = True

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        self.kinds: dict[str, dict[str, None]] = {}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        self.kinds.setdefault(name, {}).update(dict.fromkeys(gradients.kinds))

    def end(self) -> None:
        pass


@uncompiled
def explain(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    batch_size: int | None = None,
    loss_reduction: LossReduction = "sum",
    batch_first: bool = True,
) -> ExplainReport:
    """Reports how each parameter's per-sample gradients are computed: functions, rung, cost and memory.

    The arguments are those of `pergrad.grads`. The rungs are, fastest first: a closed-form *rule*; a weight
    *derived* from parameters, whose gradients are pulled back; *broadcast* arithmetic; a weight
    *expanded* to the batch; *vmap* of one function; and a *masked VJP*, one backward of one function for
    each sample. All of them are exact.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1)
    >>> print(pergrad.explain(model, lambda model, x: model(x).sum(1), torch.ones(3, 2)))
    parameter  shape   functions                   rung  factors       cost                      memory
    weight     (1, 2)  torch.nn.functional.linear  rule  OuterProduct  as the ordinary gradient  0.00 MiB
    bias       (1,)    torch.nn.functional.linear  rule  PositionSum   as the ordinary gradient  0.00 MiB
    2 parameters, 0.0 MiB for 3 samples
    """
    journal, kinds = Journal(), _FactorKinds()
    options = Options(batch_size, loss_reduction, batch_first)
    run_recorded(model, loss_fn, batch, [kinds], options, journal=journal)
    count = kinds.batch.size
    rows = []
    for name, p in kinds.batch.parameters.items():
        rung = journal.rung_of(name) if name in kinds.kinds else None
        rows.append(
            Explanation(
                name,
                tuple(p.shape),
                tuple(dict.fromkeys(function for function, _ in journal.uses.get(name, ()))),
                rung,
                tuple(kinds.kinds.get(name, ())),
                _COST[rung].format(count=count),
                count * p.numel() * p.element_size(),
            )
        )
    return ExplainReport(tuple(rows), count)
