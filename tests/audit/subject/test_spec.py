import numpy as np
import pytest
import torch
from torch import nn

from pergrad.audit import Spec
from pergrad.audit.subject.spec import grouped_parameters, groups_by_module
from pergrad.errors import AuditError
from tests.audit.cases import data, losses, mlp, network


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 3}, "spec.model must be an nn.Module, got int"),
        ({"dataset": iter([1])}, "list_iterator has no __len__"),
        ({"loss": "mse"}, "spec.loss must be callable, got str"),
        ({"show": 1}, "spec.show must be callable or None, got int"),
        ({"checkpoints": "a.pt"}, "spec.checkpoints must be a list of checkpoints, got str"),
        (
            {"checkpoints": {"0.weight": 1}},
            "spec.checkpoints must be a list of checkpoints, got dict",
        ),
        ({"checkpoints": 5}, "spec.checkpoints must be a list of checkpoints, got int"),
        ({"classes": "abc"}, "classes must be a list of names, .* got 'abc'"),
        ({"classes": 10}, "classes must be a list of names, in the order of the logits, got 10"),
        ({"classes": {0: "a"}}, "classes must be a list of names, in the order of the logits"),
        ({"known_wrong": [True, False]}, "got True and False: pass the places of True"),
        ({"known_wrong": 5}, "spec.known_wrong must be a list of indices, got int"),
        ({"known_wrong": ["a"]}, "spec.known_wrong must be a list of indices, got list"),
    ],
)
def test_what_is_no_part_of_a_spec_is_refused_by_name(changes, message):
    with pytest.raises(AuditError, match=message):
        mlp(**changes)


@pytest.mark.parametrize("known", [[], (1, 2), range(3), np.arange(2), torch.arange(2)])
def test_indices_come_in_many_forms(known):
    assert mlp(known_wrong=known).known_wrong is known


def test_title_is_the_name_or_the_type_of_the_data():
    assert mlp().title == "TensorDataset"
    assert mlp(name="iris").title == "iris"


def test_groups_are_the_modules_near_the_top():
    assert grouped_parameters(mlp()) == {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}


def test_frozen_parameters_are_in_no_group():
    model = network()
    model[0].requires_grad_(False)
    assert grouped_parameters(mlp(model=model)) == {"2": ["2.weight", "2.bias"]}


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(AuditError, match="no parameter of the model requires grad"):
        grouped_parameters(mlp(model=network().requires_grad_(False)))


@pytest.mark.parametrize("model", [nn.LazyLinear(3), nn.Linear(6, 3, device="meta")])
def test_a_model_without_values_is_refused_by_the_name_of_its_parameter(model):
    with pytest.raises(AuditError, match="parameter 'weight' has no values yet"):
        grouped_parameters(mlp(model=model))


def test_groups_of_the_spec_come_first():
    spec = mlp(groups=lambda name: name.rpartition(".")[2])
    assert list(grouped_parameters(spec)) == ["weight", "bias"]


def test_an_error_in_groups_says_where():
    with pytest.raises(AuditError, match=r"spec.groups raised KeyError: .*test_spec.py, line"):
        grouped_parameters(mlp(groups=lambda name: {}[name]))


def test_the_only_module_at_the_top_is_opened():
    model = nn.ModuleDict({"body": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})})
    spec = Spec(model, data(), losses)
    assert list(grouped_parameters(spec)) == ["body.a", "body.b"]


def test_many_numbered_layers_become_at_most_twelve_ranges():
    sizes = {f"h.{layer}.{part}": 1 for layer in range(30) for part in ("w", "b")}
    groups = groups_by_module({"embed.w": 5, **sizes, "head.w": 3})
    names = list(dict.fromkeys(groups.values()))
    assert len(names) == 12
    assert names[0] == "embed"
    assert names[1] == "h.0-2"
    assert names[-1] == "head"
    assert groups["h.0.w"] == groups["h.0.b"] == groups["h.2.w"] != groups["h.3.w"]


def test_many_modules_at_the_top_become_at_most_twelve_ranges():
    groups = groups_by_module({f"layer_{k}.weight": 1 for k in range(40)})
    assert len(set(groups.values())) == 12


def test_a_parameter_of_the_root_is_a_group_of_its_own():
    assert groups_by_module({"scale": 1, "head.weight": 2}) == {
        "scale": "scale",
        "head.weight": "head",
    }
