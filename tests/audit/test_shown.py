import numpy as np
import pytest
import torch
from PIL import Image

from pergrad.audit.shown import picture_of, write_shown
from pergrad.errors import AuditError, InterruptedAuditError
from tests.audit.cases import mlp


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
        (Image.new("RGB", (2000, 1000)), (512, 256), "RGB"),
    ],
)
def test_images_come_in_many_forms(found, size, mode):
    picture = picture_of(found)
    assert (picture.size, picture.mode) == (size, mode)


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
    assert np.asarray(picture_of(torch.tensor(values))).tolist() == expected


@pytest.mark.parametrize("found", [torch.zeros(5), np.zeros((2, 3, 4, 5)), torch.zeros(0, 3)])
def test_what_is_no_image_is_refused(found):
    with pytest.raises(AuditError, match=r"shape .H, W., .C, H, W. or .H, W, 3., got"):
        picture_of(found)


def test_pictures_and_texts_are_written(tmp_path):
    spec = mlp(show=lambda item: "é" if int(item[1]) else torch.zeros(4, 4))
    assert write_shown(tmp_path / "shown", spec, range(9)) == []
    names = {path.name for path in (tmp_path / "shown").iterdir()}
    assert names == {f"{n}.{'txt' if int(spec.dataset[n][1]) else 'png'}" for n in range(9)}


def test_nothing_is_written_without_show(tmp_path):
    assert write_shown(tmp_path / "shown", mlp(), range(9)) == []
    assert not (tmp_path / "shown").exists()


def test_a_sample_that_cannot_be_shown_is_told_and_the_others_are_shown(tmp_path):
    def show(item):
        return "a" if int(item[1]) else 3

    spec = mlp(show=show)
    problems = write_shown(tmp_path / "shown", spec, range(9))
    wrong = [n for n in range(9) if not int(spec.dataset[n][1])]
    assert len(problems) == len(wrong)
    assert f"sample {wrong[0]} could not be shown: AuditError: spec.show must" in problems[0]
    assert len(list((tmp_path / "shown").iterdir())) == 9 - len(wrong)


def test_no_space_left_stops(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(InterruptedAuditError, match="no space left"):
        write_shown(tmp_path / "shown", mlp(show=lambda item: "a"), range(2))
