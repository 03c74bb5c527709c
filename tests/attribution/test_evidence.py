import numpy as np

from pergrad.attribution import Samples, evidence
from pergrad.attribution.evidence import shares_below
from pergrad.attribution.labels import LabelErrors


def test_shares_below_count_the_smaller_finite_values() -> None:
    values = np.array([1.0, 2.0, 2.0, np.nan, 5.0, -np.inf])
    assert shares_below(values).tolist() == [0, 0.25, 0.25, 0, 0.75, 0]
    assert shares_below(np.array([np.nan])).tolist() == [0]


def test_a_share_is_never_rounded_up_to_all() -> None:
    norm = np.arange(10_000.0)
    samples = Samples(np.arange(10_000), np.zeros(10_000), norm, {}, np.ones((10_000, 1)))
    words = evidence(samples, np.zeros(10_000), np.zeros(10_000))
    assert words[-1] == ("its gradient is longer than that of 99.9%",)
    assert words[5000] == ()


def test_values_that_are_not_finite_are_said_to_be() -> None:
    loss, norm, sketch = np.array([np.nan, 1, 1]), np.array([np.inf, 1, 1]), np.ones((3, 1))
    sketch[1] = np.nan
    words = evidence(Samples(np.arange(3), loss, norm, {}, sketch), np.zeros(3), np.zeros(3))
    assert words == (
        ("its loss is not finite", "its gradient is not finite"),
        ("its gradient is not finite",),
        (),
    )


def test_a_probability_is_never_rounded_to_certainty() -> None:
    ones = np.ones(4)
    samples = Samples(
        *(np.arange(4), ones, ones, {}, np.ones((4, 1)), np.ones((4, 1, 1))),
        *(np.zeros(4, int), np.ones(4, int), np.array([[0.0, 1.0]] + [[0.003, 0.997]] * 3)),
    )
    labels = LabelErrors(
        *(ones, np.array([0.001, 0.2, 0.0, 0.004]), np.ones(4, int)),
        *(np.array([0.999, 0.8, 1.0, 0.996]), np.ones(4, bool), 4, 4, 4, 0.9),
    )
    words = evidence(samples, ones, np.zeros(4), labels)
    for found, (others, own, model) in zip(
        words,
        [
            (">99%", "<1%", "100%"),
            ("80%", "20%", ">99%"),
            ("100%", "0%", ">99%"),
            (">99%", "<1%", ">99%"),
        ],
        strict=True,
    ):
        assert found[:2] == (
            f"the other samples would call it 1 ({others}); they give its own label {own}",
            f"the model predicts 1 ({model})",
        )


def test_a_gradient_against_the_mean_is_said_with_its_cosine() -> None:
    samples = Samples(np.arange(2), np.ones(2), np.ones(2), {}, np.ones((2, 1)))
    assert evidence(samples, np.array([-0.414, 1.0]), np.ones(2)) == (
        ("points against the mean gradient (cosine -0.41)",),
        (),
    )


def test_an_unusual_layer_is_said_beside_other_evidence_alone() -> None:
    loss = np.zeros(40)
    loss[0] = 5.0
    groups = {"body": np.ones(40), "head": np.full(40, 3.0)}
    groups["body"][:2] = 9.0
    words = evidence(
        Samples(np.arange(40), loss, np.ones(40), groups, np.ones((40, 1))), loss * 0, loss * 0
    )
    assert words[0][-1] == "pulls on body more than most samples do"
    assert words[1] == ()
