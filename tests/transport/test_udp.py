"""One socket: what it sends, takes in, counts and refuses."""

import errno
import logging
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tailbound.errors import ConfigError
from tailbound.transport.batching import SOL_UDP, UDP_GRO
from tailbound.transport.datagrams import Received, SegmentTooLargeError
from tailbound.transport.udp import UdpSocket

pytestmark = pytest.mark.sockets

MakeSocket = Callable[..., UdpSocket]
SO_RXQ_OVFL = 40


@pytest.fixture
def make() -> Iterator[MakeSocket]:
    with ExitStack() as stack:

        def make_socket(host: str = "127.0.0.1", **options: Any) -> UdpSocket:
            options.setdefault("buffer_bytes", 212992)
            opened = UdpSocket(host, **options)
            stack.callback(opened.close)
            return opened

        yield make_socket


def take(udp: UdpSocket, buffer_bytes: int = 65535) -> tuple[Received, bytes]:
    """Wait for the next batch; return it and its bytes."""
    buffer = memoryview(bytearray(buffer_bytes))
    while True:
        received = udp.receive_batch(buffer)
        if received is not None:
            return received, bytes(buffer[: received.num_bytes])
        assert select.select([udp], [], [], 5.0)[0], "nothing arrived within 5 s"


def look(udp: UdpSocket) -> Received | None:
    return udp.receive_batch(memoryview(bytearray(65535)))


def failing(number: int, *, calls: int = 1_000_000, skip: int = 0) -> Any:
    """A sendmsg that fails for some calls after the first few."""
    count = 0

    def sendmsg(sock: socket.socket, *arguments: Any) -> int:
        nonlocal count
        count += 1
        if skip < count <= skip + calls:
            raise OSError(number, os.strerror(number))
        return sock.sendmsg(*arguments)

    return sendmsg


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_batch_arrives_as_one_with_its_segment_size(
    make: MakeSocket, host: str
) -> None:
    near, far = make(host), make(host)
    batch = os.urandom(10 * 1400 + 100)

    sent = near.send_batch(batch, 1400, far.address)

    received, data = take(far)
    assert (sent, data) == (14100, batch)
    assert received == Received(14100, 1400, near.address)
    assert isinstance(received, Received)
    assert near.statistics().batches_sent == 1
    assert near.statistics().datagrams_sent == 11
    assert far.statistics().batches_received == 1
    assert far.statistics().datagrams_received == 11
    assert far.statistics().bytes_received == 14100


def test_the_plain_path_delivers_the_same_bytes_datagram_by_datagram(
    make: MakeSocket,
) -> None:
    near, far = make(batching=False), make(batching=False)
    batch = bytes(range(250))

    sent = near.send_batch(batch, 100, far.address)

    parts = [take(far)[1] for _ in range(3)]
    assert (sent, parts) == (250, [batch[:100], batch[100:200], batch[200:]])
    assert near.statistics().batches_sent == 3
    assert near.statistics().datagrams_sent == 3
    assert near.statistics().bytes_sent == 250


def test_a_batched_sender_reaches_a_plain_receiver(make: MakeSocket) -> None:
    near, far = make(batching=True), make(batching=False)

    near.send_batch(b"aaabbbc", 3, far.address)

    assert [take(far)[1] for _ in range(3)] == [b"aaa", b"bbb", b"c"]


def test_an_empty_queue_gives_none(make: MakeSocket) -> None:
    assert look(make()) is None


def test_one_datagram_carries_no_batch_option(make: MakeSocket) -> None:
    options = []

    def sendmsg(sock: socket.socket, data: Any, ancillary: Any, *rest: Any) -> int:
        options.append(len(ancillary))
        return sock.sendmsg(data, ancillary, *rest)

    near, far = make(batching=True, sendmsg=sendmsg), make()

    near.send_batch(bytes(1400), 1400, far.address)
    near.send_batch(bytes(1401), 1400, far.address)

    assert options == [0, 1]


