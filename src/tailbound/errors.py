"""Every error raised on purpose, and what the caller can do about each.

Two families. ``ConfigError`` and ``ShapeError`` are ``ValueError``: the caller is
wrong, nothing was sent, fix the call. ``TailboundError`` and its children: the world
is wrong (a peer, the network, the machine); the message names the rank, the place and
the remedy. ``WireError`` never leaves the endpoint: it is counted there.

Every error survives pickling between processes: a class passes all its arguments to
``super().__init__`` in order. The children of ``OSError`` cannot, since that reads
two to five arguments as errno, message and file names; they pass their message and
say in ``__reduce__`` how they are made again.
"""

from typing import Any


class ConfigError(ValueError):
    """A setting is out of range or contradicts another. Fix the setting."""


class ShapeError(ValueError):
    """Arrays do not agree in shape or dtype with each other or with the plan."""


class TailboundError(Exception):
    """The parent of all errors whose cause lies outside the calling code."""


class WireError(TailboundError):
    """Bytes from the network do not parse. Counted by the endpoint, never raised."""


class MissingExtraError(TailboundError):
    """An optional dependency is not installed; the message says what to install."""


class HandshakeError(TailboundError):
    """The peers do not agree on something they must; names both sides' values."""

    def __init__(self, field: str, ours: str, theirs: str, remedy: str) -> None:
        super().__init__(field, ours, theirs, remedy)
        self.field, self.ours, self.theirs, self.remedy = field, ours, theirs, remedy

    def __str__(self) -> str:
        return (
            f"{self.field} differs: {self.ours} here, {self.theirs} there; "
            f"{self.remedy}"
        )


class UnreachableError(TailboundError, ConnectionError):
    """A peer cannot be reached, over TCP or over UDP; names protocol and address."""

    def __init__(self, protocol: str, peer: str, address: str, remedy: str) -> None:
        self.protocol, self.peer = protocol, peer
        self.address, self.remedy = address, remedy
        super().__init__(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.protocol, self.peer, self.address, self.remedy)

    def __str__(self) -> str:
        return (
            f"{self.protocol} to {self.peer} at {self.address} does not get through; "
            f"{self.remedy}"
        )


class PeerLostError(TailboundError, ConnectionError):
    """A peer's control connection ended in the middle of the job.

    You get this when the process is gone. A peer that is there but too slow gives
    :class:`RoundTimeoutError`.
    """

    def __init__(self, peers: tuple[str, ...], phase: str, reason: str) -> None:
        self.peers, self.phase, self.reason = peers, phase, reason
        super().__init__(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.peers, self.phase, self.reason)

    def __str__(self) -> str:
        return (
            f"lost {', '.join(self.peers)} during {self.phase} ({self.reason}); "
            "see that process's own output, then restart the job"
        )


class PeerProtocolError(TailboundError):
    """A peer sent what the protocol forbids in our state. Its session is closed."""

    def __init__(self, peer: str, state: str, got: str) -> None:
        super().__init__(peer, state, got)
        self.peer, self.state, self.got = peer, state, got

    def __str__(self) -> str:
        return (
            f"{self.peer} sent {self.got} while we were {self.state}; "
            "do all ranks run the same tailbound version?"
        )


class RoundTimeoutError(TailboundError, TimeoutError):
    """A peer is there and too late: a round passed its deadline with too much missing.

    ``chunks`` is 0 where the wait was for something else than a round's chunks.
    """

    def __init__(
        self, peer: str, phase: str, missing: int, chunks: int, waited_s: float
    ) -> None:
        self.peer, self.phase, self.missing = peer, phase, missing
        self.chunks, self.waited_s = chunks, waited_s
        super().__init__(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self.peer,
            self.phase,
            self.missing,
            self.chunks,
            self.waited_s,
        )

    def __str__(self) -> str:
        share = f" ({self.missing} of {self.chunks} chunks missing)"
        return (
            f"{self.peer} did not finish {self.phase} within {self.waited_s:.1f} s"
            f"{share if self.chunks else ''}; "
            "raise Transport(timeout_s=...) if it is only slow"
        )


class RemoteError(TailboundError):
    """Another rank failed and told us; carries its name and its message."""

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(peer, message)
        self.peer, self.message = peer, message

    def __str__(self) -> str:
        return f"{self.peer} ended the job: {self.message}"


class JobClosedError(TailboundError):
    """The job or its group is closed; no exchange is possible any more."""
