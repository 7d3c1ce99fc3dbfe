"""What a UDP socket says of a batch: that it came, or that it cannot leave."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from tailbound.errors import TailboundError
from tailbound.transport.addresses import Address


class SegmentTooLargeError(TailboundError):
    """One datagram alone is larger than the path takes. Send smaller chunks.

    ``sent_bytes`` of the batch went out before that, 0 in nearly all cases.
    """

    def __init__(self, segment_bytes: int, address: Address, sent_bytes: int) -> None:
        super().__init__(segment_bytes, address, sent_bytes)
        self.segment_bytes, self.address = segment_bytes, address
        self.sent_bytes = sent_bytes

    def __str__(self) -> str:
        return (
            f"a datagram of {self.segment_bytes} bytes is larger than the path to "
            f"{self.address[0]} port {self.address[1]} takes; set a smaller "
            "Transport(mtu=...), such as the path's own (ip route get)"
        )


class Received(NamedTuple):
    """What one call took from the queue; it lies at the start of the buffer."""

    num_bytes: int
    """All datagrams together, >= 1."""
    segment_bytes: int
    """Each of them but the last, which may be shorter."""
    address: Address
    """Where they come from; all from the same source."""


# The same object as Received(...) makes, at a third of the time.
received: Callable[..., Received] = functools.partial(tuple.__new__, Received)
