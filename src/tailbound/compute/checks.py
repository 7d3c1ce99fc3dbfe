"""Is a number in its range: each check names it in one line."""

import math

from tailbound.config import require


def check_number(name: str, value: float) -> None:
    """Raise ConfigError unless the value is a finite number."""
    require(math.isfinite(value), f"{name} is a finite number, not {value}")


def check_positive(name: str, value: float) -> None:
    """Raise ConfigError unless the value is finite and above 0."""
    require(value > 0.0 and math.isfinite(value), f"{name} is above 0, not {value}")


def check_not_negative(name: str, value: float) -> None:
    """Raise ConfigError unless the value is finite and 0 or more."""
    require(value >= 0.0 and math.isfinite(value), f"{name} is 0 or more, not {value}")


def check_share(name: str, value: float) -> None:
    """Raise ConfigError unless the value is a share."""
    require(0.0 <= value <= 1.0, f"{name} is a share in [0, 1], not {value}")
