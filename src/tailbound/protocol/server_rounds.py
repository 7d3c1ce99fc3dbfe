"""The server's part of all rounds (spec N6): collect, take the mean, set p, send back.

A round is open from the moment the previous mean is computed: a worker that already
has its mean may send the next gradient while others still receive theirs.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailbound.errors import (
    PeerProtocolError,
    RoundTimeoutError,
    TailboundError,
    WireError,
)
from tailbound.protocol.chunks import ChunkLayout, send_order
from tailbound.protocol.deadline import Deadlines
from tailbound.protocol.events import Direction, RoundKey, peer_name
from tailbound.protocol.headers import BucketBytes, MeanBytes
from tailbound.protocol.messages import Begin, Mean
from tailbound.protocol.plan import Plan
from tailbound.protocol.receiver import Receiver, ReceiverState
from tailbound.protocol.sender import Sender
from tailbound.protocol.sinks import SumSink
from tailbound.reduction import FORMATS, finish_mean, l2_norms, widen
from tailbound.regime import Decision, RegimeDetector


@dataclass(slots=True)
class _Arrival:
    """One worker's gradient in the open round."""

    receiver: Receiver
    begin: Begin | None = None

    @property
    def is_done(self) -> bool:
        if self.begin is None:
            return False
        return self.begin.weight == 0 or self.receiver.state is ReceiverState.CLOSED


@dataclass(slots=True)
class _Sum:
    """One sum over the workers, and the sink that adds to it."""

    sum_N: NDArray[Any]
    sink: SumSink | None = None
    """Made with the first round: a bucket that was only announced costs no memory."""


@dataclass(slots=True)
class _Bucket:
    """What the server keeps for a bucket: a sum, and who decides its bound."""

    sums: deque[_Sum]
    """The open round's sum first. The other one is the mean that workers still fetch:
    it is divided as it leaves."""
    mean_N: NDArray[Any] | None
    """Where the mean cannot leave like that: its memory, in the wire dtype."""
    detector: RegimeDetector
    ends_L: NDArray[np.int64]


