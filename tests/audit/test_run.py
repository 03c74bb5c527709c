import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from pergrad.audit import AuditOptions, run_audit
from pergrad.engine.checking.attribution import Judge
from pergrad.errors import AuditError, InterruptedAuditError
from tests.audit.cases import SIZE, bad_item, batch_norm, data, losses, mlp, network


class Said:
    def __init__(self):
        self.words = []

    def begin(self, samples, done): ...

    def advance(self, samples): ...

    def say(self, message):
        self.words.append(message)


FLOAT64 = AuditOptions(dtype="float64", batch_size=16, save_every=0)


def table(folder):
    return pq.read_table(Path(folder) / "samples.parquet")


def contents(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def test_results_have_a_row_a_sample_and_a_summary(tmp_path):
    spec = mlp(label=lambda item: f"class {int(item[1])}", name="blobs", known_wrong=[3, 5])
    summary = run_audit(spec, tmp_path, AuditOptions(), command="pergrad audit x:y")
    found = table(tmp_path)
    assert found.column_names == [
        *("index", "loss", "norm", "norm/0", "norm/2"),
        *("alignment", "self_influence", "suspicion"),
        *("doubt", "suggested", "confidence", "label_probability"),
        *("predicted", "predicted_probability", "model_probability"),
        *("outlier", "duplicate_group", "rank", "evidence", "label"),
    ]
    assert found["index"].to_pylist() == list(range(SIZE))
    assert sorted(found["rank"].to_pylist()) == list(range(1, SIZE + 1))
    assert found["label"].to_pylist() == [f"class {int(y)}" for _, y in data()]
    expected = losses(spec.model, *data().tensors).detach().double()
    np.testing.assert_allclose(found["loss"].to_numpy(), expected, rtol=1e-6)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["command"] == "pergrad audit x:y"
    assert summary["dataset"]["name"] == "blobs"
    assert summary["grade"]["known"] == 2
    assert summary["samples"] == summary["batch_size"] == SIZE
    assert {group["name"] for group in summary["groups"]} == {"0", "2"}
    assert abs(sum(group["share"] for group in summary["groups"]) - 1) < 1e-9


def test_no_label_is_null(tmp_path):
    run_audit(mlp(), tmp_path)
    assert table(tmp_path)["label"].null_count == SIZE


def test_the_model_is_left_as_it_was(tmp_path):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run_audit(mlp(model=model), tmp_path, AuditOptions(dtype="float64"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("lost", ["first", "last", "middle", "most"])
def test_a_resumed_audit_is_bit_for_bit_the_uninterrupted_one(tmp_path, lost):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_audit(mlp(), whole, FLOAT64)
    shutil.copytree(whole, resumed)
    for path in (*resumed.glob("*.parquet"), resumed / "summary.json"):
        path.unlink()
    chunks = sorted((resumed / "chunks").iterdir())
    assert len(chunks) == 4
    gone = {"first": chunks[:1], "last": chunks[-1:], "middle": chunks[1:3], "most": chunks[1:]}
    for path in gone[lost]:
        path.unlink()
    run_audit(mlp(), resumed, FLOAT64)
    for name in ("samples", "duplicates", "pushes"):
        parts = [(folder / f"{name}.parquet").read_bytes() for folder in (whole, resumed)]
        assert parts[0] == parts[1]


def test_models_and_data_that_draw_are_the_same_after_a_resume(tmp_path):
    class Noisy(list):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + torch.randn(6), y

    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    spec = mlp(model=model, dataset=Noisy(data()))
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_audit(spec, whole, FLOAT64)
    shutil.copytree(whole, resumed)
    (resumed / "summary.json").unlink()
    sorted((resumed / "chunks").iterdir())[2].unlink()
    torch.rand(3)
    run_audit(spec, resumed, FLOAT64)
    assert table(whole).equals(table(resumed))


def test_a_finished_audit_is_not_run_again(tmp_path):
    summary = run_audit(mlp(), tmp_path, FLOAT64)
    before = contents(tmp_path)
    watch = Said()
    assert run_audit(mlp(), tmp_path, FLOAT64, watch=watch) == summary
    assert watch.words == [f"this audit is already finished in {tmp_path}: nothing to compute"]
    assert contents(tmp_path) == before
    shutil.rmtree(tmp_path / "chunks")  # which are for resuming alone
    assert run_audit(mlp(), tmp_path, FLOAT64) == summary


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"model": network(seed=1)}, {}, "another model"),
        ({"dataset": data(seed=1)}, {}, "another dataset"),
        ({"loss": lambda model, x, y: losses(model, x, y)}, {}, "another loss"),
        ({}, {"seed": 1}, "another seed .0, now 1"),
        ({}, {"subset": "30"}, "another subset"),
        ({}, {"dtype": "float32"}, "another dtype .float64, now float32"),
        ({}, {"sketch_dim": 7}, "another sketch dim"),
        ({}, {"batch_size": 8}, "another batch size .16, now 8"),
        ({"groups": lambda name: "all"}, {}, "another groups"),
    ],
)
def test_an_audit_of_something_else_is_refused_and_nothing_changes(
    tmp_path, changes, options, message, finished
):
    began = {"dtype": "float64", "batch_size": 16}
    run_audit(mlp(), tmp_path, AuditOptions(**began))
    if not finished:
        (tmp_path / "summary.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(AuditError, match=message):
        run_audit(mlp(**changes), tmp_path, AuditOptions(**{**began, **options}))
    assert contents(tmp_path) == before


def test_a_resume_keeps_the_batch_size_that_was_found(tmp_path, monkeypatch):
    run_audit(mlp(), tmp_path, AuditOptions())
    (tmp_path / "summary.json").unlink()
    monkeypatch.setattr("pergrad.audit.run.free_bytes", lambda _: 1)
    assert run_audit(mlp(), tmp_path, AuditOptions())["batch_size"] == SIZE


def test_batch_size_is_found_from_the_memory_that_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr("pergrad.audit.run.free_bytes", lambda _: 40_000)
    found = run_audit(mlp(), tmp_path, AuditOptions())["batch_size"]
    assert found in (8, 16, 32)


def test_rows_of_several_batch_sizes_are_told(tmp_path):
    def greedy(model, x, y):
        if len(x) > 20:
            raise torch.OutOfMemoryError("out of memory")
        return losses(model, x, y)

    options = AuditOptions(batch_size=40)
    # All of them are computed at one size in the end.
    assert run_audit(mlp(size=100, loss=greedy), tmp_path / "a", options)["notes"] == []
    calls = []

    def tired(model, x, y):
        calls.append(len(x) > 20)
        if len(x) > 20 and sum(calls) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return losses(model, x, y)

    summary = run_audit(mlp(size=100, loss=tired), tmp_path / "b", options)
    assert summary["batch_sizes"] == {"40": 40, "20": 60}
    assert "40 samples in batches of 40, 60 samples in batches of 20" in summary["notes"][0]


def test_a_precision_in_which_the_model_does_not_run_is_named(tmp_path, monkeypatch):
    def fixed(model, x, y):  # only in float32
        return losses(model, x.float(), y)

    monkeypatch.setattr(Judge, "error", lambda self, *_: 1.0)  # needs a proof in float64
    summary = run_audit(mlp(loss=fixed), tmp_path)
    reason = summary["certificate"]["reason"]
    assert reason.startswith("the step cannot be repeated in torch.float64")
    assert "Cast inside the model by" in reason


def test_no_memory_for_the_first_samples_is_told(tmp_path):
    def greedy(model, x, y):
        raise torch.OutOfMemoryError("tried to allocate\n9 GiB")

    with pytest.raises(
        InterruptedAuditError, match=r"first samples .tried to allocate 9 GiB.: free"
    ):
        run_audit(mlp(loss=greedy), tmp_path)


def test_nothing_is_kept_of_an_audit_that_failed_before_its_first_rows(tmp_path):
    with pytest.raises(Exception, match="BatchNorm in training mode"):
        run_audit(batch_norm(), tmp_path, AuditOptions(batch_size=16))
    assert run_audit(mlp(), tmp_path)["samples"] == SIZE  # the spec has been put right


def test_a_bad_item_stops_the_audit_and_keeps_the_batches_before_it(tmp_path):
    options = AuditOptions(batch_size=16, strict=True)
    with pytest.raises(AuditError, match="item 17 of the data set differs from item 0"):
        run_audit(bad_item(), tmp_path, options)
    assert [path.name for path in (tmp_path / "chunks").iterdir()] == ["0000000000-0000000016.npz"]


def test_no_space_left_stops_the_audit_and_the_same_command_goes_on(tmp_path, monkeypatch):
    whole, full = tmp_path / "whole", tmp_path / "full"
    run_audit(mlp(), whole, FLOAT64)
    write = Path.write_bytes

    def filling(path, content):
        if path.name.startswith("0000000032"):
            write(path, content[:10])
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", filling)
    with pytest.raises(InterruptedAuditError, match=r"no space left to write .*0000000032"):
        run_audit(mlp(), full, FLOAT64)
    assert len(os.listdir(full / "chunks")) == 2
    monkeypatch.undo()
    run_audit(mlp(), full, FLOAT64)
    assert table(full).equals(table(whole))


def test_a_corrupt_chunk_is_named_and_nothing_is_overwritten(tmp_path):
    run_audit(mlp(), tmp_path, FLOAT64)
    (tmp_path / "summary.json").unlink()
    chunk = sorted((tmp_path / "chunks").iterdir())[1]
    chunk.write_bytes(chunk.read_bytes()[:-100])
    before = contents(tmp_path)
    with pytest.raises(AuditError, match=f"{chunk.name} is corrupt .*: remove this file"):
        run_audit(mlp(), tmp_path, FLOAT64)
    assert contents(tmp_path) == before
    chunk.unlink()
    run_audit(mlp(), tmp_path, FLOAT64)


@pytest.mark.parametrize(("subset", "count"), [("1", 1), ("2", 2), ("10:20", 10)])
def test_a_subset_has_the_indices_of_the_data_set(tmp_path, subset, count):
    summary = run_audit(mlp(), tmp_path, AuditOptions(subset=subset, batch_size=1000))
    assert summary["samples"] == count
    found = table(tmp_path)
    x, y = data().tensors
    index = found["index"].to_pylist()
    expected = losses(network(), x[index], y[index]).detach()
    np.testing.assert_allclose(found["loss"].to_numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_type_takes_the_data_in_that_type(tmp_path, dtype):
    summary = run_audit(mlp(model=network().to(dtype)), tmp_path)
    assert summary["dtype"] == str(dtype).removeprefix("torch.")


def test_items_may_be_dicts(tmp_path):
    items = [{"x": x, "y": y} for x, y in data()]
    spec = mlp(dataset=items, loss=lambda model, batch: losses(model, batch["x"], batch["y"]))
    run_audit(spec, tmp_path)
    x, y = data().tensors
    np.testing.assert_allclose(
        table(tmp_path)["loss"].to_numpy(), losses(network(), x, y).detach(), rtol=1e-5
    )


def test_gradients_that_are_not_finite_do_not_stop_the_audit(tmp_path):
    x, y = data().tensors
    x = x.clone()
    x[7] = float("nan")
    spec = mlp(dataset=torch.utils.data.TensorDataset(x, y))
    summary = run_audit(spec, tmp_path)
    assert summary["loss"]["not_finite"] == 1
    assert table(tmp_path)["rank"].to_pylist()[7] == 1
    assert summary["certificate"]["ok"]  # by the samples after it


def test_the_gradients_of_the_first_samples_are_certified_and_the_summary_says_so(tmp_path):
    certificate = run_audit(mlp(), tmp_path)["certificate"]
    assert certificate["ok"]
    assert certificate["samples"] == 8
    assert certificate["parameters"] == len(list(network().parameters()))
    assert certificate["largest_error"] < 1e-4
    assert "not certified" not in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize("certify", [False, True])
def test_an_audit_of_a_refused_model_runs_sample_by_sample_and_says_so(tmp_path, certify):
    refused = network()
    refused[2].register_full_backward_hook(lambda module, of_input, of_output: of_input)
    options = AuditOptions(batch_size=7, certify=certify)
    expected = run_audit(mlp(20), tmp_path / "plain", options)
    summary = run_audit(mlp(20, model=refused), tmp_path / "looped", options)
    assert expected["fallback"] is None
    assert "backward hook" in summary["fallback"]
    assert any("computed sample by sample" in note for note in summary["notes"])
    assert summary["certificate"]["ok"] == certify
    tables = [pq.read_table(tmp_path / name / "samples.parquet") for name in ("plain", "looped")]
    for column in ("loss", "norm"):
        plain, looped = (table[column].to_numpy() for table in tables)
        np.testing.assert_allclose(looped, plain, rtol=1e-4)


def test_an_audit_without_a_certificate_has_the_same_rows_and_says_so(tmp_path):
    run_audit(mlp(), tmp_path / "with", AuditOptions(batch_size=16))
    off = AuditOptions(batch_size=16, certify=False)
    summary = run_audit(mlp(), tmp_path / "without", off)
    assert summary["notes"] == ["the gradients of this audit are not certified: certify is off"]
    assert table(tmp_path / "with").equals(table(tmp_path / "without"))


class Centred(nn.Module):
    """Mixes samples where no gradient flows."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        h = self.inner(x)
        return h - h.detach().mean(0)


def test_an_audit_of_gradients_that_are_wrong_stops_before_it_begins(tmp_path):
    with pytest.raises(AuditError, match=r"--no-certify[\s\S]*mixes samples"):
        run_audit(mlp(model=Centred()), tmp_path)
    assert not (tmp_path / "audit.json").exists()


def test_what_is_known_to_be_wrong_may_lie_outside_of_the_subset(tmp_path):
    summary = run_audit(mlp(known_wrong=[59]), tmp_path, AuditOptions(subset="0:10"))
    assert "grade" not in summary
    assert "no grade" in summary["notes"][0]


class Broken(torch.utils.data.TensorDataset):
    """Some items cannot be read."""

    unreadable = (0, 17, 18)

    def __getitem__(self, index):
        if index in self.unreadable:
            raise OSError(f"bad picture {index}")
        return super().__getitem__(index)


def test_items_that_cannot_be_read_are_skipped_listed_and_counted(tmp_path):
    summary = run_audit(mlp(dataset=Broken(*data().tensors)), tmp_path, FLOAT64)
    assert [row["index"] for row in summary["skipped"]] == [0, 17, 18]
    assert "OSError: bad picture 17" in summary["skipped"][1]["why"]
    assert "test_run.py, line" in summary["skipped"][1]["why"]
    found = table(tmp_path)
    assert found["index"].to_pylist() == [n for n in range(SIZE) if n not in Broken.unreadable]
    x, y = data().tensors
    kept = found["index"].to_pylist()
    expected = losses(network(), x[kept], y[kept]).detach()
    np.testing.assert_allclose(found["loss"].to_numpy(), expected, rtol=1e-5)


def test_an_item_unlike_the_others_is_skipped(tmp_path):
    summary = run_audit(bad_item(), tmp_path, AuditOptions(batch_size=16))
    assert [row["index"] for row in summary["skipped"]] == [17]
    assert summary["samples"] == SIZE - 1


def test_an_audit_with_skipped_items_resumes_to_the_same_tables(tmp_path):
    class Half(Broken):
        unreadable = tuple(range(16, 32))

    spec = mlp(dataset=Half(*data().tensors))
    run_audit(spec, tmp_path / "whole", FLOAT64)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    (tmp_path / "part/summary.json").unlink()
    sorted((tmp_path / "part/chunks").iterdir())[2].unlink()
    run_audit(spec, tmp_path / "part", FLOAT64)
    assert table(tmp_path / "whole").equals(table(tmp_path / "part"))
    assert len(table(tmp_path / "part")) == SIZE - 16


def test_a_data_set_of_which_nothing_can_be_read_is_refused(tmp_path):
    class Lost(Broken):
        unreadable = tuple(range(SIZE))

    with pytest.raises(AuditError, match=r"none of the 60 items can be read: .*bad picture 0"):
        run_audit(mlp(dataset=Lost(*data().tensors)), tmp_path)


def counting():
    """A spec, and how many batches its loss has seen."""
    calls = []

    def counted(model, x, y):
        calls.append(len(x))
        return losses(model, x, y)

    return mlp(loss=counted), calls


@pytest.mark.parametrize(
    ("changes", "options", "column", "expected"),
    [
        ({"label": lambda item: f"is {int(item[1])}"}, {}, "label", "is 1"),
        ({"show": lambda item: "another text"}, {}, None, None),
        ({"known_wrong": [3, 4]}, {}, None, None),
        ({"name": "other"}, {}, None, None),
        ({}, {"shown": 3}, None, None),
        ({}, {"duplicates": 0.5}, None, None),
    ],
)
def test_what_a_report_shows_changes_without_a_gradient(
    tmp_path, changes, options, column, expected
):
    spec, calls = counting()
    run_audit(spec, tmp_path, AuditOptions(batch_size=16))
    before, seen = contents(tmp_path), len(calls)
    watch = Said()
    summary = run_audit(
        dataclasses.replace(spec, **changes),
        tmp_path,
        AuditOptions(batch_size=16, **options),
        watch=watch,
    )
    assert len(calls) == seen
    assert "only what the report shows is made again" in watch.words[0]
    assert contents(tmp_path) != before
    if column is not None:
        assert expected in table(tmp_path)[column].to_pylist()
    if "known_wrong" in changes:
        assert summary["grade"]["known"] == 2
    if "name" in changes:
        assert summary["dataset"]["name"] == "other"
    if "show" in changes:
        shown = pq.read_table(tmp_path / "shown.parquet")["text"].to_pylist()
        assert set(shown) == {"another text"}


def test_force_computes_again_also_what_another_audit_has_left(tmp_path):
    spec, calls = counting()
    run_audit(spec, tmp_path, AuditOptions(batch_size=16))
    seen = len(calls)
    run_audit(spec, tmp_path, AuditOptions(batch_size=16), force=True)
    assert len(calls) == 2 * seen
    assert run_audit(mlp(model=network(seed=1)), tmp_path, force=True)["samples"] == SIZE


def test_force_removes_nothing_that_no_audit_has_written(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(AuditError, match="holds no audit"):
        run_audit(mlp(), tmp_path, force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def classifier(**changes):
    return mlp(logits=lambda model, x, y: model(x), target=lambda x, y: y, **changes)


def test_a_classifier_has_doubts_about_labels_and_resumes_bit_for_bit(tmp_path):
    spec = classifier(checkpoints=[network(seed=1)])
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    summary = run_audit(spec, whole, FLOAT64)
    assert summary["ranked_by"] == "labels"
    assert summary["checkpoints"] == 1
    found = table(whole)
    assert found["doubt"].null_count == 0
    order = np.argsort(found["rank"].to_numpy())
    assert (np.diff(found["doubt"].to_numpy()[order]) <= 0).all()
    shares = network()(data().tensors[0]).detach().double().softmax(1)
    np.testing.assert_allclose(
        found["predicted_probability"].to_numpy(), shares.max(1).values, rtol=1e-5
    )
    assert found["label"].to_pylist() == [str(int(y)) for _, y in data()]
    shutil.copytree(whole, resumed)
    (resumed / "summary.json").unlink()
    sorted((resumed / "chunks").iterdir())[1].unlink()
    run_audit(spec, resumed, FLOAT64)
    assert table(whole).equals(table(resumed))
    with pytest.raises(AuditError, match="another checkpoints"):
        run_audit(classifier(), whole, FLOAT64)


def test_labels_that_are_strings_are_classes_too(tmp_path):
    spec = mlp(logits=lambda model, x, y: model(x), label=lambda item: "abc"[int(item[1])])
    run_audit(spec, tmp_path)
    assert set(table(tmp_path)["suggested"].to_pylist()) <= {"a", "b", "c"}
