import json
import os

import pytest

from pergrad.audit.streaming.folder import ResultsFolder
from pergrad.errors import AuditError

ABOUT = {"identity": {"model": "a", "seed": 0}, "batch_size": 8}


@pytest.fixture
def begun(tmp_path):
    folder = ResultsFolder(tmp_path / "out")
    assert folder.open() is None
    folder.begin(ABOUT)
    return folder


def test_a_folder_tells_what_was_begun_in_it(begun):
    about = ResultsFolder(begun.path).open()
    assert about is not None
    assert about["identity"] == ABOUT["identity"]
    assert not begun.is_finished


def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(AuditError, match=r"not empty and holds no audit \(thesis.tex\)"):
        ResultsFolder(tmp_path).open()
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_what_a_killed_process_was_writing_does_not_make_a_folder_foreign(tmp_path):
    (tmp_path / ".123.unfinished").touch()
    (tmp_path / "audit.json.123.unfinished").write_text("{")
    assert ResultsFolder(tmp_path).open() is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "audit.json is corrupt .JSONDecodeError"),
        ("[]", "is corrupt .TypeError"),
        (json.dumps({"kind": "tax audit"}), "was not written by an audit"),
        (json.dumps({"kind": "an audit by pergrad", "format": 9}), "has format 9"),
        (json.dumps({"kind": "an audit by pergrad", "format": 3}), "is corrupt .KeyError"),
    ],
)
def test_a_corrupt_or_foreign_folder_is_refused_and_stays_as_it_is(begun, content, message):
    path = begun.path / "audit.json"
    path.write_text(content)
    with pytest.raises(AuditError, match=message):
        begun.open()
    assert path.read_text() == content


def test_another_model_is_refused(begun):
    about = begun.open()
    begun.refuse_another(about, ABOUT["identity"])
    with pytest.raises(AuditError, match=r"holds an audit with another model \(a, now b\)"):
        begun.refuse_another(about, {"model": "b", "seed": 0})


def test_the_smallest_batch_size_is_the_one_to_go_on_with(begun):
    assert begun.batch_size(ABOUT) == 8
    begun.note_batch_size(4)
    begun.note_batch_size(2)
    assert begun.batch_size(ABOUT) == 2


def test_two_audits_at_once_in_one_folder_are_refused(begun):
    with (
        begun.locked(),
        pytest.raises(AuditError, match="another audit is writing into"),
        ResultsFolder(begun.path).locked(),
    ):
        pass
    with begun.locked():
        pass
