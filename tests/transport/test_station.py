"""Conduits and stations with real sockets and a scripted endpoint."""

import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jobs import leaves_nothing
from tailbound.config import LossBound, Transport
from tailbound.errors import ConfigError, PeerLostError, RemoteError, TailboundError
from tailbound.impairments import Impairments
from tailbound.protocol.endpoint import Endpoint
from tailbound.protocol.events import Event
from tailbound.protocol.intake import LinkCounters
from tailbound.protocol.link import Link
from tailbound.protocol.messages import (
    Begin,
    BucketSpec,
    Fail,
    Hello,
    Mark,
    Message,
    PingSeen,
    Probe,
    Start,
    Welcome,
)
from tailbound.protocol.server import ServerEndpoint
from tailbound.protocol.wire import ControlReader, encode_control, make_ping
from tailbound.protocol.worker import WorkerEndpoint
from tailbound.transport.addresses import listen
from tailbound.transport.conduit import BATCHES_AT_ONCE, MAX_GROUPS_PER_TURN, Conduit
from tailbound.transport.datagrams import SegmentTooLargeError
from tailbound.transport.links import open_link
from tailbound.transport.station import Station
from tailbound.transport.udp import UdpSocket

pytestmark = pytest.mark.sockets

VECTOR = (BucketSpec("float32", ("w",), ((200_000,),)),)


class Flood:
    """Stands in for ``recvmsg_into``: datagrams of 60000 bytes, whatever the queue."""

    def __init__(self, peer: socket.socket) -> None:
        self.num_left, self.peer = 0, peer

    def __call__(self, opened: socket.socket, *args: Any) -> Any:
        if not self.num_left:
            return opened.recvmsg_into(*args)
        self.num_left -= 1
        return 60_000, [], 0, self.peer.getsockname()


