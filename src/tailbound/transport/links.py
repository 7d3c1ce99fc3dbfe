"""Open what a link needs: the UDP socket beside a TCP connection, and its facts."""

import socket
import time

from tailbound.config import Transport, format_address, parse_address
from tailbound.errors import ConfigError, UnreachableError
from tailbound.protocol.link import Link
from tailbound.security.sealing import TRAILER_BYTES
from tailbound.transport.addresses import resolve_bind, route_mtu
from tailbound.transport.udp import UdpSocket

LARGEST_AUTO_MTU = 9000
"""``mtu="auto"`` takes no more: loopback's 64 KiB would cut a small model into so few
chunks that a loss bound means little, and larger datagrams hardly save CPU."""
SEND_QUEUE_BYTES = 1 << 19
"""What the kernel may hold of a round that leaves. A stop cannot call it back, so on a
slow link a larger queue would carry stale data for as long as it takes to empty."""
CONNECT_PATIENCE_S = 5.0
"""A refused connection is tried again for so long: the server may still start."""
CONNECT_RETRY_S = 0.05


def open_link(
    tcp: socket.socket, transport: Transport, num_links: int = 1
) -> tuple[UdpSocket, Link]:
    """Bind a UDP socket to the address that the TCP connection uses (FIELD A10).

    Args:
        tcp: the connection.
        transport: how bytes travel.
        num_links: that this process opens in all, each with a port of its own.

    Raises:
        OSError: the connection is gone already.
        ConfigError: no UDP port is free.
    """
    local, *_ = tcp.getsockname()
    peer, peer_port, *scope = tcp.getpeername()
    try:
        udp = UdpSocket(
            local,
            port_range=transport.port_range,
            send_buffer_bytes=SEND_QUEUE_BYTES,
        )
    except ConfigError as error:
        needs = f"this process needs {num_links} in all"
        raise ConfigError(f"{error}; {needs}") from error
    if isinstance(transport.mtu, int):
        mtu = transport.mtu
    else:
        mtu = min(route_mtu(peer, local), LARGEST_AUTO_MTU)
    if transport.is_sealed:
        mtu -= TRAILER_BYTES  # as the endpoint fills datagrams
    link = Link(
        peer_rank=-1,
        name=f"the connection from {format_address(peer, peer_port)}",
        address=peer,
        scope=tuple(scope),
        udp_port=udp.port,
        mtu=mtu,
        # The kernel doubles what was asked for and counts its own bookkeeping, so at
        # most half of the granted number holds data (FIELD S15).
        window_bytes=udp.granted_receive_bytes // 2,
        ip_version=6 if tcp.family == socket.AF_INET6 else 4,
    )
    return udp, link


def join_peer(
    address: str,
    transport: Transport,
    peer: str = "the server",
    num_links: int = 1,
) -> tuple[socket.socket, UdpSocket, Link]:
    """Connect to a peer and open the link to it; nothing stays open on errors.

    Args:
        address: of its control port.
        transport: how bytes travel.
        peer: its name, for messages.
        num_links: see ``open_link``.

    Raises:
        UnreachableError: nobody answers there within the timeout.
        ConfigError: the address, ``Transport.bind`` or the ports are unusable.
    """
    tcp = connect_peer(address, transport, peer)
    try:
        return (tcp, *open_link(tcp, transport, num_links))
    except OSError as error:
        tcp.close()
        remedy = f"the connection closed at once; is it {peer} of a tailbound job?"
        raise UnreachableError("TCP", peer, address, remedy) from error
    except BaseException:
        tcp.close()
        raise


def connect_peer(
    address: str, transport: Transport, peer: str = "the server"
) -> socket.socket:
    """Connect to a peer's control port.

    Raises:
        UnreachableError: nobody answers there within the timeout.
        ConfigError: the address or ``Transport.bind`` is unusable.
    """
    host, port = parse_address(address)
    local = resolve_bind(transport.bind, host)
    timeout_s = transport.timeout_s
    start_s = time.monotonic()
    while True:
        waited_s = time.monotonic() - start_s
        try:
            return socket.create_connection(
                (host, port),
                timeout=max(0.1, timeout_s - waited_s),
                source_address=(local, 0),
            )
        except TimeoutError as error:
            reason, remedy = f"no answer within {timeout_s:.0f} s", "a firewall?"
            cause: OSError = error
            break
        except OSError as error:
            cause = error
            reason, remedy = error.strerror or str(error), f"is {peer} running?"
            if waited_s > min(CONNECT_PATIENCE_S, timeout_s):
                break
            time.sleep(CONNECT_RETRY_S)
    raise UnreachableError(
        "TCP", peer, format_address(host, port), f"{reason}; {remedy}"
    ) from cause
