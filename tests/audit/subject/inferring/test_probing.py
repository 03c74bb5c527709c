import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pergrad.audit.subject.inferring.probing import first_items, logits_in, probed
from pergrad.errors import AuditError

X, Y = torch.randn(10, 4), torch.arange(10) % 3


def probe(model, items, classes=None):
    return probed(model, items, None, classes, first_items(items))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0)), "sigmoid"),
        (nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), "softmax"),
        (nn.Linear(4, 3), "addmm"),
        (nn.Linear(4, 3).requires_grad_(False), ""),
    ],
)
def test_the_last_function_of_a_model_is_known(model, name) -> None:
    assert probe(model, TensorDataset(X, Y)).last_function == name


def test_strings_are_places_among_the_classes() -> None:
    items = [(x, "abc"[y]) for x, y in zip(X, Y.tolist(), strict=True)]
    assert probe(nn.Linear(4, 3), items, ["c", "b", "a"]).targets.tolist() == [
        2,
        1,
        0,
        2,
        1,
        0,
        2,
        1,
    ]
    with pytest.raises(AuditError, match="label 'c' is none of the classes: a, b"):
        probe(nn.Linear(4, 3), items, ["a", "b"])


def test_more_targets_skip_what_cannot_be_read() -> None:
    class Broken(list):
        def __getitem__(self, index):
            if index == 1:
                raise OSError
            return super().__getitem__(index)

    items = Broken([(x, int(y)) for x, y in zip(X, Y, strict=True)])
    assert len(first_items(items)) == 8
    assert probe(nn.Linear(4, 3), items).more_targets().tolist() == [0, 2, 0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("model", "items", "message"),
    [
        (nn.Linear(4, 3, device="meta"), [(X[0], 1)], "'weight' is on the meta device"),
        (nn.Linear(3, 3), [(X[0], 1)], "the model fails on the first items: RuntimeError"),
        (nn.Linear(4, 3), [(X[0], object())], "cannot collate the first items"),
        (nn.Linear(4, 3), [(X[0], [1, "a"])], "the targets are list, not a tensor"),
    ],
)
def test_what_fails_is_said_in_one_sentence(model, items, message) -> None:
    with pytest.raises(AuditError, match=message):
        probe(model, items)


def test_targets_from_all_over_sorted_data_decide() -> None:
    items = [(X[n % len(X)], float(max(0, n - 900))) for n in range(1000)]
    assert probe(nn.Linear(4, 1), items).more_targets().max() == 99
    broken = [(X[n % len(X)], n // 400) for n in range(1000)]
    found = probe(nn.Linear(4, 3), broken)
    assert found.index_of(255) == 999


def test_items_are_looked_for_all_over_the_data() -> None:
    class Broken(list):
        def __getitem__(self, index):
            if index < 800:
                raise OSError("truncated")
            return super().__getitem__(index)

    items = Broken([(X[0], n % 3) for n in range(1000)])
    assert len(first_items(items)) == 8
    with pytest.raises(AuditError, match="nor others from all over it: OSError: truncated"):
        first_items(Broken([(X[0], 0)] * 100))


def test_logits_are_found_in_what_models_return() -> None:
    assert logits_in({"logits": X}) is X
    assert logits_in((X, None)) is X
    with pytest.raises(AuditError, match="returns dict, which has no logits"):
        logits_in({"loss": X})


@pytest.mark.parametrize(
    "odd", [None, (None, 0), (X[0], None), (X[0, :2], 0), (X[0].double(), 0.5)]
)
@pytest.mark.parametrize("where", [0, 3])
def test_an_odd_item_among_the_first_is_left_out(odd, where) -> None:
    items = [(x, int(y)) for x, y in zip(X, Y, strict=True)]
    items[where] = odd
    found = probe(nn.Linear(4, 3), items)
    assert found.batch[0].shape == (7, 4)
    assert found.targets.shape == (7,)
