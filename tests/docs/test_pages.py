"""Every code block of the documentation runs, and prints what the page says that it prints."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import run

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
# Shown for comparison: what is not installed cannot be compared with.
NEEDS = {"moving/backpack.md": "backpack", "moving/opacus.md": "opacus"}


@pytest.fixture(autouse=True)
def _as_before() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = NEEDS.get(page)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: `make install` does it")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        if page == "howto/lightning.md":  # advice on data loaders, and what it calls of torch
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            warnings.filterwarnings("ignore", message=".*treespec.*LeafSpec.*")
        if (
            needed is not None
        ):  # their hooks on a model's first layer, whose input needs no gradient
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
        run(DOCS / page)


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_fits_beside_the_sidebars(page: str) -> None:
    fence, wide = "", []
    for number, line in enumerate((DOCS / page).read_text().splitlines(), start=1):
        if line.startswith("```"):
            fence = line[3:] if not fence else ""
        elif fence == "python" and len(line) > 88:
            wide.append(number)
    assert not wide, f"{page}: code of more than 88 columns in lines {wide}"
