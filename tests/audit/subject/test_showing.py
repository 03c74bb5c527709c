import numpy as np
import pytest
import torch
from PIL import Image

from pergrad.audit.subject.showing import inferred_show, is_picture


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ((torch.tensor([1.0, 2.5]), torch.tensor(3)), "1, 2.5"),
        (("a text", 3), "a text"),
        ({"text": "a text", "label": 3}, "a text"),
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
