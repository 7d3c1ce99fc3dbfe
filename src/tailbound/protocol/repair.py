"""How many copies of each missing chunk leave in one pass (beyond the papers).

What makes a burst slow is not its bytes but its passes: each ends with a probe and
waits for the answer, one control round trip. At loss l a chunk that is sent r times in
one pass stays away with probability l**r, so fewer passes do the work of many, for more
bytes. ``Repair`` spreads the copies that are still needed over as few passes as a
budget of bytes allows, late ones larger than early ones, since few chunks are left by
then.

Only while the cause looks transient: where loss is usual on a link, a queue on the way
may be the cause, and copies would fill it.

Source: docs/design/0035.
"""

import math
from functools import lru_cache

from tailbound.config import LossBound
from tailbound.protocol.events import Direction

BUDGET = 1.4
"""Bytes of a round, over those that one copy a pass would take in expectation."""
MAX_COPIES = 24
"""That are still needed: more is a path that is dead rather than bursting."""
MAX_PASSES = 8
CLEAR_LOSS, CLEAR_FACTOR = 0.1, 2.0
"""A burst loses this share more than is usual, and so many times as much."""
MEMORY = 0.1
"""Weight of the newest round in what is usual."""
FEW_CHUNKS = 20
"""A pass over fewer says less about the loss than the passes before."""
CAUTION = 2.0
"""Standard deviations by which chance may leave more missing than expected."""


class Repairs:
    """Of all directions of all links of one end.

    Args:
        bound: of the job; says whether copies leave at all.
    """

    def __init__(self, bound: LossBound) -> None:
        self._is_plain = bound.repair == "plain"
        self._repairs: dict[tuple[int, Direction], Repair] = {}

    def of(self, peer: int, direction: Direction) -> "Repair | None":
        """Towards this peer; None: one copy a pass."""
        if self._is_plain:
            return None
        return self._repairs.setdefault((peer, direction), Repair())


class Repair:
    """What one sender's end of a link knows of its losses, over all rounds."""

    def __init__(self) -> None:
        self._usual_loss = 0.0

    def begin(self, num_chunks: int) -> "RoundRepair":
        """A round of so many chunks begins."""
        return RoundRepair(self, num_chunks)

    def note(self, loss: float) -> None:
        """A round's first pass lost this share."""
        self._usual_loss += MEMORY * (loss - self._usual_loss)

    def is_burst(self, loss: float) -> bool:
        """True if so much loss is not what the link usually has."""
        usual = self._usual_loss
        return loss >= max(usual + CLEAR_LOSS, CLEAR_FACTOR * usual)


class RoundRepair:
    """The same for one round."""

    def __init__(self, memory: Repair, num_chunks: int) -> None:
        self._memory, self._num_chunks = memory, num_chunks
        self._missing = num_chunks
        self._copies = 1
        self._loss: float | None = None
        self._is_burst = False

    def next_copies(self, missing: int, allowed: int, sent: int) -> int:
        """Copies of each missing chunk for the pass that begins.

        Args:
            missing: chunks, after the pass before; 1 or more.
            allowed: chunks that may be missing when the round closes.
            sent: datagrams of the round so far.
        """
        before = self._missing
        loss = min(missing / before, 1.0) ** (1.0 / self._copies)
        if self._loss is None:
            self._is_burst = self._memory.is_burst(loss)
            self._memory.note(loss)
        else:
            weight = before / (before + FEW_CHUNKS)
            loss = weight * loss + (1.0 - weight) * self._loss
        self._loss, self._missing = loss, missing
        self._copies = 1
        # Nothing came through at all: more of it would not either.
        if self._is_burst and 0.0 < loss < 1.0:
            total = self._num_chunks * _plain_passes(self._num_chunks, allowed, loss)
            room = (BUDGET * total - sent) / missing
            needed = copies_needed(missing, allowed, loss)
            self._copies = spread(needed, round(loss, 2), room)
        return self._copies


def copies_needed(missing: int, allowed: int, loss: float) -> int:
    """Copies of each after which, most likely, no more than ``allowed`` are missing."""
    for copies in range(1, MAX_COPIES):
        expected = missing * loss**copies
        spare = CAUTION * math.sqrt(expected)
        if expected + spare <= max(allowed, 0.1):
            return copies
    return MAX_COPIES


def spread(needed: int, loss: float, room: float) -> int:
    """Copies in the next pass, so that all ``needed`` take few passes.

    Args:
        needed: copies of each chunk, over all passes.
        loss: of a datagram, in (0, 1).
        room: datagrams that may be spent, for each chunk that is missing now.
    """
    for num_passes in range(1, MAX_PASSES + 1):
        cost, first = cheapest(needed, num_passes, loss)
        if cost <= room:
            return first
    return 1


@lru_cache(maxsize=4096)
def cheapest(needed: int, num_passes: int, loss: float) -> tuple[float, int]:
    """Expected datagrams for each chunk missing now, and copies in the first pass."""
    if num_passes == 1 or needed <= 1:
        return float(needed), max(1, needed)
    costs = [
        (first + loss**first * cheapest(needed - first, num_passes - 1, loss)[0], first)
        for first in range(1, needed + 1)
    ]
    return min(costs)


def _plain_passes(num_chunks: int, allowed: int, loss: float) -> float:
    """Expected datagrams for each chunk with one copy a pass."""
    passes = copies_needed(num_chunks, allowed, loss)
    return float((1.0 - loss**passes) / (1.0 - loss))
