"""What is asked, what is given, and how the difference is said."""

import logging
import socket

import pytest

from tailbound.transport.buffers import (
    grant_buffers,
    is_enough,
    raise_command,
    warn_if_small,
)


class Unprivileged(socket.socket):
    """A socket of a process that may not exceed the limit, here 212992 bytes."""

    def setsockopt(self, level: int, option: int, value: int) -> None:  # type: ignore[override]
        if option in (32, 33):
            raise PermissionError
        super().setsockopt(level, option, min(value, 212992))


@pytest.mark.sockets
def test_an_unprivileged_process_gets_what_the_limit_allows() -> None:
    with Unprivileged(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        receive, send = grant_buffers(opened, 8 << 20)

    assert (receive, send) == (425984, 425984)


def test_half_of_a_grant_is_data() -> None:
    assert is_enough(16777216, 8388608)
    assert not is_enough(16777214, 8388608)


def test_the_command_names_limit_and_bytes() -> None:
    assert raise_command("rmem", 8388608) == "sysctl -w net.core.rmem_max=8388608"


def test_a_small_queue_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tailbound"):
        for _ in range(2):
            warn_if_small("wmem", 425984, 8388613)
        warn_if_small("wmem", 16777226, 8388613)

    assert [record.getMessage() for record in caplog.records] == [
        "UDP send queue: asked for 8388613 bytes, the kernel gives 425984 (half of it "
        "data); bursts may overflow it. To raise it: "
        "sysctl -w net.core.wmem_max=8388613"
    ]
