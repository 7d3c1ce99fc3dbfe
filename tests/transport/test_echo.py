"""An echo server and its client over loopback, friendly and not."""

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tailbound.errors import ConfigError
from tailbound.transport.addresses import listen
from tailbound.transport.datagrams import SegmentTooLargeError
from tailbound.transport.echo import HEADER, EchoServer
from tailbound.transport.echo_client import EchoClient, EchoUnavailableError
from tailbound.transport.udp import UdpSocket

pytestmark = pytest.mark.sockets

TOKEN = bytes(range(16))
HELLO = b"tailbound-doctor 1 " + TOKEN.hex().encode() + b"\n"


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def serving(
    host: str = "127.0.0.1", clock: Callable[[], float] | None = None
) -> Iterator[EchoServer]:
    """An echo server in a thread of its own."""
    server = EchoServer(host, clock=clock or Clock())
    stop = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop.is_set,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(10.0)
        server.close()


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with serving() as started:
        yield started


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def dial(stack: ExitStack, server: EchoServer) -> socket.socket:
    return stack.enter_context(socket.create_connection(server.address, 5.0))


def ask(connection: socket.socket, line: bytes) -> bytes:
    """Say something; an answer, or nothing if the server hangs up."""
    connection.sendall(line)
    try:
        return connection.recv(100)
    except ConnectionResetError:
        return b""


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask 50 times, a tenth of a second apart."""
    for _ in range(50):
        if condition():
            return
        select.select([], [], [], 0.1)
    pytest.fail("the server did not get there within 5 s")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("batching", [None, False])
def test_datagrams_come_back(host: str, batching: bool | None) -> None:
    with (
        serving(host) as server,
        EchoClient(host, server.address[1], 5.0, batching=batching) as client,
    ):
        assert client.round_trip_s(20, 5.0) is not None
        assert client.round_trip_s(1452, 5.0) is not None
        assert client.echoes(60, 1452, 5.0) == 60
        assert client.received_by_server() == 62
        assert client.statistics().datagrams_received == 62
    assert server.statistics().echoes == 62
    assert server.statistics().clients == 1


def test_several_clients_are_served_side_by_side(server: EchoServer) -> None:
    with (
        EchoClient(*server.address, 5.0) as first,
        EchoClient(*server.address, 5.0) as second,
    ):
        assert second.echoes(3, 100, 5.0) == 3
        assert first.echoes(5, 100, 5.0) == 5
        assert (first.received_by_server(), second.received_by_server()) == (5, 3)


def test_udp_has_the_number_of_the_tcp_port(server: EchoServer) -> None:
    with EchoClient(*server.address, 5.0) as client:
        assert client.udp_address == server.address


def test_udp_moves_where_its_port_is_taken(server: EchoServer) -> None:
    taken = UdpSocket("127.0.0.1", port=server.address[1], buffer_bytes=212992)
    with EchoClient(*server.address, 5.0) as client:
        assert client.udp_address[1] != server.address[1]
        assert client.echoes(3, 100, 5.0) == 3
    taken.close()


def test_answers_leave_from_the_address_that_was_called() -> None:
    with (
        serving("0.0.0.0") as server,
        EchoClient("127.0.0.3", server.address[1], 5.0) as client,
    ):
        assert client.udp_address[0] == "127.0.0.3"
        assert client.echoes(3, 100, 5.0) == 3


def test_a_datagram_too_large_for_the_machine_does_not_leave(
    server: EchoServer,
) -> None:
    with EchoClient(*server.address, 5.0) as client:
        assert client.round_trip_s(65508, 5.0) is None
        with pytest.raises(SegmentTooLargeError):
            client.echoes(2, 65508, 5.0)
        assert client.round_trip_s(65507, 5.0) is not None


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\n",
        b"tailbound-doctor 2 " + TOKEN.hex().encode() + b"\n",
        b"tailbound-doctor 1 xyz\n",
        b"x" * 128,
        b"count\n",
        b"\xff\x00\n",
    ],
)
def test_a_wrong_first_line_ends_the_connection(
    server: EchoServer, stack: ExitStack, line: bytes
) -> None:
    assert ask(dial(stack, server), line) == b""
    assert server.statistics().refused == 1
    assert server.statistics().clients == 0


def test_a_wrong_second_line_ends_the_connection(
    server: EchoServer, stack: ExitStack
) -> None:
    connection = dial(stack, server)

    assert ask(connection, HELLO).startswith(b"ok ")
    assert ask(connection, b"recount\n") == b""


def test_a_line_may_arrive_in_pieces(server: EchoServer, stack: ExitStack) -> None:
    connection = dial(stack, server)
    connection.sendall(HELLO[:7])
    other = HELLO.replace(b"0", b"f")

    assert ask(dial(stack, server), other).startswith(b"ok ")
    assert ask(connection, HELLO[7:]).startswith(b"ok ")


def test_a_token_belongs_to_one_connection(
    server: EchoServer, stack: ExitStack
) -> None:
    assert ask(dial(stack, server), HELLO).startswith(b"ok ")
    assert ask(dial(stack, server), HELLO) == b""


def test_only_valid_datagrams_of_the_same_host_are_answered(
    server: EchoServer, stack: ExitStack
) -> None:
    port = int(ask(dial(stack, server), HELLO).split()[1])
    valid = HEADER.pack(TOKEN, 7) + b"padding"
    senders = [
        stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        for _ in range(2)
    ]
    senders[1].bind(("127.0.0.2", 0))

    senders[0].sendto(os.urandom(40), ("127.0.0.1", port))
    senders[0].sendto(valid[:19], ("127.0.0.1", port))
    senders[1].sendto(valid, ("127.0.0.1", port))
    senders[0].sendto(valid, ("127.0.0.1", port))

    senders[0].settimeout(5.0)
    assert senders[0].recv(100) == valid
    assert server.statistics().ignored == 3
    wait_until(lambda: server.statistics().echoes == 1)


def test_one_client_too_many_is_turned_away(
    server: EchoServer, stack: ExitStack
) -> None:
    crowd = [dial(stack, server) for _ in range(33)]

    assert crowd[32].recv(1) == b""
    assert ask(crowd[31], HELLO).startswith(b"ok ")
    assert server.statistics().refused == 1


def test_a_silent_client_is_let_go_after_a_minute(stack: ExitStack) -> None:
    clock = Clock()
    with serving(clock=clock) as server:
        connection = dial(stack, server)
        assert ask(connection, HELLO).startswith(b"ok ")
        clock.now_s = 60.0
        assert ask(connection, b"count\n") == b"0\n"
        clock.now_s = 120.5
        assert connection.recv(1) == b""
        assert server.statistics().refused == 1


def test_a_client_that_goes_away_is_forgotten(
    server: EchoServer, stack: ExitStack
) -> None:
    for _ in range(40):
        connection = dial(stack, server)
        assert ask(connection, HELLO).startswith(b"ok ")
        connection.close()

    assert server.statistics().clients == 40
    assert server.statistics().refused == 0


def test_a_client_that_resets_is_forgotten(
    server: EchoServer, stack: ExitStack
) -> None:
    connection = dial(stack, server)
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()

    assert ask(dial(stack, server), HELLO).startswith(b"ok ")


def test_closing_a_server_ends_its_connections(stack: ExitStack) -> None:
    with serving() as server:
        connection = dial(stack, server)
        assert ask(connection, HELLO).startswith(b"ok ")

    assert connection.recv(1) == b""


def test_a_port_in_use_is_an_error(server: EchoServer) -> None:
    with pytest.raises(ConfigError, match="is in use on"):
        EchoServer(*server.address)


def answering(answers: list[bytes]) -> tuple[str, int]:
    """A TCP server that says these things to its one client, then hangs up."""
    listener = listen("127.0.0.1")
    listener.settimeout(5.0)

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            for answer in answers:
                connection.recv(100)
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    host, port = listener.getsockname()
    return host, port


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([b"SSH-2.0-OpenSSH\n"], "'SSH-2.0-OpenSSH'"),
        ([b"ok 0\n"], "'ok 0'"),
        ([b"ok 65536\n"], "'ok 65536'"),
        ([b"ok many\n"], "'ok many'"),
        ([b"x" * 500], "'" + "x" * 127 + "'"),
        ([b""], "the connection is closed"),
        ([], "the connection is closed"),
    ],
)
def test_something_else_at_that_port_is_told_apart(
    answers: list[bytes], reason: str
) -> None:
    with pytest.raises(EchoUnavailableError) as caught:
        EchoClient(*answering(answers), 5.0)

    assert caught.value.kind == "foreign"
    # Hanging up with unread bytes in the queue shows as a reset.
    assert caught.value.reason in (reason, "Connection reset by peer")


def test_a_server_that_turns_strange_is_told_apart() -> None:
    address = answering([b"ok 9\n", b"lots\n"])
    with EchoClient(*address, 5.0) as client:
        with pytest.raises(EchoUnavailableError, match="'lots'"):
            client.received_by_server()
        with pytest.raises(EchoUnavailableError):
            client.received_by_server()


def test_a_server_that_says_nothing_is_told_apart() -> None:
    with (
        listen("127.0.0.1") as listener,
        pytest.raises(EchoUnavailableError) as caught,
    ):
        EchoClient("127.0.0.1", listener.getsockname()[1], 0.05)

    assert caught.value.kind == "foreign"
    assert caught.value.reason == "it connects and then says nothing"


def test_nothing_at_that_port_is_told_apart() -> None:
    with listen("127.0.0.1") as listener:
        host, port = listener.getsockname()

    with pytest.raises(EchoUnavailableError) as caught:
        EchoClient(host, port, 5.0)

    assert caught.value.kind == "refused"
    assert str(caught.value) == (
        f"no tailbound doctor at 127.0.0.1 port {port} over TCP: "
        "the connection is refused"
    )


def test_a_firewall_that_swallows_tcp_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swallow(*_: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", swallow)

    with pytest.raises(EchoUnavailableError) as caught:
        EchoClient("127.0.0.1", 9, 2.0)

    assert (caught.value.kind, caught.value.reason) == (
        "silent",
        "no answer within 2 s",
    )


def test_echoes_of_others_and_of_other_sizes_do_not_count(stack: ExitStack) -> None:
    """A stranger, a wrong token and a cut datagram, then nothing."""
    far = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    far.bind(("127.0.0.1", 0))
    far.settimeout(5.0)
    stranger = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    address = answering([b"ok %d\n" % far.getsockname()[1], b""])
    with EchoClient(*address, 5.0) as client:

        def answer() -> None:
            datagram, near = far.recvfrom(100)
            stranger.sendto(datagram, near)
            far.sendto(bytes(16) + datagram[16:], near)
            far.sendto(datagram[:-1], near)

        thread = threading.Thread(target=answer)
        thread.start()
        assert client.round_trip_s(30, 0.2) is None
        thread.join(5.0)


def test_a_full_device_is_tried_again_and_many_waits_are_bounded(
    stack: ExitStack,
) -> None:
    silent = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    silent.bind(("127.0.0.1", 0))
    address = answering([b"ok %d\n" % silent.getsockname()[1], b""])
    with EchoClient(*address, 5.0) as client:
        assert client.echoes(200, 8972, 0.001) == 0
        assert client.statistics().datagrams_sent == 200
