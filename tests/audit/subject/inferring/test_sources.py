import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from pergrad.audit.subject.inferring.sources import (
    as_dataset,
    listed,
    name_of_data,
    names_in_config,
    names_of_classes,
)
from pergrad.errors import AuditError

X, Y = torch.randn(6, 2), torch.arange(6)


def test_a_loader_stands_for_its_data_set_and_its_collate() -> None:
    data, said = TensorDataset(X, Y), []
    assert as_dataset(DataLoader(data, batch_size=2), said.append) == (data, None)
    assert said == ["data: the TensorDataset of the DataLoader, in order"]
    own = len
    assert as_dataset(DataLoader(data, collate_fn=own), said.append)[1] is own


@pytest.mark.parametrize(
    "columns",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        (X, Y.numpy()),
        (X, Y.tolist()),
        (X.numpy()[:, ::-1].copy()[:, ::-1], Y.numpy().astype(object)),
    ],
)
def test_tensors_and_arrays_are_rows(columns) -> None:
    dataset, _ = as_dataset(columns, print)
    assert len(dataset) == 6
    assert torch.equal(dataset[2][0], X[2])


def test_columns_of_pandas_are_rows() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "b": [0.5, 1.5], "c": [True, False]})
    dataset, _ = as_dataset((frame, pandas.Series([1, 0])), print)
    assert dataset[1][0].tolist() == [2.0, 1.5, 0.0]
    assert int(dataset[0][1]) == 1


@pytest.mark.parametrize(
    "names", [["a", "b"] * 3, np.array(["a", "b"] * 3), np.array(["a", "b"] * 3, dtype=object)]
)
def test_names_of_classes_are_targets_beside_a_tensor(names) -> None:
    dataset, _ = as_dataset((X, names), print)
    assert torch.equal(dataset[3][0], X[3])
    assert (dataset[3][1], type(dataset[3][1])) == ("b", str)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((X, np.array([object()] * 6)), "the targets cannot be made a tensor"),
        ((np.array([["a"], ["b"]] * 3), Y), "the inputs cannot be made a tensor"),
        ((X, Y[:4]), "the inputs have 6 rows, the targets 4"),
        ((X, ["a"] * 4), "the inputs have 6 rows, the targets 4"),
    ],
)
def test_columns_that_are_no_numbers_or_names_are_refused(columns, message) -> None:
    with pytest.raises(AuditError, match=message):
        as_dataset(columns, print)


def test_a_data_frame_is_its_rows() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "kind": pandas.Categorical(["dog", "cat"])})
    said = []
    dataset, _ = as_dataset(frame, said.append)
    assert [int(y) for _, y in (dataset[0], dataset[1])] == [1, 0]
    assert said[-1] == "data: 2 rows of the data frame, 1 column of numbers (a), target 'kind'"
    assert dataset.shown(dataset[1]) == "a 2"


def test_the_path_of_a_file_is_its_rows(tmp_path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("text,label\nhi,1\n")
    for given in (path, str(path)):
        dataset, _ = as_dataset(given, print, prefers_text=True)
        assert (dataset[0][0], int(dataset[0][1])) == ("hi", 1)
    with pytest.raises(AuditError, match="'pictures' is not a file of rows: its name must end in"):
        as_dataset("pictures", print)


def test_a_class_is_no_data_set() -> None:
    with pytest.raises(AuditError, match="the class TensorDataset: pass an object of it"):
        as_dataset(TensorDataset, print)


def test_a_list_of_items_is_left_alone() -> None:
    items = [(X[0], 1), (X[1], 0)]
    assert as_dataset(items, print) == (items, None)


def test_an_iterator_that_fails_once_goes_on() -> None:
    class Stream:
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.at += 1
            if self.at == 3:
                raise OSError("truncated")
            if self.at > 5:
                raise StopIteration
            return self.at

    items = listed(Stream(), print)
    assert len(items) == 5
    assert (items[1], items[3]) == (2, 4)
    with pytest.raises(OSError, match="truncated"):
        items[2]


def test_a_generator_ends_at_its_error_and_this_is_said() -> None:
    def broken():
        yield 1
        yield 2
        raise OSError("no more")

    said = []
    items = listed(broken(), said.append)
    assert len(items) == 3
    assert said[0].startswith("data: generator ended after 2 items by OSError: no more")
    with pytest.raises(OSError, match="no more"):
        items[2]


def test_an_iterable_that_never_works_is_refused() -> None:
    class Stream:
        def __iter__(self):
            return self

        def __next__(self):
            raise OSError("down")

    with pytest.raises(AuditError, match="failed at once: OSError: down"):
        listed(Stream(), print)


def test_a_data_set_without_a_length_is_refused() -> None:
    class Endless:
        def __getitem__(self, index):
            return np.zeros(2)

    with pytest.raises(AuditError, match="must have a length; Endless"):
        as_dataset(Endless(), print)


def test_names_of_classes_are_those_of_the_data_set_below() -> None:
    class Named(TensorDataset):
        classes = ("a", "b")

    assert names_of_classes(Subset(Named(X), [0])) == ["a", "b"]
    assert names_of_classes(TensorDataset(X)) is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({0: "cat", 1: "dog"}, ["cat", "dog"]),
        ({0: "LABEL_0", 1: "LABEL_1"}, None),
        ({0: "cat", 2: "dog"}, None),
        (None, None),
    ],
)
def test_names_of_classes_are_those_of_the_configuration(names, expected) -> None:
    config = type("Config", (), {"id2label": names})
    made = type("TinyForSequenceClassification", (), {"config": config})()
    assert names_in_config(made) == expected
    assert names_in_config(type("TinyForCausalLM", (), {"config": config})()) is None


def test_data_without_a_name_is_named() -> None:
    pandas = pytest.importorskip("pandas")
    frame, _ = as_dataset(pandas.DataFrame({"a": [1.0, 2.0], "y": [0, 1]}), lambda words: None)
    assert name_of_data(frame) == "data frame"
    assert name_of_data([1] * 2000) == "2,000 items"
    assert name_of_data(TensorDataset(torch.zeros(2))) is None
