"""How many bytes of a round may be on the way to the receiver.

The receiver's socket buffer is finite, and a sender on the same machine or behind a
fast link fills it in milliseconds. The sender therefore puts marks between its
datagrams, over TCP: "up to here I sent b bytes". The receiver answers a mark once its
datagram queue is empty. What lies behind the last answered mark has left the buffer,
arrived or lost, so the count needs no datagram to arrive and works at any loss.

A queue that is never empty would stop the sender until it is, so the receiver also
tells, unasked, how far it has read: new bytes since the last answered mark come on top
of it. Lost ones are missing there, which the next answered mark mends.
"""

from tailbound.errors import WireError

LARGEST_DATAGRAM_BYTES = 65507

MARKS_PER_WINDOW = 4
"""A mark each quarter window: the sender is not idle while one mark travels."""
TOLD_PER_WINDOW = 8
"""How often the receiver tells unasked how far it has read."""


class Window:
    """Counts bytes on the way; not a congestion controller."""

    def __init__(self, window_bytes: int) -> None:
        # Never less than one full datagram, or nothing could ever leave.
        self.window_bytes = max(window_bytes, LARGEST_DATAGRAM_BYTES)
        self.sent_bytes = 0
        self.seen_bytes = 0
        self._marked_bytes = 0

    @property
    def in_flight_bytes(self) -> int:
        """Bytes sent and not yet known to have left the receiver's queue."""
        return self.sent_bytes - self.seen_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that may leave now."""
        return self.window_bytes - self.in_flight_bytes

    def on_sent(self, num_bytes: int) -> int | None:
        """Count bytes handed over; returns what to say in a mark if one is due."""
        self.sent_bytes += num_bytes
        if self.sent_bytes - self._marked_bytes < self.window_bytes // MARKS_PER_WINDOW:
            return None
        self._marked_bytes = self.sent_bytes
        return self.sent_bytes

    def on_seen_untrusted(self, sent_bytes: int) -> None:
        """So many of the sent bytes have left the receiver's queue.

        A reordered datagram can make the receiver count a little more than was sent;
        a peer that claims more on purpose overruns only itself.

        Raises:
            WireError: the number is negative.
        """
        if sent_bytes < 0:
            raise WireError(f"a mark of {sent_bytes} bytes")
        self.seen_bytes = max(self.seen_bytes, min(sent_bytes, self.sent_bytes))
