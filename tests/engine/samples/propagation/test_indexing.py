"""Layouts through indexing of every kind, and through writing by index."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pergrad
from pergrad.testing import assert_near, loop_grads
from tests.engine.samples.propagation.dependence import Batched, assert_followed, follow
from tests.engine.samples.propagation.inputs import batches

Batch = tuple[int, Batched]
properties = settings(deadline=None, derandomize=True, max_examples=150)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


@st.composite
def slices(draw: st.DrawFn, size: int) -> slice:
    start = draw(st.none() | st.integers(-size, size))
    stop = draw(st.none() | st.integers(-size, size))
    return slice(start, stop, draw(st.none() | st.integers(1, 2)))


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...], *, advanced: bool) -> Any:
    """Draw an index of a tensor: for each dimension a slice, an int or an index tensor; None, `...`."""
    items: list[Any] = []
    block = draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))  # shape of the index tensors
    d = 0
    while d < len(shape):
        kinds = ["slice", "int", "whole"]
        if advanced:
            kinds += ["tensor", "list", "mask", "scalar tensor"]
        kind = draw(st.sampled_from(kinds))
        size = shape[d]
        within = st.integers(-size, size - 1)
        if kind == "slice":
            items.append(draw(slices(size)))
        elif kind == "int":
            items.append(draw(within))
        elif kind == "whole":
            items.append(slice(None))
        elif kind == "scalar tensor":
            items.append(torch.tensor(draw(within)))
        elif kind == "tensor":
            flat = [draw(within) for _ in range(int(np.prod(block)))]
            items.append(torch.tensor(flat).view(block))
        elif kind == "list":
            items.append([draw(within) for _ in range(block[-1])])
        else:
            # As many true elements as the other index tensors have columns, so that they broadcast.
            columns = block[-1]
            width = draw(st.integers(1, min(2, len(shape) - d)))
            elements = int(np.prod(shape[d : d + width]))
            if columns > elements:
                continue
            chosen = draw(st.permutations(range(elements)))[:columns]
            mask = torch.zeros(elements, dtype=torch.bool)
            mask[list(chosen)] = True
            items.append(mask.view(shape[d : d + width]))
            d += width - 1
        d += 1
    for _ in range(draw(st.integers(0, 1))):
        items.insert(draw(st.integers(0, len(items))), None)
    if draw(st.booleans()):
        # The dimensions from here on may also be left to an ellipsis, or to nothing.
        keep = draw(st.integers(0, len(items)))
        rest = items[keep:]
        if all(isinstance(i, slice) and i == slice(None) for i in rest):
            items = [*items[:keep], Ellipsis] if draw(st.booleans()) else items[:keep]
    return tuple(items)


def takes_one_sample(x: Batched, index: tuple[Any, ...]) -> bool:
    """Whether the samples' dimension is indexed away by one number."""
    d = 0
    for k, item in enumerate(index):
        if item is None:
            continue
        if item is Ellipsis:
            d = len(x.shape) - sum(i is not None for i in index[k + 1 :])
            continue
        width = item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1
        if d <= x.dim < d + width:
            return isinstance(item, int) or (isinstance(item, Tensor) and item.dim() == 0)
        d += width
    return False


