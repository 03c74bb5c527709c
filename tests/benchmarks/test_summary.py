from dataclasses import replace
from pathlib import Path

from benchmarks.summary import MODELS, main, render
from benchmarks.table import tables
from tests.benchmarks.row_cases import PLAIN

PLAIN_VIT = replace(PLAIN, model="vit", model_title="ViT")
OWN = replace(
    PLAIN_VIT, method="pergrad-norms", method_title="pergrad", quantity="norms", ratio=0.61
)
SLOWER = replace(OWN, method="pergrad-norms-call", ratio=0.7)
PEER = replace(OWN, method="vmap-norms", method_title="vmap(grad)", ratio=1.2)


def test_best_stands_beside_the_best_peer() -> None:
    text = render(tables([("x", [PLAIN_VIT, SLOWER, OWN, PEER, replace(PEER, ratio=1.4)])]))
    *_, line = text.splitlines()
    assert line == "| norms, CPU, float32 |  | **0.61** (1.20) |  |  |  |"


def test_cells_without_a_peer_are_empty() -> None:
    text = render(tables([("x", [PLAIN_VIT, OWN])]))
    assert len(text.splitlines()) == 2
    assert text.count("|", 0, text.index("\n")) == len(MODELS) + 2


def test_readme_shows_the_stored_rows() -> None:
    root = Path(__file__).parents[2]
    results = str(root / "benchmarks" / "results")
    assert main(["--results", results, "--check", str(root / "README.md")]) == 0
