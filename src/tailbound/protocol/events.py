"""Names that all machines share, and what an endpoint reports upwards."""

from dataclasses import dataclass
from enum import IntEnum

from tailbound.errors import TailboundError
from tailbound.records import RoundReport

SERVER_RANK = 0xFFFF
"""Stands for the server where a rank is asked for; workers are 0 to 65534."""


def peer_name(rank: int) -> str:
    """Name a peer as messages do: ``rank 3``, ``the server``."""
    return "the server" if rank == SERVER_RANK else f"rank {rank}"


class Direction(IntEnum):
    """Which way a round runs; also the datagram's ``kind`` on the wire."""

    IN = 0
    """Gradient, worker to server, lossy within the bound."""
    BACK = 1
    """Mean, server to worker, exact."""


@dataclass(frozen=True, slots=True)
class RoundKey:
    """What names a round in every datagram and control message (spec N3)."""

    counter: int
    """Grows by one with each round; 32 bits, wraps."""
    bucket: int
    direction: Direction

    def if_named(self, kind: int, bucket: int, counter: int) -> "RoundKey | None":
        """This key if these name it, else None."""
        is_same = (
            kind == self.direction and bucket == self.bucket and counter == self.counter
        )
        return self if is_same else None

    def describe(self) -> str:
        """Name the round for an error message."""
        way = "gradient" if self.direction is Direction.IN else "mean"
        return f"the {way} of round {self.counter}, bucket {self.bucket}"


@dataclass(frozen=True, slots=True)
class Started:
    """Every rank is here, agrees, and UDP gets through both ways."""

    world_size: int
    payload_bytes: int
    """Gradient bytes of one datagram, agreed over all links."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """An all-reduce is complete on this worker; the buffer holds the mean."""

    counter: int
    bucket: int
    total_weight: float
    """0: no rank had anything, the buffer is as it was."""
    p: float
    """Bound of the round that just ended, and its regime."""
    critical: bool
    norm: float
    """Norm of the reduced gradient as the detector saw it."""
    ratio: float | None
    verdict: str
    reports: tuple[RoundReport, ...]
    """The way in and the way back of this worker; ``step`` and ``run`` not yet set."""
    total_computed: float = 0.0
    """Micro-batches in the mean, of all ranks."""
    total_planned: int = 0
    """Micro-batches that were to be in it."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """An all-gather is complete: one byte string per rank."""

    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The job is over: every peer said goodbye."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The endpoint cannot go on; raise this. Nothing follows."""

    error: TailboundError


Event = Started | Reduced | Gathered | Ended | Failed
