import functools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pergrad.audit.streaming.fingerprint.functions import fingerprint_of_function
from pergrad.audit.subject.inferring import inferred_spec
from pergrad.audit.subject.losses import LossOfLogits
from tests.audit.cases import data, losses, network

SCALE = 1.0


def plain(model, x, y):
    return SCALE * F.cross_entropy(model(x), y, reduction="none")


def calling(model, x, y):
    return plain(model, x, y)


def closing_over(value):
    return lambda model, x, y: value


def nested(value):
    if value == 1:
        return lambda model: [x + 1 for x in model] + [(lambda y: y * 1)(2)]
    return lambda model: [x + 1 for x in model] + [(lambda y: y * 2)(2)]


@dataclass
class Weighted:
    weight: float

    def __call__(self, model, x, y):
        return self.weight * losses(model, x, y)

    def method(self, model, x, y):
        return self.weight * losses(model, x, y)


def module(value):
    made = nn.Linear(1, 1)
    nn.init.constant_(made.weight, value)
    nn.init.constant_(made.bias, value)
    return made


MAKERS = {
    "a number": closing_over,
    "a number of NumPy": lambda value: closing_over(np.float32(value)),
    "a dtype": lambda value: closing_over([None, torch.float32, torch.float64][value]),
    "a tensor": lambda value: closing_over(torch.tensor([value])),
    "a list": lambda value: closing_over([1, [value]]),
    "a set": lambda value: closing_over({"a", "b", value}),
    "a dict": lambda value: closing_over({"a": {"b": value}}),
    "a function within": lambda value: closing_over(closing_over(value)),
    "a module": lambda value: closing_over(module(value)),
    "an object with options": lambda value: closing_over(SimpleNamespace(rate=value)),
    "a default": lambda value: eval("lambda model, x=v: x", {"v": value}),
    "a keyword": lambda value: functools.partial(losses, value=value),
    "an inner function": nested,
    "a callable object": Weighted,
    "a method": lambda value: Weighted(value).method,
    "a weight of a loss": lambda value: nn.CrossEntropyLoss(weight=torch.tensor([1.0, value])),
    "an option of a loss": lambda value: nn.CrossEntropyLoss(label_smoothing=value / 10),
    "a loss of logits": lambda value: LossOfLogits(losses, closing_over(value)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_another_value_that_a_function_uses_shows(name):
    make = MAKERS[name]
    assert fingerprint_of_function(make(1)) == fingerprint_of_function(make(1))
    assert fingerprint_of_function(make(1)) != fingerprint_of_function(make(2))


def test_another_function_shows():
    assert fingerprint_of_function(losses) == fingerprint_of_function(losses)
    one, two = (lambda model, x: model(x) * 2), (lambda model, x: model(x) * 3)
    assert fingerprint_of_function(one) != fingerprint_of_function(two)
    assert fingerprint_of_function(nn.MSELoss()) != fingerprint_of_function(nn.L1Loss())


def test_another_global_shows_also_of_functions_that_are_called(monkeypatch):
    before = [fingerprint_of_function(function) for function in (plain, calling, losses)]
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    after = [fingerprint_of_function(function) for function in (plain, calling, losses)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, False, True]


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model, x, y):
        self.calls += 1


def counting_in_a_list():
    calls = []
    return lambda *batch: calls.append(len(batch))


def counting_in_a_dict():
    calls = {"n": 0}

    def counted(*batch):
        calls["n"] += 1

    return counted


def counting_in_a_variable():
    calls = 0

    def counted(*batch):
        nonlocal calls
        calls += 1

    return counted


@pytest.mark.parametrize(
    "make", [Counting, counting_in_a_list, counting_in_a_dict, counting_in_a_variable]
)
def test_what_a_function_writes_itself_does_not_count(make):
    function = make()
    before = fingerprint_of_function(function)
    function(None, 1, 2)
    assert fingerprint_of_function(function) == before


def test_functions_that_call_each_other_have_a_fingerprint():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert fingerprint_of_function(even) != fingerprint_of_function(odd)


def test_the_mode_of_a_module_that_a_loss_uses_does_not_count():
    model = network()
    before = fingerprint_of_function(closing_over(model))
    model.eval()
    assert fingerprint_of_function(closing_over(model)) == before


LOSSES = [
    None,
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3])),
    nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.MultiMarginLoss(),
    F.multi_margin_loss,
]


def test_inferred_losses_differ_by_what_was_given_and_not_by_the_data_that_were_looked_at():
    def fingerprint(loss, **fields):
        return fingerprint_of_function(inferred_spec(network(), data(**fields), loss).loss)

    found = [fingerprint(loss) for loss in LOSSES]
    assert len(set(found)) == len(LOSSES)
    assert found == [fingerprint(loss, seed=1) for loss in LOSSES]


def test_names_of_classes_are_not_part_of_targets_that_are_numbers():
    names = (["a", "b", "c"], ["x", "y", "z"])
    targets = [inferred_spec(network(), data(), classes=some).target for some in names]
    assert len(set(map(fingerprint_of_function, targets))) == 1
