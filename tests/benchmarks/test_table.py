from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import rows
from benchmarks.rows import Row
from benchmarks.table import END, LONGEST, START, document, main, render, stored, tables
from tests.benchmarks.row_cases import PLAIN, RUN

FAST = replace(
    PLAIN,
    method="fast",
    method_title="full gradients: fast",
    quantity="grads",
    ratio=1.234,
    memory_ratio=2.5,
)
BROKEN = replace(
    PLAIN,
    method="broken",
    quantity="grads",
    method_title="full gradients: broken",
    status="failed",
    note="RuntimeError: no",
    seconds=None,
    seconds_iqr=None,
    fastest=None,
    ratio=None,
    ratio_iqr=None,
    peak_bytes=None,
    memory_ratio=None,
)
ROWS = [PLAIN, FAST, BROKEN]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows.write(tmp_path / "cpu-made-up.jsonl", ROWS)
    return tmp_path


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    return path


def call(results: Path, *arguments: str | Path) -> int:
    return main(["--results", str(results), *map(str, arguments)])


def norms_of(row: Row) -> Row:
    return replace(
        row, quantity="norms", method_title=row.method_title.replace("full gradients", "norms")
    )


def later(rows_of_run: list[Row], date: str) -> list[Row]:
    return [replace(row, provenance=replace(RUN, date=date)) for row in rows_of_run]


def test_table_has_models_as_columns_and_methods_as_rows() -> None:
    other = [replace(row, model="vit", model_title="ViT, B=2") for row in ROWS[:2]]
    (table,) = tables([("x", [*ROWS, *other])])
    assert render(table) == "\n".join(
        [
            "| full gradients | ViT, B=2 | MLP, B=4 |",
            "|---|---|---|",
            "| plain | 1.00 (1.00) | 1.00 (1.00) |",
            "| fast | 1.23 (2.50) | 1.23 (2.50) |",
            "| broken |  | fails |",
            "| plain, absolute | 10.5 ms, 2 MB | 10.5 ms, 2 MB |",
            "",
            "- broken, failed on mlp: RuntimeError: no",
        ]
    )


def test_absent_packages_and_methods_without_a_count_of_memory_are_told_in_their_cells() -> None:
    absent = replace(BROKEN, method="absent", status="skipped", note="jax is not installed")
    late = replace(BROKEN, method="late", status="skipped", note="past the time for mlp, 9 s")
    (table,) = tables([("x", [PLAIN, replace(FAST, memory_ratio=None), absent, late])])
    lines = render(table).splitlines()
    assert lines[3:6] == ["| fast | 1.23 |", "| broken | not installed |", "| broken | – |"]
    assert lines[-1] == "- broken, skipped on mlp: past the time for mlp, 9 s"


def test_error_that_several_methods_share_is_said_once_and_shortened() -> None:
    note = "TypeError: no rule for <class 'torch.nn.modules.normalization.LayerNorm'>" + " x" * 99
    first = replace(BROKEN, note=note)
    second = replace(first, method="other", method_title="full gradients: other")
    (table,) = tables([("x", [PLAIN, first, second])])
    line = render(table).splitlines()[-1]
    assert line.startswith(
        "- broken and other, failed on mlp: TypeError: no rule for LayerNorm x x"
    )
    assert len(line) <= len("- broken and other, failed on mlp: ") + LONGEST
    assert line.endswith("…")


def test_every_quantity_has_its_table_beside_plain() -> None:
    found = tables([("x", [*ROWS, norms_of(FAST)])])
    assert [table.title for table in found] == ["full gradients", "norms"]
    assert list(found[0].methods) == ["plain", "fast", "broken"]
    assert found[1].methods == {"plain": "plain", "fast": "fast"}
    text = document(found)
    assert text.count("| plain | 1.00 (1.00) |") == 2
    assert text.count("Time as a multiple") == 1


def test_run_of_one_quantity_replaces_no_other() -> None:
    norms = later([PLAIN, norms_of(FAST)], "2026-01-03T00:00:00+00:00")
    grads, own = tables([("new", norms), ("old", [*ROWS, norms_of(FAST)])])
    assert [set(column.sources) for column in grads.columns.values()] == [{"old"}]
    assert [set(column.sources) for column in own.columns.values()] == [{"new"}]
    text = document([grads, own])
    assert "\n\nfull gradients: Time as a multiple" in text
    assert "\n\nnorms: Time as a multiple" in text


