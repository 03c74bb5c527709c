"""`import pergrad` is quick, brings in no extras, and shows the names that are promised."""

import subprocess
import sys
from pathlib import Path

import pergrad

NAMES = """
    __version__ PergradError
    call_for_per_sample_grads ExpandedWeight implements_per_sample_grads
    record grads norms compiled certify verify explain
    Audit Index
    Quantity Grads Norms Sum ClippedSum SecondMoment Variance Dots Gram Projection NoiseScale
""".split()
EXTRAS = """
    triton opacus sklearn rich transformers hypothesis pytest typer pyarrow jinja2 PIL datasets
    dp_accounting cryptography
""".split()


def run(code: str) -> str:
    """Run code in an interpreter of its own that sees this pergrad."""
    source = str(Path(pergrad.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {source!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_public_names_are_the_promised_ones() -> None:
    assert sorted(pergrad.__all__) == sorted(NAMES)
    assert all(hasattr(pergrad, name) for name in NAMES)


def test_completion_shows_the_promised_names_alone() -> None:
    packages = {"evaluate", "private"}  # imported when asked for
    assert {*dir(pergrad)} - {*NAMES} <= packages
    shown = dir(pergrad.Norms())
    assert "result" in shown
    assert not [name for name in shown if name.startswith("_")]


def test_import_brings_in_no_extra_that_torch_does_not() -> None:
    code = "import torch; had = {*sys.modules}; import pergrad; print(*({*sys.modules} - had))"
    added = {name.partition(".")[0] for name in run(code).split()}
    assert "pergrad" in added
    assert added.isdisjoint(EXTRAS)


def test_private_training_is_imported_when_asked_for() -> None:
    code = """
import pergrad
before = "pergrad.private" in sys.modules
print(before, pergrad.private.Plan.__name__, "dp_accounting" in sys.modules)
"""
    assert run(code).split() == ["False", "Plan", "False"]


def test_import_adds_less_than_three_tenths_of_a_second_to_torch() -> None:
    code = "import torch, time; t = time.process_time(); import pergrad; print(time.process_time() - t)"
    assert any(float(run(code)) < 0.3 for _ in range(3))


def test_import_sets_nothing_in_torch() -> None:
    code = """
import torch
state = lambda: (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(),
                 torch.are_deterministic_algorithms_enabled(), torch.initial_seed(),
                 torch.autograd.Function.apply.__func__)
before = state()
import pergrad
print(before == state())
"""
    assert run(code).strip() == "True"
