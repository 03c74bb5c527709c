import errno
import os

import pytest

from pergrad.audit.streaming.files import made_folder, replacing, write_whole
from pergrad.errors import AuditError, InterruptedAuditError


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole(tmp_path, durable):
    path = tmp_path / "a"
    write_whole(path, b"old", durable=durable)
    write_whole(path, b"new", durable=durable)
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    write_whole(path, b"old")

    def interrupted():
        with replacing(path) as unfinished:
            unfinished.write_bytes(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "no space left to write .*a: free some"), (errno.EIO, "cannot write .*a ")],
)
def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path, monkeypatch, number, message):
    path = tmp_path / "a"
    write_whole(path, b"old")

    def full(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InterruptedAuditError, match=f"{message}.*run the same command to resume"):
        write_whole(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_is_made_with_those_above(tmp_path):
    assert made_folder(tmp_path / "a" / "b").is_dir()
    assert os.listdir(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("below", ["", "b"])
def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path, below):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(AuditError, match="is a file"):
        made_folder(tmp_path / "a" / below)
    assert (tmp_path / "a").read_text() == "mine"


def test_a_folder_that_takes_no_files_is_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.touch", refuse)
    with pytest.raises(
        AuditError, match=r"cannot write to the results folder .*: Permission denied"
    ):
        made_folder(tmp_path / "a")


def test_no_place_to_write_to_is_told_with_the_way_on(tmp_path):
    with pytest.raises(
        InterruptedAuditError, match=r"cannot write .*run the same command to resume"
    ):
        write_whole(tmp_path / "missing" / "summary.json", b"")
