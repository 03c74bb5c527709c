"""The walks over modules find what torch's own iterators find, in their order."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import pergrad
from pergrad.engine.intercepting.weights import refusing_ordinary_gradients
from pergrad.engine.recording.modules import (
    buffers_in,
    hooks_of_parameters,
    names_of_tensors,
    parameters_by_name,
    refuse_new_parameters,
    submodules,
    survey,
    tensors_of,
)
from pergrad.errors import PergradError


def _shared() -> nn.Module:
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return nn.ModuleDict({"first": block, "empty": nn.Identity(), "second": block})


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    return model


def _with_gaps() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    model.register_module("left_out", None)
    model.register_buffer("nothing", None)
    model.register_buffer("same", model[1].running_mean)
    return model


def _in_a_circle() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_module("parent", model)
    return model


def _frozen_in_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.PReLU(), nn.Linear(2, 1)))
    model[1][1].weight.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: nn.Linear(2, 1),
    "a transformer": lambda: nn.Transformer(4, 2, 1, 1, 4, batch_first=True),
    "a shared block": _shared,
    "tied weights": _tied,
    "left out modules and buffers": _with_gaps,
    "a child that holds its parent": _in_a_circle,
    "frozen in part": _frozen_in_part,
}
each_model = pytest.mark.parametrize("name", MODELS)


@each_model
def test_modules_and_names_are_those_of_named_modules(name: str) -> None:
    model = MODELS[name]()
    names: list[str] = []
    found = submodules(model, names)
    assert list(zip(names, found, strict=True)) == list(model.named_modules())
    assert submodules(model) == found


@each_model
def test_every_parameter_and_buffer_is_found_once(name: str) -> None:
    model = MODELS[name]()
    found = [id(t) for t in tensors_of(submodules(model))]
    assert len(set(found)) == len(found)
    assert set(found) == {id(t) for t in (*model.parameters(), *model.buffers())}


@each_model
def test_names_lead_to_the_tensors_in_their_order(name: str) -> None:
    model = MODELS[name]()
    tensors = tensors_of(submodules(model))
    for path, t in zip(names_of_tensors(model), tensors, strict=True):
        *modules, key = path.split(".")
        assert getattr(model.get_submodule(".".join(modules)), key) is t


@each_model
def test_survey_finds_the_trainable_parameters_by_torchs_names_and_order(name: str) -> None:
    model = MODELS[name]()
    weights, own, _ = survey(model)
    wanted = [(key, id(p)) for key, p in model.named_parameters() if p.requires_grad]
    assert [(key, id(p)) for key, p in weights.items()] == wanted
    assert {id(t) for t in own} == {id(t) for t in (*model.parameters(), *model.buffers())}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.LazyLinear(2), "parameter 'weight' of a lazy module has no shape yet"),
        (nn.Sequential(nn.Linear(2, 1, device="meta")), "parameter '0.weight' is on the meta"),
        (nn.DataParallel(nn.Linear(2, 1)), "record its `.module`"),
    ],
    ids=["lazy", "meta", "DataParallel"],
)
def test_modules_whose_parameters_cannot_be_recorded_are_refused(
    model: nn.Module, message: str
) -> None:
    with pytest.raises(PergradError, match=message):
        survey(model)


def test_frozen_parameters_may_be_without_values() -> None:
    model = nn.Sequential(nn.Linear(2, 1, device="meta").requires_grad_(False), nn.Linear(1, 1))
    assert list(survey(model)[0]) == ["1.weight", "1.bias"]


def test_uninitialised_parameters_are_told_from_others_by_name() -> None:
    model = nn.ModuleDict({"known": nn.Linear(2, 2), "lazy": nn.LazyLinear(1)})
    with pytest.raises(PergradError, match=r"'lazy\.weight'"):
        survey(model)
    model["lazy"](torch.ones(1, 2))
    assert "lazy.weight" in survey(model)[0]


# -- hooks and new parameters


def test_hooks_of_the_user_are_found_by_parameter_in_their_order() -> None:
    model = nn.Linear(2, 1)
    assert hooks_of_parameters(dict(model.named_parameters())) == {}
    first, second = (lambda g: None), (lambda g: g * 2)
    model.weight.register_hook(first)
    gone = model.weight.register_hook(second)
    model.weight.register_hook(second)
    gone.remove()
    assert hooks_of_parameters(dict(model.named_parameters())) == {"weight": [first, second]}


def test_hooks_of_this_package_are_nobodys() -> None:
    model = nn.Linear(2, 1)
    weights = dict(model.named_parameters())
    with refusing_ordinary_gradients(weights):
        assert hooks_of_parameters(weights) == {}
    model.bias.register_hook(print).remove()
    assert hooks_of_parameters(weights) == {}


def test_a_hook_that_waits_for_a_gradient_is_refused_with_the_name_of_its_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    handle = model[0].bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(PergradError, match=r"parameter '0\.bias' has a hook .*would not\s+run"):
        hooks_of_parameters(dict(model.named_parameters()))
    handle.remove()
    assert hooks_of_parameters(dict(model.named_parameters())) == {}


def test_modules_with_backward_hooks_are_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    assert survey(model)[2] == []
    model[1].register_forward_hook(lambda *_: None)
    model[2].register_full_backward_hook(lambda *_: None)
    model[0].register_full_backward_pre_hook(lambda *_: None)
    assert survey(model)[2] == [model[0], model[2]]


def test_a_parameter_that_came_later_is_refused_only_if_it_was_used() -> None:
    model = nn.Linear(2, 1)
    used, elsewhere = nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)
    refuse_new_parameters(model, {id(used): used, id(elsewhere): elsewhere})
    model.extra = used
    refuse_new_parameters(model, {id(elsewhere): elsewhere})
    with pytest.raises(PergradError, match="parameter 'extra' was made or replaced while"):
        refuse_new_parameters(model, {id(used): used})


def test_trainable_sparse_parameters_are_refused_by_name_and_frozen_ones_are_not() -> None:
    class Sparse(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.table = nn.Parameter(torch.eye(3).to_sparse())

    model = Sparse()
    with pytest.raises(
        pergrad.PergradError, match=r"'table' is sparse .* make it dense, or freeze it"
    ):
        pergrad.norms(model, lambda model, x: model(x).sum(1), torch.randn(4, 3))
    model.table.requires_grad_(False)
    pergrad.norms(model, lambda model, x: model(x).sum(1), torch.randn(4, 3))


def test_a_hook_on_the_node_behind_a_parameter_is_refused_by_name_while_it_is_there() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weight = model[1].weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    handle = node.register_prehook(lambda gradients: (gradients[0] * 2,))
    for _block in range(2):
        with pytest.raises(PergradError, match=r"'1.weight' has a hook by register_prehook"):
            survey(model)
    handle.remove()
    survey(model)


@each_model
def test_parameters_and_buffers_are_those_of_torchs_iterators(name: str) -> None:
    model = MODELS[name]()
    found, wanted = parameters_by_name(model), dict(model.named_parameters())
    assert list(found) == list(wanted)
    assert all(found[key] is wanted[key] for key in wanted)
    assert list(map(id, buffers_in(model))) == list(map(id, model.buffers()))