class Peer:
    """The other end of a worker's link: plain sockets that a test speaks through."""

    def __init__(
        self,
        sendmsg: Callable[..., int] | None = None,
        buckets: tuple[BucketSpec, ...] = VECTOR,
        **path: Any,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            self.tcp, _ = listener.accept()
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.settimeout(10.0)
        self.tcp.settimeout(10.0)
        self.worker = WorkerEndpoint(
            0, 1, buckets, LossBound.fixed(0.0), timeout_s=60.0, silence_s=60.0
        )
        self.events: list[Event] = []
        impairments = Impairments(**path) if path else None
        self.station = Station(self.worker, self.events.append, impairments=impairments)
        self.flood = Flood(self.udp)
        udp = UdpSocket("127.0.0.1", sendmsg=sendmsg, recvmsg_into=self.flood)
        link = Link(-1, "", "127.0.0.1", udp_port=udp.port)
        self.conduit = self.station.add(ours, udp, link)
        self.worker.connect(link, 0.0)
        self.reader = ControlReader()
        self.heard: list[Message] = []

    def tell(self, *messages: Message) -> None:
        self.tcp.sendall(b"".join(map(encode_control, messages)))

    def hear(self) -> Message:
        while not self.heard:
            self.heard.extend(self.reader.feed_untrusted(self.tcp.recv(65536)))
        return self.heard.pop(0)

    def turn(self, now: float = 0.0) -> None:
        """What a driver does in a turn in which the TCP stream is readable."""
        self.conduit.read_control()
        self.station.drain(self.conduit, now)
        self.station.hand_on(now)
        self.conduit.send_datagrams(self.worker)
        self.conduit.write_control()
        while (event := self.worker.next_event()) is not None:
            self.events.append(event)

    def start(self) -> None:
        """Lead the worker to where it may reduce."""
        self.turn()
        assert isinstance(self.hear(), Hello)
        self.tell(Welcome(5, self.udp.getsockname()[1], (1472, 548)))
        self.settle_for(lambda: self.conduit.link.peer_udp_port > 0)
        self.tell(PingSeen(1472), Start(1448, 1 << 22))
        self.settle_for(lambda: self.worker.plan is not None)

    def settle_for(self, done: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 10.0
        while not done():
            assert time.monotonic() < deadline_s
            self.turn()

    def close(self) -> None:
        self.tcp.close()
        self.udp.close()
        self.station.close()


@contextlib.contextmanager
def peer_of(
    sendmsg: Callable[..., int] | None = None,
    buckets: tuple[BucketSpec, ...] = VECTOR,
    **path: Any,
) -> Iterator[Peer]:
    with leaves_nothing():
        peer = Peer(sendmsg, buckets, **path)
        try:
            yield peer
        finally:
            peer.close()


# -- a turn ---------------------------------------------------------------------


def test_a_bucket_that_fills_a_turn_to_the_brim_still_gets_its_probe() -> None:
    """Nothing else would wake the driver to send it."""
    # 44 chunks of 362 elements fill a kernel batch.
    num_batches = MAX_GROUPS_PER_TURN * BATCHES_AT_ONCE
    brim = (BucketSpec("float32", ("w",), ((num_batches * 44 * 362,),)),)
    with peer_of(buckets=brim) as peer:
        peer.start()
        peer.worker.all_reduce(np.ones(num_batches * 44 * 362, np.float32), 1.0, 0.0)

        peer.turn()

        assert not peer.worker.has_datagrams(0, 0.0)
        while not isinstance(message := peer.hear(), Probe):
            assert isinstance(message, PingSeen | Begin | Mark)


# -- control --------------------------------------------------------------------


def test_control_bytes_pass_both_ways() -> None:
    with peer_of() as peer:
        peer.turn()

        hello = peer.hear()
        assert isinstance(hello, Hello)
        assert hello.udp_port == peer.conduit.udp.port
        assert peer.conduit.peer_address() is None
        peer.tell(Welcome(5, 4321, (548,)))
        peer.settle_for(lambda: peer.conduit.link.peer_udp_port)
        assert peer.conduit.peer_address() == ("127.0.0.1", 4321)


def test_control_bytes_wait_until_the_datagrams_before_them_are_read() -> None:
    """1.2 MB is queued, 1 MiB is read in a turn: the rest comes first."""
    with peer_of() as peer:
        peer.start()
        before = peer.conduit.udp.statistics().batches_received
        peer.flood.num_left = 20
        peer.tell(PingSeen(1))  # breaks the protocol: no ping has this size
        deadline_s = time.monotonic() + 10.0
        while not peer.conduit.incoming and time.monotonic() < deadline_s:
            peer.conduit.read_control()

        peer.station.drain(peer.conduit, 0.0)
        peer.station.hand_on(0.0)
        first = peer.conduit.udp.statistics().batches_received - before
        has_failed_early = peer.worker.has_failed
        peer.station.drain(peer.conduit, 0.0)
        peer.station.hand_on(0.0)

        assert (first, has_failed_early) == (18, False)
        assert peer.conduit.is_drained
        assert peer.worker.counters().malformed == 20
        assert peer.worker.has_failed


def test_a_stream_that_takes_no_more_keeps_the_rest_for_later() -> None:
    with peer_of() as peer:
        peer.conduit.outgoing += bytes(64 << 20)

        assert not peer.conduit.write_control()
        left = len(peer.conduit.outgoing)
        assert 0 < left < 64 << 20
        peer.tcp.settimeout(0.0)
        taken = 0
        deadline_s = time.monotonic() + 30.0
        while taken < 64 << 20 and time.monotonic() < deadline_s:
            with contextlib.suppress(BlockingIOError):
                taken += len(peer.tcp.recv(1 << 20))
            peer.conduit.write_control()
        assert taken == 64 << 20
        assert peer.conduit.write_control()


def test_a_long_stream_is_read_in_pieces() -> None:
    with peer_of() as peer:
        peer.tcp.setblocking(False)
        sent = read = 0
        deadline_s = time.monotonic() + 30.0
        while read < 4 << 20 and time.monotonic() < deadline_s:
            with contextlib.suppress(BlockingIOError):
                sent += peer.tcp.send(bytes(min(1 << 20, (4 << 20) - sent)))
            peer.conduit.read_control()
            read = sum(map(len, peer.conduit.incoming))

        assert read == 4 << 20
        assert peer.conduit.lost is None


def test_a_closed_stream_is_told_once_and_after_its_last_words() -> None:
    with peer_of() as peer:
        peer.turn()
        peer.hear()  # closing with bytes unread would be a reset
        peer.tell(Welcome(5, 4321, (548,)))
        peer.tcp.close()

        peer.settle_for(lambda: peer.worker.has_failed)
        peer.turn()

        assert peer.worker.session == 5  # the welcome was taken in
        assert isinstance(peer.worker.error, PeerLostError)
        assert "its connection closed" in str(peer.worker.error)
        assert peer.conduit.told_lost


def test_a_closed_stream_is_told_after_words_that_are_held_back() -> None:
    with peer_of(delay_s=5.0) as peer:
        peer.turn(now=0.0)
        peer.tell(Welcome(5, 4321, (548,)))
        peer.tcp.close()
        deadline_s = time.monotonic() + 10.0
        while peer.conduit.lost is None and time.monotonic() < deadline_s:
            peer.turn(now=1.0)

        assert peer.conduit.holds_control
        assert not peer.worker.has_failed
        assert peer.station.next_due_s() == 6.0
        peer.turn(now=6.0)

        assert peer.worker.session == 5
        assert peer.worker.has_failed


def reset(opened: socket.socket) -> None:
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    opened.close()


def test_a_reset_stream_is_lost_and_the_reason_is_said() -> None:
    with peer_of() as peer:
        peer.start()
        reset(peer.tcp)

        peer.settle_for(lambda: peer.worker.has_failed)

        assert "Connection reset by peer" in str(peer.worker.error)


def test_last_words_are_heard_even_if_a_write_finds_the_stream_reset() -> None:
    with peer_of() as peer:
        peer.start()
        peer.tell(Welcome(6, 1, (548,)))
        time.sleep(0.05)
        reset(peer.tcp)
        deadline_s = time.monotonic() + 10.0
        while peer.conduit.lost is None and time.monotonic() < deadline_s:
            peer.conduit.outgoing += b"anything"
            peer.conduit.write_control()

        assert b"Welcome" in b"".join(peer.conduit.incoming)


# -- datagrams ------------------------------------------------------------------


def test_datagrams_of_another_source_are_foreign() -> None:
    with peer_of() as peer:
        peer.start()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("127.0.0.1", 0))
            ping = make_ping(5, 0xFFFF, 548)
            other.sendto(ping, ("127.0.0.1", peer.conduit.udp.port))
        peer.udp.sendto(b"malformed", ("127.0.0.1", peer.conduit.udp.port))

        peer.settle_for(lambda: peer.worker.counters().malformed)

        assert peer.worker.counters() == LinkCounters(foreign=1, malformed=1)


def test_a_flood_from_another_source_is_left_to_the_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first thousand are counted, and said once; the peer is heard as before."""
    with peer_of() as peer:
        peer.start()
        ours = ("127.0.0.1", peer.conduit.udp.port)
        counters = peer.worker.counters
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.bind(("127.0.0.1", 0))
            for num in range(100, 1001, 100):
                for _ in range(100):
                    other.sendto(make_ping(5, 0xFFFF, 548), ours)

                def are_counted(num: int = num) -> bool:
                    return counters().foreign == num

                peer.settle_for(are_counted)
            for _ in range(10):
                other.sendto(make_ping(5, 0xFFFF, 548), ours)
        peer.udp.sendto(b"malformed", ours)

        peer.settle_for(lambda: counters().malformed)

        assert counters() == LinkCounters(foreign=1000, malformed=1)
    (record,) = [r for r in caplog.records if "from other addresses" in r.message]
    assert "1000 datagrams from other addresses than 127.0.0.1 port" in record.message


def test_a_datagram_that_is_held_back_arrives_when_it_is_due() -> None:
    with peer_of(delay_s=5.0) as peer:
        peer.udp.sendto(b"malformed", ("127.0.0.1", peer.conduit.udp.port))
        deadline_s = time.monotonic() + 10.0
        while peer.station.next_due_s() != 8.0 and time.monotonic() < deadline_s:
            peer.station.drain(peer.conduit, 3.0)

        peer.station.hand_on(7.9)
        early = peer.worker.counters().malformed
        peer.station.hand_on(8.0)

        assert (early, peer.worker.counters().malformed) == (0, 1)


def test_a_job_is_not_held_up_by_datagrams_that_never_end() -> None:
    """1 MiB a turn of 2.4 MB: the others get their turn, and the timers too."""
    with peer_of() as peer:
        peer.flood.num_left = 40

        turns = 0
        peer.conduit.is_drained = False
        while not peer.conduit.is_drained:
            peer.station.drain(peer.conduit, 0.0)
            turns += 1

        assert turns == 3


class Device:
    """Stands in for ``sendmsg``: fails as a test says, else passes on."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.largest = 65535

    def __call__(self, opened: socket.socket, *args: Any) -> int:
        (part,), ancillary, *_ = args
        segment = int.from_bytes(ancillary[0][2], "little") if ancillary else len(part)
        if segment > self.largest:
            raise OSError(errno.EMSGSIZE, "Message too long")
        if self.error is not None:
            raise OSError(self.error, "as the test says")
        return opened.sendmsg(*args)


def test_a_full_queue_is_waited_for_with_the_selector() -> None:
    device = Device()
    with peer_of(device) as peer:
        peer.start()
        peer.worker.all_reduce(np.ones(200_000, np.float32), 1.0, 0.0)
        device.error = errno.EAGAIN

        assert not peer.conduit.send_datagrams(peer.worker)
        assert peer.conduit.is_blocked
        assert peer.conduit.retry_s is None
        device.error = None
        assert peer.conduit.send_datagrams(peer.worker)
        assert not peer.conduit.is_blocked


def test_a_full_device_is_tried_again_after_a_pause() -> None:
    device = Device()
    with peer_of(device) as peer:
        peer.start()
        peer.worker.all_reduce(np.ones(200_000, np.float32), 1.0, 0.0)
        device.error = errno.ENOBUFS

        before_s = time.monotonic()
        assert not peer.conduit.send_datagrams(peer.worker)
        assert peer.conduit.retry_s is not None
        assert peer.conduit.retry_s >= before_s + 0.001
        due_s = peer.station.next_due_s()
        assert due_s is not None
        assert due_s <= peer.conduit.retry_s
        device.error = None
        assert peer.conduit.send_datagrams(peer.worker)
        assert peer.conduit.retry_s is None


def test_a_failure_is_told_even_if_no_datagram_can_leave() -> None:
    device = Device()
    with peer_of(device) as peer:
        peer.start()
        peer.worker.all_reduce(np.ones(200_000, np.float32), 1.0, 0.0)
        peer.turn()
        device.error = errno.ENOBUFS
        peer.turn()

        peer.worker.fail(RemoteError("rank 0", "out of memory"))
        peer.turn()

        message = peer.hear()
        while not isinstance(message, Fail):
            message = peer.hear()
        assert message.message == "out of memory"


def test_what_is_too_large_to_leave_is_not_tried_twice_in_the_check() -> None:
    device = Device()
    device.largest = 1300
    with peer_of(device) as peer:
        peer.turn()
        assert isinstance(peer.hear(), Hello)
        peer.tell(Welcome(5, peer.udp.getsockname()[1], (1472, 1232, 548)))
        peer.settle_for(lambda: peer.conduit.link.peer_udp_port)
        for turn in range(5):
            peer.turn(now=float(turn))

        errors = peer.conduit.udp.statistics().send_errors
        assert errors == {"EMSGSIZE": 1}
        assert not peer.worker.has_failed
        sizes = {len(peer.udp.recv(65535)) for _ in range(4)}
        assert sizes == {1232, 548}


def test_what_becomes_too_large_later_ends_the_job_and_says_what_to_set() -> None:
    device = Device()
    with peer_of(device) as peer:
        peer.start()
        device.largest = 1300
        peer.worker.all_reduce(np.ones(200_000, np.float32), 1.0, 0.0)

        peer.turn()

        assert isinstance(peer.worker.error, SegmentTooLargeError)
        assert "Transport(mtu=...)" in str(peer.worker.error)


# -- accepting ------------------------------------------------------------------


@contextlib.contextmanager
def server_station(
    accept: Callable[[socket.socket], tuple[UdpSocket, Link]],
) -> Iterator[tuple[Station, Any]]:
    with leaves_nothing():
        endpoint: Endpoint = ServerEndpoint(
            2, 5, now=0.0, timeout_s=60.0, silence_s=5.0
        )
        listener = listen("127.0.0.1")
        station = Station(endpoint, print, listener=listener, accept=accept)
        try:
            yield station, listener.getsockname()
        finally:
            station.close()


def accept_until(station: Station, done: Callable[[], object]) -> list[Conduit]:
    found: list[Conduit] = []
    deadline_s = time.monotonic() + 10.0
    while not done() and not found and time.monotonic() < deadline_s:
        found += [conduit for conduit, _ in station.accept_all()]
    return found


def test_everyone_who_waits_is_accepted_and_numbered() -> None:
    with server_station(lambda tcp: open_link(tcp, Transport(mtu=1500))) as (
        station,
        address,
    ):
        with socket.create_connection(address), socket.create_connection(address):
            deadline_s = time.monotonic() + 10.0
            while len(station.conduits) < 2 and time.monotonic() < deadline_s:
                station.accept_all()
        assert list(station.conduits) == [0, 1]


def test_a_connection_that_is_gone_already_is_forgotten() -> None:
    calls = []

    def accept(tcp: socket.socket) -> tuple[UdpSocket, Link]:
        calls.append(tcp)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with server_station(accept) as (station, address):
        socket.create_connection(address).close()

        accepted = accept_until(station, lambda: calls)

        assert accepted == []
        assert not station.endpoint.has_failed


def test_without_a_port_for_a_worker_the_job_ends_with_a_clear_word() -> None:
    def accept(tcp: socket.socket) -> tuple[UdpSocket, Link]:
        raise ConfigError("UDP ports 5000 to 5003 are all in use on 127.0.0.1")

    with server_station(accept) as (station, address):
        with socket.create_connection(address):
            accept_until(station, lambda: station.endpoint.has_failed)

        assert isinstance(station.endpoint.error, TailboundError)
        assert str(station.endpoint.error) == (
            "no room for another rank: UDP ports 5000 to 5003 are all in use on "
            "127.0.0.1"
        )


def test_without_a_free_file_descriptor_the_rest_waits_its_turn() -> None:
    with server_station(lambda tcp: open_link(tcp, Transport(mtu=1500))) as (
        station,
        address,
    ):
        with socket.create_connection(address):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            copies = [os.dup(0)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (copies[0] + 8, hard))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        copies.append(os.dup(0))
                assert station.accept_all() == []
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for copy in copies:
                    os.close(copy)
            accept_until(station, lambda: station.conduits)
        assert list(station.conduits) == [0]


def test_a_station_without_a_listener_accepts_nobody() -> None:
    with peer_of() as peer:
        assert peer.station.accept_all() == []