@properties
@given(batches(), st.data())
def test_basic_indexing_is_followed(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    index = data.draw(indices(x.shape, advanced=False))
    assert_followed(count, lambda t: t[index], x, exact=not takes_one_sample(x, index))


@settings(properties, max_examples=400)
@given(batches(), st.data())
def test_indexing_by_tensors_is_followed(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    index = data.draw(indices(x.shape, advanced=True))
    assert_followed(count, lambda t: t[index], x, exact=not takes_one_sample(x, index))


PICK = torch.tensor([2, 0, 2])
PAIRS = torch.tensor([[2, 0], [1, 1], [0, 2]])
MASK = torch.tensor([[True, False, True], [False, False, True], [True, True, False]])

INDEXINGS: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda x: x[PICK],
    "list": lambda x: x[[2, 0]],
    "one row": lambda x: x[[1]],
    "nothing": lambda x: x[[]],
    "tensor of rank 2": lambda x: x[PICK[:, None]],
    "rows and columns": lambda x: x[PICK[:, None], PICK[None]],
    "together": lambda x: x[PICK, PICK],
    "together, further on": lambda x: x[:, PICK, PICK],
    "apart": lambda x: x[PICK, :, PICK],
    "apart, samples between": lambda x: x.transpose(0, 1)[PICK, :, PICK],
    "number between tensors": lambda x: x[:, PICK, 0, PICK],
    "number before": lambda x: x[:, 0, PICK, PICK],
    "scalar tensor between": lambda x: x[:, PICK, torch.tensor(0), PICK],
    "scalar tensor before a slice": lambda x: x.transpose(0, 1)[torch.tensor(0), :, PICK],
    "mask of the samples": lambda x: x[torch.tensor([True, False, True])],
    "mask of two dimensions": lambda x: x[MASK],
    "mask of later dimensions": lambda x: x[:, MASK],
    "mask and tensor": lambda x: x[MASK[0], torch.tensor([1, 2])],
    "list of truth values": lambda x: x[[True, False, True]],
    "true": lambda x: x[True],
    "array": lambda x: x[PICK.numpy()],
    "number of an array": lambda x: x[:, np.int64(1)],
    "range": lambda x: x[:, range(2)],
    "ellipsis and tensor": lambda x: x[..., PICK],
    "new dimension before the block": lambda x: x[None, PICK],
    "new dimension inside the block": lambda x: x[:, PICK, None, PICK],
    "by a tensor of the samples": lambda x: x[torch.arange(3), x.sum((1, 2, 3)).argsort()],
    "one row of each by value": lambda x: x[torch.arange(x.shape[0]), x[:, :, 0, 0].argmax(1)],
    "take_along_dim": lambda x: x.take_along_dim(x.argsort(1), 1),
    "select": lambda x: (x.select(1, 0), torch.select(x, dim=-1, index=2)),
    "narrow": lambda x: (x.narrow(0, 1, 2), x.narrow(1, 0, 2), torch.narrow(x, 0, -2, 2)),
    "index_select": lambda x: (x.index_select(0, PICK), x.index_select(-1, PICK)),
    "gather": lambda x: x.gather(1, PICK[:, None, None, None].expand(3, 2, 3, 3)),
    "gather of a vector": lambda x: x[:, 0, 0, 0].gather(0, PICK),
    "masked_select": lambda x: x.masked_select(x > 0),
    "masked_select, mask of the columns": lambda x: x.masked_select(MASK),
    "masked_select, mask of the samples": lambda x: x.masked_select(MASK[0].view(3, 1, 1, 1)),
    "nonzero": lambda x: x[(x > 0).nonzero(as_tuple=True)],
    "nonzero rows": lambda x: x[(x[:, 0, 0, 0] > -9).nonzero()[:, 0]],
    "where": lambda x: x[torch.where(x > 0)],
    "where between": lambda x: torch.where(x > 0, x, 2 * x),
    "where with a constant": lambda x: torch.where(MASK, x, 0.0),
    "argwhere": lambda x: x[(x[:, 0, 0, 0] > -9).argwhere().flatten()],
    "sorted": lambda x: x[:, 0, 0, 0].sort()[0],
    "sorted down": lambda x: torch.sort(x[:, 0, 0, 0], descending=True).values,
    "rows in the order of a score": lambda x: x[x[:, 0, 0, 0].argsort()],
    "rows out of order and back": lambda x: x[PICK.argsort()][PICK.argsort().argsort()],
    "best": lambda x: x[:, 0, 0, 0].topk(2)[0],
    "rows of the best": lambda x: x[x[:, 0, 0, 0].topk(2).indices],
    "best along another dimension": lambda x: x.topk(2, dim=1)[0],
    "sorted along another dimension": lambda x: x.sort(-1)[0],
}


@pytest.mark.parametrize("name", INDEXINGS)
def test_every_form_of_indexing_is_followed(name: str) -> None:
    assert_followed(3, INDEXINGS[name], Batched((3, 3, 3, 3)), exact=name != "true")


@pytest.mark.parametrize("name", INDEXINGS)
def test_no_form_of_indexing_is_false_where_samples_come_later(name: str) -> None:
    assert_followed(3, INDEXINGS[name], Batched((3, 3, 3, 3), 2), exact=False)


MIXING: dict[str, Callable[[Tensor], object]] = {
    "gather along the samples": lambda x: x.gather(0, PAIRS.repeat(1, 2)[:, :3]),
    "sort along the samples": lambda x: x.sort(0)[0],
    "topk along the samples": lambda x: x.topk(2, 0)[0],
    "several samples in each row": lambda x: x[PAIRS],
    "samples picked in two dimensions": lambda x: x.t()[:, PAIRS],
    "one sample": lambda x: x[1] + x,
    "take": lambda x: x.take(PAIRS),
}


@pytest.mark.parametrize("name", MIXING)
def test_indexing_that_mixes_samples_is_not_false(name: str) -> None:
    assert_followed(3, MIXING[name], Batched((3, 3)), exact=False)


def test_constant_table_indexed_by_samples_follows_the_index() -> None:
    table = torch.randn(5, 3, dtype=torch.float64)

    def look_up(x: Tensor) -> Tensor:
        index = (x.detach() > 0).long()
        return (
            torch.stack([table[index], table.index_select(0, index[:, 0])[:, None]]) * x[..., None]
        )

    assert_followed(3, look_up, Batched((3, 1)))


def written(write: Callable[[Tensor, Tensor], object], like: bool) -> Callable[[Tensor], Tensor]:
    """Write x into zeros, which are either a constant or made in the likeness of x, and give those."""

    def run(x: Tensor) -> Tensor:
        out = torch.zeros_like(x) if like else zeros(3, 3)
        result = write(out, x)
        return result if isinstance(result, Tensor) else out

    return run


def assign(out: Tensor, index: Any, value: Tensor) -> None:
    out[index] = value


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "whole": lambda out, x: assign(out, slice(None), x),
    "column": lambda out, x: assign(out, (slice(None), 1), x[:, 0]),
    "same rows": lambda out, x: assign(out, PICK[:2], x[PICK[:2]]),
    "mask": lambda out, x: assign(out, MASK, x[MASK]),
    "in another order": lambda out, x: assign(out, [2, 0, 1], x),
    "shifted": lambda out, x: assign(out, slice(0, 2), x[1:]),
    "transposed": lambda out, x: assign(out, slice(None), x.t()),
    "one row": lambda out, x: assign(out, 0, x[:, 0]),
    "one after another": lambda out, x: (assign(out, 0, x[:, 0]), assign(out, ..., x))[:0],
    "index_add, same rows": lambda out, x: out.index_add(0, PICK[:2], x[PICK[:2]]),
    "index_add, another order": lambda out, x: out.index_add(0, torch.tensor([2, 0, 1]), x),
    "index_add, two to one": lambda out, x: out.index_add(0, torch.tensor([2, 2, 1]), x),
    "index_add, columns": lambda out, x: out.index_add(1, torch.tensor([2, 2, 1]), x),
    "index_add in place": lambda out, x: out.index_add_(0, torch.tensor([2, 0, 1]), x),
    "index_copy": lambda out, x: out.index_copy(0, torch.tensor([2, 0, 1]), x),
    "index_put": lambda out, x: out.index_put((torch.tensor([2, 0, 1]),), x),
    "index_put in place": lambda out, x: out.index_put_((torch.tensor([2, 0, 1]),), x),
    "scatter": lambda out, x: out.scatter(0, PAIRS.repeat(1, 2)[:, :3], x),
    "scatter, columns": lambda out, x: out.scatter(1, torch.tensor([[2, 0, 1]] * 3), x),
    "scatter_add": lambda out, x: out.scatter_add(0, torch.tensor([[2, 2, 2]] * 3), x),
    "scatter_reduce": lambda out, x: out.scatter_reduce(0, PICK[:, None].expand(3, 3), x, "sum"),
    "masked_scatter": lambda out, x: out.masked_scatter(torch.ones(3, 3).bool(), x.flip(0)),
    "put": lambda out, x: out.put(torch.arange(9).flip(0), x),
    "copy in place": lambda out, x: out.copy_(x),
    "copy of the transpose": lambda out, x: out.copy_(x.t()),
    "into a view": lambda out, x: assign(out[:2], slice(None), x[1:]),
    "copied into a view": lambda out, x: (out[:2].copy_(x[1:]), None)[1],
    "added to a view": lambda out, x: (out.select(0, 1).add_(x[:, 0]), None)[1],
    "diagonal": lambda out, x: out.diagonal_scatter(x[:, 0]),
    "select_scatter": lambda out, x: out.select_scatter(x[:, 0], 0, 1),
    "slice_scatter": lambda out, x: out.slice_scatter(x[1:], 0, 0, 2),
}


