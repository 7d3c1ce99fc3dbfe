"""Take in one bucket over a lossy link and decide when enough of it is here (N5).

::

    OPEN --missing <= allowed, once the queue is drained--> CLOSED
      +----deadline, if one is set and anything is here------^

A probe in OPEN is answered with the bitmap; closing puts out the stop with the final
bitmap. In CLOSED everything is ignored and counted.
Source: DBLP, Algorithm 2.
"""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import RoundTimeoutError, TailboundError, WireError
from tailbound.protocol.chunks import ChunkLayout, allowed_missing
from tailbound.protocol.deadline import Deadline
from tailbound.protocol.events import RoundKey
from tailbound.protocol.messages import Bitmap, MarkSeen, Stop
from tailbound.protocol.pacing import TOLD_PER_WINDOW
from tailbound.protocol.sinks import ONES, Sink
from tailbound.protocol.wire import pack_bits


class ReceiverState(Enum):
    """What the receiver waits for."""

    OPEN = "open"
    """For chunks, until the missing share is within the bound."""
    CLOSED = "closed"
    """For nothing: the round is over."""


TRANSITIONS: dict[tuple[ReceiverState, str], ReceiverState] = {
    (ReceiverState.OPEN, "chunks"): ReceiverState.OPEN,
    (ReceiverState.OPEN, "probe"): ReceiverState.OPEN,
    (ReceiverState.OPEN, "within the bound"): ReceiverState.CLOSED,
    (ReceiverState.OPEN, "deadline"): ReceiverState.CLOSED,
    (ReceiverState.CLOSED, "chunks"): ReceiverState.CLOSED,
    (ReceiverState.CLOSED, "probe"): ReceiverState.CLOSED,
}
"""Every (state, input) and the state after it."""


MAX_SENT_BYTES = 1 << 62
"""Bytes of one round that a mark may claim: their sum still fits a control message."""


@dataclass(frozen=True, slots=True)
class ReceiverStatistics:
    """What one round brought its receiver."""

    received: int
    """Datagrams of this round, duplicates included."""
    duplicates: int
    probes: int
    missing: int
    latency_s: float
    """Opened until closed."""


