"""The closed forms, against values computed elsewhere and a search by hand."""

import math
from statistics import NormalDist
from typing import Any

import pytest

from tailbound.compute.theory import (
    best_threshold_s,
    expected_micro_batches,
    expected_speedup,
    expected_step_s,
)
from tailbound.errors import ConfigError

MEAN_S, STD_S = 0.675, math.sqrt(0.05)
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("num_workers", "step_s"),
    [
        (1, 8.1),
        (2, 8.502601),
        (16, 9.494626),
        (200, 10.242166),
        (2048, 10.775225),
    ],
)
def test_step_time_grows_with_the_workers(num_workers: int, step_s: float) -> None:
    found = expected_step_s(
        MEAN_S, STD_S, num_micro_batches=12, num_workers=num_workers
    )

    assert found == pytest.approx(step_s, abs=1e-6)


def test_step_time_of_another_job() -> None:
    found = expected_step_s(1.0, 0.3, num_micro_batches=32, num_workers=112)

    assert found == pytest.approx(36.361811, abs=1e-6)


def test_communication_adds_to_the_step() -> None:
    """12 * 0.675 + 0.5 for one worker."""
    found = expected_step_s(
        MEAN_S, STD_S, num_micro_batches=12, num_workers=1, comm_s=0.5
    )

    assert found == pytest.approx(8.6)


def test_without_noise_every_worker_takes_the_same() -> None:
    found = expected_step_s(0.5, 0.0, num_micro_batches=4, num_workers=1000)

    assert found == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("num_workers", "expected_max"),
    [(3, 0.8462844), (6, 1.2672064), (100, 2.5075936), (100_000, 4.3842)],
)
def test_the_maximum_of_normals_is_met_within_three_percent(
    num_workers: int, expected_max: float
) -> None:
    """Exact expected maxima of N standard normals, from tables of order statistics."""
    found = expected_step_s(0.0, 1.0, num_micro_batches=1, num_workers=num_workers)

    assert found == pytest.approx(expected_max, rel=0.027)


def test_more_workers_than_a_float_tells_from_infinity_still_have_a_maximum() -> None:
    found = expected_step_s(0.0, 1.0, num_micro_batches=1, num_workers=10**18)

    assert 8.7 < found < 9.0


@pytest.mark.parametrize(
    ("threshold_s", "micro_batches"),
    [(7.0, 9.909524), (8.1, 11.289235), (9.0, 11.859777), (INF, 12.0)],
)
def test_what_is_finished_before_the_threshold(
    threshold_s: float, micro_batches: float
) -> None:
    found = expected_micro_batches(threshold_s, MEAN_S, STD_S, num_micro_batches=12)

    assert found == pytest.approx(micro_batches, abs=1e-6)


def test_without_noise_what_ends_at_the_threshold_is_not_finished() -> None:
    just_above_s = math.nextafter(1.0, 2.0)

    assert expected_micro_batches(1.0, 0.5, 0.0, num_micro_batches=4) == 1.0
    assert expected_micro_batches(just_above_s, 0.5, 0.0, num_micro_batches=4) == 2.0


@pytest.mark.parametrize("num_workers", [16, 200, 2048])
def test_the_best_threshold_needs_no_number_of_workers(num_workers: int) -> None:
    speedup = {16: 1.103417, 200: 1.185947, 2048: 1.244797}[num_workers]
    step_s = expected_step_s(
        MEAN_S, STD_S, num_micro_batches=12, num_workers=num_workers
    )

    threshold_s = best_threshold_s(MEAN_S, STD_S, num_micro_batches=12, comm_s=0.5)

    assert threshold_s == pytest.approx(7.4407, abs=1e-4)
    kept = expected_micro_batches(threshold_s, MEAN_S, STD_S, num_micro_batches=12)
    assert kept / 12.0 == pytest.approx(0.876662, abs=1e-5)
    found = expected_speedup(
        threshold_s, MEAN_S, STD_S, num_micro_batches=12, step_s=step_s, comm_s=0.5
    )
    assert found == pytest.approx(speedup, abs=1e-6)


def test_a_measured_step_time_takes_the_place_of_the_expected() -> None:
    """11.289235 / 12 * (9 + 0.5) / (8.1 + 0.5)."""
    found = expected_speedup(
        8.1, MEAN_S, STD_S, num_micro_batches=12, step_s=9.0, comm_s=0.5
    )

    assert found == pytest.approx(1.039222, abs=1e-6)


