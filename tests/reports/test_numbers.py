import math

import pytest

from pergrad.reports.numbers import aligned, batch_size, number, share


@pytest.mark.parametrize(
    "value", [0.5, 3.21e-5, 12.0, 1797.0, 9.9e6, 4e7, 1e35, 1e-300, -2.5, -3e9]
)
def test_a_number_can_be_read_back_to_three_digits(value) -> None:
    text = number(value).replace(",", "").translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-"))
    assert float(text.replace(" × 10", "e")) == pytest.approx(value, rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_said_so(value) -> None:
    assert number(value) == "not finite"
    assert aligned([value, 1.0])[0] == "not finite"


def test_a_share_that_is_not_all_is_not_said_to_be() -> None:
    assert share(0.99999) == ">99.9%"
    assert share(1e-9) == "<0.1%"
    assert share(0.9985) == "99.9%"


def test_a_column_has_as_many_decimals_in_each_row() -> None:
    column = aligned([0.1, 25.0, -3.14159])
    assert column == ["0.10", "25.00", "-3.14"]


def test_a_batch_size_is_a_whole_number_from_one_up() -> None:
    assert [batch_size(value) for value in (0, 9.6, 1e5)] == ["1", "10", "100,000"]
