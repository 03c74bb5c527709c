"""The runner of the documentation's blocks finds what is wrong with a page."""

from pathlib import Path

import pytest

from tests.docs.blocks import run
from tests.docs.commands import problem_of


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


def test_blocks_share_names_and_their_output_is_compared(tmp_path: Path) -> None:
    text = '```python\na = 2\n```\n\n```python\nprint(a)\n```\n\n```text title="output"\n2\n```\n'
    assert run(page(tmp_path, text)) == 3


def test_other_output_is_an_error_that_shows_both(tmp_path: Path) -> None:
    text = '```python\nprint(1)\n```\n\n```text title="output"\n2\n```\n'
    with pytest.raises(AssertionError, match=r"expected:\n2\n\nprinted:\n1"):
        run(page(tmp_path, text))


def test_output_without_a_print_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="printed"):
        run(page(tmp_path, '```python\na = 1\n```\n\n```text title="output"\n```\n'))


@pytest.mark.parametrize(
    ("printed", "is_right"), [("took 1.5e-3 s", True), ("took -7 s", True), ("gave 2 s", False)]
)
def test_output_whose_numbers_vary_is_compared_without_them(
    printed: str, is_right: bool, tmp_path: Path
) -> None:
    block = 'text title="output; numbers vary"'
    path = page(tmp_path, f"```python\nprint('{printed}')\n```\n\n```{block}\ntook 2.5 s\n```\n")
    if is_right:
        run(path)
    else:
        with pytest.raises(AssertionError, match="gave"):
            run(path)


def test_code_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(page(tmp_path, "```python\n1 / 0\n```\n"))


@pytest.mark.parametrize("kind", ["", "py", "bash", "text", "pycon"])
def test_block_of_an_unknown_kind_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown kind of block"):
        run(page(tmp_path, f"```{kind}\n1\n```\n"))


@pytest.mark.parametrize(
    "command",
    [
        "make test ARGS='-k conv'  # some of them",
        "pip install .",
        'pip install ".[docs,bench]"',
        "python examples/clipping.py",
        "python -m benchmarks.table --write docs/benchmarks.md",
        "pergrad audit my_project:audit_spec --output results --batch-size=64",
        "pergrad --version",
        "torchrun --nproc-per-node 2 -m pergrad audit my_project:audit_spec",
    ],
)
def test_command_that_there_is_has_no_problem(command: str) -> None:
    assert problem_of(command) is None


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make tea", "no target tea"),
        ("pip install .[tea]", "no extra tea"),
        ("pip install tea", "only"),
        ("python examples/tea.py", "there is no examples/tea.py"),
        ("python -m tea", "no module tea"),
        ("pergrad tea", "fails"),
        ("pergrad audit my_project:audit_spec --tea", "does not name ['--tea']"),
        ("torchrun -m pergrad audit my_project:audit_spec --tea", "does not name"),
        ("rm -rf /", "unknown kind"),
    ],
)
def test_command_that_there_is_not_is_found(command: str, problem: str) -> None:
    assert problem in str(problem_of(command))


def test_console_block_without_a_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="without a command"):
        run(page(tmp_path, "```console\nmake test\n```\n"))


def test_command_about_a_file_of_the_page_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        '```python title="here.py"\nspec = 1\n```\n\n```console\n$ pergrad explain here:spec\n```\n'
    )
    with pytest.raises(AssertionError, match="'here:spec' must be"):
        run(page(tmp_path, text))
