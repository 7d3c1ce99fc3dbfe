"""Local-SGD among stragglers: the shape of figure local_sgd."""

from typing import Any

import pytest

from tailbound.compute.latencies import STRAGGLERS, Stragglers
from tailbound.compute.local_sgd_time import LocalSgdPoint, local_sgd_scenario
from tailbound.errors import ConfigError

PERIODS = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def uniform() -> list[LocalSgdPoint]:
    return local_sgd_scenario(STRAGGLERS["uniform"], PERIODS)


@pytest.fixture(scope="module")
def one_server() -> list[LocalSgdPoint]:
    return local_sgd_scenario(STRAGGLERS["one_server"], PERIODS)


def test_a_period_of_one_is_synchronous_training(uniform: list[LocalSgdPoint]) -> None:
    """0.45 s, and 1 s more unless none of 32 waits: 1 - 0.96^32 = 0.729."""
    assert uniform[0].speedup == 1.0
    assert uniform[0].local_step_s == pytest.approx(0.45 + 0.729, abs=0.04)


def test_uniform_stragglers_average_out_over_a_period(
    uniform: list[LocalSgdPoint],
) -> None:
    speedups = [point.speedup for point in uniform]

    assert [point.sync_period for point in uniform] == list(PERIODS)
    assert speedups == sorted(speedups)
    assert speedups[-1] > 1.85


def test_stragglers_on_one_server_average_out_much_less(
    uniform: list[LocalSgdPoint], one_server: list[LocalSgdPoint]
) -> None:
    """Synchronous training suffers alike; a period of 16 leaves 1/4 or 2/5 of it."""

    def left(points: list[LocalSgdPoint]) -> float:
        return (points[-1].local_step_s - 0.45) / (points[0].local_step_s - 0.45)

    same = one_server[0].local_step_s / uniform[0].local_step_s
    assert same == pytest.approx(1.0, abs=0.03)
    for spread, together in zip(uniform[1:], one_server[1:], strict=True):
        assert together.speedup < 0.96 * spread.speedup
    assert left(uniform) < 0.25
    assert left(one_server) > 0.37


def test_a_worker_that_always_waits_is_not_amortised_at_all() -> None:
    always = Stragglers(chance=1.0, num_workers=1)

    points = local_sgd_scenario(always, PERIODS, num_local_steps=2000)

    for point in points:
        assert point.speedup == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("scenario", ["uniform", "one_server"])
def test_a_threshold_on_top_is_faster_for_any_period(
    scenario: str, request: pytest.FixtureRequest
) -> None:
    points: list[LocalSgdPoint] = request.getfixturevalue(scenario)

    for point in points:
        assert point.dropped_share == pytest.approx(0.062, abs=0.005)
        assert point.bounded_speedup > point.speedup * 1.2
        assert point.bounded_effective_speedup == pytest.approx(
            point.bounded_speedup * (1.0 - point.dropped_share)
        )
        assert point.bounded_effective_speedup > point.speedup
        assert point.bounded_local_step_s <= point.threshold_s / point.sync_period


def test_with_a_threshold_one_server_is_no_worse_than_many(
    uniform: list[LocalSgdPoint], one_server: list[LocalSgdPoint]
) -> None:
    for spread, together in zip(uniform, one_server, strict=True):
        assert together.bounded_speedup > 0.98 * spread.bounded_speedup


def test_averaging_less_often_saves_communication_too() -> None:
    """(0.5 + 1) / (0.5 + 1 / 4): without stragglers only that is left."""
    never = Stragglers(chance=0.0)

    points = local_sgd_scenario(
        never, (4,), base_s=0.5, comm_s=1.0, num_local_steps=400, num_workers=1
    )

    assert points[0].speedup == pytest.approx(2.0, rel=0.01)


def test_at_least_one_period_is_simulated() -> None:
    points = local_sgd_scenario(STRAGGLERS["uniform"], (8,), num_local_steps=1)

    assert points[0].local_step_s > 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_periods": (4, 0)}, r"sync_periods are 1 or more .* not \[4, 0\]"),
        ({"num_workers": 0}, "num_workers is 1 or more, not 0"),
        ({"num_local_steps": 0}, "num_local_steps is 1 or more, not 0"),
        ({"dropped_share": 0.0}, r"dropped_share is in \(0, 1\), not 0\.0"),
        ({"dropped_share": 1.0}, r"dropped_share is in \(0, 1\), not 1\.0"),
    ],
)
def test_what_is_out_of_range_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        local_sgd_scenario(STRAGGLERS["uniform"], **settings)
