"""How long an owner waits for a gradient before it takes what is there.

A round asks for the limit of its place, peer and bound when it opens, and tells how it
ended. No clock: durations (seconds) come in, limits go out. Source: docs/design/0025.
"""

import math
from collections import deque
from statistics import median
from typing import Protocol

from tailbound.config import LossBound

WINDOW = 64
"""Rounds that a limit is learned from: the last ones of its place, peer and bound."""
MIN_SAMPLES = 16
"""Rounds before there is a limit at all: the spread of fewer says little."""
DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
LEAST_SLACK_S = 0.02
"""A limit is this much above the median at least. A driver waits so long for its turn
when a few threads of its process compute (Python hands over every 5 ms)."""


class Deadline(Protocol):
    """What a receiver knows of its deadline."""

    @property
    def limit_s(self) -> float:
        """Seconds from a round's first sign to its deadline; inf: there is none."""

    def note(self, duration_s: float, *, is_cut: bool) -> None:
        """A round closed so long after its first sign, or was cut then."""


class FixedDeadline:
    """The user's number."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s

    def note(self, duration_s: float, *, is_cut: bool) -> None:
        """Learn nothing."""


class LearnedDeadline:
    """Median + k deviations of the last rounds, within a floor and a cap.

    A deviation is 1.4826 times the median absolute deviation, so a few long rounds move
    neither. The limit is never less than twice the median, nor than the median and
    ``LEAST_SLACK_S``, and never more than the cap.

    Of a round that was cut only "at least so long" is known, so it counts as longer
    than any other. Once half of the rounds were cut their median is not known either,
    and the cap alone holds: a network that became slower for good is cut for half a
    window at most, and learned anew.
    """

    def __init__(self, k: float, cap_s: float) -> None:
        self._k, self._cap_s = k, cap_s
        self._durations_s: deque[float] = deque(maxlen=WINDOW)
        self.limit_s = math.inf

    def note(self, duration_s: float, *, is_cut: bool) -> None:
        """See Deadline."""
        self._durations_s.append(math.inf if is_cut else duration_s)
        if len(self._durations_s) >= MIN_SAMPLES:
            self.limit_s = self._learn()

    def _learn(self) -> float:
        middle_s = median(self._durations_s)
        if middle_s == math.inf:
            return self._cap_s
        away_s = median(abs(duration_s - middle_s) for duration_s in self._durations_s)
        slack_s = max(self._k * DEVIATION * away_s, middle_s, LEAST_SLACK_S)
        return min(middle_s + slack_s, self._cap_s)


class Deadlines:
    """All deadlines of a process, as its loss bound sets them.

    Each place in the step, peer and bound learns for itself: buckets differ in size,
    links in speed, and a loose bound closes in a fraction of a strict one's time.
    """

    def __init__(self, bound: LossBound) -> None:
        self._bound = bound
        self._learned: dict[tuple[int, int, float], tuple[int, LearnedDeadline]] = {}

    def of(self, bucket: int, peer: int, p: float, num_chunks: int) -> Deadline | None:
        """The deadline of a peer's gradient; None: it has none.

        A learned one never cuts a round of which nothing may be missing (p = 0).

        Args:
            bucket: the gradient's place in the step.
            peer: rank that it comes from.
            p: its loss bound.
            num_chunks: of it. With another number the place starts anew.
        """
        bound = self._bound
        if bound.deadline_s is None:
            return None
        if bound.deadline_s != "auto":
            return FixedDeadline(bound.deadline_s)
        if p == 0.0:
            return None
        place = bucket, peer, p
        known = self._learned.get(place)
        if known is None or known[0] != num_chunks:
            known = (
                num_chunks,
                LearnedDeadline(bound.deadline_k, bound.deadline_cap_s),
            )
            self._learned[place] = known
        return known[1]
