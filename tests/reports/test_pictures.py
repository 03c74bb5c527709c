import base64
import io

import pytest
from PIL import Image

from pergrad.reports.pictures import Shown, shown


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shown").mkdir()
    return tmp_path


def decoded(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition("base64,")[2])))


def test_a_small_picture_is_kept_pixel_for_pixel(folder) -> None:
    image = Image.effect_noise((8, 8), 80)
    image.save(folder / "shown" / "5.png")
    found = shown(folder, 5, size=96)
    assert found.has_pixels
    assert decoded(found.uri).tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_a_large_picture_is_made_small(folder, mode) -> None:
    Image.new(mode, (512, 256)).save(folder / "shown" / "5.png")
    found = shown(folder, 5, size=96)
    assert (found.width, found.height) == decoded(found.uri).size == (96, 48)
    assert not found.has_pixels


def test_a_missing_or_damaged_file_shows_nothing(folder) -> None:
    (folder / "shown" / "5.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    assert shown(folder, 5, size=96) == shown(folder, 6, size=96) == Shown()


def test_a_long_text_is_cut_at_a_word_and_kept_to_a_bound(folder) -> None:
    (folder / "shown" / "5.txt").write_text("words and words " * 1000)
    found = shown(folder, 5, size=96)
    assert len(found.excerpt) <= 282
    assert found.excerpt.endswith(("words …", "and …"))
    assert len(found.whole) + found.left_out == 15999


def test_a_short_text_is_whole_and_an_empty_one_is_said_to_be(folder) -> None:
    (folder / "shown" / "5.txt").write_text("short ü")
    (folder / "shown" / "6.txt").write_text("  ")
    assert shown(folder, 5, size=96) == Shown(excerpt="short ü")
    assert shown(folder, 6, size=96).excerpt == "(an empty text)"


def test_a_text_that_is_not_utf8_is_shown_as_far_as_it_is(folder) -> None:
    (folder / "shown" / "5.txt").write_bytes(b"caf\xe9")
    assert shown(folder, 5, size=96).excerpt == "caf�"
