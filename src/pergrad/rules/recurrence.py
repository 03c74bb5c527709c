"""Runs one layer of a recurrent network in one direction, all its steps as one function.

`unrolled` runs the steps first, without gradients. Then h of all steps is known, and the hidden weights are
applied to all of them by one linear map, `linear_over_steps`, which has the rule of one. `recurrent_states`
returns the result; its backward is one pass over the steps and gives that map its output gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from pergrad.factors.choosing import chooser_of
from pergrad.rules.cells import Cell, Kept, State
from pergrad.rules.linear import linear
from pergrad.rules.registry import Gradients, implements_per_sample_grads
from pergrad.rules.samples import SamplesOf, SequencesOf, StartedFrom, StatesOf, moves
from pergrad.runtime import internals, without_autocast

__all__ = [
    "Run",
    "Steps",
    "Unrolled",
    "linear_over_steps",
    "recurrent_states",
    "started_from",
    "unrolled",
]


class Steps(NamedTuple):
    """Describes the layout of the steps in a tensor, and their order."""

    dim: int  # of time, 0 or 1; the other of the two is that of the sequences
    reverse: bool
    sizes: tuple[int, ...] | None = (
        None  # packed: the number of rows of each step, decreasing, concatenated in dimension 0
    )

    def rows(self, of: Tensor) -> Sequence[int]:
        """Returns the number of sequences of each step, in the order of execution."""
        if self.sizes is None:
            return [of.shape[1 - self.dim]] * of.shape[self.dim]
        return self.sizes[::-1] if self.reverse else self.sizes

    def split(self, of: Tensor) -> Sequence[Tensor]:
        """Splits a tensor into its steps, in the order of execution."""
        steps = of.unbind(self.dim) if self.sizes is None else of.split(self.sizes)
        return steps[::-1] if self.reverse else steps

    def join(self, steps: list[Tensor]) -> Tensor:
        """Joins the steps again; the inverse of `split`."""
        steps = steps[::-1] if self.reverse else steps
        return torch.stack(steps, self.dim) if self.sizes is None else torch.cat(steps)

    def first(self, of: Tensor) -> Tensor:
        """Returns the step at time 0, which has all sequences."""
        return of.select(self.dim, 0) if self.sizes is None else of[: self.sizes[0]]


@dataclass(frozen=True)
class Run:
    """Holds the results of all steps."""

    cell: Cell  # the implementation that ran
    output: Tensor  # h of every step
    last: State  # the state of every sequence after its last step
    kept: list[Kept]  # for every step, in the order of execution


class Unrolled(NamedTuple):
    """Holds a run, and the inputs of its hidden weights."""

    run: Run
    before: Tensor  # h of the step before
    unprojected: Tensor | None  # h before W_r, if there is a W_r


@moves(StartedFrom, steps="steps", input="input", state="state")
def started_from(steps: Steps, input: Tensor, state: Tensor) -> Tensor:
    """Returns `input`; one that is the same for all samples, as of a decoder, belongs to those of `state`."""
    if has_torch_function((input, state)):
        return handle_torch_function(started_from, (input, state), steps, input, state)
    return input.view_as(input)


@moves(SequencesOf, steps="steps", rows="projected")
def unrolled(
    cell: Cell,
    steps: Steps,
    projected: Tensor,  # W_i x + b_i
    start: State,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
) -> Unrolled:
    """Runs all steps, one after the other, without gradients."""
    if has_torch_function((projected, *start)):
        arguments = (cell, steps, projected, start, w_hh, b_hh, w_hr)
        return handle_torch_function(unrolled, (projected, *start), *arguments)
    cell = cell.at(projected)
    output: list[Tensor] = []
    before: list[Tensor] = []
    unprojected: list[Tensor] = []
    kept: list[Kept] = []
    ended: list[State] = []  # last states of finished sequences, the longest last
    state = _rows(start, 0, 0)
    # Casts are explicit here: autocast would run torch's own cell in low precision.
    with torch.no_grad(), without_autocast(projected.device):
        if chooser_of(projected).pick("cast of a recurrent input") == "once":
            projected = projected.to(start[0].dtype)
        for rows, x in zip(steps.rows(projected), steps.split(projected), strict=True):
            state = _of_rows(rows, state, start, ended)
            before.append(state[0])
            state, known = cell.step(x, state, w_hh, b_hh)
            if w_hr is not None:
                unprojected.append(state[0])
                state = (F.linear(state[0].to(w_hr.dtype), w_hr), *state[1:])
            output.append(state[0])
            kept.append(known)
        for others in reversed(ended):
            state = _appended(state, others)
        run = Run(cell, steps.join(output), state, kept)
        shown = steps.join(unprojected).to(w_hh.dtype) if unprojected else None
        return Unrolled(run, steps.join(before).to(w_hh.dtype), shown)


def _of_rows(rows: int, state: State, others: State, over: list[State]) -> State:
    """Resizes a state to `rows` sequences: adds some from `others`, or moves the rest to `over`."""
    alive = len(state[0])
    if rows > alive:
        return _appended(state, _rows(others, alive, rows))
    if rows < alive:
        over.append(_rows(state, rows, alive))
        return _rows(state, 0, rows)
    return state


def _rows(state: State, first: int, end: int) -> State:
    return tuple([s[first:end] for s in state])


def _appended(state: State, others: State) -> State:
    return tuple([torch.cat(parts) for parts in zip(state, others, strict=True)])


@moves(SamplesOf, argument="input")
def linear_over_steps(input: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
    """Returns a tensor with the gradients of linear(input, weight, bias) and the values of `like`.

    Used if only the gradients matter: the values are not computed.
    """
    tensors = (input, weight, like) if bias is None else (input, weight, bias, like)
    if has_torch_function(tensors):
        return handle_torch_function(linear_over_steps, tensors, input, weight, bias, like)
    if any(t.requires_grad for t in tensors):  # autograd computes the gradients, and needs the map
        return F.linear(input, weight, bias)
    return like


@implements_per_sample_grads(linear_over_steps, weights={"weight": ("input",), "bias": ()})
def _linear_over_steps(
    grad_output: Tensor,  # (n, ..., o)
    input: Tensor,  # (n, ..., i)
    weight: Tensor,  # (o, i)
    bias: Tensor | None,  # (o,)
    like: Tensor,  # (n, ..., o)
) -> Gradients:
    """∂W_n = Σ_t g[n,t] ⊗ x[n,t],  ∂b_n = Σ_t g[n,t]."""
    return linear(grad_output, input, weight, bias)


@moves(StatesOf, steps="steps", start="start", hidden="hidden")
def recurrent_states(
    steps: Steps,
    projected: Tensor,
    start: State,
    hidden: Tensor,  # stands in for W_h h + b_h
    shown: Tensor | None,  # stands in for W_r h
    w_hh: Tensor,
    w_hr: Tensor | None,
    run: Run,
) -> tuple[Tensor, ...]:
    """Returns the output and last states of a run; gradients flow to input, start and stand-ins."""
    if has_torch_function((projected, *start, hidden)):
        arguments = (steps, projected, start, hidden, shown, w_hh, w_hr, run)
        return handle_torch_function(recurrent_states, (projected, *start, hidden), *arguments)
    found: tuple[Tensor, ...] = _Recurrence.apply(
        steps, run, w_hh, w_hr, projected, hidden, shown, *start
    )
    return found


class _Recurrence(torch.autograd.Function):
    """Returns the results of a run; computes only the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        steps: Steps,
        run: Run,
        w_hh: Tensor,
        w_hr: Tensor | None,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.cell, ctx.steps, ctx.count = run.cell, steps, len(run.kept)
        ctx.save_for_backward(w_hh, w_hr, *[t for kept in run.kept for t in kept])
        return run.output.detach(), *[s.detach() for s in run.last]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Tensor, *of_last: Tensor) -> tuple[Tensor | None, ...]:
        w_hh, w_hr, *flat = ctx.saved_tensors
        each = len(flat) // ctx.count
        kept = [tuple(flat[k : k + each]) for k in range(0, len(flat), each)]
        # A recorder must not see the functions of single steps.
        with internals.DisableTorchFunction(), without_autocast(w_hh.device):
            flow = _pulled_back(ctx.cell, ctx.steps, of_output, of_last, kept, w_hh, w_hr)
        return None, None, None, None, *flow


