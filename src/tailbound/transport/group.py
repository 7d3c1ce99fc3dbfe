"""The blocking face of the transport: join a group, all_reduce, all_gather, close.

One group is one worker's membership in a job. ``Server`` is the server as an object,
run in the caller's thread (``tailbound serve``) or beside a group in rank 0.
"""

import secrets
import time
from typing import Any

from numpy.typing import NDArray

from tailbound.config import LossBound, Transport, format_address
from tailbound.errors import ConfigError
from tailbound.protocol.events import Ended, Gathered, Reduced, Started
from tailbound.protocol.messages import BucketSpec
from tailbound.protocol.server import ServerEndpoint
from tailbound.protocol.worker import WorkerEndpoint
from tailbound.transport.addresses import listen
from tailbound.transport.credentials import Credentials
from tailbound.transport.driver import Driver
from tailbound.transport.links import join_peer, open_link
from tailbound.transport.member import Events, Member
from tailbound.transport.station import Station


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
        credentials = Credentials(transport)
        port_range = None if port else transport.port_range
        listener = listen(host, port, port_range)
        local_host, local_port, *_ = listener.getsockname()
        self.address = format_address(local_host, local_port)
        self._events = Events()
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
            accept=lambda tcp: open_link(tcp, transport, world_size),
            impairments=transport.impairments,
            credentials=credentials,
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


class Group(Member):
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
        transport = transport or Transport()
        credentials = Credentials(transport)
        self._server = server
        self._endpoint = WorkerEndpoint(
            rank,
            world_size,
            buckets,
            bound,
            timeout_s=transport.timeout_s,
            silence_s=transport.silence_s,
        )
        super().__init__(self._endpoint, transport)
        station = Station(
            self._endpoint,
            self._events.put,
            impairments=transport.impairments,
            credentials=credentials,
        )
        self._stations.append(station)
        try:
            if server is not None:
                self._stations.append(server.station)
                self._driver.add(server.station)
                self._driver.start()
            tcp, udp, link = join_peer(address, transport)
            station.add(tcp, udp, link)

            def join() -> None:
                self._driver.add(station)
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

    def _say_goodbye(self) -> None:
        self._endpoint.close()

    def _wait_for_others(self) -> None:
        if self._server is not None:
            # The others may still be at work: their server must stay.
            self._server.wait_ended(2 * self._transport.timeout_s)
