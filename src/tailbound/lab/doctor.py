"""`tailbound doctor`: what this machine and the path to another one can carry.

Each check is one line: ok, slow (works, costs time) or broken (training would fail),
with what to do. Local checks need nobody; those towards a host need
``tailbound doctor --listen`` there.
"""

import socket
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailbound.config import format_address
from tailbound.errors import ConfigError, UnreachableError
from tailbound.transport.addresses import open_bound, route_address, route_mtu
from tailbound.transport.batching import probe_batching
from tailbound.transport.buffers import grant_buffers, is_enough, raise_command
from tailbound.transport.echo import HEADER, QUEUE_BYTES, EchoServer
from tailbound.transport.echo_client import EchoClient, EchoUnavailableError
from tailbound.transport.udp import UdpSocket

DEFAULT_PORT = 29499
"""Beside torchrun's 29500, so that one firewall rule covers both."""

Status = Literal["ok", "slow", "broken"]

_WANTED_QUEUE_BYTES = 8 << 20
_SEGMENT_BYTES = 1472
_PUMP_S = 0.12
# Transport(mtu="auto") goes no higher; then common MTUs, for a path that hides its own.
_LARGEST_MTU = 9000
_COMMON_MTUS = (1500, 1480, 1450, 1420, 1400, 1280)
_LOSS_DATAGRAMS = 200
# With a loss bound of 0.8 % and bursts of 70 % loss a round takes 14 round trips
# (spec, worked values): from here on they cost more than a quarter second.
_SLOW_ROUND_TRIP_S = 0.020
_SLOW_LOSS_SHARE = 0.01
_COLOURS = {"ok": "green", "slow": "yellow", "broken": "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's answer."""

    name: str
    status: Status
    """``slow``: it works and costs time. ``broken``: training would fail."""
    detail: str
    """What was found, with units."""
    remedy: str = ""
    """The command or setting that helps; empty if nothing needs to be done."""


def diagnose(host: str | None, port: int, timeout_s: float) -> list[Check]:
    """Check this machine and, given a host, the way there and back.

    Args:
        host: where ``tailbound doctor --listen`` runs; None checks this machine only.
        port: TCP port of that listener.
        timeout_s: longest wait for one answer from the host, > 0.

    Returns:
        The checks in order. The way to the host ends with its first broken check.

    Raises:
        ConfigError: the timeout is not positive, or the port not in 1 to 65535.
    """
    if not timeout_s > 0.0:
        raise ConfigError(f"timeout is a positive number of seconds, not {timeout_s}")
    if not 1 <= port <= 65535:
        raise ConfigError(f"port is 1 to 65535, not {port}")
    checks = [*_check_batching(), *_check_queues(), _check_loopback()]
    if host is not None:
        checks += _check_host(host, port, timeout_s)
    return checks


def listen(
    host: str = "0.0.0.0",
    port: int = DEFAULT_PORT,
    *,
    say: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Be the far end of other machines' ``tailbound doctor`` until Ctrl-C.

    Args:
        host: local address to listen at.
        port: TCP port, and the UDP port where it is free; 0 lets the kernel choose.
        say: told one line at the start and one at the end; None prints them.
        should_stop: asked ten times a second.

    Raises:
        ConfigError: the address is not ours, or the port is in use.
    """
    say = say or Console(highlight=False).print
    server = EchoServer(host, port)
    try:
        say(
            f"listening at {format_address(*server.address)} over TCP and UDP; run "
            f"`tailbound doctor THIS_HOST --port {server.address[1]}` elsewhere, "
            "end with Ctrl-C"
        )
        server.serve(should_stop)
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    served = server.statistics()
    say(f"served {served.clients} clients, sent back {served.echoes} datagrams")


def exit_code(checks: Iterable[Check]) -> int:
    """1 if anything is broken, else 0."""
    return int(_worst(checks) == "broken")


def to_json(checks: Iterable[Check]) -> str:
    """One JSON object: the worst ``status``, and ``checks`` with all their fields."""
    found = list(checks)
    return msgspec.json.encode({"status": _worst(found), "checks": found}).decode()


def render(checks: Iterable[Check]) -> Table:
    """A table for the terminal."""
    table = Table(show_edge=False, pad_edge=False)
    for name in ("check", "status", "found and what to do"):
        table.add_column(name)
    for check in checks:
        found = Text(check.detail)
        if check.remedy:
            found.append(f"\n-> {check.remedy}", style="bold")
        status = Text(check.status, style=_COLOURS[check.status])
        table.add_row(check.name, status, found)
    return table


def _worst(checks: Iterable[Check]) -> Status:
    statuses = {check.status for check in checks}
    if "broken" in statuses:
        return "broken"
    return "slow" if "slow" in statuses else "ok"


def _check_batching() -> list[Check]:
    gso, gro, reason = probe_batching()
    remedy = "Linux 5.0 or later outside an emulated kernel (gVisor) has it"
    return [
        Check(name, "ok", f"{option} passes its self-test")
        if works
        else Check(name, "slow", f"one datagram a call ({reason})", remedy)
        for name, option, works in (
            ("batched send", "UDP_SEGMENT", gso),
            ("batched receive", "UDP_GRO", gro),
        )
    ]


def _check_queues() -> list[Check]:
    # Not by a UdpSocket, which would log what the table says better.
    with open_bound("127.0.0.1", socket.SOCK_DGRAM, range(1)) as probe:
        receive, send = grant_buffers(probe, _WANTED_QUEUE_BYTES)
    return [
        judge_queue("receive queue", "rmem", receive),
        judge_queue("send queue", "wmem", send),
    ]


def judge_queue(
    name: str, limit: str, granted: int, wanted: int = _WANTED_QUEUE_BYTES
) -> Check:
    """Compare a grant, in bytes, with what training asks for.

    Args:
        name: of the check.
        limit: ``rmem`` or ``wmem``, as in the kernel's setting.
        granted: what the kernel says; half of it is data.
        wanted: data it should hold.
    """
    detail = f"{granted // 2} bytes of {wanted} wanted"
    if is_enough(granted, wanted):
        return Check(name, "ok", detail)
    return Check(name, "slow", detail, raise_command(limit, wanted))


def _check_loopback() -> Check:
    gso, gro, _ = probe_batching()
    plain = _pump_bytes_per_s(batching=False)
    batched = _pump_bytes_per_s(batching=True) if gso and gro else None
    return judge_loopback(plain, batched)


def judge_loopback(plain: float, batched: float | None) -> Check:
    """Compare the rates, in bytes per second, of both ends in one process.

    Args:
        plain: one datagram a call.
        batched: 44 datagrams a call; None if the kernel cannot.
    """
    if not plain:
        return Check(
            "loopback",
            "broken",
            "UDP from 127.0.0.1 to itself does not get through",
            "iptables -I INPUT -i lo -j ACCEPT",
        )
    if batched is None:
        return Check("loopback", "slow", f"{plain / 1e9:.2f} GB/s, not batched")
    detail = (
        f"{batched / 1e9:.2f} GB/s batched, {plain / 1e9:.2f} GB/s plain "
        f"({batched / plain:.1f} times), one process at both ends"
    )
    if batched < plain:
        return Check("loopback", "slow", detail, "run it again on an idle machine")
    return Check("loopback", "ok", detail)


def _pump_bytes_per_s(*, batching: bool) -> float:
    """Send and receive in turn for a tenth of a second."""
    batch, buffer = bytes(44 * _SEGMENT_BYTES), memoryview(bytearray(65535))
    moved = 0
    with ExitStack() as stack:
        near, far = (
            stack.enter_context(
                closing(
                    UdpSocket("127.0.0.1", buffer_bytes=QUEUE_BYTES, batching=batching)
                )
            )
            for _ in range(2)
        )
        start_s = time.perf_counter()
        while (elapsed_s := time.perf_counter() - start_s) < _PUMP_S:
            near.send_batch(batch, _SEGMENT_BYTES, far.address)
            while (received := far.receive_batch(buffer)) is not None:
                moved += received.num_bytes
    return moved / elapsed_s


def _check_host(host: str, port: int, timeout_s: float) -> list[Check]:
    try:
        local = route_address(host)
    except (ConfigError, UnreachableError) as error:
        return [Check("route", "broken", str(error))]
    mtu = route_mtu(host, local)
    route = Check("route", "ok", f"from {local}, MTU {mtu} bytes")
    try:
        client = EchoClient(host, port, timeout_s)
    except EchoUnavailableError as error:
        return [route, _explain_tcp(error)]
    with client:
        tcp = Check("TCP", "ok", f"{format_address(host, port)} answers")
        try:
            return [route, tcp, *_check_udp(client, host, mtu, timeout_s)]
        except EchoUnavailableError as error:
            return [route, _explain_tcp(error)]


def _explain_tcp(error: EchoUnavailableError) -> Check:
    host, port = error.host, error.port
    remedies = {
        "refused": f"on {host} run: tailbound doctor --listen --port {port}",
        "silent": f"open TCP port {port} towards {host} in the firewalls",
        "foreign": "something else has that port, or the listener ended: give "
        "`tailbound doctor --listen` another --port",
    }
    return Check("TCP", "broken", str(error), remedies[error.kind])


def _check_udp(
    client: EchoClient, host: str, mtu: int, timeout_s: float
) -> list[Check]:
    place = f"UDP to {host} port {client.udp_address[1]}"
    if not _comes_back(client, HEADER.size, timeout_s):
        return [_explain_blocked(client, place)]
    round_trip_s = _round_trip_s(client, timeout_s)
    checks = [
        Check("UDP", "ok", f"{place} comes back"),
        judge_round_trip(round_trip_s),
    ]
    header_bytes = 48 if len(client.udp_address) == 4 else 28
    largest = min(mtu, _LARGEST_MTU)
    for packet_bytes in (largest, *(size for size in _COMMON_MTUS if size < largest)):
        payload_bytes = packet_bytes - header_bytes
        if _comes_back(client, payload_bytes, timeout_s):
            checks.append(_judge_size(packet_bytes, largest))
            checks += _check_loss(client, payload_bytes, round_trip_s, timeout_s)
            return checks
    return [*checks, _judge_size(0, largest)]


def _comes_back(client: EchoClient, payload_bytes: int, timeout_s: float) -> bool:
    """True if one of five datagrams of this size comes back in time."""
    tries = 5
    return any(
        client.round_trip_s(payload_bytes, timeout_s / tries) is not None
        for _ in range(tries)
    )


def _round_trip_s(client: EchoClient, timeout_s: float) -> float:
    """The median of 20; one that does not come back counts as the longest wait."""
    longest_s = timeout_s / 20
    times_s = [client.round_trip_s(HEADER.size, longest_s) for _ in range(20)]
    return statistics.median(longest_s if t is None else t for t in times_s)


def _explain_blocked(client: EchoClient, place: str) -> Check:
    port = client.udp_address[1]
    refusals = ", ".join(client.statistics().send_errors)
    if refusals:
        detail = f"TCP works, but this machine refuses to send {place} ({refusals})"
        remedy = f"iptables -I OUTPUT -p udp --dport {port} -j ACCEPT"
    elif client.received_by_server():
        detail = (
            f"TCP works and {place} arrives there, but its answers are blocked: open "
            f"UDP from port {port} in the firewall of this machine"
        )
        remedy = f"iptables -I INPUT -p udp --sport {port} -j ACCEPT"
    else:
        detail = (
            f"TCP works, but {place} is blocked: open UDP port {port} in the firewalls "
            "there and on the way"
        )
        remedy = f"on that host: iptables -I INPUT -p udp --dport {port} -j ACCEPT"
    return Check("UDP", "broken", detail, remedy)


def judge_round_trip(round_trip_s: float) -> Check:
    """Judge the median time, in seconds, that a small datagram takes there and back."""
    detail = f"{round_trip_s * 1e3:.3f} ms, median of 20"
    if round_trip_s <= _SLOW_ROUND_TRIP_S:
        return Check("round trip", "ok", detail)
    remedy = "each repair waits for one; a larger LossBound(p_high=...) needs fewer"
    return Check("round trip", "slow", detail, remedy)


def _judge_size(fitting: int, largest: int) -> Check:
    """Compare the largest packet that came back, in bytes, with the route's MTU."""
    if fitting == largest:
        return Check("packet size", "ok", f"{largest} bytes, unfragmented")
    detail = (
        f"small packets come back, those of {_COMMON_MTUS[-1]} bytes and more do not"
    )
    remedy = "repair the path: a tunnel or firewall on it drops full-sized UDP packets"
    if fitting:
        detail = f"packets of {largest} bytes, the MTU here, do not come back; "
        detail += f"{fitting} do"
        remedy = f"tailbound.Transport(mtu={fitting}) on all ranks"
    return Check("packet size", "broken", detail, remedy)


def _check_loss(
    client: EchoClient, payload_bytes: int, round_trip_s: float, timeout_s: float
) -> list[Check]:
    before = client.received_by_server()
    wait_s = min(timeout_s, max(0.2, 4 * round_trip_s))
    came = client.echoes(_LOSS_DATAGRAMS, payload_bytes, wait_s)
    arrived = client.received_by_server() - before
    checks = [judge_loss(came, arrived)]
    if client.statistics().unbatched:
        checks.append(
            Check(
                "batches on this path",
                "slow",
                "the interface refuses batches: one datagram a call, ten times the CPU",
                "ethtool -K DEVICE tx-checksumming on",
            )
        )
    return checks


def judge_loss(came: int, arrived: int, sent: int = _LOSS_DATAGRAMS) -> Check:
    """Judge how many of ``sent`` datagrams ``arrived`` there and ``came`` back."""
    lost = sent - came
    detail = (
        f"{lost} of {sent} full-sized datagrams lost ({lost / sent:.1%}): "
        f"{sent - arrived} on the way there, {arrived - came} on the way back"
    )
    if came == 0:
        return Check("loss", "broken", detail, "repair the network path first")
    if lost / sent <= _SLOW_LOSS_SHARE:
        return Check("loss", "ok", detail)
    remedy = "each repair costs a round trip; look for a full queue or a bad link"
    return Check("loss", "slow", detail, remedy)