class Receiver:
    """One round's receiver. Batches of chunks go in; bitmaps and the stop come out."""

    def __init__(
        self,
        key: RoundKey,
        layout: ChunkLayout,
        sink: Sink,
        *,
        loss_bound: float,
        peer: str,
        now: float,
        timeout_s: float,
        window_bytes: int = 1 << 22,
        deadline: Deadline | None = None,
    ) -> None:
        self.key, self.layout, self.peer = key, layout, peer
        self.state = ReceiverState.OPEN
        # One byte a chunk; bytearray finds and fills a batch's part far faster than
        # NumPy does at this size.
        self._arrived = bytearray(layout.num_chunks)
        self.arrived_C: NDArray[np.bool_] = np.frombuffer(self._arrived, np.bool_)
        self._missing = layout.num_chunks
        self._allowed = allowed_missing(loss_bound, layout.num_chunks)
        self._sink = sink
        self._opened_s = now
        self._timeout_s = now + timeout_s
        self._deadline = deadline
        self._deadline_s = math.inf
        """When the round ends above its bound; set when it is first looked at."""
        self._closed_s = now
        self._received, self._duplicates, self._probes = 0, 0, 0
        self._tell_each_bytes = window_bytes // TOLD_PER_WINDOW
        self._read_bytes = 0
        """Bytes of the sender that have left our queue, as far as we can tell."""
        self._told_bytes = 0
        self._outbox: list[Bitmap | Stop | MarkSeen] = []

    @property
    def missing(self) -> int:
        """Chunks not here yet."""
        return self._missing

    def set_bound(self, loss_bound: float, deadline: Deadline | None = None) -> None:
        """Allow another share to be missing, and end at this deadline, if open."""
        self._allowed = allowed_missing(loss_bound, self.layout.num_chunks)
        self._deadline = deadline

    def redirect(self, sink: Sink) -> None:
        """Put what comes from now on elsewhere."""
        self._sink = sink

    def receive_run(self, first: int, rows_KE: NDArray[np.generic]) -> None:
        """Take in full chunks first, first + 1, ..., each with E elements."""
        num = len(rows_KE)
        if (
            self.state is ReceiverState.OPEN
            and self._arrived.find(1, first, first + num) < 0
        ):
            self._received += num
            self._missing -= num
            self._arrived[first : first + num] = ONES[:num]
            self._sink.put_run(first, rows_KE)
            self._tell_progress(num)
            return
        self.receive(np.arange(first, first + num), rows_KE)

    def receive(
        self, chunks_K: NDArray[np.int64], rows_KE: NDArray[np.generic]
    ) -> None:
        """Take in full chunks in any order; numbers are in range already."""
        num = len(chunks_K)
        self._received += num
        if self.state is ReceiverState.CLOSED:
            self._duplicates += num
            return
        is_new = not self.arrived_C[chunks_K].any()
        if is_new and len(set(chunks_K.tolist())) == num:
            self._take(chunks_K, rows_KE)
            return
        # The first of equal numbers in one batch counts, as does the first over time.
        new_K, where_K = np.unique(chunks_K, return_index=True)
        fresh = ~self.arrived_C[new_K]
        new_K, where_K = new_K[fresh], where_K[fresh]
        self._duplicates += num - len(new_K)
        if len(new_K):
            self._take(new_K, rows_KE[where_K])

    def receive_tail(self, num: int, row_E: NDArray[np.generic]) -> None:
        """Take in ``num`` equal copies of the short last chunk."""
        self._received += num
        if self.state is ReceiverState.CLOSED or self.arrived_C[-1]:
            self._duplicates += num
            return
        self._duplicates += num - 1
        self.arrived_C[-1] = True
        self._missing -= 1
        self._sink.put_tail(row_E)

    def receive_probe(self) -> None:
        """Answer with the newest bitmap; call ``settle`` first, it may close."""
        if self.state is ReceiverState.OPEN:
            self._probes += 1
            key, bits = self.key, pack_bits(self.arrived_C)
            self._outbox.append(
                Bitmap(key.counter, key.bucket, key.direction, bits, self._allowed)
            )

    def receive_mark_untrusted(self, sent_bytes: int) -> None:
        """Answer a pacing mark; the queue is drained up to it.

        Raises:
            WireError: no sender has sent so much.
        """
        if not 0 <= sent_bytes <= MAX_SENT_BYTES:
            raise WireError(f"a mark of {sent_bytes} bytes")
        if self.state is ReceiverState.OPEN:
            self._read_bytes = max(self._read_bytes, sent_bytes)
            self._say_read()

    def _take(self, chunks_K: NDArray[np.int64], rows_KE: NDArray[np.generic]) -> None:
        """Mark and keep chunks that are new and different."""
        self.arrived_C[chunks_K] = True
        self._missing -= len(chunks_K)
        self._sink.put(chunks_K, rows_KE)
        self._tell_progress(len(chunks_K))

    def _tell_progress(self, num_new: int) -> None:
        self._read_bytes += num_new * self.layout.segment_bytes
        if self._read_bytes - self._told_bytes >= self._tell_each_bytes:
            self._say_read()

    def _say_read(self) -> None:
        key = self.key
        self._told_bytes = self._read_bytes
        self._outbox.append(
            MarkSeen(key.counter, key.bucket, key.direction, self._read_bytes)
        )

    def settle(self, now: float) -> bool:
        """Close if enough is here, or if it is time; call when drained.

        What already lies in the queue costs no time and is taken first, so a round
        closes with as little missing as is free. A round's time is its deadline; it
        waits for a first chunk even then (DESIGN decision 9).

        Returns:
            True if the round closed by this call.
        """
        if self.state is ReceiverState.CLOSED:
            return False
        deadline = self._deadline
        if deadline is not None and self._deadline_s == math.inf:
            # Not when it opened: its bound may have come later.
            self._deadline_s = now + deadline.limit_s
        is_cut = self._missing > self._allowed
        if is_cut and (now < self._deadline_s or not self._has_any):
            return False
        self.state = ReceiverState.CLOSED
        self._closed_s = now
        if deadline is not None:
            deadline.note(now - self._opened_s, is_cut=is_cut)
        key, bits = self.key, pack_bits(self.arrived_C)
        self._outbox.append(Stop(key.counter, key.bucket, key.direction, bits))
        return True

    def next_control(self) -> Bitmap | Stop | MarkSeen | None:
        """The next control message, in order."""
        return self._outbox.pop(0) if self._outbox else None

    @property
    def _has_any(self) -> bool:
        return self._missing < self.layout.num_chunks

    def timer(self) -> float | None:
        """When ``settle`` or ``handle_timer`` has something to do."""
        if self.state is ReceiverState.CLOSED:
            return None
        return min(self._timeout_s, self._deadline_s if self._has_any else math.inf)

    def handle_timer(self, now: float) -> TailboundError | None:
        """Returns the error that ends the job if nothing has ended the round."""
        if self.state is ReceiverState.CLOSED or now < self._timeout_s:
            return None
        return RoundTimeoutError(
            self.peer,
            self.key.describe(),
            self._missing,
            self.layout.num_chunks,
            now - self._opened_s,
        )

    def statistics(self) -> ReceiverStatistics:
        """Counts so far; complete once CLOSED."""
        return ReceiverStatistics(
            received=self._received,
            duplicates=self._duplicates,
            probes=self._probes,
            missing=self._missing,
            latency_s=self._closed_s - self._opened_s,
        )
