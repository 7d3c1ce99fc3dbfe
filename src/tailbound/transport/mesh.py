"""The blocking face of the sharded plan: meet all ranks, reduce, gather, part.

An all-reduce may also be started without waiting for it; several are then under way.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tailbound.config import LossBound, Transport, format_address
from tailbound.errors import (
    ConfigError,
    JobClosedError,
    RoundTimeoutError,
    TailboundError,
)
from tailbound.protocol.events import (
    Event,
    Failed,
    Gathered,
    Reduced,
    Started,
    peer_name,
)
from tailbound.protocol.mesh import MeshEndpoint
from tailbound.protocol.mesh_plan import MeshPlan
from tailbound.reduction import FORMATS
from tailbound.transport.addresses import listen
from tailbound.transport.credentials import Credentials
from tailbound.transport.links import join_peer, open_link
from tailbound.transport.member import Member, warn_if_given_up
from tailbound.transport.station import Station

Answer = Reduced | TailboundError | ConfigError
"""What becomes of an all-reduce: its result, or why there is none."""
OnDone = Callable[[Answer], None]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the ranks learn of each other where they meet."""

    session: int
    """Rank 0's draw: 63 bits that every datagram of the job carries."""
    addresses: tuple[str, ...]
    """Control address of each rank, ``host:port``."""


