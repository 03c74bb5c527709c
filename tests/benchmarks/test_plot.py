import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks import rows, scaling
from benchmarks.plot import main
from benchmarks.switches import Place, switches
from tests.benchmarks.row_cases import PLAIN, RUN

NORMS = replace(
    PLAIN, method="pergrad-norms", method_title="norms: ours", quantity="norms", ratio=1.07
)
BROKEN = replace(
    NORMS,
    method="peer",
    method_title="norms: a peer",
    status="failed",
    note="RuntimeError: no",
    ratio=None,
    seconds=None,
)
ABSENT = replace(
    BROKEN,
    method="other",
    method_title="norms: absent",
    status="skipped",
    note="other is not installed",
)
POINTS = [
    scaling.Point(
        size="cpu",
        precision="float32",
        axis=axis,
        value=value,
        shape=replace(scaling.SWEEPS["tiny"].base, **{axis: value}),
        quantity=quantity,
        status="ok",
        note="",
        seconds=0.001 * value,
        peak_bytes=1000 * value,
        provenance=RUN,
    )
    for axis in scaling.AXES
    for value in (1, 2, 4)
    for quantity in scaling.QUANTITIES
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows.write(tmp_path / "cpu.jsonl", [PLAIN, NORMS, BROKEN, ABSENT])
    rows.update(tmp_path / "scaling" / "cpu.jsonl", POINTS)
    return tmp_path


def draw(results: Path, folder: Path) -> dict[str, bytes]:
    line = ["--results", results, "--scaling", results / "scaling", "--folder", folder]
    assert main(list(map(str, line))) == 0
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def text_of(svg: bytes) -> str:
    return " ".join(ElementTree.fromstring(svg).itertext())


def test_every_table_and_every_sweep_has_its_picture(results: Path) -> None:
    found = draw(results, results / "assets")
    assert list(found) == ["benchmark-cpu-float32-norms.svg", "scaling-cpu-float32.svg"]


def test_same_rows_give_the_same_bytes(results: Path) -> None:
    assert draw(results, results / "one") == draw(results, results / "two")


def test_bars_say_ratios_and_failures(results: Path) -> None:
    text = text_of(draw(results, results / "assets")["benchmark-cpu-float32-norms.svg"])
    parts = "ours", "1.07", "a peer", "fails (RuntimeError)", "absent", "not installed", "MLP"
    for part in (*parts, "norms: time as a multiple of plain"):
        assert part in text


def test_curves_mark_where_the_cost_functions_choose_another_way(results: Path) -> None:
    text = text_of(draw(results, results / "assets")["scaling-cpu-float32.svg"])
    found = switches(POINTS[0].shape, "length", [1, 4], Place.of("cpu", "float32"))
    told = {f"{switch.layers}: {switch.after}" for switch in found}
    assert told
    for part in told:
        assert part in text


def test_curves_name_axes_and_quantities(results: Path) -> None:
    text = text_of(draw(results, results / "assets")["scaling-cpu-float32.svg"])
    for part in (*scaling.AXES.values(), *scaling.TITLES.values()):
        assert part in text
