from xml.etree import ElementTree

import numpy as np
import pytest

from pergrad.reports.charts import histogram, histogram_svg


def drawn(values, marked=()) -> ElementTree.Element:
    marked = np.asarray(marked, dtype=np.float64)
    svg = histogram_svg(np.asarray(values), marked, name="n", title="a < b", marks="none & all")
    return ElementTree.fromstring(svg)


def heights(svg: ElementTree.Element) -> list[float]:
    return [float(bar.get("height")) for bar in svg.iter("rect")]


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(size=500),
        np.random.default_rng(0).lognormal(0, 3, size=500),
        np.array([0.0, 1e-30, 1.0, 1e30]),
        np.array([5.0]),
        np.full(9, -3.0),
        np.zeros(4),
        np.full(3, 1e300),
        np.array([1.0, 1.0 + 1e-16, 2.0]),
        np.array([0.0, np.inf, np.nan, 2.0]),
    ],
    ids=str,
)
def test_every_finite_value_is_counted_or_said_to_be_left_out(values) -> None:
    found = histogram(values)
    assert found.counts.sum() + found.left_out + found.not_finite == len(values)
    assert (np.diff(found.edges) > 0).all()
    svg = drawn(values, values)
    assert len(heights(svg)) == (found.counts > 0).sum()
    numbers = [float(bar.get(key)) for bar in svg.iter("rect") for key in ("x", "y", "width")]
    assert np.isfinite(numbers).all()
    assert min(numbers, default=0) >= 0


def test_counts_are_those_of_counting_by_hand() -> None:
    values = np.array([0.0, 1.0, 1.5, 2.0, 4.0])
    found = histogram(values, bins=4)
    expected = [
        sum(low <= v < high or (high == 4 and v == 4) for v in values)
        for low, high in zip(range(4), range(1, 5), strict=True)
    ]
    assert found.counts.tolist() == expected
    assert not found.is_log


def test_wide_positive_values_are_drawn_on_a_logarithmic_scale() -> None:
    assert histogram(np.array([1.0, 1.0, 1.0, 1000.0])).is_log
    assert not histogram(np.array([-1.0, 1.0, 1.0, 1000.0])).is_log


def test_a_single_sample_beside_thousands_is_still_to_be_seen() -> None:
    values = np.array([0.0] * 100_000 + [1.0])
    assert min(heights(drawn(values))) >= 1.5


def test_a_chart_says_in_words_what_it_shows() -> None:
    svg = drawn([1.0, 2.0, 3.0])
    assert svg.get("role") == "img"
    ids = svg.get("aria-labelledby").split()
    told = [svg.find(tag) for tag in ("title", "desc")]
    assert [element.get("id") for element in told] == ids
    assert told[1].text == (
        "Histogram of 3 samples by a < b, linear scale from 1 to 3; median 2. Ticks below: none & all."
    )


def test_marked_values_have_a_tick_each_where_they_lie() -> None:
    svg = drawn([0.0, 5.0, 10.0], [0.0, 10.0, np.nan])
    rug = next(path for path in svg.iter("path") if path.get("class") == "rug")
    assert rug.get("d").count("M") == 2


def test_data_without_a_finite_value_give_an_empty_chart() -> None:
    assert heights(drawn([np.nan, np.inf])) == []
