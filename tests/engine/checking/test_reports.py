"""Columns of a table line up, whatever is in them, and reports show themselves in one line."""

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.checking.reports import text_table

HEADER = ["name", "size", "what it is"]
ROWS = [["a", "100000", ""], ["a long name", "2", "x"], ["", "", "y"]]


def test_every_column_begins_at_one_place_in_all_lines() -> None:
    lines = text_table(HEADER, ROWS).split("\n")
    starts = [lines[0].index(cell) for cell in HEADER]
    assert starts == [0, len("a long name") + 2, len("a long name") + 2 + len("100000") + 2]
    for line, row in zip(lines, [HEADER, *ROWS], strict=True):
        for start, cell in zip(starts, row, strict=True):
            assert line[start:].startswith(cell)


def test_no_line_ends_with_spaces() -> None:
    assert all(line == line.rstrip() for line in text_table(HEADER, ROWS).split("\n"))


def test_a_table_may_be_without_rows() -> None:
    assert text_table(HEADER, []) == "name  size  what it is"


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        text_table(HEADER, [["a"]])


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def test_reports_show_their_state_and_shapes_in_one_line() -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)), torch.ones(5, 2)
    names = "4 parameters (0.weight (3, 2), 0.bias (3,), 2.weight (4, 3), ...)"
    certified = pergrad.certify(model, loss, x, quiet=True)
    assert repr(certified) == f"<CertifyReport: certified, {names}, 5 samples>"
    verified = pergrad.verify(model, loss, x, quiet=True)
    shown = f"{len(verified.samples)} samples compared"
    assert repr(verified) == f"<VerifyReport: all right, {names}, {shown}>"
    assert repr(pergrad.explain(model, loss, x)) == f"<ExplainReport: {names}, 5 samples>"


def test_repr_of_a_denied_certificate_says_why() -> None:
    class Mixing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input - input.mean(0))

    report = pergrad.certify(Mixing(2, 3), loss, torch.randn(5, 2), quiet=True)
    assert repr(report).startswith("<CertifyReport: not right (the model mixes samples: ")
    assert "\n" not in repr(report)


def test_a_report_names_the_parameters_that_no_sample_touches() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 3), "spare": nn.Linear(2, 3)})
    report = pergrad.verify(model, lambda m, x: m["used"](x).sum(1), torch.ones(5, 2), quiet=True)
    assert report.untouched == ("spare.weight", "spare.bias")
