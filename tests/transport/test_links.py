"""Opening a link: the UDP socket beside a TCP connection, and how joining fails."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jobs import leaves_nothing
from tailbound.config import Transport
from tailbound.errors import ConfigError, UnreachableError
from tailbound.transport import links
from tailbound.transport.links import connect_peer, join_peer, open_link

pytestmark = pytest.mark.sockets


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with leaves_nothing():
        yield


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        opened.listen()
        yield opened


def address_of(opened: socket.socket) -> str:
    host, port = opened.getsockname()
    return f"{host}:{port}"


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def test_a_link_binds_udp_to_the_address_of_its_connection(
    listener: socket.socket,
) -> None:
    transport = Transport(bind="127.0.0.2", mtu=1400)

    tcp, udp, link = join_peer(address_of(listener), transport)
    with tcp:
        assert udp.address[0] == "127.0.0.2"
        assert tcp.getsockname()[0] == "127.0.0.2"
        assert link.udp_port == udp.port
        assert link.address == "127.0.0.1"
        assert link.peer_rank == -1
        assert link.name == f"the connection from {address_of(listener)}"
        assert (link.mtu, link.ip_version, link.scope) == (1400, 4, ())
        # Half of what the kernel says is data.
        assert link.window_bytes == udp.granted_receive_bytes // 2
        udp.close()


def test_an_automatic_mtu_is_the_routes_but_never_above_9000(
    listener: socket.socket,
) -> None:
    """Loopback's is 65536."""
    tcp, udp, link = join_peer(address_of(listener), Transport())
    tcp.close()
    udp.close()

    assert link.mtu == 9000


def test_a_link_over_ipv6_knows_it() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with listener:
        port = listener.getsockname()[1]
        tcp, udp, link = join_peer(f"[::1]:{port}", Transport(mtu=1500))
        tcp.close()
        udp.close()

    assert (link.address, link.ip_version, link.scope) == ("::1", 6, (0, 0))


def test_a_server_that_starts_a_little_later_is_found() -> None:
    port = free_port()
    opened: list[socket.socket] = []

    def start_late() -> None:
        time.sleep(0.2)
        opened.append(socket.create_server(("127.0.0.1", port)))

    thread = threading.Thread(target=start_late)
    thread.start()
    tcp = connect_peer(f"127.0.0.1:{port}", Transport(timeout_s=20.0))
    thread.join()
    tcp.close()
    opened[0].close()

    assert tcp.fileno() == -1


def test_a_refused_connection_is_given_up_after_the_timeout() -> None:
    port = free_port()

    with pytest.raises(UnreachableError) as caught:
        connect_peer(f"127.0.0.1:{port}", Transport(timeout_s=0.1))

    assert caught.value.protocol == "TCP"
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "is the server running?" in str(caught.value)


def test_a_server_that_does_not_answer_is_given_up_after_the_timeout() -> None:
    """With its queue of connections full, the kernel leaves a new one unanswered."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        for _ in range(4):
            opened = socket.socket()
            opened.setblocking(False)
            opened.connect_ex(full.getsockname())
            waiting.append(opened)

        with pytest.raises(UnreachableError, match="no answer within 0 s; a firewall"):
            connect_peer(address_of(full), Transport(timeout_s=0.3))
        for opened in waiting:
            opened.close()


def test_a_server_that_hangs_up_while_we_join_leaves_nothing_open(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reset between connecting and asking for the peer's address."""

    def gone(tcp: socket.socket, transport: Transport, num: int) -> Any:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(links, "open_link", gone)

    with pytest.raises(UnreachableError, match="closed at once"):
        join_peer(address_of(listener), Transport())


def test_an_address_that_is_none_is_a_setting_to_fix() -> None:
    with pytest.raises(ConfigError, match="host:port"):
        join_peer("localhost", Transport())


def test_a_bind_address_that_is_not_ours_is_a_setting_to_fix(
    listener: socket.socket,
) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        join_peer(address_of(listener), Transport(bind="192.0.2.1"))


def test_without_a_free_port_nothing_stays_open(listener: socket.socket) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"UDP port {port} is in use") as caught:
            join_peer(
                address_of(listener), Transport(port_range=(port, port)), num_links=3
            )

    assert str(caught.value).endswith("; this process needs 3 in all")


def test_a_connection_that_is_reset_at_once_is_no_server(
    listener: socket.socket,
) -> None:
    tcp = connect_peer(address_of(listener), Transport())
    accepted, _ = listener.accept()
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    accepted.close()
    with pytest.raises(ConnectionResetError):
        tcp.recv(1)

    with tcp, pytest.raises(OSError, match="not connected"):
        open_link(tcp, Transport())
