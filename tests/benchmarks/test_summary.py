from dataclasses import replace
from pathlib import Path

from benchmarks.rows import Row
from benchmarks.summary import main, render
from benchmarks.table import tables
from tests.benchmarks.row_cases import PLAIN

PLAIN_VIT = replace(PLAIN, model="vit", model_title="ViT")
OWN = replace(
    PLAIN_VIT, method="pergrad-norms", method_title="pergrad", quantity="norms", ratio=0.61
)
SLOWER = replace(OWN, method="pergrad-norms-call", ratio=0.7)
PEER = replace(OWN, method="vmap-norms", method_title="vmap(grad)", ratio=1.2)


COMPILED = replace(PLAIN_VIT, method="plain-compiled", ratio=0.5)
OWN_COMPILED = replace(OWN, method="pergrad-norms-compiled", ratio=0.4)
PEER_COMPILED = replace(OWN, method="vmap-norms-compiled", ratio=0.6)


def lines(*runs: list[Row]) -> list[str]:
    return render(tables([(f"{k}", run) for k, run in enumerate(runs)])).splitlines()[2:]


def test_recorded_steps_are_compared_with_eager_training() -> None:
    (line,) = lines([PLAIN_VIT, SLOWER, OWN, PEER])
    assert line == "| norms, recorded, CPU, float32 |  | **0.61** (1.20) |  |  |  |"


def test_compiled_steps_are_compared_with_compiled_training() -> None:
    compiled, recorded = lines([PLAIN_VIT, COMPILED, OWN, PEER, OWN_COMPILED, PEER_COMPILED])
    assert compiled == "| norms, compiled, CPU, float32 |  | **0.80** (1.20) |  |  |  |"
    assert recorded == "| norms, recorded, CPU, float32 |  | **0.61** (1.20) |  |  |  |"


def test_a_peer_that_is_faster_is_the_one_in_bold() -> None:
    (line,) = lines([PLAIN_VIT, OWN, replace(PEER, ratio=0.5)])
    assert line == "| norms, recorded, CPU, float32 |  | 0.61 (**0.50**) |  |  |  |"


def test_graphs_and_traces_count_as_neither() -> None:
    others = [
        replace(OWN, method=f"pergrad-norms-{kind}", ratio=0.1) for kind in ("graphs", "traced")
    ]
    compiled, recorded = lines([PLAIN_VIT, COMPILED, OWN, OWN_COMPILED, *others])
    assert "**0.80** (–)" in compiled
    assert "**0.61** (–)" in recorded


def test_a_run_without_the_base_does_not_count() -> None:
    with_base = [PLAIN_VIT, COMPILED, OWN_COMPILED]
    alone = [PLAIN_VIT, replace(OWN_COMPILED, ratio=0.1)]
    (line,) = lines(alone, with_base)
    assert "**0.80**" in line
    assert not lines(alone)


def test_readme_shows_the_stored_rows() -> None:
    root = Path(__file__).parents[2]
    results = str(root / "benchmarks" / "results")
    assert main(["--results", results, "--check", str(root / "README.md")]) == 0
