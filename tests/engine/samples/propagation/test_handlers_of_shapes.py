"""Every answer of the handlers that work elementwise, along dimensions or on shapes, without the probe."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.engine.samples.propagation.calls import answer, named, rows

C = torch.ones  # a constant
INTS = torch.tensor([0, 1, 2])
ROW = (0, 1, 1)
Answer = Callable[[], Any]


ELEMENTWISE: dict[str, tuple[Any, Answer]] = {
    "broadcast": (ROW, lambda: answer(torch.add, rows(3, 4), C(4))),
    "broadcast to more": ((1, 1, 1), lambda: answer(torch.add, C(2, 3), rows(3))),
    "two": (ROW, lambda: answer(torch.mul, rows(3, 4), rows(3, 1))),
    "crosswise": ("mixed", lambda: answer(torch.mul, rows(3, 3), rows(3))),
    "rows of one owner": (None, lambda: answer(torch.add, rows(1, 2, owners=[1]), C(4, 2))),
    "one sample": ((0, 1, 4), lambda: answer(torch.add, rows(1, 2), C(4, 2), count=1)),
    "one sample, second": (
        (1, 1, 4),
        lambda: answer(torch.add, rows(1, 1, dim=1), C(2, 4), count=1),
    ),
    "fewer dimensions": (None, lambda: answer(torch.add, rows(2, 3, dim=1), outputs=[C(3)])),
}

REDUCING: dict[str, tuple[Any, Answer]] = {
    "maximum of two": (ROW, lambda: answer(torch.max, rows(3, 4), rows(3, 4))),
    "maximum of two, first constant": ((1, 1, 1), lambda: answer(torch.max, C(2, 3), rows(3))),
    "constant": ("constant", lambda: answer(torch.sum, C(3))),
    "sum": ("total", lambda: answer(torch.sum, rows(3, 4))),
    "mean over samples": ("total", lambda: answer(torch.mean, rows(3, 4), 0)),
    "maximum over samples": ("mixed", lambda: answer(torch.amax, rows(3, 4), 0)),
    "maximum": ("mixed", lambda: answer(torch.max, rows(3, 4))),
    "kept dimension": ((1, 1, 1), lambda: answer(torch.sum, rows(4, 3, dim=1), 0, True)),
    "before": (ROW, lambda: answer(torch.sum, rows(4, 3, dim=1), 0)),
    "after": ((1, 1, 1), lambda: answer(torch.sum, rows(4, 3, 2, dim=1), -1)),
    "several": (ROW, lambda: answer(torch.sum, rows(4, 3, 2, dim=1), (0, 2))),
    "several before": (ROW, lambda: answer(torch.sum, rows(4, 2, 3, dim=2), [0, 1])),
    "none": ("total", lambda: answer(torch.sum, rows(3, 4), ())),
    "std of all": ("mixed", lambda: answer(torch.std, rows(3, 4), False)),
    "norm": (ROW, lambda: answer(torch.norm, rows(3, 4), 2, 1)),
    "norm over samples": ("mixed", lambda: answer(torch.norm, rows(3, 4), 1, 0)),
    "vector norm": (
        ROW,
        lambda: answer(named("vector_norm"), rows(4, 3, dim=1), 2, 0, outputs=[C(3)]),
    ),
    "kthvalue": (ROW, lambda: answer(torch.kthvalue, rows(4, 3, dim=1), 1, 0)),
    "kthvalue by default": (ROW, lambda: answer(torch.kthvalue, rows(3, 4), 2)),
    "kthvalue of samples by default": ("mixed", lambda: answer(torch.kthvalue, rows(3), 2)),
    "mode by default": (ROW, lambda: answer(torch.mode, rows(3, 4))),
    "softmax": (ROW, lambda: answer(torch.softmax, rows(3, 4), -1)),
    "softmax over samples": ("mixed", lambda: answer(torch.softmax, rows(3, 4), 0)),
    "softmax of a constant": ("constant", lambda: answer(torch.softmax, C(3), 0)),
    "softmax, implicit": (ROW, lambda: answer(F.softmax, rows(3, 3))),
    "softmax, implicit, samples second": ("mixed", lambda: answer(F.softmax, rows(3, 3, dim=1))),
    "softmax, implicit, vector": ("mixed", lambda: answer(F.softmax, rows(3))),
    "softmax, implicit, three": ("mixed", lambda: answer(F.softmin, rows(3, 2, 2))),
    "softmax, implicit, three, samples second": (
        (1, 1, 1),
        lambda: answer(F.log_softmax, rows(2, 3, 2, dim=1)),
    ),
    "softmax, implicit, four": (ROW, lambda: answer(F.softmax, rows(3, 2, 2, 2))),
    "softmax, implicit, four, samples second": (
        "mixed",
        lambda: answer(F.softmax, rows(2, 3, 2, 2, dim=1)),
    ),
    "cumsum": ((1, 1, 1), lambda: answer(torch.cumsum, rows(2, 3, dim=1), 0)),
    "scan of no dimension": (
        None,
        lambda: answer(named("cumsum"), rows(3), outputs=[torch.ones(3)]),
    ),
    "glu by default": (ROW, lambda: answer(F.glu, rows(3, 4))),
    "normalize by default": ("mixed", lambda: answer(F.normalize, rows(2, 3, 2, dim=1))),
    "normalize by default, samples first": (ROW, lambda: answer(F.normalize, rows(3, 2, 2))),
    "normalize by default, samples last": (
        (2, 1, 1),
        lambda: answer(F.normalize, rows(2, 2, 3, dim=2)),
    ),
    "normalize": ("mixed", lambda: answer(F.normalize, rows(3, 2), 2.0, 0)),
    "diff by default": ((1, 1, 1), lambda: answer(torch.diff, rows(2, 3, 2, dim=1))),
    "diff by default over samples": ("mixed", lambda: answer(torch.diff, rows(2, 3, dim=1))),
    "diff": ("mixed", lambda: answer(torch.diff, rows(3, 4), 1, 0)),
    "renorm": (ROW, lambda: answer(torch.renorm, rows(3, 4), 2, 0, 0.5)),
    "renorm, from the end": ((1, 1, 1), lambda: answer(torch.renorm, rows(4, 3, dim=1), 1, -1, 1)),
    "renorm across samples": ("mixed", lambda: answer(torch.renorm, rows(3, 4), 1, 1, 0.5)),
    "renorm of a constant": ("constant", lambda: answer(torch.renorm, C(3, 4), 1, 1, 0.5)),
    "sort by default": (ROW, lambda: answer(torch.sort, rows(3, 4))),
    "sort across samples": ("mixed", lambda: answer(torch.sort, rows(3, 4), 0)),
    "sort of a constant": ("constant", lambda: answer(torch.sort, C(3))),
    "sort of samples": (
        (0, [2, 0, 1]),
        lambda: answer(torch.sort, rows(of=torch.tensor([2.0, 3.0, 1.0]))),
    ),
    "argsort of samples": (
        (0, [1, 0, 2]),
        lambda: answer(torch.argsort, rows(of=torch.tensor([2.0, 3.0, 1.0])), 0, True),
    ),
    "topk of samples": (
        (0, [1, 0]),
        lambda: answer(torch.topk, rows(of=torch.tensor([2.0, 3.0, 1.0])), 2),
    ),
    "topk across samples": ("mixed", lambda: answer(torch.topk, rows(3, 4), 2, 0)),
    "topk in samples": ((1, 1, 1), lambda: answer(torch.topk, rows(4, 3, dim=1), 1, 0)),
    "msort": ("mixed", lambda: answer(torch.msort, rows(3))),
    "msort, samples second": ((1, 1, 1), lambda: answer(torch.msort, rows(2, 3, dim=1))),
    "msort, samples first": ("mixed", lambda: answer(torch.msort, rows(3, 2))),
    "bincount": ("constant", lambda: answer(torch.bincount, rows(of=INTS))),
    "unique": ("constant", lambda: answer(torch.unique, rows(of=INTS))),
}

SHAPING: dict[str, tuple[Any, Answer]] = {
    "view": ((0, 1, 2), lambda: answer(torch.reshape, rows(3, 2, 4), (6, 4))),
    "view of a constant": ("constant", lambda: answer(torch.reshape, C(3, 2), (6,))),
    "transpose": ((1, 1, 1), lambda: answer(torch.transpose, rows(3, 2, 4), 0, 1)),
    "transpose from the end": ((2, 1, 1), lambda: answer(torch.transpose, rows(3, 2, 4), -1, -3)),
    "transpose of a constant": ("constant", lambda: answer(torch.transpose, C(3, 2), 0, 1)),
    "t": ((1, 1, 1), lambda: answer(torch.t, rows(3, 2))),
    "mT": ((2, 1, 1), lambda: answer(torch.adjoint, rows(2, 3, 4, dim=1))),
    "mT, samples last": ((1, 1, 1), lambda: answer(torch.adjoint, rows(2, 4, 3, dim=2))),
    "mT, samples first": (ROW, lambda: answer(torch.adjoint, rows(3, 4, 2))),
    "permute": ((1, 1, 1), lambda: answer(Tensor.permute, rows(3, 2, 4), 2, 0, 1)),
    "permute by a tuple": ((2, 1, 1), lambda: answer(torch.permute, rows(3, 2, 4), (1, -1, 0))),
    "permute by name": ((2, 1, 1), lambda: answer(torch.permute, rows(3, 2, 4), dims=(1, 2, 0))),
    "movedim": ((2, 1, 1), lambda: answer(torch.movedim, rows(3, 2, 4), 0, -1)),
    "movedim of another": ((1, 1, 1), lambda: answer(torch.movedim, rows(3, 2, 4), -1, 0)),
    "movedim of several": ((1, 1, 1), lambda: answer(torch.movedim, rows(3, 2, 4), (0, 2), (1, 0))),
    "repeat": ((1, 2, 1), lambda: answer(Tensor.repeat, rows(3, 2), 4, 2, 1)),
    "repeat of blocks": ((0, 2, 2), lambda: answer(Tensor.repeat, rows(6, post=2), 2)),
    "repeat of owners": (
        (0, [2, 0, 2, 0]),
        lambda: answer(Tensor.repeat, rows(2, owners=[2, 0]), 2),
    ),
    "repeat of a constant": ("constant", lambda: answer(Tensor.repeat, C(2), 2)),
    "interleave": ((0, 1, 2), lambda: answer(torch.repeat_interleave, rows(3, 2), 2, 0)),
    "interleave of blocks": (
        (1, 2, 6),
        lambda: answer(torch.repeat_interleave, rows(1, 12, dim=1, pre=2, post=2), 3, -1),
    ),
    "interleave in samples": (ROW, lambda: answer(torch.repeat_interleave, rows(3, 2), 2, 1)),
    "interleave of a constant": ("constant", lambda: answer(torch.repeat_interleave, C(3), 2, 0)),
    "interleave of all": (None, lambda: answer(torch.repeat_interleave, rows(3, 2), 2)),
    "interleave by values": (
        (0, [0, 2, 2]),
        lambda: answer(torch.repeat_interleave, rows(3), torch.tensor([1, 0, 2]), 0),
    ),
    "interleave of owners": (
        (0, [1, 1, 0, 0]),
        lambda: answer(torch.repeat_interleave, rows(2, owners=[1, 0]), 2, 0),
    ),
    "flip": ((0, [2, 1, 0]), lambda: answer(torch.flip, rows(3, 2), (0,))),
    "flip in samples": (ROW, lambda: answer(torch.flip, rows(3, 2), (1,))),
    "flip, samples second": ((1, [2, 1, 0]), lambda: answer(torch.flip, rows(2, 3, dim=1), [1])),
    "flip of a constant": ("constant", lambda: answer(torch.flip, C(3, 2), (1,))),
    "roll": ((0, [2, 0, 1]), lambda: answer(torch.roll, rows(3, 2), 1, 0)),
    "roll by name": ((0, [1, 2, 0]), lambda: answer(torch.roll, rows(3, 2), shifts=-1, dims=0)),
    "roll of windows": (
        ROW,
        lambda: answer(torch.roll, rows(3, 2, 2), (-1, -1), (1, 2)),
    ),
    "roll of rows and samples": (
        (0, [1, 2, 0]),
        lambda: answer(torch.roll, rows(3, 2), (-1, 1), (0, -1)),
    ),
    "fliplr": (ROW, lambda: answer(torch.fliplr, rows(3, 2))),
    "flipud": ((0, [2, 1, 0]), lambda: answer(torch.flipud, rows(3, 2))),
    "roll of all": ("mixed", lambda: answer(torch.roll, rows(3, 2), 1)),
    "roll of all of a vector": ((0, [2, 0, 1]), lambda: answer(torch.roll, rows(3), 1)),
    "strides": ((1, 1, 1), lambda: answer(torch.as_strided, rows(3, 2), (2, 3), (1, 2))),
    "strides of some": (
        (0, [1, 2]),
        lambda: answer(torch.as_strided, rows(3, 2), (2, 2), (2, 1), 2),
    ),
    "strides across samples": (
        "mixed",
        lambda: answer(torch.as_strided, rows(3, 2), (2, 3), (3, 1)),
    ),
    "strides of a constant": ("constant", lambda: answer(torch.as_strided, C(3), (2,), (1,))),
    "windows": (ROW, lambda: answer(Tensor.unfold, rows(3, 4), 1, 2, 1)),
    "windows, samples second": (
        (1, 1, 1),
        lambda: answer(Tensor.unfold, rows(4, 3, dim=1), 0, 2, 1),
    ),
    "windows over samples": ("mixed", lambda: answer(Tensor.unfold, rows(4, 3, dim=1), -1, 2, 1)),
    "windows of a constant": ("constant", lambda: answer(Tensor.unfold, C(4), 0, 2, 1)),
    "patches": (ROW, lambda: answer(F.unfold, rows(3, 2, 4, 4), 2)),
    "patches, samples as channels": (None, lambda: answer(F.unfold, rows(2, 3, 4, 4, dim=1), 2)),
}

CASES = {
    f"{family}: {name}": case
    for family, cases in (
        ("elementwise", ELEMENTWISE),
        ("reducing", REDUCING),
        ("shaping", SHAPING),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_handler_by_itself_tells_where_the_samples_are(name: str) -> None:
    expected, find = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes broadcast in losses, and implicit dimensions
        found = find()
    if isinstance(found, list):  # of equal answers, one for each output
        assert all(one == found[0] for one in found)
        found = found[0]
    assert found == expected


def test_rolls_within_samples_are_followed_without_values() -> None:
    """A trace has none, and a GPU would be waited for."""
    with FakeTensorMode():
        x = torch.empty(3, 4, 4)
        assert answer(torch.roll, rows(3, 4, 4, of=x), (-1, -1), (1, 2)) == ROW
        assert answer(torch.flip, rows(3, 4, 4, of=x), (-1,)) == ROW
