"""Children of this process hold none of its sockets."""

import os
import socket
from collections.abc import Callable

import pytest

from tailbound.transport.addresses import listen
from tailbound.transport.forks import close_in_forked_children
from tailbound.transport.udp import UdpSocket

pytestmark = pytest.mark.sockets


def answer_of_child(question: Callable[[], bool]) -> bool:
    """Fork, ask there, and bring the answer back."""
    child = os.fork()
    if child == 0:
        os._exit(int(question()))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_A08_a_forked_child_has_no_udp_socket_and_no_listener() -> None:
    udp = UdpSocket("127.0.0.1", buffer_bytes=212992)
    listener = listen("127.0.0.1")

    assert answer_of_child(lambda: udp.fileno() == listener.fileno() == -1)

    assert udp.fileno() >= 0
    assert listener.fileno() >= 0
    udp.close()
    listener.close()


def test_A08_the_port_is_free_while_a_child_lives() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)
    os.read(ready[0], 1)

    listener.close()
    listen("127.0.0.1", port).close()

    os.write(go_on[1], b"x")
    os.waitpid(child, 0)
    for end in (*ready, *go_on):
        os.close(end)


def test_a_closed_or_forgotten_resource_does_no_harm() -> None:
    left, right = socket.socketpair()
    close_in_forked_children(left)
    close_in_forked_children(right)
    left.close()

    assert answer_of_child(lambda: right.fileno() == -1)

    right.close()
