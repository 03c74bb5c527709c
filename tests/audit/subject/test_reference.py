import pytest

from pergrad.audit import load_spec
from pergrad.errors import AuditError
from tests.audit import cases

HERE = "tests.audit.cases"


def test_a_reference_means_a_spec_or_a_function_that_returns_one():
    assert load_spec(f"{HERE}:mlp_as_it_is") is cases.mlp_as_it_is
    assert len(load_spec(f"{HERE}:mlp").dataset) == cases.SIZE


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("tests.audit.cases", "does not have the form package.module:attribute"),
        (":spec", "does not have the form package.module:attribute"),
        ("no_such_project.train:spec", "no module 'no_such_project' in"),
        ("tests.no_such_module:spec", "no module 'tests.no_such_module' in"),
        (f"{HERE}:speck", "has no attribute 'speck' .did you mean 'Spec'"),
        (f"{HERE}:not_a_spec", "must be a pergrad.audit.Spec, a function .* got int"),
        (f"{HERE}:losses", "raised TypeError: losses.. missing 3 required positional"),
        (f"{HERE}:raises", "raised KeyError: 'weights.pt'"),
        ("hf:model", "does not have the form hf:MODEL,DATASET"),
    ],
)
def test_what_means_no_spec_is_refused_with_the_reason(reference, message):
    with pytest.raises(AuditError, match=message):
        load_spec(reference)


def test_a_module_that_cannot_be_imported_is_refused_with_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_train.py").write_text("1 / 0")
    (tmp_path / "wanting_train.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AuditError, match=r"'broken_train' raised ZeroDivisionError"):
        load_spec("broken_train:spec")
    with pytest.raises(AuditError, match=r"it needs 'no_such_library', which is not installed"):
        load_spec("wanting_train:spec")


def test_modules_of_the_current_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "own_train.py").write_text("from tests.audit.cases import mlp")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p != str(tmp_path)])
    assert len(load_spec("own_train:mlp").dataset) == cases.SIZE
