"""Models of the delay that is added to each micro-batch: drawn, seeded, in seconds.

Five kinds have the parameters of the paper's noise tables, rounded as printed there;
:func:`make_noise` computes them from a variance instead. ``delay`` is the paper's
simulated delay environment. Every ``sample`` takes its numbers from the generator one
after the other, so drawing in parts gives what drawing at once gives.

Source: DropCompute, appendix:runtime_performace, appendix:noise_analysis; spec C5.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from tailbound.compute.checks import (
    check_not_negative,
    check_number,
    check_positive,
    check_share,
)
from tailbound.config import require

F64 = NDArray[np.float64]
Size = int | tuple[int, ...]
Kind = Literal["lognormal", "normal", "bernoulli", "exponential", "gamma", "delay"]

KINDS: tuple[Kind, ...] = get_args(Kind)
TABLE_MEAN_S = 0.225
"""Mean delay of a micro-batch in both tables, next to 0.45 s of compute."""

PAPER_LOG_NORMALS = {
    0.05: (-1.84, 0.83),
    0.10: (-2.04, 1.04),
    0.15: (-2.18, 1.17),
    0.20: (-2.29, 1.26),
    0.25: (-2.38, 1.33),
    0.30: (-2.46, 1.39),
}
"""The rows of table noise_scale: for a variance the parameters of a log-normal, rounded
as printed (means of 0.223 to 0.225 s). :func:`make_noise` does not round."""

STANDARD = NormalDist()


class Noise(Protocol):
    """A delay: what it is on average, and a way to draw it."""

    @property
    def mean_s(self) -> float:
        """Mean of one delay, in seconds."""

    @property
    def variance_s2(self) -> float:
        """Variance of one delay, in square seconds."""

    def sample(self, rng: np.random.Generator, size: Size) -> F64:
        """Draw independent delays, in seconds."""


@dataclass(frozen=True, slots=True)
class LogNormalNoise:
    """exp of a normal variable: mostly short, now and then very long."""

    log_mean: float = -1.84
    """Mean of the logarithm of seconds. -1.84: both tables, row a."""
    log_std: float = 0.83
    """Its standard deviation, >= 0."""

    def __post_init__(self) -> None:
        check_number("log_mean", self.log_mean)
        check_not_negative("log_std", self.log_std)

    @classmethod
    def from_moments(cls, mean_s: float, variance_s2: float) -> "LogNormalNoise":
        """The one with this mean and variance."""
        log_variance = math.log1p(variance_s2 / mean_s**2)
        return cls(math.log(mean_s) - log_variance / 2.0, math.sqrt(log_variance))

    @property
    def mean_s(self) -> float:
        """Mean of one delay, in seconds."""
        return math.exp(self.log_mean + self.log_std**2 / 2.0)

    @property
    def variance_s2(self) -> float:
        """Variance of one delay, in square seconds."""
        return math.expm1(self.log_std**2) * self.mean_s**2

    def sample(self, rng: np.random.Generator, size: Size) -> F64:
        """Draw independent delays, in seconds."""
        return rng.lognormal(self.log_mean, self.log_std, size)


@dataclass(frozen=True, slots=True)
class NormalNoise:
    """Normal, so at times negative: what it is added to may fall below zero.

    The simulator takes such a micro-batch for one of 0 s. With the defaults beside
    0.45 s of compute that is 1 of 1000, and moves its mean by less than 0.1 ms.
    """

    mean_s: float = 0.23
    """Mean of one delay, in seconds."""
    std_s: float = 0.22
    """Its standard deviation, in seconds, >= 0."""

    def __post_init__(self) -> None:
        check_number("mean_s", self.mean_s)
        check_not_negative("std_s", self.std_s)

    @classmethod
    def from_moments(cls, mean_s: float, variance_s2: float) -> "NormalNoise":
        """The one with this mean and variance."""
        return cls(mean_s, math.sqrt(variance_s2))

    @property
    def variance_s2(self) -> float:
        """Variance of one delay, in square seconds."""
        return self.std_s**2

    def sample(self, rng: np.random.Generator, size: Size) -> F64:
        """Draw independent delays, in seconds; some are negative."""
        return rng.normal(self.mean_s, self.std_s, size)


@dataclass(frozen=True, slots=True)
class BernoulliNoise:
    """All or nothing: a delay of fixed length, or none."""

    delay_s: float = 0.45
    """Length of a delay, in seconds, >= 0."""
    chance: float = 0.5
    """That a micro-batch has one, in [0, 1]."""

    def __post_init__(self) -> None:
        check_not_negative("delay_s", self.delay_s)
        check_share("chance", self.chance)

    @classmethod
    def from_moments(cls, mean_s: float, variance_s2: float) -> "BernoulliNoise":
        """The one with this mean and variance."""
        chance = 1.0 / (1.0 + variance_s2 / mean_s**2)
        return cls(mean_s / chance, chance)

    @property
    def mean_s(self) -> float:
        """Mean of one delay, in seconds."""
        return self.delay_s * self.chance

    @property
    def variance_s2(self) -> float:
        """Variance of one delay, in square seconds."""
        return self.delay_s**2 * self.chance * (1.0 - self.chance)

    def sample(self, rng: np.random.Generator, size: Size) -> F64:
        """Draw independent delays, in seconds."""
        return np.multiply(rng.random(size) < self.chance, self.delay_s)


@dataclass(frozen=True, slots=True)
class ExponentialNoise:
    """Exponential: its variance is its mean squared."""

    rate_per_s: float = 4.47
    """Delays per second of delay, the inverse of the mean, > 0."""

    def __post_init__(self) -> None:
        check_positive("rate_per_s", self.rate_per_s)

    @property
    def mean_s(self) -> float:
        """Mean of one delay, in seconds."""
        return 1.0 / self.rate_per_s

    @property
    def variance_s2(self) -> float:
        """Variance of one delay, in square seconds."""
        return 1.0 / self.rate_per_s**2

    def sample(self, rng: np.random.Generator, size: Size) -> F64:
        """Draw independent delays, in seconds."""
        return rng.exponential(1.0 / self.rate_per_s, size)


@dataclass(frozen=True, slots=True)
class GammaNoise:
    """Gamma: exponential with a shape of 1, closer to its mean with a larger one."""

    shape: float = 1.0
    """alpha, > 0."""
    rate_per_s: float = 4.5
    """beta, > 0."""

    def __post_init__(self) -> None:
        check_positive("shape", self.shape)
        check_positive("rate_per_s", self.rate_per_s)

    @classmethod
    def from_moments(cls, mean_s: float, variance_s2: float) -> "GammaNoise":
        """The one with this mean and variance."""
        return cls(mean_s**2 / variance_s2, mean_s / variance_s2)

    @property
    def mean_s(self) -> float:
        """Mean of one delay, in seconds."""
        return self.shape / self.rate_per_s

    @property
    def variance_s2(self) -> float:
        """Variance of one delay, in square seconds."""
        return self.shape / self.rate_per_s**2

    def sample(self, rng: np.random.Generator, size: Size) -> F64:
        """Draw independent delays, in seconds."""
        return rng.gamma(self.shape, 1.0 / self.rate_per_s, size)


@dataclass(frozen=True, slots=True)
class DelayModel:
    """The paper's delay environment: mu * min(Z / alpha, beta), Z log-normal.

    With the defaults a micro-batch takes 1.5 times as long on average and up to 6.5
    times. Give ``base_s`` what a micro-batch takes without delay.

    Source: appendix:runtime_performace, "Simulated delay"; figure epsilon_dist.
    """

    base_s: float = 1.0
    """Mean latency of a micro-batch without the delay (mu), in seconds, > 0."""
    scale: float = 2.0 * math.exp(4.5)
    """alpha, > 0: halves the mean of Z, before the bound."""
    bound: float = 5.5
    """beta, > 0: the longest delay, as a multiple of base_s."""
    log_mean: float = 4.0
    """Of Z: mean of the logarithm (user post lengths in internet discussions)."""
    log_std: float = 1.0
    """Of Z: standard deviation of the logarithm, > 0."""

    def __post_init__(self) -> None:
        for name in ("base_s", "scale", "bound", "log_std"):
            check_positive(name, getattr(self, name))
        check_number("log_mean", self.log_mean)

    @property
    def mean_s(self) -> float:
        """Mean of one delay, in seconds: base_s * E[eps]."""
        return self.base_s * self.moment(1)

    @property
    def variance_s2(self) -> float:
        """Variance of one delay, in square seconds."""
        return self.base_s**2 * (self.moment(2) - self.moment(1) ** 2)

    @property
    def bound_chance(self) -> float:
        """P(eps = beta): the share of delays that are as long as they can be."""
        return STANDARD.cdf(-self.bound_z)

    @property
    def bound_z(self) -> float:
        """Where beta is, in standard deviations of the logarithm above its mean."""
        log_bound = math.log(self.bound * self.scale)
        return (log_bound - self.log_mean) / self.log_std

    def moment(self, order: int) -> float:
        """E[eps^k], in closed form."""
        log_mean = self.log_mean - math.log(self.scale)
        whole = math.exp(order * log_mean + (order * self.log_std) ** 2 / 2.0)
        below = STANDARD.cdf(self.bound_z - order * self.log_std)
        return whole * below + self.bound**order * self.bound_chance

    def sample(self, rng: np.random.Generator, size: Size) -> F64:
        """Draw independent delays, in seconds.

        For the micro-batches of one rank, give each rank a generator of its own:
        ``np.random.default_rng([seed, rank])``.
        """
        log_mean = self.log_mean - math.log(self.scale)
        delay_s = rng.lognormal(log_mean, self.log_std, size)
        np.minimum(delay_s, self.bound, out=delay_s)
        delay_s *= self.base_s
        return delay_s


def make_noise(kind: str, *, base_s: float, variance_s2: float | None = None) -> Noise:
    """Make a noise of the paper's tables, or with another variance.

    Args:
        kind: one of :data:`KINDS`.
        base_s: latency of a micro-batch without noise, which ``delay`` is relative to.
        variance_s2: of the delay, > 0, with a mean of 0.225 s. None: the parameters
            printed in table noise_type, a variance of about 0.05. Not for
            ``exponential`` and ``delay``, whose mean says all.

    Raises:
        ConfigError: no such kind, or a variance that is out of range or has no place.
    """
    require(kind in KINDS, f"--noise is one of {', '.join(KINDS)}, not {kind!r}")
    if variance_s2 is None:
        tables: dict[str, Noise] = {
            "lognormal": LogNormalNoise(),
            "normal": NormalNoise(),
            "bernoulli": BernoulliNoise(),
            "exponential": ExponentialNoise(),
            "gamma": GammaNoise(),
            "delay": DelayModel(base_s),
        }
        return tables[kind]
    makers: dict[str, Callable[[float, float], Noise]] = {
        "lognormal": LogNormalNoise.from_moments,
        "normal": NormalNoise.from_moments,
        "bernoulli": BernoulliNoise.from_moments,
        "gamma": GammaNoise.from_moments,
    }
    require(
        kind in makers,
        f"--variance does not go with --noise {kind}, which has no parameter left",
    )
    require(
        variance_s2 > 0.0 and math.isfinite(variance_s2),
        f"--variance is above 0 square seconds, not {variance_s2}",
    )
    return makers[kind](TABLE_MEAN_S, variance_s2)