class MeshGroup(Member):
    """This rank's membership in a sharded job: every rank owns 1/N of each bucket.

    Args:
        rank: this process, 0 to world_size - 1.
        world_size: ranks in the job, 2 or more.
        bound: loss bound; all ranks must give the same.
        transport: how bytes travel.
        host: local address to listen on.
        meet: given our control address, waits for the other ranks'.

    Raises:
        ConfigError: no such address, or no port is free.
        UnreachableError: a rank cannot be reached, or UDP does not get through.
        HandshakeError: the ranks do not agree; both sides' values are named.
        TailboundError: see ``errors``.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        bound: LossBound,
        transport: Transport,
        *,
        host: str,
        meet: Callable[[str], Meeting],
    ) -> None:
        if not 0 <= rank < world_size or world_size < 2:
            raise ConfigError(f"a mesh has 2 or more ranks, not {rank} of {world_size}")
        self.rank, self.world_size = rank, world_size
        self._lock = threading.Lock()
        self._waiting: dict[int, OnDone] = {}
        """By ticket: those who were promised a call."""
        self._tickets: dict[int, int] = {}
        """By counter of the round, in the driver's thread."""
        self._num_tickets = 0
        self._step = 0
        credentials = Credentials(transport)
        _check_ports(transport.port_range, world_size)
        listener = listen(host, 0, transport.port_range)
        try:
            local_host, local_port, *_ = listener.getsockname()
            meeting = meet(format_address(local_host, local_port))
            self._endpoint = MeshEndpoint(
                rank,
                world_size,
                meeting.session,
                bound,
                now=time.monotonic(),
                timeout_s=transport.timeout_s,
                silence_s=transport.silence_s,
            )
            super().__init__(self._endpoint, transport)
        except BaseException:
            listener.close()
            raise
        station = Station(
            self._endpoint,
            self._on_event,
            listener=listener,
            accept=lambda tcp: open_link(tcp, transport, world_size - 1),
            impairments=transport.impairments,
            credentials=credentials,
        )
        self._stations.append(station)
        self._driver.add(station)
        self._driver.start()
        try:
            # The higher rank connects, to the nearest first: all listen already.
            for peer in range(rank - 1, -1, -1):
                self._connect(station, peer, meeting.addresses[peer])
            started = self._wait(Started, "start-up")
        except ConfigError as error:
            self.abort(str(error))
            raise
        except BaseException:
            self._shut()
            raise
        self.payload_bytes = started.payload_bytes
        """Gradient bytes of one datagram."""

    def start(
        self,
        values_N: NDArray[Any],
        *,
        dtype: str,
        weight: float,
        step: int,
        is_last: bool,
        on_done: OnDone,
        ends_L: tuple[int, ...] = (),
        learning_rate: float | None = None,
        loss_scale: float = 1.0,
        computed: float = 1.0,
        planned: int = 1,
    ) -> None:
        """Start an all-reduce and return at once; several may be under way.

        Rounds are matched across ranks by the order of calls; step, dtype and length
        must agree, or every rank gets a HandshakeError with both sides' values.

        Args:
            values_N: gradient of any length >= 1, contiguous, in the wire dtype
                (bfloat16 as uint16), already multiplied by the weight. The mesh's own
                until the call; then it holds the mean, bit-identical on all ranks.
            dtype: ``float32``, ``float64``, ``float16`` or ``bfloat16``.
            weight: samples, tokens or micro-batches behind it, >= 0.
            step: of the job; does not fall.
            is_last: the step's last bucket; then the next loss bound is decided.
            on_done: called once with the result or the error, in the driver's thread.
            ends_L: where each tensor ends in it, for ``LossBound(per_layer=True)``.
            learning_rate: for the detector's learning-rate rule.
            loss_scale: factor that the gradient carries.
            computed: micro-batches behind the gradient, 0 to ``planned``.
            planned: micro-batches that were to be behind it.

        Raises:
            JobClosedError: the group is closed.
            TailboundError: the job has failed.
        """
        self._require_open()
        with self._lock:
            ticket = self._num_tickets
            self._num_tickets += 1
            self._waiting[ticket] = on_done

        def begin() -> None:
            if self._endpoint.error is not None:
                self._events.error = self._endpoint.error
                self._answer(ticket, self._endpoint.error)
                return
            try:
                counter = self._endpoint.all_reduce(
                    values_N,
                    weight,
                    time.monotonic(),
                    dtype=dtype,
                    step=step,
                    is_last=is_last,
                    ends_L=ends_L,
                    learning_rate=learning_rate,
                    loss_scale=loss_scale,
                    computed=computed,
                    planned=planned,
                )
            except ConfigError as error:
                self._answer(ticket, error)
            except TailboundError as error:
                self._endpoint.fail(error)  # which answers all who wait
            else:
                self._tickets[counter] = ticket

        self._driver.call(begin)
        if self._closed:  # by another thread meanwhile: nobody runs the call
            self._answer(ticket, JobClosedError("the job is closed"))

    def all_reduce(
        self,
        values_N: NDArray[Any],
        weight: float,
        *,
        dtype: str = "float32",
        step: int | None = None,
        is_last: bool = True,
        ends_L: tuple[int, ...] = (),
        learning_rate: float | None = None,
        loss_scale: float = 1.0,
        computed: float = 1.0,
        planned: int = 1,
    ) -> Reduced:
        """Replace a gradient by the weighted mean over all ranks; waits for it.

        Args:
            values_N: see ``start``.
            weight: see ``start``.
            dtype: see ``start``.
            step: see ``start``; None: counted here, each ``is_last`` ends one.
            is_last: see ``start``.
            ends_L: see ``start``.
            learning_rate: see ``start``.
            loss_scale: see ``start``.
            computed: see ``start``.
            planned: see ``start``.

        Raises:
            TailboundError: the round could not be completed; the group is closed.
        """
        done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.start(
            values_N,
            dtype=dtype,
            weight=weight,
            step=self._step if step is None else step,
            is_last=is_last,
            on_done=done.put,
            ends_L=ends_L,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            computed=computed,
            planned=planned,
        )
        self._step += is_last
        timeout_s = self._longest_wait_s
        try:
            result = done.get(timeout=timeout_s)
        except queue.Empty:
            phase = "an all-reduce"
            raise RoundTimeoutError("the transport", phase, 0, 0, timeout_s) from None
        if isinstance(result, Exception):
            raise result
        return result

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """Exchange byte strings, exactly, over TCP; one per rank, in rank order."""
        self._require_open()
        self._driver.call(lambda: self._endpoint.all_gather(data, time.monotonic()))
        return self._wait(Gathered, "an all-gather").parts

    def shards(self, num_elements: int, dtype: str, slot: int) -> tuple[slice, ...]:
        """Which elements of a bucket each rank reduces.

        Args:
            num_elements: N of the bucket.
            dtype: its wire format.
            slot: order of the bucket in its step.

        Returns:
            One slice for each rank, empty where it reduces none.
        """
        shards = self._plan.cut(num_elements, FORMATS[dtype].wire.itemsize, slot)
        return tuple(
            slice(0, 0) if shard is None else slice(shard.first, shard.stop)
            for shard in shards
        )

    def forget_owed(self) -> None:
        """Owe the others no part of a mean: their parameters are made equal to ours.

        For ``LossBound.p_back``; between steps, when no all-reduce is under way.

        Raises:
            TailboundError: the job has failed or is closed.
        """
        self._require_open()
        self._run(self._plan.forget_owed)

    @property
    def _plan(self) -> MeshPlan:
        assert self._endpoint.plan is not None  # it has started
        return self._endpoint.plan

    def regime_state(self) -> dict[str, Any]:
        """What the next loss bounds follow from, as plain data; equal on all ranks.

        Between steps, when no all-reduce is under way.

        Raises:
            TailboundError: the job has failed or is closed.
        """
        self._require_open()
        found: dict[str, Any] = {}
        self._run(lambda: found.update(self._endpoint.ledger.state_dict()))
        return found

    def load_regime_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; all ranks must have before one begins a step.

        An ``all_gather`` afterwards sees to that.

        Args:
            state: what ``regime_state`` gave, with any number of ranks.

        Raises:
            ConfigError: it is no such state, or a step is open.
            TailboundError: the job has failed or is closed.
        """
        self._require_open()
        self._run(lambda: self._endpoint.ledger.load_state_dict(state))

    def _connect(self, station: Station, peer: int, address: str) -> None:
        tcp, udp, link = join_peer(
            address, self._transport, peer_name(peer), self.world_size - 1
        )

        def join() -> None:
            conduit = station.add(tcp, udp, link)
            self._driver.register(station, conduit)
            self._endpoint.connect(conduit.number, link, peer)

        self._run(join)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Reduced):
            warn_if_given_up(event)
            ticket = self._tickets.pop(event.counter)
            self._answer(ticket, event)
            return
        if isinstance(event, Failed):
            # Told to whoever waits for a round: closing need not raise it once more.
            self._events.error = event.error
            self._answer_all(event.error)
        self._events.put(event)

    def _answer(self, ticket: int, result: Answer) -> None:
        with self._lock:
            on_done = self._waiting.pop(ticket, None)
        if on_done is not None:
            on_done(result)

    def _answer_all(self, error: TailboundError) -> None:
        with self._lock:
            tickets = list(self._waiting)
        for ticket in tickets:
            self._answer(ticket, error)

    def _say_goodbye(self) -> None:
        self._endpoint.close()

    def _shut(self) -> None:
        super()._shut()
        # Whoever still waits, such as for a call that the thread never came to.
        self._answer_all(self._events.error or JobClosedError("the job is closed"))


def _check_ports(port_range: tuple[int, int] | None, world_size: int) -> None:
    """Refuse a range that is too small for this rank alone.

    Raises:
        ConfigError: says how many ports a mesh needs.
    """
    if port_range is None:
        return
    first, last = port_range
    needed = world_size - 1
    if last - first + 1 < needed:
        raise ConfigError(
            f"port_range {first} to {last} is too small: in a mesh of {world_size} "
            f"ranks each needs {needed} UDP ports and a TCP port, so give {needed} for "
            "each rank on a host"
        )
