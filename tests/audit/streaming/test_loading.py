import random

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from pergrad.audit.streaming.loading import Loader, drawing_from
from pergrad.errors import AuditError
from tests.audit.cases import SIZE, BadItem, data, mlp


def loader(**changes):
    spec = mlp(**changes)
    return Loader(spec, np.arange(len(spec.dataset)), 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_their_samples_in_order(workers):
    pieces = [(0, 4), (8, 9), (4, 8)]
    found = list(loader().batches(pieces, workers))
    assert [(batch.start, batch.stop) for batch in found] == pieces
    for batch in found:
        x, y = data()[batch.start : batch.stop]
        assert torch.equal(batch.arguments[0], x)
        assert torch.equal(batch.arguments[1], y)


def test_tensors_cut_out_at_once_are_those_of_the_items():
    class Plain(TensorDataset):
        """Not taken for what it is."""

    indices = np.array([3, 7, 8, 20])
    specs = [mlp(), mlp(dataset=Plain(*data().tensors)), mlp(label=str)]
    found = [Loader(spec, indices, 0).load(1, 4).arguments for spec in specs]
    for arguments in found:
        assert len(arguments) == 2
        for one, other in zip(arguments, found[0], strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_labels_of_tensors_cut_out_at_once_are_those_of_the_items():
    class Plain(TensorDataset):
        """Not taken for what it is."""

    def label(item):
        return f"{type(item).__name__} {item[0].tolist()} {int(item[1])} {torch.rand(())}"

    indices = np.array([3, 7, 8, 20])
    specs = [mlp(label=label), mlp(dataset=Plain(*data().tensors), label=label)]
    for workers in (0, 1):
        one, other = (next(Loader(s, indices, 0).batches([(1, 4)], workers)) for s in specs)
        assert one.labels == other.labels
        assert len(one.labels) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_an_item_of_another_form_is_named(workers):
    batches = loader(dataset=BadItem(*data().tensors)).batches([(0, 10), (10, 20)], workers)
    next(batches)
    message = r"item 17 .* differs from item 0: got \(float32 \(2,\), .* expected \(float32 \(6,\)"
    with pytest.raises(AuditError, match=message):
        next(batches)


def test_the_form_of_most_items_counts_whichever_is_first():
    items = [(torch.zeros(1 if n in (0, 5) else 3, 4, 4), n % 2) for n in range(9)]
    spec = mlp(dataset=items)
    loaded = Loader(spec, np.arange(9), 0, strict=False).load(0, 9)
    assert sorted(loaded.skipped) == [0, 5]
    assert "item 0 of the data set differs from item 1" in loaded.skipped[0]
    assert loaded.arguments[0].shape == (7, 3, 4, 4)
    # Also in a batch with no other items.
    assert sorted(Loader(spec, np.arange(9), 0, strict=False).load(4, 6).skipped) == [5]


def test_an_item_that_no_batch_can_be_made_of_is_named():
    items = [(torch.zeros(2), 1)] * 5 + [(None, 1)]
    with pytest.raises(AuditError, match=r"cannot collate item 5 .*, \(NoneType, int\)"):
        loader(dataset=items).load(0, 6)


def test_an_item_that_raises_is_named():
    class Missing(TensorDataset):
        def __getitem__(self, index):
            if index == 3:
                raise FileNotFoundError("3.png")
            return super().__getitem__(index)

    with pytest.raises(AuditError, match=r"cannot load item 3 .*: FileNotFoundError: 3.png"):
        loader(dataset=Missing(*data().tensors)).load(0, 6)


def test_a_length_that_lies_is_told():
    class Longer(TensorDataset):
        def __len__(self):
            return SIZE + 5

    message = rf"item {SIZE} .* does not exist, though its length is {SIZE + 5}"
    with pytest.raises(AuditError, match=message):
        loader(dataset=Longer(*data().tensors)).load(SIZE - 2, SIZE + 5)


def test_a_label_that_raises_is_named():
    with pytest.raises(AuditError, match=r"spec.label failed on item 0, .*IndexError: .*line"):
        loader(label=lambda item: item[5]).load(0, 2)


def test_a_label_that_raises_in_a_worker_is_told_without_its_traceback():
    with pytest.raises(AuditError, match=r"^spec.label failed on item 0, .*IndexError: .*line"):
        list(loader(label=lambda item: item[5]).batches([(0, 2)], 1))


def test_a_label_is_of_the_item_as_it_was_before_a_batch_was_made_of_it():
    items = [{"x": torch.ones(2), "y": n} for n in range(3)]

    def collate(batch):
        return torch.stack([item["x"] for item in batch]), torch.tensor([b.pop("y") for b in batch])

    spec = mlp(dataset=items, collate=collate, label=lambda item: item["y"])
    loaded = Loader(spec, np.arange(3), 0).load(0, 3)
    assert loaded.labels == ["0", "1", "2"]
    assert loaded.arguments[1].tolist() == [0, 1, 2]


def test_items_that_are_dicts_or_bare_tensors_make_one_argument():
    dicts = [{"x": torch.ones(2), "y": k} for k in range(3)]
    (batch,) = loader(dataset=dicts).load(0, 3).arguments
    assert batch["y"].tolist() == [0, 1, 2]
    (batch,) = loader(dataset=[torch.ones(2)] * 3).load(0, 3).arguments
    assert batch.shape == (3, 2)


def test_collate_of_the_spec_is_used():
    (batch,) = loader(collate=lambda items: {"count": len(items)}).load(0, 3).arguments
    assert batch == {"count": 3}


def test_what_is_drawn_depends_on_the_seed_alone_and_leaves_the_generators_as_they_were():
    def draw():
        return float(torch.rand(())), float(np.random.rand()), random.random()

    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    expected = draw(), draw()
    torch.manual_seed(7), np.random.seed(7), random.seed(7)
    first = draw()
    with drawing_from(1, 2):
        inside = draw()
    with drawing_from(1, 2):
        assert draw() == inside
    with drawing_from(1, 3):
        assert draw() != inside
    assert (first, draw()) == expected
