import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from pergrad.audit.streaming.fingerprint.content import (
    checksum_of_model,
    fingerprint_of_data,
    fingerprint_of_model,
)
from tests.audit.cases import data, network


def test_equal_models_have_one_fingerprint():
    assert fingerprint_of_model(network()) == fingerprint_of_model(network())


def changed_value(model):
    with torch.no_grad():
        model[2].bias[1] += 1e-6


@pytest.mark.parametrize(
    "change",
    [
        changed_value,
        lambda model: model.eval(),
        lambda model: model[0].requires_grad_(False),
        lambda model: model.double(),
        lambda model: model.register_buffer("extra", torch.zeros(1)),
        lambda model: model.__setitem__(1, nn.ReLU()),
    ],
)
def test_any_change_of_a_model_shows(change):
    model = network()
    change(model)
    assert fingerprint_of_model(model) != fingerprint_of_model(network())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_of_any_type_have_a_fingerprint(dtype):
    model = network()
    model.register_buffer("odd", torch.ones(3, dtype=dtype)[::2])
    model.register_buffer("empty", torch.ones(0, dtype=dtype))
    assert len(fingerprint_of_model(model)) == 16


def test_sparse_tensors_have_a_fingerprint():
    model = network()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    assert len(fingerprint_of_model(model)) == 16


def test_one_changed_label_among_tensors_shows():
    x, y = data(5000).tensors
    other = y.clone()
    other[4321] = (other[4321] + 1) % 3
    assert fingerprint_of_data(TensorDataset(x, y), 0) != fingerprint_of_data(
        TensorDataset(x, other), 0
    )


def test_another_choice_of_samples_shows():
    some, others = Subset(data(), [1, 2]), Subset(data(), [1, 3])
    assert fingerprint_of_data(some, 0) != fingerprint_of_data(others, 0)


ITEMS = [({"text": str(k), "image": np.full(3, k)}, k / 7, None) for k in range(300)]


@pytest.mark.parametrize("at", [0, 299])
def test_items_of_any_kind_have_a_fingerprint(at):
    others = list(ITEMS)
    others[at] = ({"text": "?", "image": np.zeros(3)}, 0.0, None)
    first, repeats = fingerprint_of_data(ITEMS, 0)
    assert repeats
    assert fingerprint_of_data(list(ITEMS), 0)[0] == first
    assert fingerprint_of_data(others, 0)[0] != first
    assert fingerprint_of_data(ITEMS[:299], 0)[0] != first


class Augmented(TensorDataset):
    def __init__(self, *tensors, generator=random):
        super().__init__(*tensors)
        self.generator = generator

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.generator.random(), y


def test_items_drawn_by_the_global_generators_have_a_fingerprint():
    once, again = (fingerprint_of_data(Augmented(*data().tensors), 0) for _ in range(2))
    assert once == again
    assert once[1]


def test_items_that_differ_each_time_are_told():
    drawn = Augmented(*data().tensors, generator=random.Random())
    once, again = (fingerprint_of_data(drawn, 0) for _ in range(2))
    assert once == again
    assert not once[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int8])
def test_one_other_number_changes_the_checksum(dtype):
    model = nn.Linear(3, 2)
    model.register_buffer("extra", torch.arange(12).to(dtype))
    model.register_buffer("empty", torch.empty(0, dtype=dtype))
    before = checksum_of_model(model)
    assert checksum_of_model(model) == before
    model.extra[3] += 1
    assert checksum_of_model(model) != before


def test_models_of_other_random_numbers_have_other_checksums():
    assert checksum_of_model(network()) != checksum_of_model(network(seed=1))
    assert checksum_of_model(network()) == checksum_of_model(network())
