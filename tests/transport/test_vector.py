"""Many datagrams in one call, compared with what plain calls bring."""

import contextlib
import errno
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tailbound.transport.udp import UdpSocket
from tailbound.transport.vector import (
    DatagramVector,
    Filled,
    Joining,
    find_recvmmsg,
)

pytestmark = pytest.mark.sockets

RECVMMSG = find_recvmmsg()
needs_recvmmsg = pytest.mark.skipif(RECVMMSG is None, reason="no recvmmsg here")


@contextlib.contextmanager
def pair(host: str = "127.0.0.1") -> Iterator[tuple[UdpSocket, UdpSocket]]:
    with (
        contextlib.closing(UdpSocket(host, batching=False)) as near,
        contextlib.closing(UdpSocket(host, batching=False)) as far,
    ):
        yield near, far


def make_vector(num_bytes: int = 1 << 16, slot_bytes: int = 100) -> DatagramVector:
    assert RECVMMSG is not None
    vector = DatagramVector(memoryview(bytearray(num_bytes)), RECVMMSG)
    vector.aim(slot_bytes)
    return vector


def receive(vector: DatagramVector, near: UdpSocket, far: UdpSocket) -> Filled:
    """What one call brings, once something is there."""
    deadline_s = time.monotonic() + 5.0
    while time.monotonic() < deadline_s:
        filled = vector.receive(near.fileno(), far.address)
        if filled is not None:
            return filled
    raise AssertionError("nothing came")


@needs_recvmmsg
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_full_datagrams_lie_back_to_back(host: str) -> None:
    vector = make_vector()
    with pair(host) as (near, far):
        for number in range(3):
            far.send_batch(bytes([number]) * 100, 100, near.address)

        filled = receive(vector, near, far)

    assert (filled.num, filled.is_even) == (3, True)
    assert (filled.num_foreign, filled.num_cut) == (0, 0)
    assert bytes(vector.buffer[:300]) == b"\0" * 100 + b"\1" * 100 + b"\2" * 100


@needs_recvmmsg
def test_short_and_foreign_ones_are_told_apart_and_long_ones_are_cut() -> None:
    vector = make_vector()
    with pair() as (near, far), pair() as (other, _):
        far.send_batch(b"a" * 100, 100, near.address)
        far.send_batch(b"b" * 40, 40, near.address)
        other.send_batch(b"c" * 100, 100, near.address)
        far.send_batch(b"d" * 101, 101, near.address)
        far.send_batch(b"e" * 100, 100, near.address)

        filled = receive(vector, near, far)

    assert filled.length_K.tolist() == [100, 40, 0, 0, 100]
    assert (filled.is_even, filled.num_foreign, filled.num_cut) == (False, 1, 1)


@needs_recvmmsg
def test_no_more_are_taken_than_slots_fit() -> None:
    vector = make_vector(num_bytes=250)
    with pair() as (near, far):
        for _ in range(3):
            far.send_batch(b"x" * 100, 100, near.address)
        first = receive(vector, near, far)
        second = receive(vector, near, far)

        assert (vector.num_slots, first.num, second.num) == (2, 2, 1)
        assert vector.receive(near.fileno(), far.address) is None


@needs_recvmmsg
def test_what_a_full_queue_lost_is_told() -> None:
    with (
        contextlib.closing(
            UdpSocket("127.0.0.1", batching=False, buffer_bytes=4096)
        ) as near,
        contextlib.closing(UdpSocket("127.0.0.1", batching=False)) as far,
    ):
        vector = make_vector(slot_bytes=1000)
        for _ in range(200):
            far.send_batch(b"x" * 1000, 1000, near.address)
        receive(vector, near, far)
        far.send_batch(b"x" * 1000, 1000, near.address)

        filled = receive(vector, near, far)

    assert filled.drops is not None
    assert filled.drops > 0


