"""Which address and port is chosen, and how a refusal reads."""

import errno
import os
import socket
from pathlib import Path

import pytest

from tailbound.errors import ConfigError, UnreachableError
from tailbound.transport.addresses import (
    host_of,
    listen,
    open_bound,
    pick_address,
    port_choices,
    resolve_bind,
    route_address,
    route_mtu,
)

pytestmark = pytest.mark.sockets


class RoutedSocket(socket.socket):
    """A socket on a machine whose route to everywhere has one local address."""

    local = ("10.7.0.3", 40000)

    def connect(self, address: object) -> None:
        del address

    def getsockname(self) -> tuple[str, int]:
        return self.local


class RoutelessSocket(socket.socket):
    """A socket on a machine without a route."""

    def connect(self, address: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")


class IPv6lessSocket(socket.socket):
    """A socket on a machine where IPv6 is off."""

    def __init__(self, family: int, kind: int) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.1"), ("::1", "::1")],
)
def test_the_address_on_the_route_is_chosen(host: str, local: str) -> None:
    assert route_address(host) == local


def test_S19_the_route_decides_and_not_the_hosts_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.setattr(socket, "socket", RoutedSocket)

    assert resolve_bind(None, "192.0.2.10") == "10.7.0.3"


def test_no_route_is_an_error_that_names_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "socket", RoutelessSocket)

    with pytest.raises(UnreachableError) as caught:
        route_address("192.0.2.10")

    assert str(caught.value) == (
        "UDP to 192.0.2.10 at 192.0.2.10 does not get through; there is no route "
        "(Network is unreachable): see `ip route get 192.0.2.10`"
    )
    assert route_mtu("192.0.2.10", "127.0.0.1") == 1500


@pytest.mark.parametrize("host", ["no-such-host.invalid", "", "a\0b", "x" * 300])
def test_a_name_that_does_not_resolve_is_an_error(host: str) -> None:
    with pytest.raises(ConfigError, match="does not resolve to an address"):
        route_address(host)
    with pytest.raises(ConfigError, match="does not resolve to an address"):
        listen(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_mtu_of_the_route_is_the_interfaces(host: str) -> None:
    # A datagram of IPv4 has 65535 bytes at most, whatever the interface says.
    assert route_mtu(host, host) in (65535, 65536)


def test_an_mtu_that_cannot_be_told_is_ethernets() -> None:
    assert route_mtu("127.0.0.1", "203.0.113.1") == 1500


@pytest.mark.parametrize("bind", ["lo", "127.0.0.2", None])
def test_loopback_is_fine_where_the_peer_is_on_it(bind: str | None) -> None:
    expected = {"lo": "127.0.0.1", "127.0.0.2": "127.0.0.2", None: "127.0.0.1"}

    assert resolve_bind(bind, "127.0.0.1") == expected[bind]


def test_an_interface_gives_the_address_of_the_peers_version() -> None:
    assert resolve_bind("lo", "::1") == "::1"


@pytest.mark.parametrize("bind", ["lo", "127.0.0.1"])
def test_S19_loopback_is_refused_when_the_peer_is_elsewhere(bind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_bind(bind, "192.0.2.10")

    assert str(caught.value).startswith(
        "127.0.0.1 is loopback, which peers on other hosts cannot answer to; set bind "
        "to an address on the way to 192.0.2.10 (this machine has lo 127.0.0.1"
    )


def test_S19_loopback_is_refused_when_ranks_are_on_several_hosts() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 is loopback"):
        resolve_bind(None, "127.0.0.1", is_loopback_fine=False)


@pytest.mark.parametrize(
    ("bind", "words"),
    [
        ("^lo,docker", "not '^lo,docker': a list or pattern is not understood"),
        ("lo,eth0", "not 'lo,eth0': a list or pattern is not understood"),
        ("10.0.0.5", "10.0.0.5 is not an address of this machine"),
        ("nope0", "not 'nope0': no such interface or address"),
        ("fe80::1", "a link-local IPv6 address needs its interface"),
    ],
)
def test_S19_what_is_no_address_here_is_explained(bind: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_bind(bind, "192.0.2.10")

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    if bind != "fe80::1":
        assert "this machine has lo 127.0.0.1" in str(caught.value)


def test_an_address_of_the_other_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="are not of one IP version"):
        resolve_bind("::1", "127.0.0.1")


def test_an_interface_without_an_address_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (9, "bare0")])

    for peer, version in (("127.0.0.1", "IPv4"), ("::1", "IPv6")):
        with pytest.raises(ConfigError) as caught:
            resolve_bind("bare0", peer)
        assert str(caught.value) == (
            f"interface bare0 has no {version} address "
            "(this machine has lo 127.0.0.1, bare0)"
        )