def test_run_of_one_model_replaces_its_column_alone() -> None:
    other = [replace(row, model="vit", model_title="ViT, B=2") for row in ROWS]
    run = later(other, "2026-01-03T00:00:00+00:00")
    (table,) = tables([("new", run), ("old", [*ROWS, *other])])
    assert {model: set(column.sources) for model, column in table.columns.items()} == {
        "mlp": {"old"},
        "vit": {"new"},
    }


def test_method_that_a_run_has_not_tried_is_from_the_newest_that_has() -> None:
    skipped = replace(BROKEN, method="fast", method_title=FAST.method_title, status="skipped")
    newest = later([PLAIN, skipped, replace(BROKEN, note="new")], "2026-01-04T00:00:00+00:00")
    newer = later([PLAIN, replace(FAST, ratio=1.5)], "2026-01-03T00:00:00+00:00")
    (table,) = tables([("old", ROWS), ("newest", newest), ("newer", newer)])
    column = table.columns["mlp"]
    assert {row.method: (row.ratio, row.note) for row in column.rows} == {
        "plain": (PLAIN.ratio, PLAIN.note),
        "fast": (1.5, FAST.note),
        "broken": (None, "new"),  # a failure is not hidden by an older success
    }
    assert set(column.sources) == {"newest", "newer"}
    run = column.run_of("fast")
    assert run is not None
    assert run[0] == "newer"


def test_run_of_plain_training_alone_is_a_table_too() -> None:
    assert [table.title for table in tables([("x", [PLAIN])])] == ["training"]


def test_stored_rows_read_back_equal(results: Path) -> None:
    assert rows.read(results / "cpu-made-up.jsonl") == ROWS


def test_stored_rows_are_never_replaced(results: Path) -> None:
    with pytest.raises(FileExistsError):
        rows.write(results / "cpu-made-up.jsonl", ROWS)


def test_caption_names_machine_versions_commit_and_file() -> None:
    text = document(tables([("cpu-made-up.jsonl", ROWS)]))
    for part in (RUN.machine, "torch 2.13.0", RUN.commit, "benchmarks/results/cpu-made-up.jsonl"):
        assert part in text
    dirty = [replace(row, provenance=replace(RUN, dirty=True)) for row in ROWS]
    assert "with local changes" in document(tables([("x", dirty)]))


def test_check_detects_a_stale_table_and_write_mends_it(results: Path, readme: Path) -> None:
    assert call(results, "--check", readme) == 1
    assert call(results, "--write", readme) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{START}\n| full gradients | MLP, B=4 |")
    assert text.endswith(f"{END}\nafter\n")
    assert call(results, "--check", readme) == 0
    readme.write_text(text.replace("1.23", "1.13"))
    assert call(results, "--check", readme) == 1


def test_check_detects_newer_rows(results: Path, readme: Path) -> None:
    call(results, "--write", readme)
    rows.write(results / "cpu-a.jsonl", later(ROWS, "2026-01-03T00:00:00+00:00"))
    (table,) = tables(stored(results))
    assert [set(column.sources) for column in table.columns.values()] == [{"cpu-a.jsonl"}]
    assert call(results, "--check", readme) == 1


@pytest.mark.parametrize(
    "text", ["no markers", f"{START}\n", f"{END}\n{START}", f"{START}{START}{END}"]
)
def test_file_without_its_two_markers_is_refused(results: Path, readme: Path, text: str) -> None:
    readme.write_text(text)
    with pytest.raises(SystemExit, match="benchmark-table"):
        call(results, "--write", readme)
    assert readme.read_text() == text


def test_no_rows_is_an_error_that_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"benchmarks\.run"):
        call(tmp_path)


def test_documentation_shows_the_stored_rows() -> None:
    root = Path(__file__).parents[2]
    assert call(root / "benchmarks" / "results", "--check", root / "docs" / "benchmarks.md") == 0
