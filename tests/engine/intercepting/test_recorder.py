"""The recorder: it sees what it should, and nothing before it begins."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pergrad
from pergrad.engine.intercepting.recorder import Recorder, _is_of_torch
from tests.engine.exactness import numbers
from tests.engine.intercepting.formulas import D, model_of, reshapes_by_size, squares


def test_sizes_read_off_the_samples_remember_what_they_count() -> None:
    model = model_of(reshapes_by_size)
    with pergrad.record(model, pergrad.Norms()):
        model(numbers(D, D)).sum().backward()


# -- before the beginning, and what is no use


def test_functions_pass_by_until_the_recording_begins() -> None:
    w = nn.Parameter(numbers(D, D))
    recorder = Recorder({"w": w})
    assert not recorder.wants_function((w,), {})
    with recorder:
        y = F.linear(x := numbers(3, D), w)
        assert type(y.shape[0]) is int
        y.sum().backward()
    assert torch.equal(w.grad, x.sum(0).expand(D, D))  # type: ignore[arg-type]


def test_an_autograd_function_is_wanted_if_it_uses_a_weight_and_gradients_are_enabled() -> None:
    asked: list[bool] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(numbers(D))

        def forward(self, x: Tensor) -> Tensor:
            asked.append(current[0].wants_function((x, [self.w]), {}))
            asked.append(current[0].wants_function((x,), {"w": self.w}))
            asked.append(current[0].wants_function((x,), {}))
            with torch.no_grad():
                asked.append(current[0].wants_function((x, self.w), {}))
            return x * self.w

    current: list[Any] = []
    begin = Recorder.begin

    def watched(self: Recorder, *args: Any) -> None:
        current.append(self)
        begin(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "begin", watched)
        pergrad.grads(Model(), squares, numbers(3, D))
    assert asked == [True, True, False, False]


def test_classes_of_tensors_are_torch_s_own_unless_they_have_functions_of_their_own() -> None:
    class Renamed(Tensor): ...

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__torch_function__(*args, **kwargs)

    class NoTensor:
        __torch_function__ = Tensor.__torch_function__

    for kind in (Tensor, nn.Parameter, nn.UninitializedParameter, Renamed):
        assert _is_of_torch(kind)
    for kind in (Own, NoTensor):
        assert not _is_of_torch(kind)