@dataclass(slots=True)
class ServerRounds:
    """The server's side of all rounds, one after the other."""

    plan: Plan
    index: int = 0
    """The open round, from 0."""
    _buckets: list[_Bucket] = field(default_factory=list)
    _arrivals: dict[int, _Arrival] = field(default_factory=dict)
    _opened_s: float | None = None
    _senders: dict[int, Sender] = field(default_factory=dict)
    _mean_bytes: BucketBytes | None = None
    _deadlines: Deadlines = field(init=False)
    _key: RoundKey = field(init=False)
    _layout: ChunkLayout = field(init=False)

    def __post_init__(self) -> None:
        self._open()
        self._deadlines = Deadlines(self.plan.bound)
        for spec in self.plan.buckets:
            sizes_L = [int(np.prod(shape, dtype=np.int64)) for shape in spec.shapes]
            wire_format = FORMATS[spec.dtype]
            is_lazy = (
                self.plan.bound.holes != "received_mean"
                and wire_format.wire == wire_format.sum
            )
            sums = [
                _Sum(np.zeros(spec.num_elements, wire_format.sum))
                for _ in range(1 + is_lazy)
            ]
            self._buckets.append(
                _Bucket(
                    deque(sums),
                    None if is_lazy else np.zeros(spec.num_elements, wire_format.wire),
                    RegimeDetector(self.plan.bound),
                    np.cumsum(sizes_L, dtype=np.int64),
                )
            )

    @property
    def key(self) -> RoundKey:
        """The open round."""
        return self._key

    def arrival(self, rank: int, now: float) -> Receiver:
        """The receiver of this worker's gradient in the open round."""
        return self._arrival(rank, now).receiver

    def begin(self, rank: int, begin: Begin, now: float) -> None:
        """A worker announced its gradient and its weight.

        Raises:
            WireError: a number is out of range.
            PeerProtocolError: it has announced this round already.
        """
        if not begin.is_in_range:
            raise WireError(
                f"weight {begin.weight}, loss scale {begin.loss_scale}, "
                f"{begin.computed} of {begin.planned}"
            )
        arrival = self._arrival(rank, now)
        if arrival.begin is not None:
            raise PeerProtocolError(
                peer_name(rank), f"in {self.key.describe()}", "Begin twice"
            )
        arrival.begin = begin

    def senders(self, rank: int) -> tuple[tuple[Sender, BucketBytes], ...]:
        """The mean's sender to this worker, with the mean, if one is under way."""
        sender = self._senders.get(rank)
        if sender is None or self._mean_bytes is None:
            return ()
        return ((sender, self._mean_bytes),)

    @property
    def layout(self) -> ChunkLayout:
        """How the open round's bucket is cut."""
        return self._layout

    @property
    def open_ranks(self) -> tuple[int, ...]:
        """Workers that have begun the open round."""
        return tuple(self._arrivals)

    @property
    def is_all_in(self) -> bool:
        """Every worker's gradient is in, within the bound, and its weight known."""
        done = [arrival.is_done for arrival in self._arrivals.values()]
        return len(done) == self.plan.world_size and all(done)

    def try_finish(self, now: float) -> Mean | None:
        """Take the mean if all is in; returns what to announce to every worker."""
        return self._finish(now) if self.is_all_in else None

    def timer(self) -> float | None:
        """When ``handle_timer`` has something to do."""
        times = [
            time
            for machine in self._machines()
            if (time := machine.timer()) is not None
        ]
        if self._opened_s is not None:
            times.append(self._opened_s + self.plan.limits.timeout_s)
        return min(times, default=None)

    def handle_timer(self, now: float) -> TailboundError | None:
        """Returns the error that ends the job, if a deadline has passed."""
        for machine in self._machines():
            error = machine.handle_timer(now)
            if error is not None:
                return error
        if self._opened_s is None:
            return None
        waited_s = now - self._opened_s
        if waited_s < self.plan.limits.timeout_s:
            return None
        late = [rank for rank in range(self.plan.world_size) if not self._is_in(rank)]
        num = self.plan.layout(self.key.bucket).num_chunks
        names = ", ".join(peer_name(rank) for rank in late)
        return RoundTimeoutError(names, self.key.describe(), num, num, waited_s)

    def _open(self) -> None:
        self._key = self.plan.key(self.index, Direction.IN)
        self._layout = self.plan.layout(self._key.bucket)

    def _is_in(self, rank: int) -> bool:
        arrival = self._arrivals.get(rank)
        return arrival is not None and arrival.is_done

    def _machines(self) -> list[Sender | Receiver]:
        # A rank that has nothing leaves its receiver open; it is not the late one.
        receivers = [
            arrival.receiver
            for arrival in self._arrivals.values()
            if not arrival.is_done
        ]
        return [*self._senders.values(), *receivers]

    def _arrival(self, rank: int, now: float) -> _Arrival:
        arrival = self._arrivals.get(rank)
        if arrival is None:
            key = self.key
            layout = self.layout
            p = self._buckets[key.bucket].detector.p
            arrival = self._arrivals[rank] = _Arrival(
                Receiver(
                    key,
                    layout,
                    self._sink(key.bucket),
                    loss_bound=p,
                    peer=peer_name(rank),
                    now=now,
                    timeout_s=self.plan.limits.timeout_s,
                    window_bytes=self.plan.limits.window_bytes,
                    deadline=self._deadlines.of(key.bucket, rank, p, layout.num_chunks),
                )
            )
            if self._opened_s is None:
                self._opened_s = now
            # A worker that sends the next gradient has its mean, whatever its stop.
            self._senders.pop(rank, None)
        return arrival

    def _sink(self, number: int) -> SumSink:
        """Where the open round's chunks are added."""
        total = self._buckets[number].sums[0]
        if total.sink is None:
            wire_format = FORMATS[self.plan.buckets[number].dtype]
            total.sink = SumSink(total.sum_N, self.layout, wire_format)
        return total.sink

    def _finish(self, now: float) -> Mean:
        key = self.key
        bucket = self._buckets[key.bucket]
        begins = {
            rank: arrival.begin
            for rank, arrival in sorted(self._arrivals.items())
            if arrival.begin is not None
        }
        total = sum(begin.weight for begin in begins.values())
        if total > 0:
            self._sink(key.bucket).fill_holes()
            norm_L, mean_bytes = self._mean(key.bucket, total)
            decision = self._decide(key, bucket, norm_L, list(begins.values()))
            self._send_back(key.bucket, mean_bytes, now)
            bucket.sums.rotate()
        else:
            detector = bucket.detector
            decision = Decision(
                key.counter,
                0.0,
                None,
                detector.critical,
                detector.p,
                "skipped: no rank had anything",
            )
            self._senders.clear()
        self._arrivals.clear()
        self._opened_s = None
        self.index += 1
        self._open()
        return Mean(
            key.counter,
            key.bucket,
            total,
            decision.p,
            decision.critical,
            decision.norm,
            decision.ratio,
            decision.verdict,
            sum(begin.computed for begin in begins.values()),
            sum(begin.planned for begin in begins.values()),
        )

    def _mean(self, number: int, total: float) -> tuple[NDArray[Any], BucketBytes]:
        """The norm of each tensor of the mean, and the mean."""
        wire_format = FORMATS[self.plan.buckets[number].dtype]
        layout = self.layout
        bucket = self._buckets[number]
        sum_N = bucket.sums[0].sum_N
        # The mean before this one is with all workers, or they could not have sent
        # their next gradients: its memory is free again.
        mean_N = bucket.mean_N
        if mean_N is None:
            norm_L = l2_norms(sum_N, bucket.ends_L) / total
            return norm_L, MeanBytes(sum_N, layout, total)
        weight_C = None
        if self.plan.bound.holes == "received_mean":
            weight_C = np.zeros(layout.num_chunks)
            for arrival in self._arrivals.values():
                assert arrival.begin is not None  # all is in
                weight_C += arrival.begin.weight * arrival.receiver.arrived_C
        finish_mean(
            sum_N,
            total,
            wire_format,
            weight_C=weight_C,
            elements_per_chunk=layout.elements_per_chunk,
            out=mean_N,
        )
        norm_L = l2_norms(widen(mean_N, wire_format), bucket.ends_L)
        return norm_L, BucketBytes(mean_N, layout)

    def _decide(
        self,
        key: RoundKey,
        bucket: _Bucket,
        norm_L: NDArray[Any],
        begins: list[Begin],
    ) -> Decision:
        senders = [
            arrival.receiver
            for arrival in self._arrivals.values()
            if arrival.begin is not None and arrival.begin.weight > 0
        ]
        num = sum(receiver.layout.num_chunks for receiver in senders)
        missing = sum(receiver.missing for receiver in senders)
        return bucket.detector.update(
            norm_L,
            counter=key.counter,
            share_received=1.0 - missing / num,
            loss_scale=begins[0].loss_scale,
            learning_rate=begins[0].learning_rate,
        )

    def _send_back(self, bucket: int, mean_bytes: BucketBytes, now: float) -> None:
        layout = self.plan.layout(bucket)
        key = self.plan.key(self.index, Direction.BACK)
        self._mean_bytes = mean_bytes
        limits = self.plan.limits
        self._senders = {
            rank: Sender(
                key,
                layout,
                # The way back is exact: no chunk is given up, any order does.
                send_order("fixed", layout.num_chunks, counter=0, share=0.0),
                peer=peer_name(rank),
                now=now,
                window_bytes=limits.window_bytes,
                timeout_s=limits.timeout_s,
                silence_s=limits.silence_s,
                is_ascending=True,
                repair=self.plan.repairs.of(rank, Direction.BACK),
            )
            for rank in range(self.plan.world_size)
        }
