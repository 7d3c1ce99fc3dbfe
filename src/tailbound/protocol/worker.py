"""A worker's endpoint: one link, to the server."""

import math
import sys
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from tailbound.config import LossBound
from tailbound.errors import (
    ConfigError,
    HandshakeError,
    PeerProtocolError,
    TailboundError,
    UnreachableError,
    WireError,
)
from tailbound.protocol.chunks import ChunkLayout
from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.events import (
    SERVER_RANK,
    Direction,
    Ended,
    Gathered,
    Reduced,
    RoundKey,
    Started,
    peer_name,
)
from tailbound.protocol.gather import Gather, cut_pieces
from tailbound.protocol.headers import BucketBytes
from tailbound.protocol.link import Link
from tailbound.protocol.messages import (
    Begin,
    BucketSpec,
    Bye,
    GatherPart,
    Hello,
    Mean,
    Message,
    Refuse,
    Start,
    Welcome,
)
from tailbound.protocol.plan import Limits, Plan
from tailbound.protocol.receiver import Receiver
from tailbound.protocol.sender import Sender
from tailbound.protocol.session import (
    LinkState,
    UdpCheck,
    check_start_untrusted,
    check_welcome_untrusted,
    next_state,
)
from tailbound.protocol.wire import VERSION
from tailbound.protocol.worker_round import WorkerRound
from tailbound.reduction import FORMATS, WireFormat
from tailbound.residual import Residuals

LINK = 0
"""A worker's only link."""


