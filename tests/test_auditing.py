import shutil

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pergrad
from pergrad.errors import AuditError
from pergrad.reports.explorer import payload

WRONG = list(range(6))
ODD = "caf\udce9.png"  # a name of a file that is not in UTF-8, as Python reads it


def problem(samples=120):
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(samples) % 3
    x = 3 * torch.eye(3)[truth] + torch.randn(samples, 3, generator=generator)
    x[-1] = x[-4]  # a copy
    given = truth.clone()
    given[WRONG] = (given[WRONG] + 1) % 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, TensorDataset(x, given)


@pytest.fixture(scope="module")
def audit():
    return pergrad.Audit.run(*problem(), quiet=True, known_wrong=WRONG)


def test_one_line_finds_wrong_labels_and_copies(audit) -> None:
    labels = audit.issues[audit.issues["kind"] == "label"]
    assert set(WRONG) <= set(labels["index"])
    assert (labels["label"] != labels["suggested"]).all()
    assert audit.summary["grade"]["average_precision"] > 0.9
    assert [116, 119] in audit.duplicates[["index_a", "index_b"]].to_numpy().tolist()
    assert audit.duplicates["group"].min() == 1
    copies = audit.issues[audit.issues["kind"] == "duplicate"].set_index("index")
    assert copies.loc[119, "why"] == "to the model the same as 116 (group 1)"
    assert copies.loc[119, "score"] == pytest.approx(1.0)


def test_copies_with_different_labels_are_said() -> None:
    model, data = problem()
    data.tensors[1][119] = (data.tensors[1][116] + 1) % 3
    audit = pergrad.Audit.run(model, data, quiet=True)
    copies = audit.issues[audit.issues["kind"] == "duplicate"].set_index("index")
    assert copies.loc[116, "why"] == "to the model the same as 119 (group 1, labels differ)"
    assert "In it the labels differ." in repr(audit)


def test_samples_have_a_row_each_in_order_of_rank(audit) -> None:
    assert audit.samples["rank"].tolist() == list(range(1, 121))
    assert len(audit) == 120
    columns = {"doubt", "suggested", "confidence", "predicted", "outlier", "duplicate_group"}
    assert columns <= set(audit.samples.columns)


def test_inferences_are_printed(capsys) -> None:
    pergrad.Audit.run(*problem(20))
    said = capsys.readouterr().err
    assert "loss: cross-entropy of the logits" in said
    assert "labels: the target, one of 3 classes" in said


def test_a_finished_audit_is_opened_by_its_path(tmp_path, capsys) -> None:
    made = pergrad.Audit.run(*problem(30), tmp_path / "a")
    said = capsys.readouterr().err
    assert f"report: {tmp_path / 'a/report.html'}" in said
    assert f"MB in {tmp_path / 'a/chunks'}, to change the report" in said
    opened = pergrad.Audit(tmp_path / "a")
    assert opened.samples.equals(made.samples)
    assert (tmp_path / "a/report.html").exists()
    with pytest.raises(AuditError, match="no results folder"):
        pergrad.Audit(tmp_path / "b")


def test_without_a_path_the_folder_goes_with_the_object_unless_it_is_saved(tmp_path) -> None:
    made = pergrad.Audit.run(*problem(30), quiet=True)
    folder = made.path
    made.save(tmp_path / "kept")
    made.report(tmp_path / "page.html")
    del made
    assert not folder.exists()
    assert len(pergrad.Audit(tmp_path / "kept")) == 30
    assert "<!doctype html>" in (tmp_path / "page.html").read_text()


def test_tables_are_there_after_the_folder_is_gone(tmp_path) -> None:
    made = pergrad.Audit.run(*problem(30), tmp_path / "a", quiet=True)
    shutil.rmtree(tmp_path / "a")
    assert len(made.samples) == len(made) == 30
    assert list(made.duplicates) == ["index_a", "index_b", "cosine", "group"]
    assert made._repr_html_().startswith("<iframe")
    assert repr(made).startswith(f"Audit of {tmp_path / 'a'}\n")


