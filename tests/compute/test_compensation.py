"""What makes up for dropped micro-batches; numbers worked out by hand."""

import pytest

from tailbound.compute.compensation import (
    extra_steps,
    grown_micro_batches,
    normalize_factor,
    redundancy,
)
from tailbound.errors import ConfigError


@pytest.mark.parametrize(
    ("dropped_share", "expected"), [(0.0, 0.0), (0.1, 1 / 9), (0.5, 1.0), (0.75, 3.0)]
)
def test_dropping_a_tenth_asks_for_a_ninth_more(
    dropped_share: float, expected: float
) -> None:
    assert redundancy(dropped_share) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps", "dropped_share", "expected"),
    [(900, 0.1, 100), (1000, 0.0, 0), (1000, 0.1, 112), (1, 0.01, 1), (0, 0.5, 0)],
)
def test_extra_steps_are_rounded_up(
    steps: int, dropped_share: float, expected: int
) -> None:
    assert extra_steps(steps, dropped_share) == expected


@pytest.mark.parametrize(
    ("num", "dropped_share", "expected"),
    [(9, 0.1, 10), (12, 0.0, 12), (12, 0.1, 14), (12, 0.25, 16), (12, 0.9, 24)],
)
def test_a_plan_grows_to_compute_as_much_as_before(
    num: int, dropped_share: float, expected: int
) -> None:
    assert grown_micro_batches(num, dropped_share) == expected


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"a dropped share is in \[0, 1\)"):
        redundancy(share)


def test_counts_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps is 0 or more, not -1"):
        extra_steps(-1, 0.1)
    with pytest.raises(ConfigError, match="1 or more, not 0"):
        grown_micro_batches(0, 0.1)


def test_the_three_normalisations() -> None:
    assert normalize_factor("computed", 30.0, 40, 0.2) == 1.0
    assert normalize_factor("planned", 30.0, 40, 0.2) == 0.75
    assert normalize_factor("constant", 30.0, 40, 0.2) == pytest.approx(0.8)
