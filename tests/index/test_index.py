"""An index gives the inner products of gradients, exactly where nothing is projected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import pergrad
from pergrad.errors import AuditError, IndexingError
from pergrad.index.store.store import Store
from tests.index.cases import built, data, flat_gradients, losses, network


def test_scores_are_inner_products_of_gradients() -> None:
    model, (x, y) = network(), data().tensors
    index = built(model=model)
    own = flat_gradients(model, x, y)
    torch.testing.assert_close(
        index.scores((x[:5], y[:5])), own[:5] @ own.T, rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("size", [1, 3, 40])
def test_rows_do_not_depend_on_the_batch_size(size: int) -> None:
    for projection in ("count", "rademacher", "normal", "two_sided", "none"):
        options = {"projection": projection, "dim": 16}
        one = built(batch_size=size, **options).rows()
        torch.testing.assert_close(one, built(**options).rows(), rtol=1e-10, atol=1e-12)


def test_scores_are_means_over_the_checkpoints_and_the_model() -> None:
    models, (x, y) = [network(seed=n) for n in range(3)], data().tensors
    index = built(model=models[2], checkpoints=[models[0].state_dict(), models[1], models[2]])
    expected = torch.stack([(g := flat_gradients(m, x, y))[:4] @ g.T for m in models]).mean(0)
    torch.testing.assert_close(index.scores((x[:4], y[:4])), expected, rtol=1e-11, atol=1e-13)
    assert index.info().checkpoints == 3


def test_whitened_scores_are_those_of_the_damped_second_moment() -> None:
    model, (x, y) = network(), data().tensors
    index = built(model=model, preconditioner="second_moment", damping=2.0)
    g = flat_gradients(model, x, y)
    moment = g.T @ g / len(g)
    damped = moment + 2.0 * moment.trace() / 512 * torch.eye(len(moment), dtype=torch.float64)
    expected = g[:4] @ torch.linalg.solve(damped, g.T)
    torch.testing.assert_close(index.scores((x[:4], y[:4])), expected, rtol=1e-8, atol=1e-9)


def test_a_query_finds_the_highest_and_the_lowest_scores() -> None:
    (x, y) = data().tensors
    index = built()
    scores = index.scores((x[:3], y[:3]))
    found = index.query((x[:3], y[:3]), 4)
    assert np.array_equal(found.helpful, scores.topk(4, dim=1).indices.numpy())
    assert np.array_equal(found.harmful, scores.topk(4, dim=1, largest=False).indices.numpy())
    frame = found.frame
    assert list(frame.columns)[:5] == ["query", "kind", "rank", "index", "score"]
    assert len(frame) == 3 * 2 * 4


def test_an_index_that_is_opened_again_gives_the_same_scores(tmp_path: Path) -> None:
    model, dataset = network(), data()
    x, y = dataset.tensors
    index = built(tmp_path / "a", model, dataset, checkpoints=[network(seed=3)])
    expected = index.scores((x[:2], y[:2]))
    again = pergrad.Index(tmp_path / "a", model, dataset, losses)
    assert torch.equal(again.scores((x[:2], y[:2])), expected)
    assert torch.equal(pergrad.Index(tmp_path / "a").scores((x[:2], y[:2])), expected)


def test_another_model_is_refused(tmp_path: Path) -> None:
    built(tmp_path / "a")
    other = pergrad.Index(tmp_path / "a", network(seed=1), data(), losses)
    with pytest.raises(IndexingError, match="another model"):
        other.scores((torch.zeros(1, 6).double(), torch.zeros(1).long()))


def test_a_model_that_was_trained_on_since_is_refused() -> None:
    model, (x, y) = network(), data().tensors
    index = built(model=model)
    index.scores((x[:1], y[:1]))
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(IndexingError, match="another model"):
        index.scores((x[:1], y[:1]))


def test_another_loss_is_refused(tmp_path: Path) -> None:
    model = network()
    built(tmp_path / "a", model)
    other = pergrad.Index(tmp_path / "a", model, data(), lambda m, x, y: losses(m, x, y) * 2)
    with pytest.raises(IndexingError, match="another loss"):
        other.scores(data().tensors)


def test_an_index_without_its_model_says_what_to_pass(tmp_path: Path) -> None:
    built(tmp_path / "a")  # the model is gone
    with pytest.raises(IndexingError, match="opened without its model"):
        pergrad.Index(tmp_path / "a").scores(data().tensors)


def test_a_query_of_another_shape_is_refused_in_one_sentence() -> None:
    index = built()
    with pytest.raises(IndexingError, match="does not fit the model and loss"):
        index.scores((torch.zeros(2, 7).double(), torch.zeros(2).long()))


def test_a_damping_of_zero_on_a_singular_matrix_is_refused() -> None:
    index = built(preconditioner="second_moment", damping=0.0)
    with pytest.raises(IndexingError, match="singular with a damping of 0"):
        index.scores(data().tensors)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"projection": "fourier"}, "projection must be one of 'count'"),
        ({"dtype": "int8"}, "stored as one of float16"),
        ({"preconditioner": "magic"}, "preconditioner must be one of"),
        ({"damping": -1.0}, "damping must be"),
        ({"dimm": 3}, "did you mean 'dim'"),
        ({"dim": 0}, "dim must be a positive integer"),
    ],
)
def test_bad_options_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(IndexingError, match=message):
        built(**given)


def test_dropout_does_not_make_rows_random() -> None:
    model = torch.nn.Sequential(network(), torch.nn.Dropout(0.5)).train()
    index = built(model=model)
    assert torch.equal(index.rows(), built(model=model).rows())
    assert model.training


def test_appended_samples_are_those_of_one_build(tmp_path: Path) -> None:
    model, whole = network(), data(48)
    x, y = whole.tensors
    index = built(tmp_path / "a", model, TensorDataset(x[:32], y[:32]))
    index.append(TensorDataset(x[32:], y[32:]), quiet=True)
    expected = built(model=model, dataset=whole)
    assert torch.equal(index.rows(), expected.rows())
    assert np.array_equal(index.indices, np.arange(48))


def test_deleted_samples_are_gone_before_and_after_compaction(tmp_path: Path) -> None:
    x, y = data().tensors
    index = built(tmp_path / "a")
    rows = index.rows()
    assert index.delete([0, 7, 39]) == 3
    left = np.setdiff1d(np.arange(40), [0, 7, 39])
    for _ in range(2):
        assert np.array_equal(index.indices, left)
        assert torch.equal(index.rows(), rows[left])
        assert index.scores((x[:2], y[:2])).shape == (2, 37)
        assert not {0, 7, 39} & set(index.query((x[:2], y[:2]), 37).frame["index"])
        index.compact()
    with pytest.raises(IndexingError, match="no sample 7"):
        index.delete([7])


def test_half_precision_rows_are_close_at_any_scale() -> None:
    for size in (1e-12, 1.0, 1e12):

        def scaled(
            model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, size: float = size
        ) -> torch.Tensor:
            return losses(model, x, y) * size

        model = network()
        exact = pergrad.Index.build(
            model, data(), loss=scaled, projection="none", dtype="float64", quiet=True
        ).rows()
        for dtype in ("float16", "bfloat16", "float32"):
            rows = pergrad.Index.build(
                model, data(), loss=scaled, projection="none", dtype=dtype, quiet=True
            ).rows()
            unit, of_exact = (t / t.norm(dim=2, keepdim=True) for t in (rows.double(), exact))
            assert (unit * of_exact).sum(2).min() > 0.9999


def test_unit_norm_gives_cosines() -> None:
    model, (x, y) = network(), data().tensors
    index = built(model=model, unit_norm=True)
    g = torch.nn.functional.normalize(flat_gradients(model, x, y), dim=1)
    torch.testing.assert_close(index.scores((x[:3], y[:3])), g[:3] @ g.T, rtol=1e-9, atol=1e-9)


def test_unit_norm_of_whitened_rows_is_one_for_a_sample_with_itself() -> None:
    x, y = data().tensors
    index = built(preconditioner="second_moment", unit_norm=True)
    own = index.scores((x, y)).diagonal()
    torch.testing.assert_close(own, torch.ones_like(own), rtol=1e-8, atol=1e-8)
    with pytest.raises(IndexingError, match="unit_norm needs"):
        built(preconditioner="ekfac", unit_norm=True)


def test_inputs_without_targets_are_queried_by_what_the_model_predicts() -> None:
    model, (x, _) = network(), data().tensors
    index = built(model=model)
    assert torch.equal(index.scores(x[:3]), index.scores((x[:3], model(x[:3]).argmax(1))))


@pytest.mark.parametrize("preconditioner", ["none", "second_moment"])
def test_an_index_without_rows_says_so_and_can_be_appended_to(
    tmp_path: Path, preconditioner: str
) -> None:
    index = built(tmp_path, preconditioner=preconditioner)
    index.delete(range(40))
    for _ in range(2):
        with pytest.raises(IndexingError, match="holds no rows"):
            index.scores(data(3).tensors)
        with pytest.raises(IndexingError, match="holds no rows"):
            index.query(data(3).tensors, 2, approximate=True)
        index.compact()
    index.append(data(8, seed=5), quiet=True)
    assert index.scores(data(3).tensors).shape == (3, 8)


def test_two_that_change_one_index_lose_nothing(tmp_path: Path) -> None:
    """Each has read what was there when it was opened."""
    first, second = built(tmp_path), pergrad.Index(tmp_path, network(), data(), losses)
    assert len(second) == 40
    first.delete([1])
    second.delete([2])
    assert {1, 2}.isdisjoint(second.indices.tolist())
    assert len(pergrad.Index(tmp_path, network(), data(), losses)) == 38
    second.append(data(8, seed=5), quiet=True)
    first.compact()  # knows of 40 samples
    assert len(first) == 46
    with Store.locked(tmp_path), pytest.raises(AuditError, match="is writing into"):
        first.delete([3])
