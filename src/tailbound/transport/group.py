"""The blocking face of the transport: join a group, all_reduce, all_gather, close.

One group is one worker's membership in a job. ``Server`` is the server as an object,
run in the caller's thread (``tailbound serve``) or beside a group in rank 0.
"""

import queue
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

from numpy.typing import NDArray

from tailbound.config import LossBound, Transport, format_address
from tailbound.errors import (
    ConfigError,
    JobClosedError,
    RemoteError,
    RoundTimeoutError,
    TailboundError,
)
from tailbound.protocol.events import (
    Ended,
    Event,
    Failed,
    Gathered,
    Reduced,
    Started,
    peer_name,
)
from tailbound.protocol.intake import LinkCounters
from tailbound.protocol.messages import BucketSpec
from tailbound.protocol.server import ServerEndpoint
from tailbound.protocol.worker import WorkerEndpoint
from tailbound.transport.addresses import listen
from tailbound.transport.counters import UdpStatistics
from tailbound.transport.driver import Driver
from tailbound.transport.links import join_server, open_link
from tailbound.transport.station import Station

E = TypeVar("E", Started, Reduced, Gathered, Ended)

STOP_TIMEOUT_S = 5.0
CALL_POLL_S = 0.5
"""How often a call looks whether the driver still lives."""


class _Events:
    """Events of one station, handed from the driver's thread to the caller's."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.error: TailboundError | None = None

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def wait(self, kind: type[E], timeout_s: float, phase: str) -> E:
        """Wait for an event of this kind; a Failed is raised.

        The endpoint has its own, shorter deadlines with better names; this one is the
        last resort if the driver itself stands still.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self.error is not None:
                raise self.error
            try:
                event = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise RoundTimeoutError(
                    "the transport", phase, 0, 0, timeout_s
                ) from None
            if isinstance(event, Failed):
                self.error = event.error
            elif isinstance(event, kind):
                return event


