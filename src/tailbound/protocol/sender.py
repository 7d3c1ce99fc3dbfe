"""Send one bucket over a lossy link until the receiver says stop (spec N4).

::

    SENDING --all handed over--> WAITING --bitmap--> SENDING --...
       |                            |
       +-----------stop-------------+---> STOPPED

Entering WAITING puts out a probe. A stop that arrives in SENDING is an early stop.
Source: DBLP, Algorithm 1.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import (
    PeerProtocolError,
    RoundTimeoutError,
    TailboundError,
    UnreachableError,
)
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.events import RoundKey
from tailbound.protocol.messages import Bitmap, Mark, MarkSeen, Probe, Stop
from tailbound.protocol.pacing import Window
from tailbound.protocol.repair import Repair
from tailbound.protocol.wire import unpack_bits_untrusted


class SenderState(Enum):
    """What the sender waits for."""

    SENDING = "sending"
    """For room to hand over the chunks that are due."""
    WAITING = "waiting for a bitmap"
    """For the answer to its probe."""
    STOPPED = "stopped"
    """For nothing: the receiver has enough."""


TRANSITIONS: dict[tuple[SenderState, str], SenderState] = {
    (SenderState.SENDING, "all handed over"): SenderState.WAITING,
    (SenderState.SENDING, "stop"): SenderState.STOPPED,
    (SenderState.WAITING, "bitmap"): SenderState.SENDING,
    (SenderState.WAITING, "stop"): SenderState.STOPPED,
}
"""Every legal (state, input) and the state after it; anything else is an error."""

PATIENT_SENDS = 8
"""Repairs without any new chunk before the sender slows down. At 70 % loss a single
chunk stays away this often in 6 % of rounds, so an ordinary burst is not slowed."""
FIRST_PAUSE_S = 0.001
"""Doubles with each repair after those that brings nothing."""
SLOWEST_REPAIR_S = 0.05
"""The pause grows no longer."""


@dataclass(frozen=True, slots=True)
class SenderStatistics:
    """What one round cost its sender."""

    sends: int
    """Passes over the data: 1 plus repairs."""
    probes: int
    sent: int
    """Datagrams handed over."""
    retransmitted: int
    """Those that were repairs."""
    missing: int
    """Chunks that the final bitmap shows missing."""
    latency_s: float
    """First datagram handed over until stop."""
    waiting_s: float
    """Part of it between a probe and its answer."""
    early_stop: bool


class Sender:
    """One round's sender. Batches of chunk numbers come out; bitmaps go in."""

    def __init__(
        self,
        key: RoundKey,
        layout: ChunkLayout,
        order_C: NDArray[np.int64],
        *,
        peer: str,
        now: float,
        window_bytes: int,
        timeout_s: float,
        silence_s: float,
        is_ascending: bool = False,
        repair: Repair | None = None,
    ) -> None:
        self.key, self.layout, self.peer = key, layout, peer
        self.is_ascending = is_ascending
        """The order ascends, but for one wrap-around."""
        self._repair = None if repair is None else repair.begin(layout.num_chunks)
        self.state = SenderState.SENDING
        self.window = Window(window_bytes)
        self._order_C = order_C
        self._has_tail = layout.tail_bytes > 0
        self._begin_pass(order_C)
        self._opened_s = now
        self._deadline_s = now + timeout_s
        self._silence_s = silence_s
        self._first_sent_s: float | None = None
        self._pause_until_s: float | None = None
        self._probed_s = now
        self._progress_s: float | None = None
        self._num_arrived = 0
        self._idle_sends = 0
        self._final_C: NDArray[np.bool_] | None = None
        self._sends, self._probes, self._sent, self._retransmitted = 1, 0, 0, 0
        self._stopped_s = now
        self._waiting_s = 0.0
        self._early_stop = False
        self._outbox: list[Probe | Mark] = []

    def next_chunks(
        self, now: float, max_chunks: int, max_bytes: int
    ) -> NDArray[np.int64] | None:
        """Chunk numbers of the next batch, or None if nothing may leave now.

        A short last chunk is always the last of its batch, since only the last
        segment of a kernel batch may be short. Handing out is sending: the caller
        puts the batch into the socket, or keeps it until it can.
        """
        if self.state is not SenderState.SENDING or self._is_pausing(now):
            return None
        segment = self.layout.segment_bytes
        max_bytes = min(max_bytes, self.window.room_bytes)
        num = min(max_chunks, max_bytes // segment)
        if num < 1:
            return None
        end = self._position + num
        if self._tails and self._position <= self._tails[0] < end:
            end = self._tails.pop(0) + 1
        batch_K = self._due_K[self._position : end]
        num_bytes = len(batch_K) * segment
        if self._first_sent_s is None:
            self._first_sent_s = now
        self._position += len(batch_K)
        self._sent += len(batch_K)
        if self._sends > 1:
            self._retransmitted += len(batch_K)
        mark = self.window.on_sent(num_bytes)
        if self._position == len(self._due_K):
            self._move("all handed over")
            self._probes += 1
            self._probed_s = now
            key = self.key
            self._outbox.append(Probe(key.counter, key.bucket, key.direction))
        elif mark is not None:
            key = self.key
            self._outbox.append(Mark(key.counter, key.bucket, key.direction, mark))
        return batch_K

    def has_chunks(self, now: float) -> bool:
        """True if ``next_chunks`` would give a batch."""
        return (
            self.state is SenderState.SENDING
            and not self._is_pausing(now)
            and self.window.room_bytes >= self.layout.segment_bytes
        )

    def next_control(self) -> Probe | Mark | None:
        """The next control message, in order; send it after the batch so far."""
        return self._outbox.pop(0) if self._outbox else None

    def receive_untrusted(self, message: Bitmap | Stop | MarkSeen, now: float) -> None:
        """Take in an answer of the receiver.

        Raises:
            WireError: the message does not fit the bucket.
            PeerProtocolError: a bitmap that no probe asked for.
            UnreachableError: repairs have brought nothing for ``silence_s``.
        """
        if isinstance(message, MarkSeen):
            self.window.on_seen_untrusted(message.sent_bytes)
            return
        arrived_C = unpack_bits_untrusted(message.bits, self.layout.num_chunks)
        if isinstance(message, Bitmap) and arrived_C.all():
            # A receiver that has everything says stop, not bitmap.
            raise PeerProtocolError(self.peer, self.state.value, "a complete bitmap")
        if isinstance(message, Stop):
            if not arrived_C.any():
                # Total loss is within no bound (DESIGN decision 9).
                raise PeerProtocolError(self.peer, self.state.value, "an empty stop")
            before = self.state
            self._move("stop")
            self._early_stop = before is SenderState.SENDING
            if before is SenderState.WAITING:
                self._waiting_s += now - self._probed_s
            self._final_C = arrived_C
            self._stopped_s = now
            self._outbox.clear()
            return
        self._move("bitmap")
        self._waiting_s += now - self._probed_s
        self.window.on_seen_untrusted(self.window.sent_bytes)
        self._sends += 1
        self._note_progress(int(np.count_nonzero(arrived_C)), now)
        due_K = self._order_C[~arrived_C[self._order_C]]
        if self._repair is not None:
            allowed = min(max(message.allowed, 0), self.layout.num_chunks)
            copies = self._repair.next_copies(len(due_K), allowed, self._sent)
            if copies > 1:
                # One after the other: what strikes a chunk spares its copy.
                due_K = np.tile(due_K, copies)
                self.is_ascending = False
        self._begin_pass(due_K)

    @property
    def arrived_C(self) -> NDArray[np.bool_] | None:
        """The final bitmap: what arrived; None until STOPPED."""
        return self._final_C

    def timer(self) -> float | None:
        """When ``handle_timer`` or ``next_chunks`` has something to do next."""
        if self.state is SenderState.STOPPED:
            return None
        if self.state is SenderState.SENDING and self._pause_until_s is not None:
            return min(self._deadline_s, self._pause_until_s)
        return self._deadline_s

    def handle_timer(self, now: float) -> TailboundError | None:
        """Returns the error that ends the round if its deadline has passed."""
        if not self._is_pausing(now):
            # Else timer() would name a time in the past while the window is full.
            self._pause_until_s = None
        if self.state is SenderState.STOPPED or now < self._deadline_s:
            return None
        num = self.layout.num_chunks
        return RoundTimeoutError(
            self.peer,
            self.key.describe(),
            num - self._num_arrived,
            num,
            now - self._opened_s,
        )

    def statistics(self) -> SenderStatistics:
        """Counts and times so far; complete once STOPPED."""
        final = self._final_C
        first = self._first_sent_s
        return SenderStatistics(
            sends=self._sends,
            probes=self._probes,
            sent=self._sent,
            retransmitted=self._retransmitted,
            missing=0 if final is None else int(np.count_nonzero(~final)),
            latency_s=0.0 if first is None else self._stopped_s - first,
            waiting_s=self._waiting_s,
            early_stop=self._early_stop,
        )

    def _is_pausing(self, now: float) -> bool:
        return self._pause_until_s is not None and now < self._pause_until_s

    def _begin_pass(self, due_K: NDArray[np.int64]) -> None:
        self._due_K = due_K
        self._position = 0
        self._tails: list[int] = []
        """Where the short last chunk stands in this pass."""
        if self._has_tail:
            self._tails = np.flatnonzero(due_K == self.layout.num_full).tolist()

    def _move(self, event: str) -> None:
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise PeerProtocolError(self.peer, self.state.value, f"a {event}")
        self.state = state

    def _note_progress(self, num_arrived: int, now: float) -> None:
        """Slow repairs down while nothing arrives, and give up after silence_s."""
        if num_arrived > self._num_arrived:
            self._num_arrived = num_arrived
            self._idle_sends = 0
            self._progress_s = now
            self._pause_until_s = None
            return
        since = self._opened_s if self._progress_s is None else self._progress_s
        self._idle_sends += 1
        if now - since > self._silence_s and self._idle_sends > PATIENT_SENDS:
            raise UnreachableError(
                "UDP",
                self.peer,
                f"{self.key.describe()}",
                f"no datagram arrived for {now - since:.1f} s while TCP works; "
                "look for a firewall or a changed route",
            )
        if self._idle_sends > PATIENT_SENDS:
            # Exponent bounded: the pause is capped after a few doublings anyway.
            pause = FIRST_PAUSE_S * 2.0 ** min(self._idle_sends - PATIENT_SENDS, 10)
            self._pause_until_s = now + min(pause, SLOWEST_REPAIR_S)
