"""The layers of recurrent networks, in which every row is a sequence of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pergrad.engine.samples.layouts import Layout, Lost, Owners, Samples
from pergrad.engine.samples.propagation.table import Call, moves_samples

__all__: list[str] = []


@moves_samples("unrolled", by_value=True)
def _all_steps(call: Call) -> Layout:
    """As the projected input, if each of its sequences belongs to one sample."""
    _, steps, projected = call.args[:3]
    layout = call.layout(projected)
    if call.scope.count == 1:
        return call.scope.samples(0, 1, projected.shape[0])
    if not isinstance(layout, Samples | Owners):
        return layout
    if steps.sizes is None:
        is_one = layout.dim == 1 - steps.dim
    else:
        owner = layout.owner_of_each(projected.device)
        is_one = torch.equal(owner, torch.cat([owner[:size] for size in steps.sizes]))
    if is_one:
        return layout
    # Not by `mixed`: no gradient flows yet, but one is going to.
    return call.scope.lost("a recurrent layer takes several samples for one sequence", "mixed")


@moves_samples("recurrent_states", by_value=True)
def _output_and_last_states(call: Call) -> Sequence[Layout]:
    if call.scope.count == 1:
        return [call.scope.samples(0, 1, t.shape[0]) for t in call.outputs]
    start, hidden = call.args[3:5]
    layout = call.layout(hidden)
    if isinstance(layout, Lost):
        return [call.mixed("takes several samples for one sequence")] * len(call.outputs)
    return [layout, *[call.layout(start[0])] * (len(call.outputs) - 1)]


@moves_samples("linear_over_steps")
def _as_the_input(call: Call) -> Layout:
    return call.layout(call.args[0])
