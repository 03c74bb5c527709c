import numpy as np
import pandas as pd
import pytest
import torch

from pergrad.audit import load_spec
from pergrad.audit.subject.files import FileData
from pergrad.audit.subject.inferring import inferred_spec
from pergrad.errors import AuditError

ROWS = "a,b,label\n1,2.5,0\n3,4,1\n5,6,1\n"
MODEL = "import torch\nmodel = torch.nn.Linear(2, 2)\n"


def test_columns_of_numbers_are_the_input_and_the_label_is_the_target(tmp_path) -> None:
    (tmp_path / "data.csv").write_text(ROWS)
    said = []
    data = FileData(tmp_path / "data.csv", say=said.append)
    x, y = data[0]
    assert x.tolist() == [1.0, 2.5]
    assert (len(data), int(y)) == (3, 0)
    assert data.shown(data[1]) == "a 3, b 4"
    assert "2 columns of numbers (a, b), target 'label'" in said[0]


def test_a_target_that_is_no_class_is_shown(tmp_path) -> None:
    (tmp_path / "data.csv").write_text("rooms,price\n2,10.5\n3,12.25\n")
    data = FileData(tmp_path / "data.csv")
    assert data.shown(data[1]) == "rooms 3 → price 12.25"


def test_json_lines_and_texts_are_read_too(tmp_path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "hi", "label": 1}\n{"text": "oh", "label": 0}\n')
    data = FileData(tmp_path / "data.jsonl")
    assert (data.text, data[0][0], data.shown(data[0])) == ("text", "hi", "hi")


def test_lists_of_numbers_are_inputs(tmp_path) -> None:
    frame = pd.DataFrame({"name": list("abc"), "vector": [[1.0, 2.0], None, [3.0, 4.0]]})
    frame["label"] = [0, 1, 1]
    frame.to_parquet(tmp_path / "data.parquet")
    frame.to_json(tmp_path / "data.jsonl", orient="records", lines=True)
    for name in ("data.parquet", "data.jsonl"):
        said = []
        data = FileData(tmp_path / name, say=said.append)
        assert data[2][0].tolist() == [3.0, 4.0]
        assert data.shown(data[0]) == "1, 2"
        assert said[0].endswith("lists of 2 numbers (vector), target 'label' (not used: name)")
        with pytest.raises(ValueError, match=r"row 1 of .* is empty in column 'vector'"):
            data[1]
    assert FileData(tmp_path / "data.parquet", prefers_text=True)[1][0] == "b"
    frame["vector"] = [[1.0] * 20, [2.0] * 20, [3.0] * 20]
    data = FileData(frame)
    assert data.shown(data[0]) == f"{', '.join(['1'] * 8)}, ... (20 numbers)"
    frame["vector"] = [[1.0], [2.0, 3.0], []]
    with pytest.raises(AuditError, match="has lists of 0 to 2 numbers: inputs need one length"):
        FileData(frame)


def test_labels_that_are_strings_are_classes_in_order(tmp_path) -> None:
    (tmp_path / "data.csv").write_text("a,kind\n1,dog\n2,cat\n")
    said = []
    assert FileData(tmp_path / "data.csv", say=said.append)._targets.tolist() == [1, 0]
    assert said[0].startswith("classes: cat, dog in alphabetical order")
    assert FileData(tmp_path / "data.csv", ["dog", "cat"])._targets.tolist() == [0, 1]
    with pytest.raises(AuditError, match=r"label 'cat' .* is none of the classes given"):
        FileData(tmp_path / "data.csv", ["dog"])


def test_blanks_around_labels_do_not_count(tmp_path) -> None:
    (tmp_path / "data.csv").write_text("a,kind\n1, dog\n2,cat \n3,dog\n4,  \n")
    data = FileData(tmp_path / "data.csv")
    assert data.classes == ["cat", "dog"]
    assert [int(data[n][1]) for n in range(3)] == [1, 0, 1]
    with pytest.raises(ValueError, match=r"row 3 of .* is empty in column 'kind'"):
        data[3]


def test_a_model_and_a_file_are_a_spec(tmp_path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "data.csv").write_text(ROWS)
    said = []
    spec = load_spec(str(tmp_path / "model.py"), str(tmp_path / "data.csv"), say=said.append)
    assert spec.title == "data.csv"
    assert spec.loss(spec.model, torch.zeros(3, 2), torch.tensor([0, 1, 1])).shape == (3,)
    assert "loss: cross-entropy of the logits" in said


