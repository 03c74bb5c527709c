"""Options are checked when they are made; a typo gets a suggestion."""

from __future__ import annotations

import pytest

from pergrad.errors import IndexingError
from pergrad.index.options import IndexOptions, Printing, split_options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"projection": "fourier"}, "projection must be one of 'count'"),
        ({"per": "word"}, "per must be 'sample' or 'token'"),
        ({"norms": "rough"}, "norms must be 'exact' or 'estimated'"),
        ({"dtype": "int8"}, "rows are stored as one of"),
        ({"compute_dtype": "int8"}, "compute_dtype must be one of"),
        ({"dim": 0}, "dim must be a positive integer, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a positive integer"),
        ({"chunk": -1}, "chunk must be a positive integer"),
        ({"workers": -1}, "workers must be 0 or more"),
    ],
)
def test_bad_values_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(IndexingError, match=message):
        IndexOptions(**given)  # type: ignore[arg-type]


def test_the_width_is_that_of_the_projection() -> None:
    assert IndexOptions().width == 2048
    assert IndexOptions(projection="two_sided").width == 256
    assert IndexOptions(projection="two_sided", dim=9).width == 9


def test_keywords_are_options_of_the_index_or_fields_of_the_spec() -> None:
    def show(item: object) -> str:
        return str(item)

    options, fields = split_options(IndexOptions(seed=3), {"dim": 8, "show": show})
    assert (options.seed, options.dim) == (3, 8)
    assert fields == {"show": show}
    with pytest.raises(IndexingError, match="no option 'projecton': did you mean 'projection'"):
        split_options(None, {"projecton": "count"})
    with pytest.raises(IndexingError, match="no option 'model'"):  # given by position
        split_options(None, {"model": 1})


def test_messages_are_printed_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    Printing().say("hello")
    Printing(quiet=True).say("silence")
    assert capsys.readouterr().err == "pergrad: hello\n"
