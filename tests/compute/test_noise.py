"""The noises: what they are on average, how they are drawn, what is refused."""

import math
from typing import Any

import numpy as np
import pytest

from tailbound.compute.noise import (
    KINDS,
    PAPER_LOG_NORMALS,
    BernoulliNoise,
    DelayModel,
    ExponentialNoise,
    GammaNoise,
    LogNormalNoise,
    Noise,
    NormalNoise,
    make_noise,
)
from tailbound.errors import ConfigError

MOMENTS = {
    # mean, variance of the parameters that the paper prints, by hand
    "lognormal": (0.224125, 0.049806),
    "normal": (0.23, 0.0484),
    "bernoulli": (0.225, 0.050625),
    "exponential": (0.223714, 0.050048),
    "gamma": (0.222222, 0.049383),
    "delay": (0.223157, 0.073915),
}


def make(kind: str, variance_s2: float | None = None) -> Noise:
    return make_noise(kind, base_s=0.45, variance_s2=variance_s2)


def test_every_kind_has_the_moments_of_the_paper_s_parameters() -> None:
    assert tuple(MOMENTS) == KINDS
    for kind, (mean_s, variance_s2) in MOMENTS.items():
        noise = make(kind)
        assert noise.mean_s == pytest.approx(mean_s, abs=1e-6), kind
        assert noise.variance_s2 == pytest.approx(variance_s2, abs=1e-6), kind


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_has_the_moments_that_are_told(kind: str) -> None:
    noise = make(kind)

    delay_s = noise.sample(np.random.default_rng(3), (400, 500))

    assert delay_s.shape == (400, 500)
    assert delay_s.dtype == np.float64
    assert delay_s.mean() == pytest.approx(noise.mean_s, rel=0.01)
    assert delay_s.var() == pytest.approx(noise.variance_s2, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_drawing_in_parts_gives_what_drawing_at_once_gives(kind: str) -> None:
    noise, rng = make(kind), np.random.default_rng(4)

    parts = [noise.sample(rng, (2, 3)), noise.sample(rng, (5, 3))]

    whole = noise.sample(np.random.default_rng(4), (7, 3))
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("kind", ["lognormal", "normal", "bernoulli", "gamma"])
@pytest.mark.parametrize("variance_s2", [0.05, 0.3])
def test_a_variance_is_met_with_the_tables_mean(kind: str, variance_s2: float) -> None:
    noise = make(kind, variance_s2)

    assert noise.mean_s == pytest.approx(0.225)
    assert noise.variance_s2 == pytest.approx(variance_s2)


@pytest.mark.parametrize("variance_s2", [0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
def test_the_paper_s_rounded_log_normals_are_close_to_their_variance(
    variance_s2: float,
) -> None:
    log_mean, log_std = PAPER_LOG_NORMALS[variance_s2]

    exact = LogNormalNoise.from_moments(0.225, variance_s2)

    assert exact.log_mean == pytest.approx(log_mean, abs=0.006)
    assert exact.log_std == pytest.approx(log_std, abs=0.006)


def test_delay_model_has_the_specification_s_values() -> None:
    delay = DelayModel()

    assert delay.mean_s == pytest.approx(0.495904, abs=1e-6)
    assert math.sqrt(delay.variance_s2) == pytest.approx(0.604159, abs=1e-6)
    assert delay.bound_chance == pytest.approx(0.00187838, abs=1e-8)


def test_a_delay_is_at_most_its_bound_times_the_base() -> None:
    delay_s = DelayModel(base_s=0.05).sample(np.random.default_rng(0), 100_000)

    assert delay_s.min() > 0.0
    assert delay_s.max() == pytest.approx(5.5 * 0.05)
    assert (delay_s == delay_s.max()).mean() == pytest.approx(0.00188, abs=0.0004)


def test_ranks_with_generators_of_their_own_draw_other_delays_again_and_again() -> None:
    first_M, again_M, other_M = (
        DelayModel().sample(np.random.default_rng([7, rank]), 12) for rank in (0, 0, 1)
    )

    assert np.array_equal(first_M, again_M)
    assert not (first_M == other_M).any()


def test_bernoulli_delays_are_all_or_nothing() -> None:
    delay_s = BernoulliNoise().sample(np.random.default_rng(0), 1000)

    assert set(delay_s.tolist()) == {0.0, 0.45}


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_a_chance_at_its_limit_leaves_none_to_chance(chance: float) -> None:
    delay_s = BernoulliNoise(2.0, chance).sample(np.random.default_rng(0), 1000)

    assert set(delay_s.tolist()) == {2.0 * chance}


@pytest.mark.parametrize(
    ("kind", "variance_s2", "message"),
    [
        (
            "cauchy",
            None,
            "--noise is one of lognormal, normal, bernoulli, exponential, gamma, "
            "delay, not 'cauchy'",
        ),
        ("exponential", 0.05, "--variance does not go with --noise exponential"),
        ("delay", 0.05, "--variance does not go with --noise delay"),
        ("gamma", 0.0, r"--variance is above 0 square seconds, not 0\.0"),
        ("normal", math.inf, "--variance is above 0 square seconds, not inf"),
    ],
)
def test_a_noise_that_cannot_be_made_is_refused(
    kind: str, variance_s2: float | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(kind, variance_s2)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (LogNormalNoise, {"log_mean": math.nan}, "log_mean is a finite number"),
        (LogNormalNoise, {"log_std": -1.0}, r"log_std is 0 or more, not -1\.0"),
        (NormalNoise, {"mean_s": math.inf}, "mean_s is a finite number, not inf"),
        (NormalNoise, {"std_s": math.nan}, "std_s is 0 or more, not nan"),
        (BernoulliNoise, {"delay_s": -0.1}, r"delay_s is 0 or more, not -0\.1"),
        (BernoulliNoise, {"chance": 1.1}, r"chance is a share in \[0, 1\], not 1\.1"),
        (ExponentialNoise, {"rate_per_s": 0.0}, r"rate_per_s is above 0, not 0\.0"),
        (GammaNoise, {"shape": 0.0}, r"shape is above 0, not 0\.0"),
        (GammaNoise, {"rate_per_s": math.inf}, "rate_per_s is above 0, not inf"),
        (DelayModel, {"base_s": 0.0}, r"base_s is above 0, not 0\.0"),
        (DelayModel, {"log_mean": math.nan}, "log_mean is a finite number"),
    ],
)
def test_a_parameter_out_of_range_is_refused(
    kind: type[Any], settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**settings)