def test_other_columns_are_a_reference_to_a_data_frame(tmp_path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "data.csv").write_text("id,a,b,label\n1,2,3,0\n2,4,5,1\n")
    (tmp_path / "chosen.py").write_text(
        "import pathlib, pandas\n"
        "rows = pandas.read_csv(pathlib.Path(__file__).parent / 'data.csv')[['a', 'b', 'label']]\n"
    )
    spec = load_spec(str(tmp_path / "model.py"), f"{tmp_path / 'chosen.py'}:rows")
    assert spec.dataset[1][0].tolist() == [4.0, 5.0]


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (MODEL, "", "cannot read|has 0 rows"),
        (MODEL, "a,b\n", "has 0 rows"),
        (MODEL, "a,b,label\n1,2,\n", "column 'label' of .* is empty"),
        (
            "model = 1 / 0",
            ROWS,
            r"raised ZeroDivisionError: division by zero \(.*model_file.py, line 1",
        ),
        ("model = 3", ROWS, "must be an nn.Module"),
        (f"{MODEL}classes = 2", ROWS, "spec.classes must be a list of names, .* got 2"),
        (
            f"{MODEL}loss = model(torch.zeros(1, 2)).sum()",
            ROWS,
            "model_file.py defines 'loss', a Tensor: by this name the audit takes a function",
        ),
        ("modle = 3", ROWS, "has no attribute 'model' .did you mean 'modle'"),
        (MODEL, "text,label\nhi,0\n", "define `tokenizer`"),
        (
            "import torch\nmodel = torch.nn.Linear(1, 1)\n",
            "a,label\n1,x\n2,y\n3,z\n",
            "the labels are names of 3 classes, but the model has one output",
        ),
        (
            MODEL,
            "id,a,b,label\n1,2,3,0\n",
            r"inputs are 3 columns of numbers \(id, a, b\): to choose others, pass a data frame",
        ),
        (
            MODEL,
            "a,b,label\n1,2,x\n3,4,y\n5,6,z\n",
            r"target of sample 2 is 2 \('z' of x, y, z\), but the model has 2 outputs",
        ),
    ],
)
def test_bad_files_are_named_in_one_sentence(tmp_path, model, data, message) -> None:
    (tmp_path / "model_file.py").write_text(model)
    (tmp_path / "data.csv").write_text(data)
    with pytest.raises(AuditError, match=message) as raised:
        load_spec(str(tmp_path / "model_file.py"), str(tmp_path / "data.csv"))
    assert "\n" not in str(raised.value)


def test_variables_with_a_typo_are_said(tmp_path) -> None:
    more = "clases = ['a', 'b']\nlabels = torch.zeros(3)\ndef shows(item): return 'x'\n"
    (tmp_path / "typo_model.py").write_text(MODEL + more)
    (tmp_path / "data.csv").write_text(ROWS)
    said = []
    load_spec(str(tmp_path / "typo_model.py"), str(tmp_path / "data.csv"), say=said.append)
    hints = [line for line in said if "did you mean" in line]
    assert [hint.partition("typo_model.py: ")[2] for hint in hints] == [
        "'clases' is not used: did you mean 'classes'?",
        "'shows' is not used: did you mean 'show'?",
    ]


def test_missing_files_suggest_the_name_that_exists(tmp_path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with pytest.raises(AuditError, match=r"no file .*modle.py: did you mean .*model.py"):
        load_spec(str(tmp_path / "modle.py"), "data.csv")
    (tmp_path / "rows.csv").write_text(ROWS)
    with pytest.raises(AuditError, match=r"neither a file of rows .*: did you mean .*rows.csv"):
        load_spec(str(tmp_path / "model.py"), str(tmp_path / "rows.cvs"))
    with pytest.raises(AuditError, match=r"is not a file of rows.*; did you mean .*rows.csv"):
        inferred_spec(torch.nn.Linear(2, 2), str(tmp_path / "rows.cvs"))
    with pytest.raises(AuditError, match=r"no file .*missing.csv"):
        load_spec(str(tmp_path / "model.py"), str(tmp_path / "missing.csv"))


def test_rows_with_empty_cells_cannot_be_read_and_the_others_can(tmp_path) -> None:
    (tmp_path / "data.csv").write_text("a,b,label\n1,2,x\n3,,y\n5,6,\n7,8,y\n")
    said = []
    data = FileData(tmp_path / "data.csv", say=said.append)
    assert "data: rows with empty cells: 2" in said
    assert (data[0][0].tolist(), int(data[3][1])) == ([1.0, 2.0], 1)
    with pytest.raises(ValueError, match=r"row 1 of .*data.csv is empty in column 'b'"):
        data[1]
    with pytest.raises(ValueError, match=r"row 2 of .*data.csv is empty in column 'label'"):
        data[2]


def test_a_text_without_letters_is_an_empty_cell(tmp_path) -> None:
    (tmp_path / "data.csv").write_text('text,label\nhi,0\n"",1\n')
    with pytest.raises(ValueError, match=r"row 1 of .* is empty in column 'text'"):
        FileData(tmp_path / "data.csv")[1]


def test_a_label_is_found_whatever_the_case_of_its_name(tmp_path) -> None:
    (tmp_path / "data.csv").write_text("Label,a\n1,2.5\n")
    assert FileData(tmp_path / "data.csv").label == "Label"


def test_texts_beside_numbers_are_taken_for_a_tokenizer(tmp_path) -> None:
    (tmp_path / "data.csv").write_text("id,text,label\n7,hi,0\n8,oh,1\n")
    assert FileData(tmp_path / "data.csv").columns == ["id"]
    assert FileData(tmp_path / "data.csv", prefers_text=True)[0][0] == "hi"


def test_targets_that_are_too_large_are_refused() -> None:
    frame = pd.DataFrame({"a": [1], "label": np.array([2**63], dtype=np.uint64)})
    with pytest.raises(
        AuditError, match="a target in column 'label' of the data frame is too large"
    ):
        FileData(frame)


def test_data_that_is_no_file_and_no_reference_is_refused(tmp_path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with pytest.raises(AuditError, match=r"'data.csv.gz' is neither a file of rows \(.csv, "):
        load_spec(str(tmp_path / "model.py"), "data.csv.gz")
