"""Operators of torch's own database, with samples in any dimension of any argument: no layout is false."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.engine.samples.propagation import table
from pergrad.engine.samples.propagation.elementwise import aligned
from pergrad.runtime import internals
from tests.engine.samples.propagation.operators import judged, placings
from tests.engine.torch_databases import op_db

SEED = 0
DIFFERENTIABLE = [op for op in op_db if op.supports_autograd and torch.float64 in op.dtypes]


def name_of(op: Any) -> str:
    return f"{op.name} {op.variant_test_name}".strip()


def tensors_of(sample: Any) -> list[Tensor]:
    leaves = internals.pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [v for v in leaves if isinstance(v, Tensor) and v.is_floating_point()]


def samples_of(op: Any, most: int) -> Iterator[Any]:
    """Inputs of an operator with dense tensors only."""
    torch.manual_seed(SEED)
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float64), most):
        tensors = tensors_of(sample)
        if tensors and all(t.layout is torch.strided for t in tensors):
            yield sample


def judge(op: Any, *, samples: int, places: int) -> Counter[str]:
    """Judges calls of an operator; an AssertionError or any error but pergrad's own is a failure."""
    seen: Counter[str] = Counter()
    for sample in samples_of(op, samples):
        tensors = tensors_of(sample)
        for count, placing in placings(tensors, places, seed=SEED):
            try:
                seen[judged(op, sample, count, placing)] += 1
            except Exception as error:
                shapes = [tuple(t.shape) for t in tensors]
                error.add_note(f"{name_of(op)} of {shapes}, {count} samples at {placing}")
                raise
    return seen


@pytest.mark.filterwarnings("ignore")  # operators warn about the arguments of the database
@pytest.mark.parametrize("op", random.Random(SEED).sample(DIFFERENTIABLE, 100), ids=name_of)
def test_no_layout_of_an_operator_is_false(op: Any) -> None:
    judge(op, samples=3, places=3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=name_of)
def test_no_layout_of_any_operator_is_false(op: Any) -> None:
    judge(op, samples=8, places=6)


FOLLOWED = "add mul div cumsum softmax matmul transpose unsqueeze nn.functional.linear cat".split()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FOLLOWED)
def test_samples_are_followed_and_not_only_refused(name: str) -> None:
    (op, *_) = [op for op in DIFFERENTIABLE if op.name == name]
    seen = judge(op, samples=8, places=3)
    assert seen["followed"] > 0
    assert seen["followed"] >= seen["refused"]


@pytest.mark.parametrize("name", ["flip", "cumsum"])
def test_the_judge_finds_a_false_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.HANDLERS, name, aligned)  # as if it worked elementwise
    (op,) = [op for op in DIFFERENTIABLE if op.name == name]
    with pytest.raises(AssertionError, match="not its samples"):
        judge(op, samples=8, places=6)