def test_an_audit_that_fails_leaves_no_folder_without_a_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model, data = problem(30)
    with pytest.raises(AuditError, match="label failed"):
        pergrad.Audit.run(model, data, quiet=True, label=lambda item: 1 / 0)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AuditError, match="label failed"):
        pergrad.Audit.run(model, data, tmp_path / "a", quiet=True, label=lambda item: 1 / 0)
    assert (tmp_path / "a").exists()


def test_the_model_keeps_its_mode(tmp_path) -> None:
    model, data = problem(20)
    model = nn.Sequential(model, nn.Dropout(0.5))
    model.train()
    pergrad.Audit.run(model, data, quiet=True)
    assert all(module.training for module in model.modules())


def test_a_typo_suggests_the_name_that_exists() -> None:
    with pytest.raises(AuditError, match="no option 'know_wrong': did you mean 'known_wrong'"):
        pergrad.Audit.run(*problem(20), know_wrong=[1])


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        (
            (nn.CrossEntropyLoss(),),
            {},
            "path must be a folder, got CrossEntropyLoss: did you mean loss=",
        ),
        ((3,), {}, "path must be a folder, got int"),
        (
            (),
            {"loss": nn.CrossEntropyLoss},
            r"is a class: pass an object of it, CrossEntropyLoss\(\)",
        ),
        (
            (),
            {"loss": lambda out, y: out},
            r"with 3 arguments, but takes \(out, y\): for a loss of outputs",
        ),
        ((), {"options": {}}, "options must be AuditOptions, got dict"),
        ((), {"watch": 3}, "watch must have begin, advance and say, got int"),
        ((), {"shown": "5"}, "shown must be a whole number, got '5'"),
    ],
)
def test_arguments_of_other_kinds_are_refused_in_one_sentence(arguments, fields, message) -> None:
    with pytest.raises(AuditError, match=message):
        pergrad.Audit.run(*problem(20), *arguments, quiet=True, **fields)
    with pytest.raises(AuditError, match=r"the class Sequential: pass an object of it"):
        pergrad.Audit.run(nn.Sequential, problem(20)[1])


def test_it_shows_itself_in_a_notebook_and_as_text(audit) -> None:
    assert audit._repr_html_().startswith('<iframe srcdoc="')
    assert "labels look wrong" in repr(audit)


def test_regression_ranks_by_the_loss_and_says_so() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    found = pergrad.Audit.run(nn.Linear(3, 1), TensorDataset(x, x.sum(1)), quiet=True)
    assert found.summary["ranked_by"] == "loss"
    assert "label" not in set(found.issues["kind"])


EDGES = {
    "no known label": (
        lambda y: torch.full_like(y, -100),
        "no sample has a label that is a class: labels are not judged",
    ),
    "one class": (lambda y: torch.zeros_like(y), "all samples have the same label"),
    "a class of one": (
        lambda y: torch.where(torch.arange(len(y)) == 3, 2, y % 2),
        "classes with a single sample cannot be judged: 2",
    ),
}


@pytest.mark.parametrize("case", EDGES)
def test_labels_that_cannot_be_judged_are_said(case) -> None:
    model, data = problem(30)
    x, y = data.tensors
    change, words = EDGES[case]
    found = pergrad.Audit.run(model, TensorDataset(x, change(y)), quiet=True)
    assert any(words in note for note in found.summary["notes"])
    assert f"note: {words}" in repr(found)


def test_a_data_set_of_one_and_samples_that_are_all_alike_have_findings() -> None:
    model, data = problem(30)
    x, y = data.tensors
    one = pergrad.Audit.run(model, TensorDataset(x[:1], y[:1]), quiet=True)
    assert "One sample was audited" in repr(one)
    alike = pergrad.Audit.run(model, TensorDataset(x[:1].expand(30, -1), y), quiet=True)
    assert alike.summary["label_errors"]["expected"] is None
    assert alike.summary["duplicate_groups"] == 1
    assert alike.summary["duplicates"] == 30 * 29 // 2
    assert "the labels differ" in repr(alike)