@pytest.mark.parametrize(
    ("candidates", "picked"),
    [
        (["fe80::1%eth0", "10.1.0.2"], "10.1.0.2"),
        (["fe80::1%eth0", "fd00::2"], "fd00::2"),
        (["fe80::1", "fe80::1%eth0"], "fe80::1%eth0"),
    ],
)
def test_A09_a_link_local_address_comes_last_and_keeps_its_scope(
    candidates: list[str], picked: str
) -> None:
    assert pick_address(candidates) == picked


@pytest.mark.parametrize("candidates", [["fe80::1"], []])
def test_A09_a_link_local_address_without_scope_is_refused(
    candidates: list[str],
) -> None:
    with pytest.raises(ConfigError, match="no usable address among"):
        pick_address(candidates)


def test_A09_a_sockets_link_local_address_gets_its_interface_back() -> None:
    index = socket.if_nametoindex("lo")

    assert host_of(("fe80::1", 80, 0, index)) == "fe80::1%lo"
    assert host_of(("fe80::1%lo", 80, 0, index)) == "fe80::1%lo"
    assert host_of(("fd00::2", 80, 0, 0)) == "fd00::2"
    assert host_of(("10.0.0.5", 80)) == "10.0.0.5"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_listener_accepts_and_does_not_block(host: str) -> None:
    with listen(host) as listener:
        with pytest.raises(BlockingIOError):
            listener.accept()
        with socket.create_connection(listener.getsockname()[:2], 5.0):
            pass
        assert not os.get_inheritable(listener.fileno())


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]

        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port)

    assert str(caught.value) == (
        f"TCP port {port} is in use on 127.0.0.1: stop the program there "
        "(`ss -ltnp` names it) or choose other ports"
    )


def test_a_restarted_server_has_its_port_back_at_once() -> None:
    """The side that closes first leaves the port waiting for a minute."""
    with listen("127.0.0.1") as listener:
        address = listener.getsockname()
        with socket.create_connection(address, 5.0) as client:
            listener.setblocking(True)
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv(1) == b""

    with listen("127.0.0.1", address[1]) as again:
        assert again.getsockname() == address


def test_S17_all_sockets_lie_in_the_range_until_it_is_full() -> None:
    with listen("127.0.0.1", port_range=(20000, 65535)) as first:
        port = first.getsockname()[1]
        full = (port, port)

        with pytest.raises(ConfigError, match=f"TCP port {port} is in use"):
            listen("127.0.0.1", port_range=full)
        with listen("127.0.0.1", port_range=(port, 65535)) as second:
            assert port < second.getsockname()[1] <= 65535


def test_a_full_range_is_named() -> None:
    with (
        open_bound("127.0.0.1", socket.SOCK_DGRAM, range(20000, 65000)) as first,
        open_bound(
            "127.0.0.1",
            socket.SOCK_DGRAM,
            range(first.getsockname()[1] + 1, first.getsockname()[1] + 2),
        ) as second,
    ):
        low, high = first.getsockname()[1], second.getsockname()[1]

        with pytest.raises(ConfigError, match=f"UDP ports {low} to {high} are all in"):
            open_bound("127.0.0.1", socket.SOCK_DGRAM, range(low, high + 1))


def test_a_range_wins_over_a_port() -> None:
    assert list(port_choices(7, None)) == [7]
    assert list(port_choices(0, (5, 7))) == [5, 6, 7]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "port 80 on 127.0.0.1 needs privileges; choose one above 1023"),
        (errno.EINVAL, "cannot bind 127.0.0.1 port 80: Invalid argument"),
    ],
)
def test_a_bind_that_the_kernel_refuses_is_explained(
    monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    class Refused(socket.socket):
        def bind(self, address: object) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Refused)

    with pytest.raises(ConfigError) as caught:
        listen("127.0.0.1", 80)

    assert str(caught.value) == words


def test_a_machine_without_ipv6_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", IPv6lessSocket)

    with pytest.raises(ConfigError) as caught:
        listen("::1")

    assert str(caught.value) == (
        "cannot bind ::1: Address family not supported by protocol"
    )


def test_a_machine_without_ipv6_has_no_list_of_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)

    with pytest.raises(ConfigError, match="interface lo has no IPv6 address"):
        resolve_bind("lo", "::1")
