import numpy as np
import pytest
import torch
from PIL import Image

from pergrad.audit.subject.inferring.showing import inferred_show, is_picture, words_of_show


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ((torch.tensor([1.0, 2.5]), torch.tensor(3)), "1, 2.5"),
        (("a text", 3), "a text"),
        ({"text": "a text", "label": 3}, "a text"),
        ({"input_ids": [50256, 7]}, "50256, 7"),
        ((np.arange(30), 1), ", ".join(str(n) for n in range(24)) + ", ... (30 numbers)"),
    ],
)
def test_rows_and_texts_are_shown_as_words(item, expected) -> None:
    assert inferred_show([item])(item) == expected


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (3, 8, 6), (8, 6, 3)])
def test_arrays_of_the_shape_of_a_picture_are_pictures(shape) -> None:
    assert is_picture(shape)
    item = (torch.rand(shape), 0)
    assert torch.equal(inferred_show([item])(item), item[0])


def test_images_are_shown_as_they_are() -> None:
    image = Image.new("RGB", (4, 4))
    assert inferred_show([(image, 0)])((image, 0)) is image
    assert inferred_show([{"image": image, "label": 1}])({"image": image}) is image


def test_items_that_hold_nothing_to_show_have_no_preview() -> None:
    assert inferred_show([{"label": 1}]) is None
    assert inferred_show([]) is None


def test_an_unreadable_first_item_does_not_hide_the_others() -> None:
    class Broken(list):
        def __getitem__(self, index):
            if index == 0:
                raise OSError("truncated")
            return super().__getitem__(index)

    show = inferred_show(Broken([("a", 0), ("b", 1)]))
    assert show(("b", 1)) == "b"


def test_tokens_are_decoded_by_the_tokenizer() -> None:
    class Tokenizer:
        def decode(self, tokens, skip_special_tokens):
            return "".join("_ab"[int(token)] for token in tokens if token)

    item = {"input_ids": torch.tensor([1, 2, 0]), "labels": 1}
    assert inferred_show([item], tokenizer=Tokenizer())(item) == "ab"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ((torch.rand(1, 8, 6), 0), "pictures of 8 by 6 pixels"),
        ((torch.rand(5), 0), "rows, as text"),
        ({"input_ids": [1, 2, 3], "labels": 1}, "rows, as text"),
        ({"x": [0.5, 2.0], "label": 1}, "rows, as text"),
        (([0.5, 2.0], 1), "rows, as text"),
        (("a text", 0), "texts"),
        ({"label": 1}, "nothing, since no part"),
    ],
)
def test_what_is_shown_is_said(item, words) -> None:
    assert words_of_show(inferred_show([item]), item).startswith(words)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (torch.tensor(2.5), "1, 2 → 2.5"),
        (torch.tensor([2.5, 3.0]), "1, 2 → 2.5, 3"),
        (np.float64(2.5), "1, 2 → 2.5"),
        (3, "1, 2 → 3"),
        (torch.zeros(5), "1, 2"),
        ("a word", "1, 2"),
    ],
)
def test_a_short_target_is_shown_beside_its_row(target, expected) -> None:
    item = (torch.tensor([1.0, 2.0]), target)
    assert inferred_show([item], with_target=True)(item) == expected
    assert inferred_show([item])(item) == "1, 2"


def test_a_target_is_not_shown_beside_a_picture() -> None:
    item = (torch.zeros(8, 8), torch.tensor(1.0))
    assert inferred_show([item], with_target=True)(item).shape == (8, 8)


def test_lists_of_numbers_are_shown_as_rows() -> None:
    for item in ({"x": [1 / 3, 2.0], "label": 1}, ([1 / 3, 2.0], 1)):
        assert inferred_show([item])(item) == "0.3333, 2"


def test_an_odd_item_at_the_start_does_not_decide_how_others_are_shown() -> None:
    items = [None, *[(torch.tensor([1.0, float(n)]), n) for n in range(4)]]
    assert inferred_show(items)(items[2]) == "1, 1"
