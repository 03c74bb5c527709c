import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.ranking import __main__ as ranking
from benchmarks.ranking.cells import Cell, _margin, cells, fresh_cells
from benchmarks.ranking.data import CHOSEN_ON, DATA, FEW_COLUMNS, USED
from benchmarks.ranking.planting import CHOSEN_WITH, NOISES, with_duplicates, with_outliers
from benchmarks.ranking.table import with_table


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("noise", NOISES)
def test_a_noise_changes_some_labels_to_other_classes(noise):
    data = DATA["wine"](0)
    given = NOISES[noise](data.x.numpy(), data.y, data.classes, np.random.default_rng(0))
    changed = (given != data.y).mean()
    assert 0.01 < changed < 0.2
    assert set(given) <= set(data.y)


def test_half_of_the_cells_are_new_in_their_data_or_their_noise():
    found = [cell for cell in cells(3) if cell.noise != "planted"]
    new = [cell for cell in found if cell.is_new]
    assert len(new) >= len(found) / 2
    assert len({cell.data for cell in new} - set(CHOSEN_ON)) >= 2
    assert len({cell.noise for cell in new} - set(CHOSEN_WITH)) >= 2
    assert len({(c.data, c.noise, c.seed) for c in found}) == len(found)


def test_fresh_cells_have_every_data_set_and_noise_and_say_what_is_new():
    found = fresh_cells(300, 2)
    assert {cell.seed for cell in found} == {300, 301}
    assert {(c.data, c.noise) for c in found} >= {(d, n) for d in DATA for n in NOISES}
    assert {c.noise for c in found if c.data in FEW_COLUMNS} == {"planted"}
    assert {c.data for c in found if not c.is_new and c.noise == "planted"} == set(USED)


def test_planted_pairs_and_outliers_are_where_they_are_said_to_be():
    x, y = torch.randn(100, 4), np.arange(100)
    more, labels, pairs = with_duplicates(x, y, np.random.default_rng(0))
    assert len(more) == len(labels) == 105
    assert all((more[a] - more[b]).norm() < 0.1 and labels[a] == labels[b] for a, b in pairs)
    changed, chosen = with_outliers(x, np.random.default_rng(0))
    same = (changed == x).all(1).numpy()
    assert set(np.flatnonzero(~same)) == set(chosen)


def test_the_margin_is_that_of_cleanlab():
    shares = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])
    np.testing.assert_allclose(_margin(shares, np.array([0, 1])), [0.5, -0.3])


def test_cells_are_computed_tabulated_and_stored(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("benchmarks.ranking.training._EPOCHS_TO_MEMORISE", 1)
    made = [Cell("wine", "uniform", 0), Cell("wine", "planted", 0), Cell("plane", "planted", 0)]
    monkeypatch.setattr(ranking, "fresh_cells", lambda first, seeds: made)
    assert ranking.main(["--fresh", "7", "--store"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "A: label-free",
        "margin, 5-fold",
        "duplicates, recall",
        "within the interval",
        "of few",
    ):
        assert words in printed
    (path,) = (tmp_path / "results/ranking").iterdir()
    stored = json.loads(path.read_text())["cells"]
    assert path.name.startswith("confirmation")
    assert len(stored) == 9
    assert sum("outliers" in row for row in stored) == 3
    assert [row["ap"]["A"] > 0.5 for row in stored if "ap" in row] == [True] * 3


def test_cells_that_are_kept_are_not_computed_again(capsys, tmp_path, monkeypatch):
    wanted = [Cell("wine", "uniform", 0), Cell("wine", "planted", 0)]
    monkeypatch.setattr(ranking, "cells", lambda seeds: wanted)
    made = []

    def computed(cell):
        made.append(cell)
        return [{"data": cell.data, "noise": cell.noise, "seed": cell.seed, "new": False}]

    monkeypatch.setattr(ranking, "computed", computed)
    arguments = ["--cells", str(tmp_path / "cells.jsonl")]
    assert ranking.main([*arguments, "--stop-after", "0"]) == 3
    assert made == []
    for _ in range(2):
        assert ranking.main(arguments) == 0
        assert made == wanted[::-1]
    assert "2 of 2 cells" in capsys.readouterr().out


def stored() -> list[dict]:
    (*_, last) = sorted((ranking.RESULTS / "ranking").glob("ranking-*.json"))
    return json.loads(last.read_text())["cells"]


def confirmed() -> list[dict]:
    paths = sorted((ranking.RESULTS / "ranking").glob("confirmation-*.json"))
    return [cell for path in paths for cell in json.loads(path.read_text())["cells"]]


@pytest.mark.parametrize(("name", "found"), [("ranking", stored), ("confirmation", confirmed)])
def test_the_documentation_has_the_stored_figures(name, found):
    path = Path(ranking.__file__).parents[2] / "docs/howto/audit.md"
    page = path.read_text()
    assert f"<!-- {name}:start -->" in page
    assert page == with_table(page, found(), name)


def test_the_confirmation_has_seeds_of_its_own_and_all_data_sets():
    assert not {row["seed"] for row in confirmed()} & {row["seed"] for row in stored()}
    planted = {row["data"] for row in confirmed() if "duplicates" in row}
    assert planted == {*DATA, *FEW_COLUMNS}
    assert {row["data"] for row in confirmed() if "ap" in row} == set(DATA)


@pytest.mark.parametrize("found", [stored, confirmed])
@pytest.mark.parametrize("state", ["undertrained", "well trained", "memorised"])
def test_the_stored_runs_meet_the_goals(state, found):
    at = [row for row in found() if row["state"] == state]
    noisy, planted = ([row for row in at if key in row] for key in ("ap", "outliers"))
    for some in (noisy, [row for row in noisy if row["new"]]):
        mean = {name: np.mean([row["ap"][name] for row in some]) for name in some[0]["ap"]}
        assert max(mean["A"], mean["B"]) > max(mean["loss"], mean["margin"])
        close = [abs((r["count"]["B"][1] or 0) - r["wrong"]) <= 0.25 * r["wrong"] for r in some]
        assert np.mean(close) >= 0.6
    assert np.mean([row["new"] for row in at]) >= 0.5
    of_duplicates = {
        name: np.mean([row["duplicates"][name] for row in planted])
        for name in ("recall", "precision")
    }
    assert of_duplicates["recall"] >= (0.8 if state == "memorised" else 0.9)
    assert of_duplicates["precision"] >= 0.95
    outliers = [row["outliers"]["label-free self-influence"] for row in planted]
    assert np.mean(outliers) >= 0.7
