"""The exception tree: one root, itself a RuntimeError, and no errors outside of it."""

import inspect

import pytest

import pergrad
from pergrad import errors

ALL = [getattr(errors, name) for name in errors.__all__]
KINDS = [kind for kind in ALL if not issubclass(kind, Warning)]


def test_root_is_a_runtime_error_and_public() -> None:
    assert issubclass(errors.PergradError, RuntimeError)
    assert pergrad.PergradError is errors.PergradError


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_can_be_caught_as_one(kind: type[Exception]) -> None:
    with pytest.raises(pergrad.PergradError, match="because"):
        raise kind("because")
    assert kind.__doc__


def test_all_errors_are_listed() -> None:
    defined = [
        c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__
    ]
    assert sorted(c.__name__ for c in defined) == sorted(errors.__all__)
