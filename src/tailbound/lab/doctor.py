"""`tailbound doctor`: what this machine and the path to another one can carry.

Each check is one line: ok, slow (works, costs time) or broken (training would fail),
with what to do. Local checks need nobody; those towards a host need
``tailbound doctor --listen`` there.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailbound.config import format_address
from tailbound.errors import ConfigError, UnreachableError
from tailbound.transport.addresses import route_address, route_mtu
from tailbound.transport.batching import probe_batching
from tailbound.transport.buffers import is_enough, raise_command
from tailbound.transport.echo import HEADER, QUEUE_BYTES, EchoServer
from tailbound.transport.echo_client import EchoClient, EchoUnavailableError
from tailbound.transport.udp import SegmentTooLargeError, UdpSocket

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
        Check("batched send", "ok", "UDP_SEGMENT passes its self-test")
        if gso
        else Check("batched send", "slow", f"one datagram a call ({reason})", remedy),
        Check("batched receive", "ok", "UDP_GRO passes its self-test")
        if gro
        else Check(
            "batched receive", "slow", f"one datagram a call ({reason})", remedy
        ),
    ]


def _check_queues() -> list[Check]:
    # As training does it, but without the log line that the table says better.
    udp = UdpSocket("127.0.0.1", buffer_bytes=QUEUE_BYTES, batching=False)
    receive, send = udp.ask_buffers(_WANTED_QUEUE_BYTES)
    udp.close()
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
    if not (gso and gro):
        return Check("loopback", "slow", f"{plain / 1e9:.2f} GB/s, not batched")
    batched = _pump_bytes_per_s(batching=True)
    detail = (
        f"{batched / 1e9:.2f} GB/s batched, {plain / 1e9:.2f} GB/s plain "
        f"({batched / plain:.1f} times), one process at both ends"
    )
    if batched < plain:
        return Check(
            "loopback", "slow", detail, "run it again on an idle machine"
        )
    return Check("loopback", "ok", detail)


def _pump_bytes_per_s(*, batching: bool) -> float:
    """Send and receive in turn for a tenth of a second."""
    near = UdpSocket("127.0.0.1", buffer_bytes=QUEUE_BYTES, batching=batching)
    far = UdpSocket("127.0.0.1", buffer_bytes=QUEUE_BYTES, batching=batching)
    batch = bytes(44 * _SEGMENT_BYTES)
    buffer = memoryview(bytearray(65535))
    moved = 0
    start_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - start_s) < _PUMP_S or not moved:
        near.send_batch(batch, _SEGMENT_BYTES, far.address)
        while (received := far.receive_batch(buffer)) is not None:
            moved += received.num_bytes
    near.close()
    far.close()
    return moved / elapsed_s


def _check_host(host: str, port: int, timeout_s: float) -> list[Check]:
    try:
        local = route_address(host)
    except (ConfigError, UnreachableError) as error:
        return [Check("route", "broken", str(error), "check the name and the network")]
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
    remedies = {
        "refused": f"run `tailbound doctor --listen --port {error.port}` on {error.host}",
        "silent": f"open TCP port {error.port} towards {error.host} in the firewalls",
        "foreign": "something else has that port, or the listener ended: give "
        "`tailbound doctor --listen` another --port",
    }
    return Check("TCP", "broken", str(error), remedies[error.kind])


def _check_udp(
    client: EchoClient, host: str, mtu: int, timeout_s: float
) -> list[Check]:
    place = f"UDP to {host} port {client.udp_address[1]}"
    small = HEADER.size
    round_trips_s = _round_trips_s(client, timeout_s)
    if not round_trips_s:
        return [_explain_blocked(client, place)]
    checks = [
        Check("UDP", "ok", f"{place} comes back"),
        _check_round_trip(statistics.median(round_trips_s)),
    ]
    ...
    return checks