class WorkerEndpoint(Endpoint):
    """One worker of a server-plan job (DBLP, Algorithm 4)."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        buckets: tuple[BucketSpec, ...],
        bound: LossBound,
        *,
        timeout_s: float,
        silence_s: float,
        first_counter: int = 1,
    ) -> None:
        super().__init__(rank)
        self.plan: Plan | None = None
        """What all ranks agreed on; None before the start."""
        self._world_size, self._buckets, self._bound = world_size, buckets, bound
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self._first_counter = first_counter
        self._index = 0
        self._round: WorkerRound | None = None
        self._gather = Gather(world_size)
        self._start_deadline_s = math.inf
        # Each bucket has a detector of its own on the server.
        self._regimes = [(bound.p_low, True)] * len(buckets)
        self._weight = 0.0
        self._residuals = Residuals.for_bound(bound)

    def connect(self, link: Link, now: float) -> None:
        """The TCP connection to the server is there; introduce ourselves."""
        # After the server's own deadline, which names the ranks that are missing.
        self._start_deadline_s = now + 1.25 * self._timeout_s + 1.0
        link.peer_rank, link.name = SERVER_RANK, peer_name(SERVER_RANK)
        self.links[LINK] = link
        link.control.append(
            Hello(
                VERSION,
                self.rank,
                self._world_size,
                sys.byteorder,
                self._buckets,
                self._bound,
                link.mtu,
                link.udp_port,
                link.window_bytes,
            )
        )

    @property
    def next_bucket(self) -> int:
        """Whose turn it is in ``all_reduce``."""
        return self._index % len(self._buckets)

    def all_reduce(
        self,
        values_N: NDArray[Any],
        weight: float,
        now: float,
        *,
        learning_rate: float | None = None,
        loss_scale: float = 1.0,
        computed: float = 1.0,
        planned: int = 1,
    ) -> None:
        """Start the next round; its end is a Reduced event.

        Args:
            values_N: the next bucket's gradient, already multiplied by the weight,
                contiguous, in the wire dtype. Read until the round ends, and then
                holds the mean.
            weight: what is behind it, 0 or 1e-30 to 1e30; with 0 nothing is sent.
            now: seconds, monotonic.
            learning_rate: for the detector's ``lr_rule``.
            loss_scale: factor that the gradient carries, 1e-30 to 1e30; the detector
                divides by it.
            computed: micro-batches behind the gradient, 0 to ``planned``; their sum
                over ranks comes back, as does that of the next.
            planned: micro-batches that were to be behind it, at most 1e9.

        Raises:
            ConfigError: not started, another round is not over yet, or a number is
                out of range.
            ShapeError: the array is not the bucket.
        """
        if self.plan is None or self._round is not None:
            raise ConfigError("one all-reduce at a time, after the start")
        key = self.plan.key(self._index, Direction.IN)
        begin = Begin(
            key.counter,
            key.bucket,
            weight,
            learning_rate,
            loss_scale,
            computed,
            planned,
        )
        if not begin.is_in_range:
            raise ConfigError(
                "weight is 0 or 1e-30 to 1e30, loss_scale 1e-30 to 1e30, and computed "
                f"0 to planned, not {weight}, {loss_scale}, and {computed} of {planned}"
            )
        p, critical = self._regimes[key.bucket]
        self._round = WorkerRound(
            self.plan,
            self._index,
            values_N,
            rank=self.rank,
            weight=weight,
            p=p,
            critical=critical,
            now=now,
            loss_scale=loss_scale,
            residuals=self._residuals,
        )
        self.links[LINK].control.append(begin)

    def all_gather(self, data: bytes) -> None:
        """Give this rank's bytes; all ranks' come back as a Gathered event."""
        self.links[LINK].control.extend(cut_pieces(self.rank, data))

    def close(self) -> None:
        """Say goodbye; the server's answer is an Ended event.

        Only then may the connection be closed: closing with bytes unread resets it,
        and a reset can overtake the goodbye.
        """
        link = self.links.get(LINK)
        if link is not None and link.state is LinkState.RUNNING and self.error is None:
            link.state = next_state(link.state, "bye", peer=link.name)
            link.control.append(Bye())

    def lose_link(self, link: int, reason: str, now: float) -> None:
        """See Endpoint; who has said goodbye need not wait for an answer any more."""
        if self.error is None and self.links[link].state is LinkState.CLOSED:
            self._events.append(Ended())
        super().lose_link(link, reason, now)

    def settle(self, now: float) -> None:
        """See Endpoint."""
        if self._round is None or self.error is not None:
            return
        receiver = self._round.receiver
        receiver.settle(now)
        self._collect(LINK, receiver)
        mean = self._round.mean
        if mean is None or not self._round.is_complete:
            return
        ended, self._round = self._round, None
        ended.keep_lost()
        self._index += 1
        self._events.append(
            Reduced(
                mean.counter,
                mean.bucket,
                mean.total_weight,
                *self._regimes[mean.bucket],
                mean.norm,
                mean.ratio,
                mean.verdict,
                ended.reports(),
                mean.total_computed,
                mean.total_planned,
            )
        )
        # All ranks learn the next bound with the mean of the same round.
        self._regimes[mean.bucket] = mean.p, mean.critical

    def timer(self) -> float | None:
        """See Endpoint."""
        if self.error is not None:
            return None
        times = self._ping_timers()
        if self.plan is None and self.links:
            times.append(self._start_deadline_s)
        if self._round is not None and (time := self._round.timer()) is not None:
            times.append(time)
        return min(times, default=None)

    def handle_timer(self, now: float) -> None:
        """See Endpoint."""
        if self.error is not None:
            return
        self._queue_pings(now)
        if self._round is not None:
            error = self._round.handle_timer(now)
            if error is not None:
                self.fail(error)
        elif self.plan is None and now >= self._start_deadline_s:
            self.fail(
                UnreachableError(
                    "TCP",
                    peer_name(SERVER_RANK),
                    self.links[LINK].address,
                    "it took the connection and never started the job; is it a "
                    "tailbound server, and did all ranks join it?",
                )
            )

    def _senders(self, link: int) -> Sequence[tuple[Sender, BucketBytes]]:
        if self._round is None or self._round.sender is None:
            return ()
        return ((self._round.sender, self._round.bytes),)

    def _find_round(
        self, link: int, kind: int, bucket: int, counter: int
    ) -> RoundKey | None:
        if self._round is None:
            return None
        return self._round.back_key.if_named(kind, bucket, counter)

    def _layout(self, link: int, key: RoundKey) -> ChunkLayout:
        assert self._round is not None  # the key is its
        return self._round.bytes.layout

    def _receiver(
        self, link: int, key: RoundKey, now: float
    ) -> tuple[Receiver, WireFormat]:
        assert self._round is not None  # the key is its
        assert self.plan is not None
        self._round.note_back(now)
        spec = self.plan.buckets[key.bucket]
        return self._round.receiver, FORMATS[spec.dtype]

    def _handle(self, link: int, message: Message, now: float) -> None:
        state = self.links[link]
        match message:
            case Refuse():
                self.fail(_refused(message))
            case Welcome():
                check_welcome_untrusted(message)
                state.state = next_state(state.state, "agreed", peer=state.name)
                self.session = message.session
                state.peer_udp_port = message.udp_port
                state.check = UdpCheck(
                    session=self.session,
                    rank=self.rank,
                    sizes=message.ping_bytes,
                    peer=state.name,
                    address=f"{state.address} port {message.udp_port}",
                    now=now,
                    timeout_s=self._timeout_s,
                )
            case Start():
                running = next_state(state.state, "start", peer=state.name)
                assert state.check is not None  # made with the welcome
                check_start_untrusted(message, state.check.largest_bytes)
                state.state = running
                limits = Limits(message.window_bytes, self._timeout_s, self._silence_s)
                self.plan = Plan(
                    self._buckets,
                    self._bound,
                    message.payload_bytes,
                    self._world_size,
                    limits,
                    self._first_counter,
                )
                self._events.append(Started(self._world_size, message.payload_bytes))
            case Mean() if self._round is not None and self._is_open(message):
                if not message.is_in_range:
                    raise WireError(
                        f"p {message.p}, weight {message.total_weight}, "
                        f"{message.total_computed} of {message.total_planned}"
                    )
                self._round.receive_mean(message, now)
            case GatherPart():
                self._gather.receive_untrusted(message)
                while (parts := self._gather.pop()) is not None:
                    self._events.append(Gathered(parts))
            case Bye() if state.state is LinkState.CLOSED:
                self._events.append(Ended())
            case _:
                raise PeerProtocolError(
                    state.name, self._phase(), type(message).__name__
                )

    def _is_open(self, mean: Mean) -> bool:
        key = None if self._round is None else self._round.key
        return key is not None and (key.counter, key.bucket) == (
            mean.counter,
            mean.bucket,
        )

    def _phase(self) -> str:
        if self._round is not None:
            return self._round.key.describe()
        if self.plan is None:
            return "start-up"
        return f"the pause after round {self._index}"


def _refused(message: Refuse) -> TailboundError:
    return HandshakeError(message.field, message.ours, message.theirs, message.remedy)
