import numpy as np
import torch

from pergrad.audit.subject.forms import form_of, kind_of, most_alike


def test_a_form_tells_types_and_shapes():
    assert form_of([np.zeros((1, 2), np.int64), "a", None]) == "(int64 (1, 2), str, NoneType)"


def test_a_kind_tells_types_and_no_sizes():
    assert (
        kind_of((torch.zeros(3), [1, 2])) == kind_of((torch.zeros(4), [1])) == "tuple(Tensor, list)"
    )
    assert kind_of({"x": 1, "label": None}) == "dict(x: int, label: NoneType)"
    assert kind_of({"x": 1}) != kind_of({"x": None})


def test_the_most_common_form_wins_and_of_equally_common_ones_the_first():
    assert most_alike([np.zeros(2), np.zeros(3), np.ones(3)])[0].shape == (3,)
    assert most_alike(["a", 1, 2, "b"], kind_of) == ["a", "b"]