def _pulled_back(
    cell: Cell,
    steps: Steps,
    of_output: Tensor,
    of_last: State,
    kept: Sequence[Kept],
    w_hh: Tensor,
    w_hr: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Computes the gradients of the projected input, of the outputs of W_h and W_r, and of the start."""
    to_input: Tensor | None = None
    outs: Sequence[Tensor | None] = [None] * len(kept)
    if chooser_of(of_output).pick("gradients of steps") == "in place":
        shape = (*of_output.shape[:-1], w_hh.shape[0])
        to_input = of_output.new_empty(shape, dtype=w_hh.dtype)
        outs = steps.split(to_input)
    of_input: list[Tensor] = []
    of_hidden: list[Tensor] = []
    of_shown: list[Tensor] = []
    begun: list[
        State
    ] = []  # start gradients of sequences whose backward is complete, the longest last
    state = _rows(of_last, 0, 0)
    each = zip(steps.rows(of_output), steps.split(of_output), kept, outs, strict=True)
    for rows, of_h, known, out in reversed([*each]):
        state = _of_rows(rows, state, of_last, begun)
        h = state[0] + of_h
        if w_hr is not None:
            of_shown.append(h)
            h = h.to(w_hr.dtype) @ w_hr
        of_x, of_gates, state = cell.pull(known, (h, *state[1:]), w_hh, out)
        of_input.append(of_x)
        of_hidden.append(of_gates)
    for others in reversed(begun):
        state = _appended(state, others)
    if to_input is None:
        to_input = steps.join(of_input[::-1])
    is_same = of_input[0] is of_hidden[0]
    return (
        to_input,
        to_input if is_same else steps.join(of_hidden[::-1]),
        steps.join(of_shown[::-1]) if of_shown else None,
        *state,
    )
