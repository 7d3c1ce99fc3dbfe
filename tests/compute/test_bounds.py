"""The theorems' bounds and step sizes, and what gradient descent makes of them."""

from typing import Any

import pytest

from tailbound.compute.bounds import (
    convex_bound,
    convex_step_size,
    non_convex_bound,
    non_convex_step_size,
)
from tailbound.errors import ConfigError

JOB: dict[str, Any] = {
    "smoothness": 2.0,
    "max_batch": 64,
    "num_samples": 10_000,
    "gradient_std": 3.0,
}
NOISELESS = JOB | {"gradient_std": 0.0}


def test_non_convex_bound_has_the_specification_s_value() -> None:
    assert non_convex_bound(**JOB, loss_gap=1.5) == pytest.approx(0.14232305, abs=1e-8)


def test_convex_bound_has_the_specification_s_value() -> None:
    assert convex_bound(**JOB, distance=2.5) == pytest.approx(1.09, abs=1e-8)


def test_non_convex_step_is_limited_by_noise_or_by_the_batch() -> None:
    """sqrt(1.5) / (3 sqrt(20000)), and 1 / 256."""
    noisy = non_convex_step_size(**JOB, loss_gap=1.5)
    short = non_convex_step_size(**JOB | {"num_samples": 1000}, loss_gap=1.5)

    assert noisy == pytest.approx(0.00288675, abs=1e-8)
    assert short == 0.00390625
    assert non_convex_step_size(**NOISELESS, loss_gap=1.5) == 0.00390625


def test_convex_step_is_limited_by_noise_or_by_the_batch() -> None:
    """2.5 / (3 sqrt(8e6)), and 1 / 1024."""
    noisy = convex_step_size(**JOB | {"num_samples": 1_000_000}, distance=2.5)

    assert noisy == pytest.approx(0.000294628, abs=1e-9)
    assert convex_step_size(**JOB, distance=2.5) == 0.0009765625
    assert convex_step_size(**NOISELESS, distance=2.5) == 0.0009765625


def descend(step_size: float, steps: int) -> list[float]:
    """Parameters of full batches of 64 on theta^2 (L = 2), from 1."""
    theta, visited = 1.0, []
    for _ in range(steps):
        visited.append(theta)
        theta -= step_size * 64 * 2.0 * theta
    return visited


def test_the_non_convex_proof_shows_twice_the_printed_bound() -> None:
    """Gradient descent ends at 4/3 of it: 1 + 1/4 + 1/16 + ... of the first term."""
    job = NOISELESS | {"num_samples": 64 * 50}
    visited = descend(non_convex_step_size(**job, loss_gap=1.0), 50)

    mean_square = sum((2.0 * theta) ** 2 for theta in visited) / 50

    bound = non_convex_bound(**job, loss_gap=1.0)
    assert mean_square / bound == pytest.approx(4.0 / 3.0)
    assert mean_square < 2.0 * bound


def test_gradient_descent_is_within_the_convex_bound() -> None:
    job = NOISELESS | {"num_samples": 64 * 50}
    visited = descend(convex_step_size(**job, distance=1.0), 50)

    loss = (sum(visited) / 50) ** 2

    assert loss < convex_bound(**job, distance=1.0)


@pytest.mark.parametrize("name", ["smoothness", "max_batch", "num_samples"])
def test_what_must_be_positive_is(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is above 0, not 0\.0"):
        non_convex_bound(**JOB | {name: 0.0}, loss_gap=1.5)


def test_what_must_not_be_negative_is_not() -> None:
    with pytest.raises(ConfigError, match=r"gradient_std is 0 or more, not -1\.0"):
        non_convex_step_size(**JOB | {"gradient_std": -1.0}, loss_gap=1.5)
    with pytest.raises(ConfigError, match=r"loss_gap is 0 or more, not -1\.5"):
        non_convex_bound(**JOB, loss_gap=-1.5)
    with pytest.raises(ConfigError, match="distance is 0 or more, not inf"):
        convex_bound(**JOB, distance=float("inf"))
    with pytest.raises(ConfigError, match="distance is 0 or more, not nan"):
        convex_step_size(**JOB, distance=float("nan"))
