"""Which local address and port to use, and a clear word when one cannot be had.

A host's own name is never asked: many resolve to loopback, and peers would then dial
themselves (FIELD S19). The kernel knows the address on the route to a peer.
"""

import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tailbound.errors import ConfigError, UnreachableError
from tailbound.transport.forks import close_in_forked_children

Address = tuple[Any, ...]
"""(host, port) over IPv4, (host, port, flow, scope) over IPv6, as socket has them."""

# Linux's numbers; the socket module of Python 3.11 has no names for these.
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_DO = 10, 23, 2
_IP_MTU, _IPV6_MTU, _SIOCGIFADDR = 14, 24, 0x8915
# Any port does: a connected UDP socket sends nothing until it is told to.
_DISCARD_PORT = 9
_ETHERNET_MTU = 1500


def route_address(host: str) -> str:
    """The local address on the route to a host; nothing is sent.

    Args:
        host: name or address of the peer.

    Returns:
        The address; a link-local one keeps its scope (``fe80::1%eth0``).

    Raises:
        ConfigError: the name does not resolve.
        UnreachableError: there is no route.
    """
    family, target = _resolve(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise UnreachableError(
                "UDP",
                host,
                str(target[0]),
                f"there is no route ({error.strerror}): see `ip route get {target[0]}`",
            ) from error
        return host_of(probe.getsockname())


def route_mtu(host: str, local: str) -> int:
    """Bytes of the largest IP packet on the route from a local address to a host.

    Args:
        host: name or address of the peer.
        local: address of this machine that the packets leave from.

    Returns:
        What the kernel knows of the route, 1500 where it cannot tell.

    Raises:
        ConfigError: the name does not resolve.
    """
    family, target = _resolve(host)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(_resolve(local, port=0)[1])
            probe.connect(target)
            if family == socket.AF_INET6:
                return probe.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
            return probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError:
        return _ETHERNET_MTU


def is_loopback(host: str) -> bool:
    """True if a name or address leads to the machine that asks, whichever it is.

    Raises:
        ConfigError: the name does not resolve.
    """
    parsed = _parse(str(_resolve(host)[1][0]))
    return parsed is not None and parsed.is_loopback


def resolve_bind(
    bind: str | None, peer_host: str, *, is_loopback_fine: bool | None = None
) -> str:
    """Turn the user's ``bind`` into one address of this machine.

    Args:
        bind: an address, an interface's name, or None for the address on the route.
        peer_host: name or address of a peer that must be able to answer.
        is_loopback_fine: False if ranks run on several hosts. None: fine if the peer
            is on loopback itself.

    Raises:
        ConfigError: ``bind`` is no address or interface of this machine, or one that
            the peer cannot answer to; or the peer's name does not resolve.
        UnreachableError: there is no route to the peer.
    """
    family, target = _resolve(peer_host)
    if bind is None:
        address = route_address(peer_host)
    elif _parse(bind) is not None:
        address = pick_address([bind])
        open_bound(address, socket.SOCK_DGRAM, range(1)).close()
    else:
        address = _interface_address(bind, family)
    parsed = _parse(address)
    if parsed is None or (parsed.version == 6) != (family == socket.AF_INET6):
        raise ConfigError(
            f"bind {address} and the peer {target[0]} are not of one IP version; "
            "give a bind address of the peer's version"
        )
    if is_loopback_fine is None:
        is_loopback_fine = is_loopback(str(target[0]))
    if parsed.is_loopback and not is_loopback_fine:
        raise ConfigError(
            f"{address} is loopback, which peers on other hosts cannot answer to; set "
            f"bind to an address on the way to {peer_host} ({_describe_interfaces()})"
        )
    return address


def pick_address(candidates: Iterable[str]) -> str:
    """The first address that peers can use as it is written.

    A link-local IPv6 address means something on one link only, so it comes last, and
    only with its scope (FIELD A09).

    Raises:
        ConfigError: nothing usable is among them.
    """
    found = tuple(candidates)
    parsed = [(text, ipaddress.ip_address(text)) for text in found]
    for text, address in parsed:
        if not (address.version == 6 and address.is_link_local):
            return text
    for text, address in parsed:
        if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
            return text
    raise ConfigError(
        f"no usable address among {', '.join(found) or 'none'}: a link-local IPv6 "
        "address needs its interface, as in fe80::1%eth0"
    )


def listen(
    host: str, port: int = 0, port_range: tuple[int, int] | None = None
) -> socket.socket:
    """Open a TCP listener, non-blocking, closed in forked children.

    Keep it: a port that is looked up, closed and opened again later may be taken by
    then (FIELD S17). A port that only waits out an old connection is taken over, one
    that another program listens on is not.

    Args:
        host: local address, IPv4 or IPv6.
        port: 0 lets the kernel choose.
        port_range: first and last port to try instead, in order.

    Raises:
        ConfigError: the address is not ours, or no port is free; says who to ask.
    """
    listener = open_bound(host, socket.SOCK_STREAM, port_choices(port, port_range))
    close_in_forked_children(listener)
    return listener


def port_choices(port: int, port_range: tuple[int, int] | None) -> range:
    """The ports to try, in order; a range wins over a single port."""
    first, last = port_range or (port, port)
    return range(first, last + 1)


def open_bound(host: str, kind: socket.SocketKind, ports: range) -> socket.socket:
    """Open a non-blocking socket on the first free port; a TCP one listens.

    A UDP one never lets IP cut a datagram into fragments.

    Raises:
        ConfigError: the address is not ours, or no port is free.
    """
    family, target = _resolve(host, port=0)
    for port in ports:
        opened = _maybe_open(family, kind, host, (target[0], port, *target[2:]))
        if opened is not None:
            return opened
    protocol, flag = (
        ("TCP", "-ltnp") if kind == socket.SOCK_STREAM else ("UDP", "-uanp")
    )
    named = f"port {ports[0]} is" if len(ports) == 1 else _all_of(ports)
    raise ConfigError(
        f"{protocol} {named} in use on {host}: stop the program there "
        f"(`ss {flag}` names it) or choose other ports"
    )


def host_of(address: Address) -> str:
    """The host of a socket's address; an IPv6 link-local one keeps its interface."""
    host = str(address[0])
    if len(address) == 4 and address[3] and "%" not in host:
        return f"{host}%{socket.if_indextoname(address[3])}"
    return host


def _forbid_fragments(opened: socket.socket) -> None:
    """Have a UDP socket refuse what exceeds the MTU rather than cut it up.

    One lost fragment would lose the whole datagram (FIELD A13).
    """
    if opened.family == socket.AF_INET6:
        opened.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_DO)
    else:
        opened.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_DO)


