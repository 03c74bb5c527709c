import numpy as np
import pytest
import torch
from PIL import Image

from pergrad.audit.subject.inferring.collating import inferred_collate, place_of_text
from pergrad.errors import AuditError


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ("hi", ()),
        (("hi", 1), 0),
        ({"label": 1, "sentence": "hi", "id": "7"}, "sentence"),
        ({"label": "yes", "words": "hi"}, "words"),
        ({"input_ids": [1, 2], "text": "hi"}, None),
        ({"image": Image.new("L", (2, 2)), "file": "a.png"}, None),
        ({"signal": np.zeros(3), "file": "a.wav"}, None),
        ((torch.zeros(2), "cat"), None),
        ({"label": 1}, None),
    ],
)
def test_a_text_is_the_input_where_there_is_no_other(item, place) -> None:
    assert place_of_text(item) == place


def test_the_text_of_all_items_is_where_that_of_the_first_is() -> None:
    said, seen = [], []

    def tokenizer(texts, **_):
        seen.extend(texts)
        return {"input_ids": torch.zeros(len(texts), 1)}

    collate = inferred_collate({"text": "hi", "title": "a"}, tokenizer, said.append)
    collate([{"text": "oh", "title": "b"}])
    assert said == ["inputs: texts through function: 'text' (not used: title)"]
    assert seen == ["oh"]
    with pytest.raises(ValueError, match="it has no text, but None"):
        collate([{"text": None, "title": "c"}])


def test_lists_of_tokens_are_padded_and_masked() -> None:
    items = [
        {"input_ids": [3, 4, 5], "labels": [3, 4, 5], "id": 0},
        {"input_ids": [6], "labels": [6], "id": 1},
    ]
    said = []
    collate = inferred_collate(items[0], None, said.append)
    batch = collate(items)
    assert said == ["inputs: lists of tokens, padded with 0"]
    assert batch["input_ids"].tolist() == [[3, 4, 5], [6, 0, 0]]
    assert batch["labels"].tolist() == [[3, 4, 5], [6, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["id"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "items",
    [
        [([0.5, 1.5], 0), ([2, 3.0], 1)],
        [([[0.5], [1.5]], "a"), ([[2.0], [3.0]], "b")],
        [([1, 2], 0.5), ([3, 4], 1.5)],
    ],
)
def test_lists_of_numbers_are_tensors(items) -> None:
    said = []
    inputs, targets = inferred_collate(items[0], None, said.append)(items)
    assert inputs.tolist() == [part for part, _ in items]
    assert list(targets) == [target for _, target in items]
    assert said == ["inputs: lists of numbers, as tensors"]
    dicts = [{"x": part, "label": target} for part, target in items]
    assert torch.equal(inferred_collate(dicts[0], None, print)(dicts)["x"], inputs)


def test_other_items_are_left_to_torch() -> None:
    assert inferred_collate((torch.zeros(2), 1), None, print) is None
    assert inferred_collate({"x": torch.zeros(2)}, None, print) is None


def test_texts_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(AuditError, match=r"the items are texts .such as 'hi'.: pass tokenizer="):
        inferred_collate(("hi", 1), None, print)
