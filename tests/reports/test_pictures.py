import base64
import io

import pytest
from PIL import Image

from pergrad.reports.pictures import Shown, shown
from tests.reports.result_folders import shown_row


def decoded(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition("base64,")[2])))


def test_a_small_picture_is_kept_pixel_for_pixel() -> None:
    image = Image.effect_noise((8, 8), 80)
    found = shown(shown_row(5, image), size=96)
    assert found.has_pixels
    assert decoded(found.uri).tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_a_large_picture_is_made_small(mode) -> None:
    found = shown(shown_row(5, Image.new(mode, (512, 256))), size=96)
    assert (found.width, found.height) == decoded(found.uri).size == (96, 48)
    assert not found.has_pixels


@pytest.mark.parametrize("change", [{"pixels": b"few"}, {"mode": "of none"}, {"width": None}])
def test_a_missing_or_damaged_row_shows_nothing(change) -> None:
    row = shown_row(5, Image.new("L", (8, 8)))
    assert shown({**row, **change}, size=96) == shown(None, size=96) == Shown()


def test_a_long_text_is_cut_at_a_word_and_kept_to_a_bound() -> None:
    found = shown(shown_row(5, "words and words " * 1000), size=96)
    assert len(found.excerpt) <= 282
    assert found.excerpt.endswith(("words …", "and …"))
    assert len(found.whole) + found.left_out == 15999


def test_a_short_text_is_whole_and_an_empty_one_is_said_to_be() -> None:
    assert shown(shown_row(5, "short ü"), size=96) == Shown(excerpt="short ü")
    assert shown(shown_row(6, "  "), size=96).excerpt == "(an empty text)"
