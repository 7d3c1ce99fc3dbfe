"""What makes up for dropped micro-batches, and what a mean over fewer is divided by.

Source: DropCompute, section:dropped_samples_compensation and
appendix:image_classification; spec C6, C7.
"""

import math
from typing import Literal

from tailbound.errors import ConfigError

MAX_GROWTH = 2.0
"""Largest factor on the planned micro-batches: past it the drop is not a tail any more,
and steps would grow with every look."""


def redundancy(dropped_share: float) -> float:
    """Extra computation that makes up for drops: R = M / M~ - 1.

    Args:
        dropped_share: of the planned micro-batches, in [0, 1).

    Raises:
        ConfigError: the share is out of range; nothing makes up for dropping all.
    """
    if not 0.0 <= dropped_share < 1.0:
        raise ConfigError(f"a dropped share is in [0, 1), not {dropped_share}")
    return 1.0 / (1.0 - dropped_share) - 1.0


def extra_steps(steps: int, dropped_share: float) -> int:
    """Steps to add so that as many micro-batches are computed: R * I_base, rounded up.

    Args:
        steps: without drops (I_base), 0 or more.
        dropped_share: realised, in [0, 1).

    Raises:
        ConfigError: a number is out of range.
    """
    if steps < 0:
        raise ConfigError(f"a number of steps is 0 or more, not {steps}")
    # Shares are sums of floats: a whole number must not be rounded up to the next.
    return math.ceil(round(steps * redundancy(dropped_share), 9))


def grown_micro_batches(num_micro_batches: int, dropped_share: float) -> int:
    """Micro-batches to plan so that as many as before are computed on average.

    Args:
        num_micro_batches: planned without drops (M), 1 or more.
        dropped_share: expected of the grown plan, in [0, 1).

    Returns:
        M (1 + R), rounded up, at most ``MAX_GROWTH`` times M.

    Raises:
        ConfigError: a number is out of range.
    """
    if num_micro_batches < 1:
        raise ConfigError(f"micro-batches are 1 or more, not {num_micro_batches}")
    factor = min(1.0 + redundancy(dropped_share), MAX_GROWTH)
    return math.ceil(round(num_micro_batches * factor, 9))


def normalize_factor(
    normalize: Literal["computed", "planned", "constant"],
    computed: float,
    planned: int,
    mean_dropped_share: float,
) -> float:
    """What the mean over computed micro-batches is multiplied by.

    Args:
        normalize: ``computed``: nothing (the stochastic correction). ``planned``: the
            sum is divided by what was planned (Algorithm 1, no correction).
            ``constant``: 1 - P_drop, the constant correction of the learning rate.
        computed: micro-batches of this step, of all ranks.
        planned: those that were planned, of all ranks; 1 or more.
        mean_dropped_share: average over the steps so far (P_drop).

    Source: DropCompute, appendix:image_classification; spec C7.
    """
    match normalize:
        case "computed":
            return 1.0
        case "planned":
            return computed / planned
        case "constant":
            return 1.0 - mean_dropped_share