@needs_recvmmsg
def test_an_error_of_the_call_is_raised() -> None:
    vector = make_vector()

    with pytest.raises(OSError, match="recvmmsg") as caught:
        vector.receive(-1, ("127.0.0.1", 9))

    assert caught.value.errno == errno.EBADF


def test_a_call_that_brings_nothing_is_an_empty_queue() -> None:
    vector = DatagramVector(memoryview(bytearray(1000)), lambda *_: 0)
    vector.aim(100)

    assert vector.receive(0, ("127.0.0.1", 9)) is None


@pytest.mark.parametrize("case", ["platform", "pointer", "library"])
def test_elsewhere_there_is_no_such_call(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "platform":
        monkeypatch.setattr("sys.platform", "darwin")
    elif case == "pointer":
        monkeypatch.setattr("struct.calcsize", lambda _: 4)
    else:

        def no_library(*_: object, **__: object) -> object:
            raise OSError("no C library")

        monkeypatch.setattr("ctypes.CDLL", no_library)

    assert find_recvmmsg() is None


# -- when it is used ---------------------------------------------------------------


def filled(num: int, num_cut: int = 0) -> Filled:
    return Filled(num, np.full(num, 100, np.uint32), True, 0, num_cut, None)


def test_many_single_datagrams_in_a_row_turn_joining_off() -> None:
    joining = Joining()

    turned = [joining.note_batch(100 + number % 2, 1000) for number in range(256)]
    assert not any(turned)

    assert joining.note_batch(99, 99)
    assert (joining.takes_many, joining.largest_bytes) == (True, 101)


def test_one_joined_batch_starts_the_count_anew() -> None:
    joining = Joining()
    for _ in range(256):
        joining.note_batch(100, 100)

    joining.note_batch(200, 100)

    assert not joining.note_batch(100, 100)
    assert not joining.takes_many


@pytest.mark.parametrize("last", [filled(1), filled(1, num_cut=1)])
def test_now_and_then_or_after_a_cut_joining_is_tried_again(last: Filled) -> None:
    joining = Joining()
    for _ in range(257):
        joining.note_batch(100, 100)
    assert not joining.note_many(filled(1 << 14 if not last.num_cut else 5))

    assert joining.note_many(last)

    assert not joining.takes_many


@needs_recvmmsg
def test_a_socket_on_a_path_that_joins_nothing_takes_many() -> None:
    vector = make_vector()
    with pair() as (near, far):
        buffer = memoryview(bytearray(65536))
        for _ in range(257):
            far.send_batch(b"x" * 100, 100, near.address)
            deadline_s = time.monotonic() + 5.0
            while near.receive_batch(buffer) is None:
                assert time.monotonic() < deadline_s
        assert near.takes_many
        for _ in range(10):
            far.send_batch(b"y" * 100, 100, near.address)
        before = near.statistics().datagrams_received
        num = 0
        while num < 10:
            assert time.monotonic() < deadline_s + 5.0
            many = near.receive_many(vector, far.address)
            num += 0 if many is None else many.num

    assert near.statistics().datagrams_received - before == 10


def test_news_of_a_lost_datagram_is_counted_and_other_errors_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pair() as (near, far):
        vector = DatagramVector(memoryview(bytearray(1000)), lambda *_: -1)
        buffer = memoryview(bytearray(65536))
        far.send_batch(b"x" * 100, 100, near.address)
        deadline_s = time.monotonic() + 5.0
        while near.receive_batch(buffer) is None:
            assert time.monotonic() < deadline_s
        monkeypatch.setattr("ctypes.get_errno", lambda: errno.ECONNREFUSED)
        assert near.receive_many(vector, far.address) is None
        assert near.statistics().receive_errors == {"ECONNREFUSED": 1}
        monkeypatch.setattr("ctypes.get_errno", lambda: errno.EBADF)
        with pytest.raises(OSError, match="recvmmsg"):
            near.receive_many(vector, far.address)
