"""Loss and delay added to what a process receives: burst injection for tests and lab.

The settings (:class:`Impairments` and its loss models) say what a bad network does,
:class:`ImpairedLink` decides it for one receiving path, :class:`DelayLine` holds back
what is not due yet. The receiving path and the fake network use the same three.

Sans-IO: batches of round counters, a generator and times (seconds) go in, masks, delays
and due items come out. Source: spec N10.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import ConfigError

T = TypeVar("T")
Mask = NDArray[np.bool_]
Counters = NDArray[np.integer[Any]]
Dropper = Callable[[Counters], Mask]

MIN_REORDER_S = 0.001
"""Least further delay of a reordered datagram: more than a batch takes to arrive."""
FOREVER = 1 << 62
"""Datagrams that a state without an exit lasts."""


def require_share(name: str, value: float) -> None:
    """Raise ConfigError unless the value is a share in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} is a share in [0, 1], not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentLoss:
    """Each datagram is lost with the same probability, whatever came before."""

    rate: float
    """Probability in [0, 1]."""

    def __post_init__(self) -> None:
        require_share("loss rate", self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class GilbertElliottLoss:
    """Loss in bursts: a Markov chain of a good and a bad state, stepped per datagram.

    The chain starts in the good state. It is bad for a share
    to_bad / (to_bad + to_good) of the datagrams, 1 / to_good at a time on average.

    Source: Gilbert 1960, Elliott 1963.
    """

    to_bad: float
    """Probability in [0, 1] per datagram of going from good to bad."""
    to_good: float
    """Probability in [0, 1] per datagram of going from bad to good."""
    loss_good: float = 0.0
    """Probability in [0, 1] of losing a datagram in the good state."""
    loss_bad: float = 1.0
    """Probability in [0, 1] of losing a datagram in the bad state."""

    def __post_init__(self) -> None:
        for name in ("to_bad", "to_good", "loss_good", "loss_bad"):
            require_share(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstLoss:
    """A microburst: loss in chosen rounds only, repairs included.

    Source: DBLP, evaluation: 70 % in the first iteration of chosen epochs; spec N10.
    """

    rate: float
    """Probability in [0, 1] of losing a datagram of these rounds."""
    rounds: tuple[int, ...]
    """Counters of the rounds that are hit, from 1."""

    def __post_init__(self) -> None:
        require_share("burst rate", self.rate)
        if any(counter < 1 for counter in self.rounds):
            raise ConfigError(f"burst rounds count from 1, not {min(self.rounds)}")


LossModel = IndependentLoss | GilbertElliottLoss | BurstLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class Impairments:
    """What a bad network does to everything that one process receives."""

    losses: tuple[LossModel, ...] = ()
    """A datagram is lost if any of these drops it. Control messages never are."""
    delay_s: float = 0.0
    """ONE-WAY delay in seconds, of datagrams and control messages alike. Half of the
    round-trip time, if both ends have it."""
    jitter_s: float = 0.0
    """Further delay in seconds, uniform in [0, jitter_s], drawn for each one."""
    reorder_share: float = 0.0
    """Share in [0, 1] of the datagrams that is held back by a further delay_s, but
    at least 1 ms, so that later ones overtake them."""
    duplicate_share: float = 0.0
    """Share in [0, 1] of the datagrams that arrives twice."""
    seed: int = 0
    """Seed of every draw; each receiving path derives its own generator from it."""

    def __post_init__(self) -> None:
        for loss in self.losses:
            if not isinstance(loss, LossModel):
                raise ConfigError(
                    "losses holds IndependentLoss, GilbertElliottLoss or BurstLoss, "
                    f"not {loss!r}"
                )
        for name in ("delay_s", "jitter_s"):
            value = getattr(self, name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise ConfigError(f"{name} is 0 or more seconds, not {value}")
        require_share("reorder_share", self.reorder_share)
        require_share("duplicate_share", self.duplicate_share)
        if self.seed < 0:
            raise ConfigError(f"seed is 0 or more, not {self.seed}")

    @property
    def is_none(self) -> bool:
        """True if nothing is lost, delayed or doubled."""
        return (
            not self.losses
            and self.delay_s == 0.0
            and self.has_constant_delay
            and self.duplicate_share == 0.0
        )

    @property
    def has_constant_delay(self) -> bool:
        """True if every datagram is delayed alike: a batch may be held back whole."""
        return self.jitter_s == 0.0 and self.reorder_share == 0.0


class ImpairedLink:
    """The draws for one receiving path.

    Every kind of draw has its own stream, so what is lost depends on the seed and on
    the order of the datagrams, not on how they were batched nor on the delays.
    """

    def __init__(self, impairments: Impairments, rng: np.random.Generator) -> None:
        self.impairments = impairments
        loss, self.jitter, self.reorder, self.duplicate, self.control = rng.spawn(5)
        self.droppers = tuple(
            make_dropper(model, own)
            for model, own in zip(
                impairments.losses, loss.spawn(len(impairments.losses)), strict=True
            )
        )
        self.held_back_s = max(impairments.delay_s, MIN_REORDER_S)

    def keep(self, counter_K: Counters) -> Mask:
        """Decide which datagrams of a batch survive.

        Args:
            counter_K: round counter of each datagram, in order of arrival.

        Returns:
            keep_K: False where the datagram is lost.
        """
        lost_K = np.zeros(len(counter_K), dtype=np.bool_)
        for drops in self.droppers:
            lost_K |= drops(counter_K)
        return ~lost_K

    def delay_s(self, num: int) -> NDArray[np.float64]:
        """Draw the delay in seconds of each of ``num`` datagrams."""
        delay_K = np.full(num, self.impairments.delay_s)
        if self.impairments.jitter_s:
            delay_K += self.impairments.jitter_s * self.jitter.random(num)
        if self.impairments.reorder_share:
            held_K = self.reorder.random(num) < self.impairments.reorder_share
            delay_K[held_K] += self.held_back_s
        return delay_K

    def copies(self, num: int) -> NDArray[np.int64]:
        """Draw how often each of ``num`` datagrams arrives: 1 or 2 times."""
        copies_K = np.ones(num, dtype=np.int64)
        if self.impairments.duplicate_share:
            copies_K += self.duplicate.random(num) < self.impairments.duplicate_share
        return copies_K

    def control_delay_s(self) -> float:
        """Draw the delay in seconds of one control message.

        A stream does not reorder: with jitter, the caller holds a message back until
        the one before it is out.
        """
        delay_s = self.impairments.delay_s
        if self.impairments.jitter_s:
            delay_s += self.impairments.jitter_s * float(self.control.random())
        return delay_s


class DelayLine(Generic[T]):
    """Items that wait for their due time (seconds, the caller's clock)."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, T]] = []
        self.num_pushed = 0

    def __len__(self) -> int:
        return len(self.heap)

    def push(self, due_s: float, item: T) -> None:
        """Hold an item back until ``due_s``."""
        heapq.heappush(self.heap, (due_s, self.num_pushed, item))
        self.num_pushed += 1

    def pop_due(self, now: float) -> list[T]:
        """Take out what is due at ``now``, earliest first, ties as they were pushed."""
        due: list[T] = []
        while self.heap and self.heap[0][0] <= now:
            due.append(heapq.heappop(self.heap)[2])
        return due

    def next_due_s(self) -> float | None:
        """When the next item is due, or None if there is none."""
        return self.heap[0][0] if self.heap else None


class GilbertElliottChain:
    """The chain, run a stay at a time: a batch costs one draw per change of state."""

    def __init__(self, loss: GilbertElliottLoss, rng: np.random.Generator) -> None:
        self.loss = loss
        self.stays, self.drops = rng.spawn(2)
        self.is_bad = False
        self.left = self.draw_stay()

    def draw_stay(self) -> int:
        """Draw how many datagrams meet the state just entered."""
        leave = self.loss.to_good if self.is_bad else self.loss.to_bad
        return int(self.stays.geometric(leave)) if leave else FOREVER

    def __call__(self, counter_K: Counters) -> Mask:
        """Decide which datagrams of a batch are lost."""
        num = len(counter_K)
        rate_K = np.empty(num)
        start = 0
        while start < num:
            stop = min(num, start + self.left)
            rate = self.loss.loss_bad if self.is_bad else self.loss.loss_good
            rate_K[start:stop] = rate
            self.left -= stop - start
            if self.left == 0:
                self.is_bad = not self.is_bad
                self.left = self.draw_stay()
            start = stop
        return self.drops.random(num) < rate_K


def make_dropper(loss: LossModel, rng: np.random.Generator) -> Dropper:
    """Make the function that decides, for one model, which of a batch are lost."""
    if isinstance(loss, GilbertElliottLoss):
        return GilbertElliottChain(loss, rng)
    rate = loss.rate
    if isinstance(loss, IndependentLoss):
        return lambda counter_K: rng.random(len(counter_K)) < rate
    hit_R = np.array(sorted(loss.rounds), dtype=np.int64)

    def drops(counter_K: Counters) -> Mask:
        # np.isin costs several times as much on one batch.
        counter_K = counter_K.astype(np.int64, copy=False)
        first_K = hit_R.searchsorted(counter_K, "left")
        hit_K = hit_R.searchsorted(counter_K, "right") > first_K
        # Drawn for these alone: what happens before a burst does not change it.
        hit_K[hit_K] = rng.random(int(np.count_nonzero(hit_K))) < rate
        return hit_K

    return drops