@pytest.mark.parametrize(
    ("number", "by_device"),
    [(errno.EAGAIN, False), (errno.ENOBUFS, True), (errno.ENOMEM, True)],
)
def test_a_blocked_batch_sends_nothing_and_says_by_what(
    make: MakeSocket, number: int, by_device: bool
) -> None:
    near = make(batching=True, sendmsg=failing(number))

    assert near.send_batch(bytes(300), 100, make().address) == 0

    assert near.blocked_by_device is by_device
    assert near.statistics().blocked == 1
    assert near.statistics().send_errors == {}


def test_a_blocked_plain_send_tells_how_far_it_came(make: MakeSocket) -> None:
    near = make(batching=False, sendmsg=failing(errno.EAGAIN, skip=2))

    assert near.send_batch(bytes(350), 100, make().address) == 200


def test_a_long_batch_stops_at_the_call_that_is_blocked(make: MakeSocket) -> None:
    near = make(batching=True, sendmsg=failing(errno.EAGAIN, skip=1))

    assert near.send_batch(bytes(200 * 100), 100, make().address) == 64 * 100


@pytest.mark.parametrize(("batching", "calls"), [(True, 1), (False, 3)])
def test_what_a_firewall_eats_counts_as_gone(
    make: MakeSocket, batching: bool, calls: int
) -> None:
    near = make(batching=batching, sendmsg=failing(errno.EPERM))

    assert near.send_batch(bytes(300), 100, make().address) == 300

    assert near.statistics().send_errors == {"EPERM": calls}
    assert near.statistics().datagrams_sent == 0


def test_an_error_that_is_nobodys_loss_is_raised(make: MakeSocket) -> None:
    near = make()
    near.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        near.send_batch(bytes(300), 100, ("127.0.0.1", 9))
    with pytest.raises(OSError, match="Bad file descriptor"):
        look(near)
    assert near.fileno() == -1


def test_the_largest_datagram_goes_and_one_byte_more_is_refused(
    make: MakeSocket,
) -> None:
    near, far = make(), make()

    assert near.send_batch(bytes(65507), 65507, far.address) == 65507
    with pytest.raises(SegmentTooLargeError) as caught:
        near.send_batch(bytes(65508), 65508, far.address)

    assert caught.value.segment_bytes == 65508
    assert caught.value.sent_bytes == 0
    assert str(caught.value).startswith(
        "a datagram of 65508 bytes is larger than the path to "
        f"127.0.0.1 port {far.port} takes; "
    )


def test_a_path_that_narrows_in_the_middle_says_what_went(make: MakeSocket) -> None:
    near = make(batching=True, sendmsg=failing(errno.EMSGSIZE, skip=1))

    with pytest.raises(SegmentTooLargeError) as caught:
        near.send_batch(bytes(100 * 100), 100, make().address)

    assert caught.value.sent_bytes == 6400
    assert near.statistics().unbatched == ()


def test_a_refused_batch_that_then_meets_a_full_queue_decides_nothing(
    make: MakeSocket,
) -> None:
    count = 0

    def sendmsg(sock: socket.socket, *arguments: Any) -> int:
        nonlocal count
        count += 1
        raise OSError(errno.EIO if count == 1 else errno.EAGAIN, "")

    near = make(batching=True, sendmsg=sendmsg)

    assert near.send_batch(bytes(300), 100, make().address) == 0

    assert near.statistics().unbatched == ()
    assert near.statistics().send_errors == {"EIO": 1}


def test_a_cut_off_batch_is_skipped_for_the_next_whole_one(make: MakeSocket) -> None:
    near, far = make(batching=True), make(batching=True)
    near.send_batch(bytes(3000), 1400, far.address)
    near.send_batch(b"whole", 1400, far.address)

    received, data = take(far, buffer_bytes=2000)

    assert (received.num_bytes, data) == (5, b"whole")
    assert far.statistics().truncated == 1
    assert far.statistics().batches_received == 1


