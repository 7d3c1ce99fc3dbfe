"""What a mesh's steps add up to: all ranks decide the next bound from equal numbers.

Each owner tells all ranks the squares of its shard's mean and what was missing. All
ranks add them up in the same order and run the same detector, so that they change
regime in the same round without a word more (docs/design/0022).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.errors import ConfigError
from tailbound.protocol.messages import ShardBegin, ShardMean
from tailbound.regime import Decision, RegimeDetector


@dataclass(frozen=True, slots=True)
class RoundSum:
    """What one round adds to its step."""

    index: int
    """Of the round, from 0."""
    counter: int
    is_last: bool
    total_weight: float
    square_L: NDArray[np.float64]
    """Sum of squares of the mean, of each tensor that is told apart."""
    num_chunks: int
    missing: int
    loss_scale: float
    learning_rate: float | None

    @property
    def share_received(self) -> float:
        """Share in (0, 1] of the gradients' chunks that were in the mean."""
        return 1.0 - self.missing / self.num_chunks if self.num_chunks else 1.0


def sum_round(index: int, begin: ShardBegin, means: list[ShardMean]) -> RoundSum:
    """Add up what the owners told, in the order given: by rank, so all agree.

    Args:
        index: of the round.
        begin: rank 0's.
        means: of the ranks that own a shard; empty if nobody had anything.
    """
    square_L = np.zeros(begin.num_norms)
    for mean in means:
        square_L += np.array(mean.squares)
    return RoundSum(
        index,
        begin.counter,
        begin.is_last,
        float(bool(means)),
        square_L,
        sum(mean.num_chunks for mean in means),
        sum(mean.missing for mean in means),
        begin.loss_scale,
        begin.learning_rate,
    )


class StepLedger:
    """The open step, and the bound that holds in it."""

    def __init__(self, bound: LossBound) -> None:
        self._bound = bound
        self._detector = RegimeDetector(bound)
        self._step: int | None = None
        self._first_index = 0
        self._last_index: int | None = None
        self._sums: dict[int, RoundSum] = {}

    @property
    def p(self) -> float:
        """Loss bound of the open step."""
        return self._detector.p

    @property
    def critical(self) -> bool:
        """Regime of the open step."""
        return self._detector.critical

    def bound_of(self, step: int) -> float | None:
        """The loss bound of a step; None while the step before it is open.

        Asked for in the order of the steps, since the first one asked for is open.
        """
        if self._step is None:
            self._step = step
        return self.p if step <= self._step else None

    def state_dict(self) -> dict[str, Any]:
        """What the next bounds follow from, as plain data; equal on all ranks."""
        return self._detector.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, on all ranks before any of them begins a step.

        Raises:
            ConfigError: a step is open, or it is no such state.
        """
        if self._step is not None:
            raise ConfigError("a loss bound is loaded between steps, not within one")
        self._detector.load_state_dict(state)

    def norm_of(self, part: RoundSum) -> float:
        """Norm of one round's mean, unscaled and corrected for holes if so set."""
        norm = math.sqrt(float(part.square_L.sum()))
        if self._bound.corrects_norms:
            norm /= math.sqrt(part.share_received)
        return norm / part.loss_scale

    def add(self, part: RoundSum) -> Decision | None:
        """Take in a round that is over; returns the decision that ends its step."""
        self._sums[part.index] = part
        if part.is_last:
            self._last_index = part.index
        if self._last_index is None:
            return None
        indices = range(self._first_index, self._last_index + 1)
        if len(self._sums) < len(indices):
            return None
        parts = [self._sums.pop(index) for index in indices]
        self._first_index, self._last_index = self._last_index + 1, None
        self._step = None
        return self._decide(parts)

    def _decide(self, parts: list[RoundSum]) -> Decision:
        last = parts[-1]
        if not any(part.total_weight for part in parts):
            return Decision(
                last.counter,
                0.0,
                None,
                self.critical,
                self.p,
                "skipped: no rank had anything",
            )
        if self._bound.per_layer:
            square_L = np.concatenate([part.square_L for part in parts])
        else:
            square_L = np.array([sum(float(part.square_L.sum()) for part in parts)])
        num_chunks = sum(part.num_chunks for part in parts)
        missing = sum(part.missing for part in parts)
        return self._detector.update(
            np.sqrt(square_L),
            counter=last.counter,
            share_received=1.0 - missing / num_chunks,
            loss_scale=last.loss_scale,
            learning_rate=last.learning_rate,
        )
