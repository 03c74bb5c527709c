"""Propagates layouts through functions that declare how they move samples; see `pergrad.rules.samples`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pergrad.engine.samples.layouts import Constant, Layout, Lost, Owners, Samples
from pergrad.engine.samples.propagation.elementwise import aligned
from pergrad.engine.samples.propagation.table import Call, moves_declared
from pergrad.rules.samples import (
    DECLARED,
    AreSamples,
    SamplesOf,
    SequencesOf,
    StartedFrom,
    StatesOf,
)

__all__ = ["declared_samples"]


@moves_declared(SamplesOf)
def _samples_of(declared: SamplesOf, call: Call) -> Layout:
    own = next((la for t, la in call.with_samples if t.requires_grad), None)
    return own or call.layout(call.args[declared.argument])


@moves_declared(StartedFrom, by_value=True)
def _started_from(declared: StartedFrom, call: Call) -> Layout:
    steps, own = call.args[declared.steps], call.layout(call.args[declared.input])
    layout = call.layout(call.args[declared.state])
    if not isinstance(own, Constant) or not isinstance(layout, Samples | Owners):
        return own
    if steps.sizes is None:
        return layout.at(1 - steps.dim)
    owner = layout.owner_of_each(call.output.device)
    return call.scope.owners(0, torch.cat([owner[:size] for size in steps.sizes]))


@moves_declared(AreSamples)
def _are_samples(declared: AreSamples, call: Call) -> Layout | None:
    return aligned(call)


def declared_samples(call: Call) -> Layout | None:
    """Returns the layout that a function declares for a tensor without known samples."""
    is_declared = isinstance(DECLARED.get(call.func), AreSamples)
    if is_declared and call.output.shape[0] == call.scope.count:
        return call.scope.samples(0)
    return None


@moves_declared(SequencesOf, by_value=True)
def _sequences_of(declared: SequencesOf, call: Call) -> Layout:
    """Returns the layout of the rows if each of their sequences belongs to one sample."""
    steps, rows = call.args[declared.steps], call.args[declared.rows]
    layout = call.layout(rows)
    if call.scope.count == 1:
        return call.scope.samples(0, 1, rows.shape[0])
    if not isinstance(layout, Samples | Owners):
        return layout
    if steps.sizes is None:
        is_one = layout.dim == 1 - steps.dim
    else:
        owner = layout.owner_of_each(rows.device)
        is_one = torch.equal(owner, torch.cat([owner[:size] for size in steps.sizes]))
    if is_one:
        return layout
    # Not `call.mixed`, which gives a constant: the steps run without gradients, but the loss needs them.
    return call.scope.lost("a recurrent layer treats several samples as one sequence", "mixed")


@moves_declared(StatesOf, by_value=True)
def _states_of(declared: StatesOf, call: Call) -> Sequence[Layout]:
    if call.scope.count == 1:
        return [call.scope.samples(0, 1, t.shape[0]) for t in call.outputs]
    start, hidden = call.args[declared.start], call.args[declared.hidden]
    layout = call.layout(hidden)
    if isinstance(layout, Lost):
        return [call.mixed("treats several samples as one sequence")] * len(call.outputs)
    rows = [la for s in start if isinstance(la := call.layout(s), Samples | Owners)]
    if isinstance(layout, Samples | Owners) and rows:
        steps = call.args[declared.steps]
        if steps.sizes is None:
            first = layout.at(0)
        else:
            first = call.scope.owners(0, layout.owner_of_each(hidden.device)[: steps.sizes[0]])
        if isinstance(call.agreed([first, *rows]), Lost):
            reason = "a recurrent layer starts from states of other samples than those of its input"
            return [call.scope.lost(reason, "mixed")] * len(call.outputs)
    return [layout, *[call.layout(start[0])] * (len(call.outputs) - 1)]