def test_an_empty_datagram_is_counted_and_skipped(make: MakeSocket) -> None:
    near, far = make(), make()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.sendto(b"", far.address)
    near.send_batch(b"x", 1, far.address)

    assert take(far)[1] == b"x"
    assert far.statistics().empty == 1


def test_a_flood_of_empty_datagrams_gives_the_caller_a_turn(make: MakeSocket) -> None:
    def recvmsg_into(*_: Any) -> tuple[int, list[Any], int, Any]:
        return 0, [], 0, ("127.0.0.1", 9)

    far = make(recvmsg_into=recvmsg_into)

    assert look(far) is None
    assert far.statistics().empty == 64


def test_icmp_news_while_receiving_is_counted(make: MakeSocket) -> None:
    answers: list[OSError] = [ConnectionRefusedError(errno.ECONNREFUSED, "refused")]

    def recvmsg_into(*_: Any) -> tuple[int, list[Any], int, Any]:
        raise answers.pop() if answers else BlockingIOError(errno.EAGAIN, "empty")

    far = make(recvmsg_into=recvmsg_into)

    assert look(far) is None
    assert far.statistics().receive_errors == {"ECONNREFUSED": 1}


def test_the_drop_counter_is_followed_across_its_wrap_around(make: MakeSocket) -> None:
    drops = iter([5, 5, 0xFFFFFFFF, 2])

    def recvmsg_into(*_: Any) -> tuple[int, list[Any], int, Any]:
        count = next(drops).to_bytes(4, sys.byteorder)
        size = (700).to_bytes(4, sys.byteorder)
        ancillary = [
            (socket.SOL_SOCKET, SO_RXQ_OVFL, count),
            (SOL_UDP, UDP_GRO, size),
            (socket.SOL_IP, 1, b"of no interest"),
        ]
        return 1400, ancillary, 0, ("127.0.0.1", 9)

    far = make(recvmsg_into=recvmsg_into)
    seen = []
    for _ in range(4):
        received = look(far)
        seen.append(far.statistics().overflow)

    assert seen == [5, 5, 0xFFFFFFFF, 0xFFFFFFFF + 3]
    assert received == Received(1400, 700, ("127.0.0.1", 9))


def test_is_closed_on_exec_not_shared_not_fragmented(make: MakeSocket) -> None:
    four, six = make(), make("::1")
    with socket.fromfd(four.fileno(), socket.AF_INET, socket.SOCK_DGRAM) as view:
        assert view.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0
        assert view.getsockopt(socket.IPPROTO_IP, 10) == 2
    with socket.fromfd(six.fileno(), socket.AF_INET6, socket.SOCK_DGRAM) as view:
        assert view.getsockopt(socket.IPPROTO_IPV6, 23) == 2
        assert view.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
    assert not os.get_inheritable(four.fileno())


def test_a_port_range_gives_the_first_free_port(make: MakeSocket) -> None:
    taken = make(port_range=(20000, 65000))

    second = make(port_range=(taken.port, 65535))

    assert second.port > taken.port


def test_a_taken_port_is_named_with_the_remedy(make: MakeSocket) -> None:
    port = make().port

    with pytest.raises(ConfigError) as caught:
        make(port=port)

    assert str(caught.value) == (
        f"UDP port {port} is in use on 127.0.0.1: stop the program there "
        "(`ss -uanp` names it) or choose other ports"
    )


def test_a_small_grant_is_said_once_with_the_command(
    make: MakeSocket, caplog: pytest.LogCaptureFixture
) -> None:
    """No kernel doubles this number, whatever the privileges."""
    wanted = 2**31 - 1
    with caplog.at_level(logging.WARNING, "tailbound"):
        first = make(buffer_bytes=wanted)
        make(buffer_bytes=wanted)

    assert first.requested_bytes == wanted
    assert first.granted_receive_bytes < 2 * wanted
    assert first.granted_send_bytes < 2 * wanted
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("UDP receive queue: asked for 2147483647 bytes")
    assert lines[0].endswith("sysctl -w net.core.rmem_max=2147483647")
    assert lines[1].endswith("sysctl -w net.core.wmem_max=2147483647")
