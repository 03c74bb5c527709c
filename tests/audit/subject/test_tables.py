import json
import pathlib

import pandas as pd
import pytest

from pergrad.audit.subject.tables import read_frame, read_table
from pergrad.errors import AuditError

ROWS = [["a", "b", "label"], ["1", "2.5", "x"], ["3", "4", "ü"]]


def read(folder: pathlib.Path, name: str, content: str | bytes, said: list[str] | None = None):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_table(path, (said if said is not None else []).append)


@pytest.mark.parametrize(
    ("separator", "word"),
    [(",", None), (";", "semicolons"), ("\t", "tabs"), ("|", "bars")],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_columns_are_read_whatever_separates_them(tmp_path, separator, word, ending, encoding):
    said: list[str] = []
    text = ending.join(separator.join(row) for row in ROWS)
    table = read(tmp_path, "data.csv", text.encode(encoding), said)
    assert table.to_pydict() == {"a": [1, 3], "b": [2.5, 4.0], "label": ["x", "ü"]}
    assert said == ([] if word is None else [f"data: columns are separated by {word}"])


def test_separators_within_quotes_do_not_count(tmp_path):
    table = read(tmp_path, "data.csv", '"a;b;c;d",label\n1,0\n')
    assert table.column_names == ["a;b;c;d", "label"]


def test_a_first_line_of_numbers_is_a_row(tmp_path):
    said: list[str] = []
    table = read(tmp_path, "data.csv", "1,2,0\n3,4,1\n", said)
    assert table.to_pydict() == {"f0": [1, 3], "f1": [2, 4], "f2": [0, 1]}
    assert said == ["data: the first line has numbers, so columns have no names: f0, f1, ..."]


def test_types_that_show_late_in_a_long_file_are_found(tmp_path):
    lines = [f"{n},{'' if n < 200_000 else 'text'},{n % 2}" for n in range(200_010)]
    lines[-1] = "0.5,text,1"
    table = read(tmp_path, "data.csv", "\n".join(["a,b,label", *lines]))
    assert table["a"][-1].as_py() == 0.5
    assert table["b"][-1].as_py() == "text"


def test_lines_may_break_within_quotes_anywhere_in_a_long_file(tmp_path):
    texts = ["first\n\nsecond, third " * 20] * 5000
    table = read(tmp_path, "data.csv", "text,label\n" + "".join(f'"{t}",1\n' for t in texts))
    assert table["text"].to_pylist() == texts


def test_json_is_an_object_on_each_line_or_a_list_of_objects(tmp_path):
    rows = [{"a": 1, "label": "x"}, {"a": None, "b": 2, "label": "y"}]
    expected = {"a": [1, None], "label": ["x", "y"], "b": [None, 2]}
    for text in (json.dumps(rows), "\ufeff " + json.dumps(rows, indent=1)):
        assert read(tmp_path, "data.json", text).to_pydict() == expected
    lines = "\n".join(map(json.dumps, rows))
    assert read(tmp_path, "data.jsonl", lines).to_pydict() == expected
    long = json.dumps({"text": "long " * 1_000_000, "label": 1})
    assert read(tmp_path, "data.jsonl", f"{long}\n{long}").num_rows == 2


def test_blanks_around_names_of_columns_do_not_count(tmp_path):
    table = read(tmp_path, "data.csv", "a, label ,b\n1, x, 2\n")
    assert table.column_names == ["a", "label", "b"]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_numbers_may_have_decimal_commas(tmp_path, separator):
    said: list[str] = []
    rows = [["a", "b", "text", "label"], ["-1,5", "2", "1,2,3", "x"], ["", "3", "3,5", "y"]]
    text = "\n".join(separator.join(row) for row in rows)
    found = read(tmp_path, "data.csv", text, said).to_pydict()
    assert found["a"] == [-1.5, None]
    assert (found["b"], found["text"]) == ([2, 3], ["1,2,3", "3,5"])
    assert said[-1] == "data: numbers have decimal commas"


def test_an_index_that_pandas_has_written_is_left_out(tmp_path):
    frame = pd.DataFrame({"a": [0.5, 1.5, 2.5], "label": [0, 1, 0]})
    for part in (frame, frame[frame["a"] != 1.5]):
        said: list[str] = []
        assert read(tmp_path, "data.csv", part.to_csv(), said).column_names == ["a", "label"]
        assert said == ["data: the column without a name is an index of pandas: not used"]
        part.to_parquet(tmp_path / "data.parquet")
        assert read_table(tmp_path / "data.parquet").column_names == ["a", "label"]
    read_again = frame.rename_axis("Unnamed: 0").to_csv()
    assert read(tmp_path, "data.csv", read_again).column_names == ["a", "label"]
    # A column without a name that does not count is data.
    assert read(tmp_path, "data.csv", ",label\n5,0\n3,1\n").column_names == ["", "label"]


def test_json_may_be_one_object_of_columns(tmp_path):
    frame = pd.DataFrame({"a": [0.5, 1.5], "label": ["x", "y"]})
    for text in (frame.to_json(), json.dumps(frame.to_dict("list"))):
        assert read(tmp_path, "data.json", text).to_pydict() == frame.to_dict("list")
    one = '{"a": [1, 2], "label": "x"}'
    assert read(tmp_path, "data.json", one).to_pydict() == {"a": [[1, 2]], "label": ["x"]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.csv", "", "cannot read .*: Empty CSV file"),
        ("data.csv", "a,a,label\n1,2,3\n", "has several columns 'a'"),
        ("data.csv", b"text,label\n" + b"caf\xe9,1\n", "'text' of .* is not text in UTF-8"),
        ("data.csv", b"caf\xe9,label\n1,2\n", "is not text in UTF-8"),
        ("data.csv", "a,label\n1,2,3\n", "cannot read .*: CSV parse error"),
        ("data.json", "[1, 2]", "the entries of its list must be objects"),
        ("data.json", '[{"a": 1', "cannot read .*"),
        ("data.json", '[{"a": 1}, {"a": "x"}]', "cannot read .*"),
        ("data.json", '[{"a": 100000000000000000000000000}]', "cannot read .*"),
        ("data.json", '{"a": 1', "cannot read .*: JSON parse error"),
        ("data.parquet", "PAR1xxxx", "cannot read .*"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, name, content, message):
    with pytest.raises(AuditError, match=message) as raised:
        read(tmp_path, name, content)
    assert "\n" not in str(raised.value)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "data.csv").mkdir()
    with pytest.raises(AuditError, match=r"cannot read .*data.csv"):
        read_table(tmp_path / "data.csv")


def test_frames_that_are_no_tables_are_refused_in_one_sentence():
    with pytest.raises(AuditError, match="the data frame has several columns 'a'"):
        read_frame(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(
        AuditError, match=r"Could not convert 'x'.*a column needs values of one type"
    ):
        read_frame(pd.DataFrame({"a": [1, "x"], "label": [0, 1]}))