@pytest.mark.parametrize("like", [True, False], ids=["into zeros_like", "into constant zeros"])
@pytest.mark.parametrize("name", WRITES)
def test_writing_samples_is_not_false(name: str, like: bool) -> None:
    assert_followed(3, written(WRITES[name], like), Batched((3, 3)), exact=False)


EXACT_WRITES = ["whole", "column", "same rows", "mask", "index_add, same rows", "copy in place"]


@pytest.mark.parametrize("name", EXACT_WRITES)
def test_writing_rows_where_they_belong_is_followed(name: str) -> None:
    assert_followed(3, written(WRITES[name], like=True), Batched((3, 3)))


def test_indices_carry_the_samples_that_their_values_come_from() -> None:
    """What an index by value leaves is told by following a gradient through it."""

    def route(x: Tensor) -> Tensor:  # as a mixture of experts does
        scores, rows = x[:, 0], torch.arange(x.shape[0])
        chosen = rows[scores.detach() > scores.detach().median()]
        return torch.zeros_like(x).index_add(0, chosen, 2 * x[chosen])

    (found,) = follow(4, route, Batched((4, 2)))
    assert_followed(4, route, Batched((4, 2)))
    assert found.needs.any()


class Experts(nn.Module):
    """Rows sorted by the sign of their first entry; each kind goes through a layer of its own."""

    def __init__(self, *, parts: int, follows: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 4) for _ in range(2))
        self.after = nn.Linear(4, 2) if follows else nn.Identity()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        kind = (rows[:, 0] > 0).long()
        order = kind.argsort(stable=True)
        ends = torch.cat(
            [torch.zeros(1, dtype=torch.long), torch.bincount(kind, minlength=2).cumsum(0)]
        )
        sorted_rows = rows[order]
        out = torch.zeros(len(rows), 4, dtype=x.dtype)
        for k, layer in enumerate(self.layers[: self.parts]):
            out[ends[k] : ends[k + 1]] = layer(sorted_rows[ends[k] : ends[k + 1]])
        back = out[order.argsort()]
        return self.after(back.view(*x.shape[:2], 4)).square()


@pytest.mark.parametrize("samples", [1, 4, 5])
@pytest.mark.parametrize("follows", [False, True])
def test_result_filled_part_by_part_belongs_to_those_who_filled_it(
    samples: int, follows: bool
) -> None:
    torch.manual_seed(0)
    model = Experts(parts=2, follows=follows).double()
    x = torch.randn(samples, 5, 3).double()
    found = pergrad.grads(model, lambda m, x: m(x).sum((1, 2)), x)
    expected = loop_grads(model, lambda m, x: m(x).sum((1, 2)), x)
    for name, rows in expected.items():
        assert_near(found[name], rows, name)


@pytest.mark.parametrize("follows", [False, True])
def test_rows_that_no_sample_fills_are_constants_of_the_samples_that_they_stand_for(
    follows: bool,
) -> None:
    torch.manual_seed(0)
    model = Experts(parts=1, follows=follows).double()
    x = torch.randn(4, 5, 3).double()
    found = pergrad.grads(model, lambda m, x: m(x).sum((1, 2)), x)
    expected = loop_grads(model, lambda m, x: m(x).sum((1, 2)), x)
    for name, rows in expected.items():
        assert_near(found[name], rows, name)
