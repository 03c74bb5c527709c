import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pergrad.errors import PergradError
from pergrad.reports.reading import read_results
from tests.reports.result_folders import clustered, write_folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "results", clustered(40, wrong=4), labels=list("abcd") * 10)


def test_results_are_those_that_were_written(folder) -> None:
    results = read_results(folder)
    samples = clustered(40, wrong=4)
    assert len(results) == 40
    np.testing.assert_array_equal(results.samples["loss"], samples.loss)
    assert results.samples["rank"][results.top(3)].tolist() == [1, 2, 3]
    assert (results.label(6), results.label(999)) == ("c", None)
    helpers, harmers = results.pushed(int(results.samples["index"][results.top(1)[0]]))
    assert 0 < len(helpers) <= 3
    assert 0 < len(harmers) <= 3


def test_samples_of_a_subset_are_found_by_their_index(tmp_path) -> None:
    samples = clustered(40)
    moved = type(samples)(**{**vars(samples), "index": np.arange(40) * 7 + 3})
    results = read_results(write_folder(tmp_path, moved, labels=[str(n) for n in range(40)]))
    assert results.label(17) == "2"
    assert results.row_of(18) is None


def test_results_without_pushes_say_that_nobody_pushes(folder) -> None:
    (folder / "pushes.parquet").unlink()
    assert read_results(folder).pushed(0) == ([], [])


def test_a_folder_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(PergradError, match=r"no results folder .*: run `pergrad audit`"):
        read_results(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["summary.json", "samples.parquet", "duplicates.parquet"])
def test_a_missing_or_damaged_file_is_refused_by_name(folder, name) -> None:
    (folder / name).write_bytes(b"{ not what it should be")
    with pytest.raises(PergradError, match=name):
        read_results(folder)
    (folder / name).unlink()
    with pytest.raises(PergradError, match=name):
        read_results(folder)


@pytest.mark.parametrize("content", [{"format": 1}, {"format": 9}, {}, []])
def test_another_format_is_refused(folder, content) -> None:
    (folder / "summary.json").write_text(json.dumps(content))
    with pytest.raises(PergradError, match="format"):
        read_results(folder)


def test_a_table_of_something_else_is_refused(folder) -> None:
    pq.write_table(pa.table({"a": [1]}), folder / "samples.parquet")
    with pytest.raises(PergradError, match="no column 'index'"):
        read_results(folder)


def test_an_audit_of_nothing_is_refused(folder) -> None:
    empty = pq.read_table(folder / "samples.parquet").slice(0, 0)
    pq.write_table(empty, folder / "samples.parquet")
    with pytest.raises(PergradError, match="no rows"):
        read_results(folder)


def test_rounding_makes_no_outliers_among_inputs_that_are_alike(folder) -> None:
    results = read_results(folder)

    def outlying(values):
        return dataclasses.replace(
            results, samples={**results.samples, "outlier": values}
        ).outlying()

    alike = 1 + 1e-7 * np.random.default_rng(0).normal(size=40)
    alike[[1, 2, 3]] += 1e-5
    assert outlying(alike).tolist() == []
    alike[7] = 3.0
    assert outlying(alike).tolist() == [7]
