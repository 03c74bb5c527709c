import numpy as np
import pytest
import torch
from PIL import Image

from pergrad.audit.writing.previews import picture_of, preview_table
from pergrad.errors import AuditError
from tests.audit.cases import mlp


def _table(spec, indices):
    return preview_table(spec.dataset, spec.show, indices)


@pytest.mark.parametrize(
    ("found", "size", "mode"),
    [
        (torch.zeros(8, 6), (6, 8), "L"),
        (torch.zeros(1, 8, 6), (6, 8), "L"),
        (torch.zeros(3, 8, 6, dtype=torch.bfloat16), (6, 8), "RGB"),
        (np.zeros((8, 6, 3), np.uint8), (6, 8), "RGB"),
        (np.zeros((3, 8, 6), np.int64), (6, 8), "RGB"),
        (torch.ones(4, 4, dtype=torch.bool), (4, 4), "L"),
        (Image.new("P", (6, 8)), (6, 8), "RGB"),
        (Image.new("RGB", (2000, 1000)), (256, 128), "RGB"),
        (np.zeros((600, 300)), (128, 256), "L"),
        (np.zeros((6, 8, 3), np.uint8)[:, ::2], (4, 6), "RGB"),
    ],
)
def test_images_come_in_many_forms(found, size, mode):
    picture = picture_of(found)
    assert (picture.width, picture.height, picture.mode) == (*size, mode)
    assert len(picture.pixels) == size[0] * size[1] * len(mode)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[0.0, 0.5], [0.25, 1.0]], [[0, 128], [64, 255]]),
        ([[0.0, 255.0], [51.0, 102.0]], [[0, 255], [51, 102]]),
        ([[-1.0, 1.0], [0.0, 0.0]], [[0, 255], [128, 128]]),
        ([[0.0, 16.0], [8.0, 4.0]], [[0, 255], [128, 64]]),
        ([[0.0, float("nan")], [1.0, 0.0]], [[0, 0], [255, 0]]),
        ([[0.0, 0.0], [0.0, 0.0]], [[0, 0], [0, 0]]),
    ],
)
def test_values_are_stretched_to_bytes(values, expected):
    assert list(picture_of(torch.tensor(values)).pixels) == [*expected[0], *expected[1]]


@pytest.mark.parametrize("found", [torch.zeros(5), np.zeros((2, 3, 4, 5)), torch.zeros(0, 3)])
def test_what_is_no_image_is_refused(found):
    with pytest.raises(AuditError, match=r"shape .H, W., .C, H, W. or .H, W, 3., got"):
        picture_of(found)


def test_pixels_are_in_the_order_of_rows_then_columns_then_colours():
    values = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert picture_of(values).pixels == values.tobytes()
    assert picture_of(values[:, ::2]).pixels == np.ascontiguousarray(values[:, ::2]).tobytes()
    assert picture_of(np.moveaxis(values, 2, 0)).pixels == values.tobytes()
    assert picture_of(Image.fromarray(values)) == picture_of(values)


def test_each_sample_has_a_text_or_a_picture():
    spec = mlp(show=lambda item: "é" if int(item[1]) else torch.zeros(4, 5))
    table, problems = preview_table(spec.dataset, spec.show, np.arange(9))
    assert problems == []
    for index, row in enumerate(table.to_pylist()):
        empty = dict.fromkeys(("text", "mode", "width", "height", "pixels"))
        text = {"text": "é"}
        picture = {"mode": "L", "width": 5, "height": 4, "pixels": bytes(20)}
        expected = text if int(spec.dataset[index][1]) else picture
        assert row == {"index": index, **empty, **expected}


def test_a_sample_that_cannot_be_shown_is_told_and_the_others_are_shown():
    def show(item):
        return "a" if int(item[1]) else 3

    spec = mlp(show=show)
    table, problems = preview_table(spec.dataset, spec.show, range(9))
    wrong = [n for n in range(9) if not int(spec.dataset[n][1])]
    first = ", ".join(map(str, wrong[:5]))
    assert len(problems) == 1
    assert problems[0].startswith(f"no preview of {len(wrong)} samples ({first}")
    assert "): spec.show must return a string" in problems[0]
    assert table["index"].to_pylist() == [n for n in range(9) if n not in wrong]


def test_nothing_to_show_is_a_table_without_rows():
    table, problems = _table(mlp(show=lambda item: 3), range(2))
    assert table.num_rows == 0
    assert table.column_names == ["index", "text", "mode", "width", "height", "pixels"]
    assert len(problems) == 1


def test_an_error_in_show_says_where():
    _, problems = _table(mlp(show=lambda item: 1 / 0), [3])
    assert problems[0].startswith("no preview of sample 3: ZeroDivisionError: division by zero (")
    assert "test_previews.py, line" in problems[0]