class Server:
    """The server of a job, listening; workers join at ``address``.

    Args:
        world_size: workers to wait for.
        host: local address to listen on.
        port: 0 lets the kernel choose.
        transport: MTU, port range, timeouts, impairments of the receiving path.
        join_timeout_s: how long the workers may take to join.

    Raises:
        ConfigError: no such address, or the port is in use.
    """

    def __init__(
        self,
        world_size: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        transport: Transport | None = None,
        join_timeout_s: float | None = None,
    ) -> None:
        if world_size < 1:
            raise ConfigError(f"a job has 1 or more workers, not {world_size}")
        transport = transport or Transport()
        port_range = None if port else transport.port_range
        listener = listen(host, port, port_range)
        local_host, local_port, *_ = listener.getsockname()
        self.address = format_address(local_host, local_port)
        self._events = _Events()
        self.endpoint = ServerEndpoint(
            world_size,
            secrets.randbits(64),
            now=time.monotonic(),
            timeout_s=transport.timeout_s,
            silence_s=transport.silence_s,
            join_timeout_s=join_timeout_s,
        )
        self.station = Station(
            self.endpoint,
            self._events.put,
            listener=listener,
            accept=lambda tcp: open_link(tcp, transport),
            impairments=transport.impairments,
        )

    def run(self) -> None:
        """Serve in this thread until all workers said goodbye.

        Raises:
            TailboundError: the job failed; every worker was told.
        """
        driver = Driver()
        driver.add(self.station)
        driver.run()
        self._events.wait(Ended, 0.0, "the end of the job")

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until all workers said goodbye; the driver runs elsewhere."""
        self._events.wait(Ended, timeout_s, "the other ranks' goodbye")

    def close(self) -> None:
        """Close a server that no driver ever ran."""
        self.station.close()


class Group:
    """This worker's membership in a job.

    Args:
        address: the server's control address, ``host:port``.
        rank: this worker, 0 to world_size - 1.
        world_size: workers in the job.
        buckets: what is reduced, in the order of the calls.
        bound: loss bound; all ranks must give the same.
        transport: how bytes travel.
        server: a server that this process hosts, turned by the same thread.

    Raises:
        UnreachableError: no server, or UDP does not get through.
        HandshakeError: the ranks do not agree; both sides' values are named.
        TailboundError: see ``errors``.
    """

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        world_size: int,
        buckets: tuple[BucketSpec, ...],
        bound: LossBound,
        transport: Transport | None = None,
        server: Server | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._transport = transport or Transport()
        self._server = server
        self._events = _Events()
        self._closed = False
        self._endpoint = WorkerEndpoint(
            rank,
            world_size,
            buckets,
            bound,
            timeout_s=self._transport.timeout_s,
            silence_s=self._transport.silence_s,
        )
        self._driver = Driver()
        self._station = Station(
            self._endpoint,
            self._events.put,
            impairments=self._transport.impairments,
        )
        try:
            if server is not None:
                self._driver.add(server.station)
                self._driver.start()
            tcp, udp, link = join_server(address, self._transport)
            self._station.add(tcp, udp, link)

            def join() -> None:
                self._driver.add(self._station)
                self._endpoint.connect(link, time.monotonic())

            self._driver.call(join)
            if server is None:
                self._driver.start()
            started = self._wait(Started, "start-up")
        except BaseException:
            self._shut()
            raise
        self.payload_bytes = started.payload_bytes
        """Gradient bytes of one datagram."""

    def all_reduce(
        self,
        values_N: NDArray[Any],
        weight: float,
        *,
        learning_rate: float | None = None,
        loss_scale: float = 1.0,
        computed: float = 1.0,
        planned: int = 1,
    ) -> Reduced:
        """Replace a bucket's gradient by the weighted mean over all ranks.

        Args:
            values_N: the next bucket's gradient, already multiplied by the weight,
                contiguous, in the wire dtype (bfloat16 as uint16). Holds the mean
                afterwards, bit-identical on all ranks.
            weight: samples, tokens or micro-batches behind it, >= 0.
            learning_rate: for the detector's learning-rate rule.
            loss_scale: factor that the gradient carries.
            computed: micro-batches behind the gradient, 0 to ``planned``.
            planned: micro-batches that were to be behind it.

        Returns:
            Total weight and counts, what the detector said, and this rank's round
            reports. With a total weight of 0 the buffer is as it was.

        Raises:
            ShapeError: the array is not the bucket.
            TailboundError: the round could not be completed; the group is closed.
        """
        self._require_open()
        self._run(
            lambda: self._endpoint.all_reduce(
                values_N,
                weight,
                time.monotonic(),
                learning_rate=learning_rate,
                loss_scale=loss_scale,
                computed=computed,
                planned=planned,
            )
        )
        return self._wait(Reduced, "an all-reduce")

    def all_gather(self, data: bytes) -> tuple[bytes, ...]:
        """Exchange byte strings, exactly, over TCP; one per rank, in rank order."""
        self._require_open()
        self._driver.call(lambda: self._endpoint.all_gather(data))
        return self._wait(Gathered, "an all-gather").parts

    def counters(self) -> LinkCounters:
        """Datagrams by fate, so far."""
        return self._endpoint.counters()

    def udp_statistics(self) -> UdpStatistics:
        """What this worker's socket counted, its own overflow included."""
        (conduit,) = self._station.conduits.values()
        return conduit.udp.statistics()

    def abort(self, reason: str) -> None:
        """Leave because of an error of our own; all other ranks are told why."""
        if self._closed:
            return
        name = peer_name(self.rank)
        self._driver.call(lambda: self._endpoint.fail(RemoteError(name, reason)))
        self._shut()

    def close(self) -> None:
        """Say goodbye and close every socket. Closing twice is fine."""
        if self._closed:
            return
        if self._events.error is None:
            self._driver.call(self._endpoint.close)
            try:
                self._events.wait(Ended, self._transport.timeout_s, "the goodbye")
                if self._server is not None:
                    # The others may still be at work: their server must stay.
                    self._server.wait_ended(2 * self._transport.timeout_s)
            finally:
                self._shut()
        self._shut()

    def _shut(self) -> None:
        """Let the last control bytes leave, then end the thread."""
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        flushed = queue.SimpleQueue[bool]()
        while self._driver.is_running and time.monotonic() < deadline_s:
            self._driver.call(lambda: flushed.put(self._is_flushed()))
            try:
                if flushed.get(timeout=0.2):
                    break
            except queue.Empty:
                continue
            time.sleep(0.001)
        self._driver.stop(STOP_TIMEOUT_S)
        self._station.close()  # if the driver never got it

    def _is_flushed(self) -> bool:
        stations = [self._station]
        if self._server is not None:
            stations.append(self._server.station)
        return all(
            (not conduit.outgoing and not conduit.link.control)
            or conduit.lost is not None
            for station in stations
            for conduit in station.conduits.values()
        )

    def _require_open(self) -> None:
        if self._events.error is not None:
            raise self._events.error
        if self._closed:
            raise JobClosedError("the job is closed; attach again to go on")

    def _run(self, function: Callable[[], None]) -> None:
        """Run in the driver's thread; an error of the call is raised here."""
        done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def guarded() -> None:
            try:
                function()
            except ValueError as error:
                done.put(error)
            else:
                done.put(None)

        self._driver.call(guarded)
        deadline_s = time.monotonic() + self._transport.timeout_s
        while True:
            try:
                error = done.get(timeout=CALL_POLL_S)
            except queue.Empty:
                if not self._driver.is_running or time.monotonic() > deadline_s:
                    # A thread that ended said why: that is what this raises.
                    self._events.wait(Ended, 0.0, "a call")
                continue
            if error is not None:
                raise error
            return

    def _wait(self, kind: type[E], phase: str) -> E:
        # Longer than any deadline of the endpoint, whose errors name the culprit.
        return self._events.wait(kind, 3 * self._transport.timeout_s + 10.0, phase)
