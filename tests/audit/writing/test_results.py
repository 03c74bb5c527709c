import pyarrow.parquet as pq
import pytest

from pergrad.audit.writing.results import write_previews
from pergrad.errors import InterruptedAuditError
from tests.audit.cases import mlp


def test_what_samples_look_like_is_one_table(tmp_path):
    assert write_previews(tmp_path, mlp(show=lambda item: "a"), range(9)) == []
    assert pq.read_table(tmp_path / "shown.parquet")["text"].to_pylist() == ["a"] * 9
    assert [path.name for path in tmp_path.iterdir()] == ["shown.parquet"]


def test_items_are_shown_without_show(tmp_path):
    assert write_previews(tmp_path, mlp(), range(9)) == []
    assert len(pq.read_table(tmp_path / "shown.parquet")["text"].to_pylist()[0].split(", ")) == 6


def test_nothing_is_written_for_items_that_hold_nothing_to_show(tmp_path):
    assert write_previews(tmp_path, mlp(dataset=[{"label": 1}]), range(1)) == []
    assert not list(tmp_path.iterdir())


def test_no_space_left_stops(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(InterruptedAuditError, match="no space left"):
        write_previews(tmp_path, mlp(show=lambda item: "a"), range(2))