def test_samples_that_are_not_finite_are_named_and_the_rest_is_certified() -> None:
    model, data = problem(40)
    data.tensors[0][3] = torch.nan
    audit = pergrad.Audit.run(model, data, quiet=True)
    assert "1 sample has a loss or gradient that is not finite: #3." in repr(audit)
    assert audit.issues["kind"][0] == "not finite"
    assert audit.summary["certificate"]["ok"]


def test_a_sample_that_is_not_finite_has_no_prediction_and_no_doubt_in_the_page() -> None:
    model, data = problem(60)
    inputs, labels = (part.clone() for part in data.tensors)
    inputs[7] = float("nan")
    found = pergrad.Audit.run(model, TensorDataset(inputs, labels), quiet=True)
    row = found.samples.set_index("index").loc[7]
    assert row["rank"] == 1
    assert row[["predicted", "suggested"]].isna().all()
    shown = payload(found._results)
    assert shown["doubt"][shown["index"].index(7)] is None
    assert None not in shown["doubt"][1:]


def test_another_value_in_a_label_function_changes_the_report(tmp_path) -> None:
    model, data = problem(30)
    for names in (["a", "b", "c"], ["d", "e", "f"]):
        audit = pergrad.Audit.run(
            model, data, tmp_path / "a", quiet=True, label=lambda item, n=names: n[item[1]]
        )
        assert set(audit.samples["label"]) == set(names)
    audit = pergrad.Audit.run(model, data, tmp_path / "a", quiet=True, classes=["x", "y", "z"])
    assert set(audit.samples["label"]) == {"x", "y", "z"}


def test_names_that_are_no_text_are_escaped_everywhere(tmp_path) -> None:
    class Pictures(list):
        def __getitem__(self, index):
            if index == 5:
                raise OSError(f"cannot read {ODD}")
            return super().__getitem__(index)

    model, data = problem(40)
    for fields in ({"label": lambda item: f"{ODD} {int(item[1])}"}, {"classes": ["a", ODD, "c"]}):
        audit = pergrad.Audit.run(
            *(
                model,
                Pictures(data),
                tmp_path / str(len(fields["classes"]) if "classes" in fields else 0),
            ),
            **{"quiet": True, "show": lambda item: ODD, "name": ODD, **fields},
        )
        page = audit.report().read_text()
        assert page.count("caf\\udce9.png") > 3
        assert any("caf\\udce9.png" in label for label in audit.samples["label"])


def test_an_error_in_the_length_says_where() -> None:
    class Data(list):
        def __len__(self):
            raise TypeError("unknown")

    with pytest.raises(
        AuditError, match=r"the length of the data set raised TypeError.*test_auditing.py"
    ):
        pergrad.Audit.run(problem(20)[0], Data([1]))


def test_unknown_labels_are_neither_judged_nor_shown() -> None:
    model, data = problem(40)
    data.tensors[1][7] = -100
    audit = pergrad.Audit.run(model, data, quiet=True)
    row = audit.samples.set_index("index").loc[7]
    assert row["label"] is None or row["label"] != row["label"]
    assert "None" not in audit.report().read_text().split('id="classes"')[1].split("</section>")[0]


def test_a_long_table_of_classes_is_folded(tmp_path) -> None:
    labels = torch.arange(120) % 40
    data = TensorDataset(torch.eye(40)[labels] + 0.1 * torch.randn(120, 40), labels)
    found = pergrad.Audit.run(nn.Linear(40, 40), data, quiet=True)
    page = found.report(tmp_path / "page.html").read_text()
    assert "<summary>Show the next 10</summary>" in page
    assert all(page.count(f'data-class="{label}"') == 1 for label in range(40))
