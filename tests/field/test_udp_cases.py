"""Cases from the field that a socket alone must stand: one test per row."""

import errno
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tailbound.transport.datagrams import Received, SegmentTooLargeError
from tailbound.transport.udp import UdpSocket

pytestmark = pytest.mark.sockets

MakeSocket = Callable[..., UdpSocket]


@pytest.fixture
def make() -> Iterator[MakeSocket]:
    with ExitStack() as stack:

        def make_socket(host: str = "127.0.0.1", **options: Any) -> UdpSocket:
            options.setdefault("buffer_bytes", 212992)
            opened = UdpSocket(host, **options)
            stack.callback(opened.close)
            return opened

        yield make_socket


def take_all(udp: UdpSocket) -> tuple[list[Received], bytes]:
    """Everything in the queue."""
    buffer = memoryview(bytearray(65535))
    batches, data = [], b""
    while (received := udp.receive_batch(buffer)) is not None:
        batches.append(received)
        data += buffer[: received.num_bytes]
    return batches, data


def transfer(near: UdpSocket, far: UdpSocket, data: bytes, segment_bytes: int) -> bytes:
    """Send all in steps that fit the queue, draining the far end between them."""
    step = 64 * segment_bytes
    arrived, sent, turns = b"", 0, 0
    while sent < len(data):
        part = memoryview(data)[sent : sent + min(step, 65000)]
        whole = len(part) - len(part) % segment_bytes or len(part)
        sent += near.send_batch(part[:whole], segment_bytes, far.address)
        arrived += take_all(far)[1]
        turns += 1
        assert turns < 10 * (1 + len(data) // segment_bytes), "no progress"
    while len(arrived) < len(data):
        assert select.select([far], [], [], 5.0)[0], "nothing arrived within 5 s"
        arrived += take_all(far)[1]
    return arrived


class Refusing:
    """A sendmsg that refuses batches to one host, from some call on."""

    def __init__(self, number: int, host: str, good_calls: int = 0) -> None:
        self.number, self.host, self.good_calls = number, host, good_calls
        self.failed = self.batched = 0

    def __call__(
        self, sock: socket.socket, data: Any, ancillary: Any, flags: int, address: Any
    ) -> int:
        if ancillary and address[0] == self.host:
            if self.good_calls <= 0:
                self.failed += 1
                raise OSError(self.number, os.strerror(self.number))
            self.good_calls -= 1
        self.batched += bool(ancillary)
        return sock.sendmsg(data, ancillary, flags, address)


@pytest.mark.parametrize(
    ("number", "good_calls"),
    [
        (errno.EIO, 0),
        (errno.EINVAL, 0),
        (errno.EOPNOTSUPP, 0),
        (errno.EMSGSIZE, 0),
        (errno.EIO, 10),
    ],
)
def test_S12_a_path_that_refuses_batches_gets_datagrams_and_loses_nothing(
    make: MakeSocket,
    caplog: pytest.LogCaptureFixture,
    number: int,
    good_calls: int,
) -> None:
    refusing = Refusing(number, "127.0.0.2", good_calls)
    near = make("0.0.0.0", batching=True, sendmsg=refusing)
    narrow, wide = make("127.0.0.2"), make("127.0.0.1")
    data = os.urandom(1_000_000)

    with caplog.at_level(logging.WARNING, "tailbound"):
        assert transfer(near, narrow, data, 1400) == data
        before = refusing.batched
        assert transfer(near, wide, data, 1400) == data

    assert refusing.failed == 1
    assert refusing.batched - before == 16  # 15 of 46 x 1400 bytes, and the rest
    assert near.statistics().unbatched == (narrow.address,)
    assert near.statistics().send_errors == {errno.errorcode[number]: 1}
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert warnings[0].startswith("batched sends to 127.0.0.2 port ")


@pytest.mark.parametrize(("segment_bytes", "most_bytes"), [(1400, 64400), (400, 25600)])
def test_S13_no_call_exceeds_the_limits_of_bytes_and_segments(
    make: MakeSocket, segment_bytes: int, most_bytes: int
) -> None:
    sizes = []

    def sendmsg(_: socket.socket, data: Any, *__: Any) -> int:
        sizes.append(len(data[0]))
        return sizes[-1]

    near = make(batching=True, sendmsg=sendmsg)

    sent = near.send_batch(bytes(4_000_000), segment_bytes, ("127.0.0.1", 9))

    assert sent == sum(sizes) == 4_000_000
    assert max(sizes) == most_bytes  # 46 segments below 65507 bytes, or 64 segments
    assert all(size % segment_bytes == 0 for size in sizes[:-1])


def test_S13_a_segment_above_the_path_is_an_error_and_a_smaller_one_goes(
    make: MakeSocket,
) -> None:
    failed = 0

    def sendmsg(
        sock: socket.socket, data: Any, ancillary: Any, flags: int, address: Any
    ) -> int:
        nonlocal failed
        segment = int.from_bytes(ancillary[0][2], sys.byteorder) if ancillary else 0
        if (segment or len(data[0])) > 1300:
            failed += 1
            raise OSError(errno.EMSGSIZE, "Message too long")
        return sock.sendmsg(data, ancillary, flags, address)

    near, far = make(batching=True, sendmsg=sendmsg), make()
    data = os.urandom(200_000)

    with pytest.raises(SegmentTooLargeError) as caught:
        near.send_batch(data, 1301, far.address)
    assert caught.value.sent_bytes == 0
    assert transfer(near, far, data, 1300) == data

    assert failed == 2  # once as a batch, once alone
    assert near.statistics().unbatched == ()


def test_S14_a_joined_batch_keeps_its_chunks_apart(make: MakeSocket) -> None:
    near, far = make(batching=True), make(batching=True)
    batch = os.urandom(44 * 1400 + 100)

    near.send_batch(batch, 1400, far.address)
    batches, data = take_all(far)

    assert data == batch
    assert [(b.num_bytes, b.segment_bytes) for b in batches] == [(61700, 1400)]
    assert far.statistics().datagrams_received == 45


def test_S14_a_small_buffer_is_counted_and_the_batch_not_handed_on(
    make: MakeSocket,
) -> None:
    near, far = make(batching=True), make(batching=True)
    near.send_batch(bytes(44 * 1400 + 100), 1400, far.address)

    assert far.receive_batch(memoryview(bytearray(20000))) is None
    assert far.statistics().truncated == 1
    assert far.statistics().batches_received == 0


def test_S14_without_ancillary_room_no_batch_passes_as_one_chunk(
    make: MakeSocket,
) -> None:
    def recvmsg_into(sock: socket.socket, buffers: Any, _: int) -> Any:
        return sock.recvmsg_into(buffers, 0)

    near = make(batching=True)
    far = make(batching=True, recvmsg_into=recvmsg_into)
    near.send_batch(bytes(44 * 1400 + 100), 1400, far.address)

    assert take_all(far) == ([], b"")
    assert far.statistics().truncated == 1


def test_S15_the_grant_reported_is_what_the_kernel_says(make: MakeSocket) -> None:
    udp = make(buffer_bytes=64 << 20)

    with socket.fromfd(udp.fileno(), socket.AF_INET, socket.SOCK_DGRAM) as view:
        receive = view.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        send = view.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert udp.requested_bytes == 67108864
    assert (udp.granted_receive_bytes, udp.granted_send_bytes) == (receive, send)


def test_S15_what_a_full_queue_drops_is_counted_apart(make: MakeSocket) -> None:
    near = make(batching=False)
    far = make(batching=False, buffer_bytes=16384)
    for _ in range(200):
        near.send_batch(bytes(1400), 1400, far.address)
    kept = len(take_all(far)[0])
    near.send_batch(b"brings the counter", 1400, far.address)
    take_all(far)

    assert 0 < kept < 200
    assert far.statistics().overflow == 200 - kept
    assert far.statistics().truncated == 0


def test_A07_a_full_queue_or_device_is_no_loss(make: MakeSocket) -> None:
    count = 0

    def sendmsg(sock: socket.socket, *arguments: Any) -> int:
        nonlocal count
        count += 1
        if count % 10 == 0:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        if count % 7 == 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return sock.sendmsg(*arguments)

    data = os.urandom(300_000)
    for batching in (True, False):
        near, far = make(batching=batching, sendmsg=sendmsg), make(batching=batching)

        assert transfer(near, far, data, 300) == data

        assert near.statistics().blocked > 0
        assert near.statistics().send_errors == {}


def test_A07_a_device_that_stays_full_takes_nothing_and_raises_nothing(
    make: MakeSocket,
) -> None:
    def sendmsg(*_: Any) -> int:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    near = make(sendmsg=sendmsg)

    assert [near.send_batch(bytes(900), 300, ("127.0.0.1", 9)) for _ in range(5)] == [
        0
    ] * 5
    assert near.blocked_by_device


def test_A10_datagrams_leave_from_the_address_that_was_bound(make: MakeSocket) -> None:
    near, far = make("127.0.0.2"), make("127.0.0.1")

    near.send_batch(bytes(5000), 500, far.address)
    batches, _ = take_all(far)

    assert {batch.address for batch in batches} == {("127.0.0.2", near.port)}


@pytest.mark.netns
@pytest.mark.parametrize(
    ("mtu", "host", "payload_bytes"),
    [(1500, "127.0.0.1", 1472), (1500, "::1", 1452), (9000, "127.0.0.1", 8972)],
)
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"),
    reason="needs root, unshare and ip",
)
def test_A13_a_datagram_above_the_mtu_is_refused_not_cut_up(
    mtu: int, host: str, payload_bytes: int
) -> None:
    program = f"""
from tailbound.transport.addresses import route_mtu
from tailbound.transport.datagrams import SegmentTooLargeError
from tailbound.transport.udp import UdpSocket
near, far = (UdpSocket({host!r}, buffer_bytes=212992) for _ in range(2))
assert route_mtu({host!r}, {host!r}) == {mtu}
size = {payload_bytes}
assert near.send_batch(bytes(size), size, far.address) == size
assert near.send_batch(bytes(3 * size), size, far.address) == 3 * size
for number in (1, 3):
    try:
        near.send_batch(bytes(number * (size + 1)), size + 1, far.address)
    except SegmentTooLargeError as error:
        assert error.sent_bytes == 0
    else:
        raise SystemExit("a datagram above the MTU went out")
assert near.statistics().unbatched == ()
"""
    command = f'ip link set lo up mtu {mtu} && exec {sys.executable} -c "$PROGRAM"'

    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", command],
        env={**os.environ, "PROGRAM": program, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
