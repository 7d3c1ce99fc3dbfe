"""The self-test of kernel batches, against kernels that do it wrong."""

import errno
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tailbound.transport.batching import (
    Batching,
    probe_batching,
    probe_loopback,
    segment_ancillary,
    self_test,
)

pytestmark = pytest.mark.sockets


class Sender(socket.socket):
    """Sends each batch as the given kernel would."""

    def __init__(self, *behaviours: str) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_DGRAM)
        self.behaviours = list(behaviours)

    def sendmsg(  # type: ignore[override]
        self, data: Any, ancillary: Any, flags: int, address: Any
    ) -> int:
        behaviour = self.behaviours.pop(0)
        if behaviour == "refuses":
            raise OSError(errno.EINVAL, "Invalid argument")
        if behaviour == "works":
            return super().sendmsg(data, ancillary, flags, address)
        if behaviour == "ignores the option":
            return self.sendto(b"".join(data), address)
        assert behaviour == "swaps"
        for part in reversed(data):
            self.sendto(part, address)
        return 180


@pytest.fixture
def receiver() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.bind(("127.0.0.1", 0))
        opened.settimeout(0.05)
        yield opened


@pytest.mark.parametrize(
    ("behaviours", "expected"),
    [
        (["refuses"], Batching(False, False, "UDP_SEGMENT: Invalid argument")),
        (["ignores the option"], Batching(False, False, "the two test segments arriv")),
        (["swaps"], Batching(False, False, "the two test segments arrived changed")),
        (["works", "refuses"], Batching(True, False, "UDP_GRO: Invalid argument")),
        (["works", "swaps"], Batching(True, False, "the kernel does not join datag")),
    ],
)
def test_a_kernel_that_only_says_it_can_fails_the_self_test(
    receiver: socket.socket, behaviours: list[str], expected: Batching
) -> None:
    with Sender(*behaviours) as sender:
        found = self_test(sender, receiver)

    assert found[:2] == expected[:2]
    assert found.reason.startswith(expected.reason)


def test_segments_that_never_arrive_fail_the_self_test(receiver: socket.socket) -> None:
    class Swallower(socket.socket):
        def sendmsg(self, *_: Any) -> int:
            return 180

    with Swallower(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        found = self_test(sender, receiver)

    assert found == Batching(False, False, "UDP_SEGMENT: timed out")


def test_a_working_kernel_has_nothing_to_explain(receiver: socket.socket) -> None:
    with Sender("works", "works") as sender:
        found = self_test(sender, receiver)

    if not found.gso:
        pytest.skip(f"this kernel has no batches: {found.reason}")
    assert found == Batching(True, True, "")


def test_the_probe_runs_once_for_each_family() -> None:
    assert probe_batching("127.0.0.1") is probe_batching("10.0.0.5")
    assert probe_batching("::1") is probe_batching("fd00::2")


def test_no_loopback_means_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket, "socket", Bare)
    found = probe_loopback(socket.AF_INET)

    assert (found.gso, found.gro) == (False, False)
    assert found.reason.startswith("no loopback socket: ")


def test_the_send_option_is_two_bytes_long() -> None:
    assert segment_ancillary(1472) == ((17, 103, struct.pack("=H", 1472)),)
