"""A worker's part of an all-reduce (spec N7): gradient out within p, mean in exact."""

from typing import Any

from numpy.typing import NDArray

from tailbound.errors import RoundTimeoutError, TailboundError
from tailbound.protocol.chunks import beyond_bound, send_order
from tailbound.protocol.events import SERVER_RANK, Direction, peer_name
from tailbound.protocol.headers import BucketBytes
from tailbound.protocol.messages import Mean
from tailbound.protocol.plan import Plan
from tailbound.protocol.receiver import Receiver, ReceiverState
from tailbound.protocol.sender import Sender, SenderState
from tailbound.protocol.sinks import StoreSink
from tailbound.records import RoundReport
from tailbound.reduction import FORMATS, chunk_norms, widen
from tailbound.residual import Residual, Residuals


class WorkerRound:
    """A worker's part of one all-reduce: sender, then receiver, in one buffer."""

    def __init__(
        self,
        plan: Plan,
        index: int,
        values_N: NDArray[Any],
        *,
        rank: int,
        weight: float,
        p: float,
        critical: bool,
        now: float,
        loss_scale: float = 1.0,
        residuals: Residuals | None = None,
    ) -> None:
        self.key = plan.key(index, Direction.IN)
        self.back_key = plan.key(index, Direction.BACK)
        self._rank, self._p, self._critical = rank, p, critical
        self._limits = plan.limits
        self._started_s = now
        self.mean: Mean | None = None
        self._back_s: float | None = None
        layout = plan.layout(self.key.bucket)
        self._layout = layout
        self.bytes = BucketBytes(values_N, layout)
        self.sender: Sender | None = None
        self._residual: Residual | None = None
        if weight > 0:
            spec = plan.buckets[self.key.bucket]
            if residuals is not None:
                self._residual = residuals.of(
                    self.key.bucket,
                    layout.num_elements,
                    layout.elements_per_chunk,
                    FORMATS[spec.dtype],
                )
                self._residual.apply(values_N, loss_scale=loss_scale)
            norm_C = None
            if plan.bound.order == "norm":
                wide_N = widen(values_N, FORMATS[spec.dtype])
                norm_C = chunk_norms(wide_N, layout.elements_per_chunk)
            self.sender = Sender(
                self.key,
                layout,
                send_order(
                    plan.bound.order,
                    layout.num_chunks,
                    counter=self.key.counter,
                    share=rank / plan.world_size,
                    norm_C=norm_C,
                ),
                peer=peer_name(SERVER_RANK),
                now=now,
                window_bytes=plan.limits.window_bytes,
                timeout_s=plan.limits.timeout_s,
                silence_s=plan.limits.silence_s,
                is_ascending=plan.bound.order != "norm",
                repair=plan.repairs.of(SERVER_RANK, Direction.IN),
            )
        # Open from the start: the mean's datagrams may overtake the stop over TCP,
        # and once the server computes a mean it never asks for this gradient again.
        self.receiver = Receiver(
            self.back_key,
            layout,
            StoreSink(values_N, layout),
            loss_bound=0.0,
            peer=peer_name(SERVER_RANK),
            now=now,
            timeout_s=float("inf"),
            window_bytes=plan.limits.window_bytes,
        )

    def receive_mean(self, mean: Mean, now: float) -> None:
        """The server announced the mean."""
        self.mean = mean
        self.note_back(now)

    def note_back(self, now: float) -> None:
        """Something of the way back is here: a datagram or the announcement."""
        if self._back_s is None:
            self._back_s = now

    @property
    def is_complete(self) -> bool:
        """True once the mean is known and in the buffer."""
        if self.mean is None:
            return False
        if self.sender is not None and self.sender.state is not SenderState.STOPPED:
            return False
        closed = self.receiver.state is ReceiverState.CLOSED
        return closed or self.mean.total_weight == 0

    def keep_lost(self) -> None:
        """The round is complete: what the final bitmap shows missing is carried."""
        if self._residual is not None:
            assert self.sender is not None  # there was a gradient
            assert self.sender.arrived_C is not None  # it was stopped
            self._residual.note(self.sender.arrived_C)

    def timer(self) -> float | None:
        """When ``handle_timer`` has something to do."""
        sender = self.sender.timer() if self.sender is not None else None
        return sender if sender is not None else self._deadline_s()

    def handle_timer(self, now: float) -> TailboundError | None:
        """Returns the error that ends the round, if a deadline has passed."""
        if self.sender is not None:
            error = self.sender.handle_timer(now)
            if error is not None:
                return error
        if now < self._deadline_s():
            return None
        return RoundTimeoutError(
            peer_name(SERVER_RANK),
            self.back_key.describe(),
            self.receiver.missing,
            self._layout.num_chunks,
            now - self._started_s,
        )

    def _deadline_s(self) -> float:
        # The server times out first and names the rank that it waited for; this
        # deadline is for a server that says nothing at all.
        start = self._started_s if self._back_s is None else self._back_s
        return start + 1.25 * self._limits.timeout_s + 1.0

    def reports(self) -> tuple[RoundReport, ...]:
        """What the way in and the way back cost; ``step`` is set by the caller."""
        layout = self._layout
        itemsize = layout.itemsize
        reports = []
        if self.sender is not None:
            sent = self.sender.statistics()
            reports.append(
                RoundReport(
                    rank=self._rank,
                    step=0,
                    counter=self.key.counter,
                    bucket=self.key.bucket,
                    direction="in",
                    p=self._p,
                    critical=self._critical,
                    num_chunks=layout.num_chunks,
                    num_bytes=layout.num_elements * itemsize,
                    missing=sent.missing,
                    sends=sent.sends,
                    probes=sent.probes,
                    sent=sent.sent,
                    retransmitted=sent.retransmitted,
                    latency_s=sent.latency_s,
                    waiting_s=sent.waiting_s,
                    early_stop=sent.early_stop,
                    given_up=beyond_bound(sent.missing, self._p, layout.num_chunks),
                )
            )
        if self.mean is not None and self.mean.total_weight > 0:
            got = self.receiver.statistics()
            begun_s = self._started_s if self._back_s is None else self._back_s
            closed_s = self._started_s + got.latency_s
            reports.append(
                RoundReport(
                    rank=self._rank,
                    step=0,
                    counter=self.key.counter,
                    bucket=self.key.bucket,
                    direction="back",
                    p=0.0,
                    critical=self._critical,
                    num_chunks=layout.num_chunks,
                    num_bytes=layout.num_elements * itemsize,
                    missing=got.missing,
                    sends=1 + got.probes,
                    probes=got.probes,
                    sent=got.received,
                    retransmitted=got.duplicates,
                    latency_s=closed_s - begun_s,
                    waiting_s=0.0,
                    early_stop=False,
                )
            )
        return tuple(reports)
