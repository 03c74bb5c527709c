"""The commands in this process: what they print, and their exit codes."""

import os
import re
from pathlib import Path

import pytest

import pergrad
from pergrad.cli import main
from pergrad.cli.app import app
from tests.audit.cases import SIZE

CASES = "tests.audit.cases"


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Run the command in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run


def test_audit_writes_results_and_report_and_says_where(command, tmp_path):
    code, out, _ = command("audit", f"{CASES}:mlp", "--output", "out")
    assert code == 0
    assert "out/report.html" in out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    expected = {"samples.parquet", "duplicates.parquet", "summary.json", "report.html"}
    assert expected <= names


def test_report_is_made_again_from_the_folder_alone(command, tmp_path):
    command("audit", f"{CASES}:mlp", "-o", "out")
    (tmp_path / "out/report.html").unlink()
    code, out, _ = command("report", "out")
    assert code == 0
    assert (tmp_path / "out/report.html").exists()
    assert "out/report.html" in out


@pytest.mark.parametrize("folder", ["missing", "empty", "file", "unfinished"])
def test_report_of_no_results_is_refused_in_one_line(command, tmp_path, folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished/audit.json").write_text("{}")
    code, out, err = command("report", folder)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert folder in err


def test_an_earlier_audit_that_is_none_is_refused_before_anything_is_computed(command, tmp_path):
    code, _, err = command("audit", f"{CASES}:mlp", "-o", "out", "--before", "none")
    assert (code, err.count("\n")) == (2, 1)
    assert "no results folder none" in err
    assert not (tmp_path / "out").exists()


HOSTILE = ["[/b]", "[red]x", "a\x1b[31mb\x07"]


def test_names_are_printed_as_they_are_and_without_codes_of_control(command, tmp_path):
    (tmp_path / "model.py").write_text("import torch\nmodel = torch.nn.Linear(1, 3)\n")
    rows = "".join(f"{n},{HOSTILE[n % 3]}\n" for n in range(30))
    (tmp_path / "data.csv").write_text(f"a,label\n{rows}")
    code, out, err = command("audit", "model.py", "data.csv", "-o", "out [/b]")
    assert code == 0
    assert "classes: [/b], [red]x, a [31mb" in err
    assert "report: out [/b]/report.html" in out
    assert "\x1b" not in out + err
    assert command("report", "out [/b]")[0] == 0


def test_verify_shows_the_table_and_exits_with_0(command):
    code, out, _ = command("verify", f"{CASES}:mlp", "--dtype", "float64")
    assert code == 0
    assert "all right: 4 parameters" in out


def test_verify_of_wrong_gradients_exits_with_1(command, monkeypatch):
    verify = pergrad.verify

    def wrong(model, loss, *batch, **options):
        return verify(model, lambda model, x, y: loss(model, x, y) / x.sum(), *batch, **options)

    monkeypatch.setattr(pergrad, "verify", wrong)
    code, out, _ = command("verify", f"{CASES}:mlp")
    assert code == 1
    assert "not right" in out


def test_explain_shows_the_rungs(command):
    code, out, _ = command("explain", f"{CASES}:mlp", "--samples", 3)
    assert code == 0
    assert "OuterProduct" in out
    assert "for 3 samples" in out


BAD = [
    (["audit", "no_such:spec"], "no module 'no_such'"),
    (["audit", f"{CASES}:missing"], "has no attribute 'missing'"),
    (["audit", f"{CASES}:not_a_spec"], "must be a pergrad.audit.Spec"),
    (["audit", f"{CASES}:bad_item", "--strict"], "item 17 of the data set differs from item 0"),
    (["audit", f"{CASES}:scalar_loss"], "loss of each sample, shape (2,), got a scalar"),
    (["audit", f"{CASES}:batch_norm"], "BatchNorm in training mode"),
    (["audit", f"{CASES}:mlp", "--device", "cuda:7"], "device 'cuda:7'"),
    (["audit", f"{CASES}:mlp", "--device", "gpu"], "device 'gpu'"),
    (["audit", f"{CASES}:mlp", "--subset", "900"], "expected 1 to 60 samples"),
    (["audit", f"{CASES}:mlp", "--dtype", "int8"], "int8"),
    (["audit", f"{CASES}:mlp", "--batch-size", "0"], "batch-size"),
    (["audit", f"{CASES}:mlp", "--output", "taken"], "is a file"),
    (["audit", f"{CASES}:mlp", "--output", "foreign"], "holds no audit (notes.txt)"),
    (["audit", "own_model.py"], "it has a model: name its data too, such as data.csv"),
    (["audit"], "REFERENCE"),
    (["audti"], "audti"),
    (["verify", f"{CASES}:scalar_loss"], "got a scalar"),
    (["explain", f"{CASES}:batch_norm"], "BatchNorm in training mode"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_clear_line_and_exit_code_2(command, tmp_path, arguments, message):
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "own_model.py").write_text("import torch\nmodel = torch.nn.Linear(1, 2)\n")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/notes.txt").write_text("mine")
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("pergrad: ")
    assert err.count("\n") == 1
    assert (tmp_path / "taken").read_text() == "mine"
    assert os.listdir(tmp_path / "foreign") == ["notes.txt"]


def test_no_space_left_is_one_line_and_exit_code_3(command, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    code, _, err = command("audit", f"{CASES}:mlp")
    assert code == 3
    assert re.fullmatch(
        r"pergrad: no space left to write pergrad-audit/\S+: free some "
        r"and run the same command to resume; .*\n",
        err,
    )


def test_no_space_for_the_report_is_one_line_and_exit_code_3(command, tmp_path, monkeypatch):
    command("audit", f"{CASES}:mlp", "-o", "out")

    def full(*_, **__):
        raise OSError(28, "No space left on device", "out/report.html")

    with monkeypatch.context() as patched:
        for method in ("write_text", "write_bytes"):
            patched.setattr(Path, method, full)
        code, _, err = command("report", "out")
    assert code == 3
    assert err.count("\n") == 1
    assert "out/report.html" in err


def test_ctrl_c_says_that_the_same_command_resumes(command, monkeypatch):
    arguments = ("audit", f"{CASES}:interrupts", "--batch-size", 16)
    monkeypatch.setenv("PRESS_CTRL_C", "1")
    code, _, err = command(*arguments)
    assert code == 130
    assert err == (
        f"pergrad: interrupted; 32 of {SIZE} samples in pergrad-audit: "
        "run the same command to resume\n"
    )
    monkeypatch.delenv("PRESS_CTRL_C")
    code, _, err = command(*arguments)
    assert code == 0
    assert f"resuming: 32 of {SIZE} samples are already computed" in err


def test_a_second_ctrl_c_while_saving_leaves_the_folder_whole(command, monkeypatch):
    arguments = ("audit", f"{CASES}:interrupts", "--batch-size", 16)
    monkeypatch.setenv("PRESS_CTRL_C", "1")
    replace = Path.replace

    def pressed_again(path, target):
        if "chunks" in str(path):
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", pressed_again)
        code, _, err = command(*arguments)
    assert code == 130
    assert "run the same command to resume" in err
    monkeypatch.delenv("PRESS_CTRL_C")
    assert command(*arguments)[0] == 0


def test_every_option_has_a_help(command):
    code, out, _ = command("audit", "--help")
    assert code == 0
    for parameter in app.registered_commands[0].callback.__annotations__:
        assert parameter == "return" or parameter.replace("_", "-") in out.lower()


def test_exit_codes_are_in_the_help(command):
    assert "Exit codes: 0 done" in command("--help")[1].replace("\n", " ")
