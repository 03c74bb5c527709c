from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import rows
from benchmarks.methods import METHODS
from benchmarks.rows import Row
from benchmarks.table import tables
from benchmarks.targets import MARKERS, MODELS, TARGETS, judged, leads, main, render_targets
from tests.benchmarks.row_cases import PLAIN

GPU = replace(PLAIN, size="gpu", precision="bfloat16", model="vit", model_title="ViT")
COMPILED = replace(
    GPU,
    method="plain-compiled",
    method_title="plain, torch.compile",
    ratio=0.8,
    peak_bytes=1_000_000,
)
NORMS = replace(
    GPU,
    method="pergrad-norms-compiled",
    method_title="norms: pergrad.compiled",
    quantity="norms",
    ratio=0.6,
    peak_bytes=1_200_000,
)
PEER = replace(NORMS, method="vmap-norms", method_title="norms: vmap(grad)", ratio=1.2)
FAST = next(t for t in TARGETS if t.method == NORMS.method and t.figure == "ratio")
SMALL = next(t for t in TARGETS if t.method == NORMS.method and t.figure == "peak_bytes")


def on_vit(target: object, found: list[Row]) -> str:
    assert target in TARGETS
    return judged(TARGETS[TARGETS.index(target)], "vit", 0.85, tables([("x", found)])).text


def test_target_is_judged_against_its_own_base_of_the_same_run() -> None:
    assert on_vit(FAST, [GPU, COMPILED, NORMS]) == "≤ 0.85: 0.75, met by 12 %"
    slow = replace(NORMS, ratio=0.816)
    assert on_vit(FAST, [GPU, COMPILED, slow]) == "≤ 0.85: 1.02, **missed by 20 %**"
    assert on_vit(SMALL, [GPU, COMPILED, NORMS]).startswith("≤ 0.85: 1.20, **missed")


def test_rows_of_another_size_or_precision_do_not_count() -> None:
    for change in ({"size": "cpu"}, {"precision": "float32"}):
        found = [replace(row, **change) for row in (GPU, COMPILED, NORMS)]
        assert on_vit(FAST, found) == "≤ 0.85: no rows"


def test_missing_and_failing_rows_are_said_and_not_taken_from_another_run() -> None:
    assert on_vit(FAST, [GPU, NORMS]) == "≤ 0.85: plain-compiled was not run"
    broken = replace(NORMS, status="failed", note="RuntimeError: no", ratio=None)
    assert on_vit(FAST, [GPU, COMPILED, broken]) == (
        "≤ 0.85: pergrad-norms-compiled failed: RuntimeError: no"
    )
    run = replace(GPU.provenance, date="2026-02-01T00:00:00+00:00")
    newer = [replace(row, provenance=run) for row in (GPU, NORMS)]
    found = tables([("old", [GPU, COMPILED, NORMS]), ("new", newer)])
    assert judged(FAST, "vit", 0.85, found).measured is None


def test_every_target_names_methods_and_has_a_sentence_of_its_own() -> None:
    for target in TARGETS:
        assert {target.method, target.base} <= METHODS.keys()
        assert METHODS[target.method].compiled == METHODS[target.base].compiled
        assert len(target.limits) == len(MODELS)
    assert len({target.sentence for target in TARGETS}) == len(TARGETS)
    assert len(render_targets([]).splitlines()) == len(TARGETS) + 2


def test_lead_is_pergrads_best_over_the_best_peer_and_bases_are_no_peers() -> None:
    worse = replace(PEER, method="opacus-ghost-norms", ratio=3.0)
    found = tables([("x", [GPU, COMPILED, NORMS, PEER, worse])])
    ((_, model, own, peer),) = leads(found)
    assert (model, own.method, peer.method) == ("vit", NORMS.method, PEER.method)


def test_document_is_written_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write(tmp_path / "gpu.jsonl", [GPU, COMPILED, NORMS, PEER])
    page = tmp_path / "page.md"
    page.write_text("before\n{}\n{}\nafter\n".format(*MARKERS))
    line = ["--results", str(tmp_path)]
    assert main([*line, "--check", str(page)]) == 1
    assert "benchmarks.targets --write" in capsys.readouterr().err
    assert main([*line, "--write", str(page)]) == 0
    assert main([*line, "--check", str(page)]) == 0
    assert "| 0.60 (pergrad.compiled) | 1.20 (vmap(grad)) | ahead 2.00x |" in page.read_text()
