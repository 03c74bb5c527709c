"""Functions of the rules say themselves how they move samples."""

import torch

from pergrad.engine.samples.propagation import handler_of, is_by_value
from pergrad.engine.samples.propagation.table import HANDLERS
from pergrad.rules.experts import rows_by_group
from pergrad.rules.normalization import channel_affine
from pergrad.rules.recurrence import linear_over_steps, recurrent_states, started_from, unrolled
from pergrad.rules.samples import DECLARED, are_samples, carry_samples

OWN = [are_samples, carry_samples, channel_affine, linear_over_steps, recurrent_states]


def test_functions_of_the_rules_are_known_by_what_they_declare() -> None:
    assert {*OWN, rows_by_group, started_from, unrolled} == DECLARED.keys()
    for function in DECLARED:
        assert function.__name__ not in HANDLERS
        assert handler_of(function) is not None


def test_a_function_that_only_shares_a_name_declares_nothing() -> None:
    def unrolled(x: torch.Tensor) -> torch.Tensor:
        return x

    assert handler_of(unrolled) is None
    assert not is_by_value(unrolled)


def test_what_depends_on_values_is_declared_so() -> None:
    assert {function for function in DECLARED if is_by_value(function)} == {
        started_from,
        unrolled,
        recurrent_states,
    }