def _all_of(ports: range) -> str:
    return f"ports {ports[0]} to {ports[-1]} are all"


def _maybe_open(
    family: socket.AddressFamily, kind: socket.SocketKind, host: str, address: Address
) -> socket.socket | None:
    """Open and bind a socket; None if the port is in use."""
    is_tcp = kind == socket.SOCK_STREAM
    try:
        opened = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"cannot bind {host}: {error.strerror}") from error
    try:
        opened.setblocking(False)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # A restarted server shall have its port back at once, for which both its old
        # and its new socket need this option. Set before binding to port 0 it may end
        # in a port that cannot be listened on; with UDP two sockets would share one.
        if is_tcp and address[1]:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        if is_tcp:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.listen(128)
        else:
            _forbid_fragments(opened)
    except OSError as error:
        opened.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise ConfigError(_explain_bind(error, host, address[1])) from error
    return opened


def _explain_bind(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine ({_describe_interfaces()})"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} needs privileges; choose one above 1023"
    return f"cannot bind {host} port {port}: {error.strerror}"


def _resolve(
    host: str, port: int = _DISCARD_PORT
) -> tuple[socket.AddressFamily, Address]:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_DGRAM
        )[0]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{host!r} does not resolve to an address ({error.args[-1]}); "
            "check the name or give an address"
        ) from error
    return family, address


def _parse(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _interface_address(name: str, family: socket.AddressFamily) -> str:
    """An address of the named interface, of the wanted family.

    Raises:
        ConfigError: there is no such interface, or it has no such address.
    """
    names = [known for _, known in socket.if_nameindex()]
    if name not in names:
        hint = (
            "a list or pattern is not understood, name one"
            if any(mark in name for mark in "^,=*! ")
            else "no such interface or address"
        )
        raise ConfigError(
            f"bind is one interface or one address, not {name!r}: {hint} "
            f"({_describe_interfaces()})"
        )
    addresses = _addresses_of(name, family)
    if not addresses:
        version = "IPv6" if family == socket.AF_INET6 else "IPv4"
        raise ConfigError(
            f"interface {name} has no {version} address ({_describe_interfaces()})"
        )
    return pick_address(addresses)


def _addresses_of(name: str, family: socket.AddressFamily) -> list[str]:
    if family == socket.AF_INET6:
        return _ipv6_addresses_of(name)
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6_addresses_of(name: str) -> list[str]:
    """Read /proc/net/if_inet6: address, index, prefix, scope, flags, name."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        digits, *_, known = line.split()
        if known == name:
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            found.append(f"{address}%{name}" if address.is_link_local else str(address))
    return found


def _describe_interfaces() -> str:
    """What this machine has: ``lo 127.0.0.1, eth0 10.0.0.5``."""
    described = []
    for _, name in socket.if_nameindex():
        addresses = _addresses_of(name, socket.AF_INET) or _ipv6_addresses_of(name)
        described.append(f"{name} {addresses[0]}" if addresses else name)
    return "this machine has " + ", ".join(described)
