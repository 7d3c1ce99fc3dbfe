"""Scale graphs: the paper's numbers, and what holds for each point."""

import json
import math
from typing import Any

import pytest

from tailbound.compute.noise import (
    PAPER_LOG_NORMALS,
    DelayModel,
    LogNormalNoise,
    NormalNoise,
)
from tailbound.compute.simulate import ScalePoint, scale_graph, simulate
from tailbound.errors import ConfigError

TABLE_NOISE_TYPE = {
    "lognormal": 1.496,
    "normal": 1.302,
    "bernoulli": 1.283,
    "exponential": 1.386,
    "gamma": 1.39,
}
TABLE_NOISE_SCALE = {
    0.05: 1.496,
    0.10: 1.933,
    0.15: 2.394,
    0.20: 2.773,
    0.25: 3.043,
    0.30: 3.4,
}


def point(noise: str, workers: int, **options: Any) -> ScalePoint:
    return simulate(noise, [workers], **options).points[0]


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "ratio"), TABLE_NOISE_TYPE.items())
def test_iteration_ratio_is_the_paper_s_for_each_noise(
    noise: str, ratio: float
) -> None:
    found = point(noise, 768)

    assert found.steps >= 600
    assert found.iteration_ratio == pytest.approx(ratio, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize(("variance_s2", "ratio"), TABLE_NOISE_SCALE.items())
def test_iteration_ratio_is_the_paper_s_for_each_variance(
    variance_s2: float, ratio: float
) -> None:
    found = point("lognormal", 768, variance=variance_s2)

    assert found.iteration_ratio == pytest.approx(ratio, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize(("variance_s2", "ratio"), TABLE_NOISE_SCALE.items())
def test_iteration_ratio_is_the_paper_s_with_its_rounded_parameters(
    variance_s2: float, ratio: float
) -> None:
    noise = LogNormalNoise(*PAPER_LOG_NORMALS[variance_s2])

    found = scale_graph(noise, [768])[0]

    assert found.iteration_ratio == pytest.approx(ratio, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "speedup"),
    [(16, 1.19), (64, 1.30), (200, 1.38), (512, 1.45), (2048, 1.54)],
)
def test_speedup_in_the_delay_environment_is_the_specification_s(
    workers: int, speedup: float
) -> None:
    found = point("delay", workers, base_s=1.0)

    assert found.speedup == pytest.approx(speedup, abs=0.02)
    assert 0.12 < found.dropped_share < 0.15


def test_a_point_is_consistent_in_itself() -> None:
    found = point("lognormal", 16, steps=300)

    assert found.worker_step_s == pytest.approx(12 * 0.674, rel=0.01)
    assert found.iteration_ratio == found.step_s / found.worker_step_s
    assert found.threshold_s is not None
    assert found.worker_step_s / 2.0 < found.threshold_s < found.step_s
    assert found.bounded_step_s <= found.threshold_s
    planned = 16 * 12
    baseline = planned / (found.step_s + 0.5)
    bounded = planned * (1.0 - found.dropped_share) / (found.bounded_step_s + 0.5)
    assert found.baseline_micro_batches_per_s == pytest.approx(baseline)
    assert found.bounded_micro_batches_per_s == pytest.approx(bounded)
    assert found.linear_micro_batches_per_s == pytest.approx(
        planned / (found.worker_step_s + 0.5)
    )
    assert found.speedup == pytest.approx(bounded / baseline, rel=0.01)


def test_theory_stands_beside_what_was_simulated() -> None:
    """Worked values for a mean of 0.675 and a variance of 0.05, met by sampling."""
    normal = scale_graph(NormalNoise(0.225, math.sqrt(0.05)), [16], steps=1000)[0]

    assert normal.theory_step_s == pytest.approx(9.494626, rel=0.005)
    assert normal.theory_threshold_s == pytest.approx(7.4407, rel=0.005)
    assert normal.theory_speedup == pytest.approx(1.103417, abs=0.005)
    assert normal.speedup == pytest.approx(normal.theory_speedup, abs=0.01)


def test_a_measured_step_time_makes_theory_better_with_skewed_noise() -> None:
    found = point("delay", 200, base_s=1.0, steps=200)

    off = abs(found.theory_speedup - found.speedup)
    off_given_step = abs(found.theory_speedup_given_step - found.speedup)
    assert off > 0.1
    assert off_given_step < 0.02


def test_one_worker_waits_for_nobody_and_gains_nothing() -> None:
    found = point("gamma", 1, steps=500)

    assert found.iteration_ratio == pytest.approx(1.0)
    assert found.threshold_s is None
    assert found.theory_threshold_s is None
    assert (found.speedup, found.dropped_share) == (1.0, 0.0)
    assert (found.theory_speedup, found.theory_speedup_given_step) == (1.0, 1.0)
    assert found.bounded_step_s == found.step_s
    throughputs = (found.baseline_micro_batches_per_s, found.linear_micro_batches_per_s)
    assert throughputs == pytest.approx([found.bounded_micro_batches_per_s] * 2)


def test_a_job_without_noise_gains_nothing() -> None:
    found = scale_graph(NormalNoise(0.0, 0.0), [64], steps=10)[0]

    assert found.threshold_s is None
    assert found.iteration_ratio == pytest.approx(1.0)


def test_where_most_micro_batches_take_no_time_a_threshold_still_takes_some() -> None:
    """Noise takes away more than the base: 7 of 10 latencies are clipped to 0 s."""
    found = scale_graph(
        NormalNoise(-0.5, 0.1), [64], num_micro_batches=2, comm_s=0.0, steps=500
    )[0]

    assert found.threshold_s is not None
    assert found.threshold_s > 0.0
    assert found.speedup > 1.0


@pytest.mark.parametrize("max_drop", [0.1, 0.01, 0.0])
def test_no_more_is_dropped_than_allowed(max_drop: float) -> None:
    free = point("delay", 64, steps=300)
    bounded = point("delay", 64, steps=300, max_drop=max_drop)

    assert bounded.dropped_share <= max_drop
    assert 1.0 <= bounded.speedup < free.speedup
    assert bounded.theory_speedup < free.theory_speedup
    assert (max_drop == 0.1) == (bounded.dropped_share > 0.09)


def test_a_point_depends_on_its_own_workers_and_the_seed_only() -> None:
    alone = simulate("lognormal", [16], steps=50, seed=3)
    among = simulate("lognormal", [4, 16, 1], steps=50, seed=3)
    another = simulate("lognormal", [16], steps=50, seed=4)

    assert [found.workers for found in among.points] == [4, 16, 1]
    assert among.points[1] == alone.points[0]
    assert another.points[0] != alone.points[0]


def test_the_gain_grows_with_the_workers() -> None:
    speedups = [
        found.speedup for found in simulate("delay", [1, 4, 16, 64], steps=300).points
    ]

    assert speedups == sorted(speedups)
    assert speedups[0] == 1.0


def test_stragglers_add_to_the_noise() -> None:
    """Each micro-batch waits 0.04 s on average, wherever; on one server of 64."""
    calm = point("normal", 64, steps=200)
    uniform = point("normal", 64, steps=200, stragglers="uniform")
    one_server = point("normal", 64, steps=200, stragglers="one_server")

    extra_s = uniform.worker_step_s - calm.worker_step_s
    assert extra_s == pytest.approx(12 * 0.04, abs=0.02)
    extra_s = one_server.worker_step_s - calm.worker_step_s
    assert extra_s == pytest.approx(12 * 0.16 * 8 / 64, abs=0.02)
    assert one_server.step_s > uniform.step_s > calm.step_s


@pytest.mark.slow
def test_default_steps_fit_the_number_of_workers() -> None:
    few = scale_graph(DelayModel(), [1], num_micro_batches=1)[0]
    many = scale_graph(DelayModel(), [200], num_micro_batches=1000)[0]

    assert (few.steps, many.steps) == (2000, 100)


def test_json_holds_the_options_and_every_point() -> None:
    simulation = simulate("gamma", [1, 8], 6, 0.3, 0.1, 5, steps=20, variance=0.02)

    told = json.loads(simulation.to_json())

    points = told.pop("points")
    assert told == {
        "noise": "gamma",
        "variance_s2": 0.02,
        "stragglers": None,
        "num_micro_batches": 6,
        "base_s": 0.3,
        "comm_s": 0.1,
        "max_drop": 1.0,
        "seed": 5,
    }
    assert [found["workers"] for found in points] == [1, 8]
    assert points[0]["threshold_s"] is None
    assert points[1]["speedup"] == simulation.points[1].speedup
    assert points[1]["iteration_ratio"] == simulation.points[1].iteration_ratio


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "white"}, "--noise is one of lognormal, .*, not 'white'"),
        (
            {"workers": []},
            r"--workers is one or more numbers, each 1 or more, not \[\]",
        ),
        ({"workers": [4, 0]}, r"--workers is one or more numbers, .* not \[4, 0\]"),
        ({"num_micro_batches": 0}, "--micro-batches is 1 or more, not 0"),
        ({"base_s": 0.0}, r"--base is above 0 seconds, not 0\.0"),
        ({"base_s": math.inf}, "--base is above 0 seconds, not inf"),
        ({"comm_s": -1.0}, r"--comm-time is 0 or more seconds, not -1\.0"),
        ({"comm_s": math.nan}, "--comm-time is 0 or more seconds, not nan"),
        ({"seed": -1}, "--seed is 0 or more, not -1"),
        ({"steps": 0}, "--steps is 1 or more, not 0"),
        ({"max_drop": 1.5}, r"--max-drop is a share in \[0, 1\], not 1\.5"),
        ({"variance": -0.1}, r"--variance is above 0 square seconds, not -0\.1"),
        (
            {"stragglers": "few"},
            "--stragglers is one of uniform, one_server, not 'few'",
        ),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    valid: dict[str, Any] = {"noise": "normal", "workers": [2], "steps": 1}

    with pytest.raises(ConfigError, match=message):
        simulate(**valid | options)