def test_a_threshold_beyond_the_step_only_loses() -> None:
    """The step is 8 s with and without: what is left is the kept share."""
    found = expected_speedup(
        8.1, MEAN_S, STD_S, num_micro_batches=12, step_s=8.0, comm_s=0.5
    )

    assert found == pytest.approx(11.289235 / 12.0, abs=1e-6)


@pytest.mark.parametrize("max_drop", [1.0, 0.5, 0.1, 0.02])
@pytest.mark.parametrize(
    ("std_s", "num_micro_batches", "comm_s"),
    [(0.22, 12, 0.5), (0.01, 12, 0.5), (0.02, 7, 3.0), (0.4, 3, 0.0), (0.1, 1, 0.2)],
)
def test_no_other_threshold_in_its_domain_is_better(
    std_s: float, num_micro_batches: int, comm_s: float, max_drop: float
) -> None:
    """Against a walk over the domain in steps of 1 ms."""
    mean_s, phi = 0.675, NormalDist().cdf

    def kept(threshold_s: float) -> float:
        return sum(
            phi((threshold_s - m * mean_s) / (math.sqrt(m) * std_s))
            for m in range(1, num_micro_batches + 1)
        )

    found_s = best_threshold_s(
        mean_s,
        std_s,
        num_micro_batches=num_micro_batches,
        comm_s=comm_s,
        max_drop=max_drop,
    )

    whole_s = num_micro_batches * mean_s
    walk = [whole_s / 2.0 + 0.001 * n for n in range(1, int(whole_s * 2000.0))]
    kept_s = {threshold_s: kept(threshold_s) for threshold_s in walk}
    best = max(
        kept / (threshold_s + comm_s)
        for threshold_s, kept in kept_s.items()
        if kept >= (1.0 - max_drop) * num_micro_batches
    )
    assert kept(found_s) >= (1.0 - max_drop) * num_micro_batches * (1.0 - 1e-12)
    assert kept(found_s) / (found_s + comm_s) >= best * (1.0 - 1e-9)


def test_narrow_peaks_are_not_missed() -> None:
    """With 0.1 ms of noise the best is some 4 deviations above the 64th sum."""
    found_s = best_threshold_s(0.675, 1e-4, num_micro_batches=64, comm_s=0.5)

    assert 64 * 0.675 < found_s < 64 * 0.675 + 8.0 * 8e-4


@pytest.mark.parametrize("std_s", [0.0, 1e-30, 0.2])
def test_a_threshold_that_may_drop_nothing_does_not(std_s: float) -> None:
    found_s = best_threshold_s(
        0.675, std_s, num_micro_batches=12, comm_s=0.5, max_drop=0.0
    )

    assert expected_micro_batches(found_s, 0.675, std_s, num_micro_batches=12) == 12.0


def valid(**changes: Any) -> dict[str, Any]:
    return {"mean_s": 1.0, "std_s": 0.1, "num_micro_batches": 4, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean_s": -1.0}, r"mean_s is 0 or more seconds, not -1\.0"),
        ({"mean_s": NAN}, "mean_s is 0 or more seconds, not nan"),
        ({"std_s": -0.1}, r"std_s is 0 or more seconds, not -0\.1"),
        ({"num_micro_batches": 0}, "num_micro_batches is 1 or more, not 0"),
        ({"num_workers": 0}, "num_workers is 1 or more, not 0"),
        ({"comm_s": INF}, "comm_s is 0 or more seconds, not inf"),
    ],
)
def test_a_step_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expected_step_s(**valid(num_workers=2) | changes)


@pytest.mark.parametrize("threshold_s", [0.0, -1.0, NAN])
def test_a_threshold_that_is_none_is_refused(threshold_s: float) -> None:
    with pytest.raises(ConfigError, match="threshold_s is above 0 seconds"):
        expected_micro_batches(threshold_s, 1.0, 0.1, num_micro_batches=4)


@pytest.mark.parametrize("step_s", [0.0, INF, NAN])
def test_a_step_time_that_is_none_is_refused(step_s: float) -> None:
    with pytest.raises(ConfigError, match="step_s is a positive number of seconds"):
        expected_speedup(1.0, 1.0, 0.1, num_micro_batches=4, step_s=step_s)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean_s": 0.0}, r"mean_s is a positive number of seconds, not 0\.0"),
        ({"max_drop": 1.1}, r"max_drop is a share in \[0, 1\], not 1\.1"),
    ],
)
def test_a_search_out_of_range_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        best_threshold_s(**valid() | changes)
