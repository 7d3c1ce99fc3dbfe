"""Numbers as people read them."""

import math

import pytest

from tailbound.report import text


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        (0.0, "0.00"),
        (5.104, "5.10"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (21.34, "21.3"),
        (99.96, "100"),
        (1520.4, "1520"),
        (-21.34, "-21.3"),
        (None, "–"),  # noqa: RUF001
        (math.nan, "–"),  # noqa: RUF001
        (math.inf, "–"),  # noqa: RUF001
    ],
)
def test_a_number_has_about_three_digits_and_the_unknown_is_a_dash(
    value: float | None, printed: str
) -> None:
    assert text.number(value) == printed


def test_units_follow_a_number_but_not_a_dash() -> None:
    assert text.with_unit(21.34, "ms") == "21.3 ms"
    assert text.with_unit(None, "ms") == "–"  # noqa: RUF001
    assert text.times(4.197) == "4.20×"  # noqa: RUF001
    assert text.times(None) == "–"  # noqa: RUF001


def test_shares_are_printed_as_percent() -> None:
    assert text.percent(0.40812) == "40.8 %"
    assert text.percent(0.0081) == "0.81 %"
    assert text.percent(1.0) == "100 %"
    assert text.percent(None) == "–"  # noqa: RUF001


def test_a_bound_is_printed_as_the_paper_does() -> None:
    assert text.bound(0.008) == "0.8 %"
    assert text.bound(0.408) == "40.8 %"
    assert text.bound(0.0) == "0 %"


def test_a_metric_keeps_four_digits_and_its_zeros() -> None:
    assert text.metric(0.97) == "0.9700"
    assert text.metric(12.3456) == "12.35"
    assert text.metric(1234.4) == "1234"
    assert text.metric(None) == "–"  # noqa: RUF001
    assert text.metric(math.nan) == "–"  # noqa: RUF001


def test_counts_agree_with_their_noun() -> None:
    assert text.plural(1, "round trip") == "1 round trip"
    assert text.plural(3.0, "round trip") == "3 round trips"
    assert text.plural(13.5, "round trip") == "13.5 round trips"


def test_a_time_keeps_six_digits() -> None:
    assert text.six_digits(2.1000000000000005) == 2.1
    assert text.six_digits(1234.56789) == 1234.57
